"""Paged K and V: which slabs there are at every length, what they take, and that nothing is ever copied or moved."""

import asyncio
from pathlib import Path

import pytest

from stepwell.decode.paged_kv import PagedKV
from stepwell.errors import BudgetExceeded, ContextFull
from stepwell.kernels.kv import UNUSED, KVShape, KVSlabs
from stepwell.memory.buffer import Role
from stepwell.memory.policies import POLICIES
from stepwell.memory.pool import BufferPool
from tests.support.decode_lab import (
    KV_WIDTH,
    LAYERS,
    DecodeDevice,
    DecodeLab,
    ids,
    templates_rendered_once,
    tokens,
    write_model,
)

__all__ = ["templates_rendered_once"]  # a fixture for every test here

WIDTH = 768  # SmolLM2-135M: bytes of a position of one K or V tensor
SHAPE = KVShape(layers=3, width_bytes=WIDTH, slabs=4, chunks=(64, 256))
POSITION_BYTES = 2 * SHAPE.layers * WIDTH


def kv_bytes(pool: BufferPool) -> int:
    return pool.report().by_role[Role.KV].reserved_bytes


def step(pool: BufferPool, cache: PagedKV, rows: int, reach: int = 0) -> KVSlabs:
    pool.begin_run(1)
    layer = cache.extend(rows, reach)[0]
    assert isinstance(layer, KVSlabs)
    pool.flush()
    cache.commit()
    return layer


def expected_slabs(prompt: int, length: int, capacity: int) -> list[int]:
    """Positions of each slab, as the documentation says it: whole pages of 16, 9 % more than what is needed; up to
    1,000 positions twice that, from 272 on, but not more than those may have.
    """
    slabs: list[int] = []
    while sum(slabs) < length:
        needed = max(prompt, sum(slabs) + 1)
        room = needed * 1.09
        if needed <= 1000:
            room = min(1090, max(272, 2 * needed))
        pages = max(-(-needed // 16), room // 16)
        slabs.append(int(min(pages, -(-capacity // 16))) * 16 - sum(slabs))
    return slabs


@pytest.mark.parametrize(("prompt", "policy"), [*((37, policy) for policy in POLICIES), (1, "exact"), (1003, "pow2")])
def test_slabs_follow_the_sequence(prompt: int, policy: str) -> None:
    """From the prompt on, one position after the other: never above 1.10 of what is live beyond 1,000 positions."""
    capacity = 6500
    device = DecodeDevice()
    pool = BufferPool(device, policy)
    cache = PagedKV(pool, SHAPE, capacity)
    seen, creates = 0, device.creates
    for length in range(prompt, 6001):
        layer = step(pool, cache, prompt if length == prompt else 1, prompt if length == prompt else 0)
        assert cache.length == length
        if len(layer.slabs) == seen:
            assert device.creates == creates, "created without a slab"
        else:
            assert device.creates - creates == SHAPE.layers + (len(layer.slabs) % SHAPE.slabs == 1)
        seen, creates = len(layer.slabs), device.creates
        if length > 1000:
            assert kv_bytes(pool) <= 1.10 * length * POSITION_BYTES
    slabs = [positions for _, positions in layer.table.slabs]
    assert slabs == expected_slabs(prompt, 6000, capacity)
    assert [first for first, _ in layer.table.slabs] == [sum(slabs[:i]) for i in range(len(slabs))]
    assert len(slabs) < 25
    cache.close()
    cache.close()
    pool.trim()
    pool.flush()
    assert kv_bytes(pool) == 0
    pool.close()


def test_what_was_freed_by_others_is_not_lent_to_a_slab() -> None:
    """``adaptive`` lends a free buffer that is a little larger; a slab would not keep its promise in one."""
    pool = BufferPool(DecodeDevice(), "adaptive")
    others = [pool.acquire(2 * WIDTH * 1200, Role.KV, site=layer) for layer in range(SHAPE.layers)]
    for buffer in others:
        pool.release(buffer)
    for _ in range(3):
        pool.begin_run(1)
    cache = PagedKV(pool, SHAPE, 2000)
    layer = step(pool, cache, 64, 1001)
    assert [slab.size for slab in layer.slabs] == [1088 * 2 * WIDTH]
    pool.close()


@pytest.mark.parametrize("prompt", [1500, 5000])
def test_a_prompt_has_one_slab(prompt: int) -> None:
    pool = BufferPool(DecodeDevice())
    cache = PagedKV(pool, SHAPE, 8000)
    for first in range(0, prompt, 64):
        rows = min(64, prompt - first)
        assert cache.fits(64) == 64
        layer = step(pool, cache, rows, prompt)
        assert len(layer.slabs) == 1
    assert kv_bytes(pool) <= 1.10 * prompt * POSITION_BYTES
    pool.close()


def test_steps_end_where_their_slab_does() -> None:
    """A second prompt goes on in the slab that is there, and has another for the rest."""
    pool = BufferPool(DecodeDevice())
    cache = PagedKV(pool, SHAPE, 4000)
    step(pool, cache, 60, 250)  # 496 positions
    for _ in range(6):
        step(pool, cache, 64)
    assert (cache.length, cache.fits(64)) == (444, 52)
    step(pool, cache, 52, 1500)
    assert cache.fits(64) == 64
    layer = step(pool, cache, 64, 1500)
    assert layer.table.slabs == ((0, 496), (496, 1632 - 496))
    assert layer.last == 1
    cache.rewind()
    assert cache.fits(64) == 64
    assert step(pool, cache, 64, 1500).last == 0, "read once more, in the slabs that are there"
    assert len(layer.slabs) == 2
    pool.close()


def test_the_context_is_the_end() -> None:
    pool = BufferPool(DecodeDevice())
    cache = PagedKV(pool, SHAPE, 100)
    layer = step(pool, cache, 99, 99)
    assert layer.table.slabs == ((0, 112),), "whole pages, not more than the context"
    step(pool, cache, 1)
    with pytest.raises(ContextFull, match=r"100 positions are filled and 1 more are wanted; the context holds 100"):
        cache.extend(1)
    pool.close()


def test_slabs_are_not_larger_than_a_binding() -> None:
    pool = BufferPool(DecodeDevice(limits={"maxStorageBufferBindingSize": 2 * WIDTH * 320 + 100}))
    cache = PagedKV(pool, SHAPE, 2000)
    layer = step(pool, cache, 64, 1500)
    assert [positions for _, positions in layer.table.slabs] == [320, 320, 320, 320, 320, 32]
    assert len(layer.table.groups) == 2
    pool.close()


def test_tables_say_where_everything_is() -> None:
    device = DecodeDevice()
    pool = BufferPool(device)
    cache = PagedKV(pool, SHAPE, 8000)
    step(pool, cache, 60, 60)
    while len((layer := step(pool, cache, 1)).slabs) < 6:
        pass
    tables = [device.words(table.id) for table in layer.table.groups]
    spans = list(layer.table.slabs)
    assert [len(table) for table in tables] == [4 * (1 + SHAPE.slabs)] * 2
    chunks = {64: 0, 256: 0}
    for number, (first, positions) in enumerate(spans):
        entry = tables[number // 4][4 + 4 * (number % 4) :][:4]
        assert entry == [first, positions, chunks[64], chunks[256]]
        for size in chunks:
            chunks[size] += -(-positions // size)
    assert tables[1][:4] == [chunks[64], chunks[256]] * 2
    assert tables[0][:4] == [*tables[1][6:8], chunks[64], chunks[256]]
    assert tables[1][4 + 4 * 2 :] == [UNUSED] * 8
    reads = list(layer.reads(64, 2, 1))
    assert [read.grid[0] for read in reads] == [sum(-(-n // 64) for _, n in part) for part in (spans[:4], spans[4:])]
    assert [read.buffers for read in reads] == [
        (layer.table.groups[0], *layer.slabs[:4]),
        (layer.table.groups[1], *layer.slabs[4:]),
    ]
    assert [dict(read.constants)["slabs"] for read in reads] == [4, 2]
    assert layer.appended() == (layer.table.groups[1], layer.slabs[5])
    pool.close()


@pytest.mark.parametrize("prompt", [100, 1500])
def test_what_a_step_added_goes_with_it(prompt: int) -> None:
    """A step that is abandoned gives its slabs back: they may have no memory behind them.  What is done stays."""
    device = DecodeDevice()
    pool = BufferPool(device, "disabled")
    cache = PagedKV(pool, SHAPE, 4000)
    pool.begin_run(1)
    cache.extend(64, prompt)
    cache.abandon()
    assert pool.report().in_use_bytes == 0
    assert cache.end == cache.class_bytes == 0
    while cache.length < prompt:
        step(pool, cache, min(64, prompt - cache.length), prompt)
    slabs, in_use = cache.key, pool.report().in_use_bytes
    while cache.end < 2 * prompt + 200:  # steps under way, none of which comes back
        cache.extend(1)
    assert cache.key > slabs
    cache.abandon()
    assert cache.end == prompt
    assert pool.report().in_use_bytes == in_use
    layer = step(pool, cache, 1)
    table = device.words(layer.table.groups[-1].id)
    assert table[2] == sum(-(-positions // 64) for _, positions in layer.table.slabs), "the table is that of now"
    pool.close()


@pytest.mark.parametrize("refused", range(1, 6))
def test_a_slab_that_the_budget_does_not_allow(refused: int) -> None:
    """All layers have it, or none; with more room the next attempt is like the first."""
    nbytes = 272 * POSITION_BYTES
    pool = BufferPool(DecodeDevice(), "disabled", nbytes * refused // 6, hard=True)
    cache = PagedKV(pool, SHAPE, 2000)
    pool.begin_run(1)
    with pytest.raises(BudgetExceeded):
        cache.extend(64, 100)
    pool.flush()
    assert pool.report().in_use_bytes == 0
    assert cache.end == 0
    pool.set_budget(None)
    step(pool, cache, 64, 100)
    assert kv_bytes(pool) == nbytes
    pool.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_a_session_that_grows_past_a_thousand_positions(tmp_path: Path, model: Path) -> None:
    """Same tokens as with static tensors; buffers are created when a slab is added, and nothing is copied."""

    async def run() -> None:
        lab = await DecodeLab().load(model)
        prompt = [7] * 900
        session = lab.session("static", context=1024)
        expected = ids(await tokens(session, prompt, 120))
        session.close()
        session = lab.session("paged", context=1024)
        events = await tokens(session, prompt[:500], 3)
        events += await tokens(session, prompt[:200], 3)
        session.close()
        lab.pool.trim()
        session = lab.session("paged", context=1024)
        events = await tokens(session, prompt, 120)
        assert ids(events) == expected
        copies = {e.counters.copies for e in events if e.counters and e.counters.refused != "recorded"}
        assert copies == {1}, "what is read back"
        session.close()
        session = lab.session("paged", context=1024)
        short = await tokens(session, prompt[:200], 400)
        created = {e.position for e in short[3:] if e.counters and e.counters.buffers_created}
        classes = [e.counters.kv_class_bytes for e in short if e.counters]
        grown = {short[i].position for i in range(3, 400) if classes[i] != classes[i - 1]}
        # the step in flight delays the plan for it by a token, whose check reads back through buffers of its own
        assert created <= {position + late for position in grown for late in (0, 1, 2)}
        assert len(grown) == 1
        assert classes[-1] == 800 * KV_WIDTH
        reasons = [e.counters.refused for e in short if e.counters]
        assert reasons.count(None) > 380
        assert reasons.count("recorded") == 2, "a plan for each number of slabs"
        session.close()
        lab.close()

    assert LAYERS == 2
    asyncio.run(run())
