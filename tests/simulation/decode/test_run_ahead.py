"""Steps that run ahead of the token that is awaited: the same tokens, whatever ends it all, and nothing is left."""

import asyncio
import gc
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stepwell.decode.generation import Generation
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.sampling import Sampling
from stepwell.decode.session import DecodeSession
from stepwell.decode.timing import TokenEvent
from stepwell.errors import BadRequest, BudgetExceeded, ContextFull, DeviceLost
from stepwell.gpu.fake_objects import FakeBuffer
from stepwell.launch.counters import COUNTERS
from stepwell.launch.options import ABLATION, LaunchOptions
from stepwell.memory.buffer import Role
from tests.support.covering import covering
from tests.support.decode_lab import (
    LAYERS,
    DecodeDevice,
    DecodeLab,
    ids,
    short_slabs,
    templates_rendered_once,
    tokens,
    write_model,
)

__all__ = ["short_slabs", "templates_rendered_once"]  # fixtures for every test here

PROMPT = [5, 6, 7]
NEXT = [9, 8]
DEPTHS = (0, 1, 2, 4)
KV = tuple(KV_MODES)
MAIN = ABLATION[0][1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[TokenEvent]:
    """Without any switch: 40 tokens, one at a time."""

    async def run() -> list[TokenEvent]:
        lab = await DecodeLab(MAIN).load(model)
        return await tokens(lab.session(), PROMPT, 40, digest=True)

    return asyncio.run(run())


def ahead(depth: int, **options: Any) -> LaunchOptions:
    return LaunchOptions(readback_depth=depth, **options)


async def second(session: DecodeSession) -> list[int]:
    return ids(await tokens(session, NEXT, 12))


_REFERENCES: dict[int, tuple[list[int], int]] = {}


async def reference(model: Path, first: int) -> tuple[list[int], int]:
    """A generation of ``first`` tokens and the one after it, with nothing ever in flight: (its tokens, its length)."""
    if first not in _REFERENCES:
        lab = await DecodeLab(MAIN).load(model)
        session = lab.session()
        await tokens(session, PROMPT, first)
        _REFERENCES[first] = await second(session), session.length
    return _REFERENCES[first]


def assert_alone(session: DecodeSession) -> None:
    """Nothing is in flight."""
    assert session.in_flight == 0
    assert session.end == session.length == len(session.history)


# ---- the same tokens ------------------------------------------------------------------------------------------------


@covering(kv=KV, depth=DEPTHS, replay=(True, False), params=("uniform_pool", "call_site", "immediates"))
def test_the_same_tokens_at_every_depth(
    model: Path, expected: Sequence[TokenEvent], kv: str, depth: int, replay: bool, params: str
) -> None:
    async def run() -> None:
        lab = await DecodeLab(
            LaunchOptions.from_dict({"readback_depth": depth, "replay": replay, "params": params})
        ).load(model)
        session = lab.session(kv)
        events = await tokens(session, PROMPT, 40, digest=True)
        assert ids(events) == ids(expected)
        assert [event.digest for event in events] == [event.digest for event in expected]
        assert [event.position for event in events] == [event.position for event in expected]
        assert list(session.history) == [*PROMPT, *ids(events)[:-1]]
        assert (lab.launcher.plans.replayed > 0) is replay
        assert_alone(session)
        session.close()
        lab.close()

    asyncio.run(run())


def test_tokens_differ_from_each_other(expected: Sequence[TokenEvent]) -> None:
    """Else equal tokens would prove little."""
    assert len(set(ids(expected))) > 30
    assert len({event.digest for event in expected}) == 40


@pytest.mark.parametrize("depth", DEPTHS)
def test_so_many_steps_are_in_flight(model: Path, depth: int) -> None:
    async def run() -> None:
        lab = await DecodeLab(ahead(depth)).load(model)
        session = lab.session()
        async for event in session.generate(PROMPT, Generation(max_tokens=20)):
            left = 20 - (event.index + 1)  # steps that are still to come
            if event.index >= 2:  # the prompt's step and the one that is recorded have nothing beside them
                assert session.in_flight == min(depth, left), event.index

    asyncio.run(run())


def test_the_default_depth(model: Path) -> None:
    async def run() -> None:
        lab = await DecodeLab().load(model)
        for kv, options, depth in (
            ("static", {}, 1),
            ("grow", {}, 0),
            ("static", {"sampling": Sampling(temperature=1.0)}, 1),
            ("static", {"sampling": Sampling(temperature=1.0), "top_logits": 3}, 0),
            ("static", {"top_logits": 3}, 0),
        ):
            session = lab.session(kv)
            async with aclosing(session.generate(PROMPT, Generation(max_tokens=9, **options))) as events:  # type: ignore[arg-type]
                async for event in events:
                    if event.index == 4:
                        assert session.in_flight == depth
            session.close()

    asyncio.run(run())


def test_where_the_host_chooses_nothing_runs_ahead(model: Path) -> None:
    async def run(depth: int) -> list[int]:
        lab = await DecodeLab(ahead(depth)).load(model)
        session = lab.session()
        found = []
        async for event in session.generate(PROMPT, Generation(12, Sampling(temperature=1.0, seed=4), top_logits=1)):
            assert session.in_flight == 0
            found.append(event.id)
        return found

    assert asyncio.run(run(0)) == asyncio.run(run(4))


# ---- ends -----------------------------------------------------------------------------------------------------------


@covering(kv=KV, depth=DEPTHS, at=(0, 1, 3, 7))
def test_an_end_of_generation_that_is_seen_late(
    model: Path, expected: Sequence[TokenEvent], kv: str, depth: int, at: int
) -> None:
    """The steps after it were issued already: neither the text, nor the cache, nor the next answer shows it."""

    async def run() -> None:
        lab = await DecodeLab(ahead(depth)).load(model)
        session = lab.session(kv)
        events = await tokens(session, PROMPT, 40, eog_ids=frozenset({expected[at].id}))
        assert ids(events) == ids(expected)[: at + 1]
        assert [event.ends for event in events] == [False] * at + [True]
        assert session.length == len(PROMPT) + at
        assert_alone(session)
        after, length = await reference(model, at + 1)
        assert await second(session) == after
        assert session.length == length
        session.close()
        lab.close()

    asyncio.run(run())


@covering(kv=KV, depth=DEPTHS, at=(0, 6))
def test_cancel(model: Path, expected: Sequence[TokenEvent], kv: str, depth: int, at: int) -> None:
    async def run() -> None:
        lab = await DecodeLab(ahead(depth)).load(model)
        session = lab.session(kv)
        found = []
        async for event in session.generate(PROMPT, Generation(max_tokens=40)):
            found.append(event.id)
            if event.index == at:
                session.cancel()
        assert found == ids(expected)[: at + 1]
        assert session.cancelled
        assert_alone(session)
        after, length = await reference(model, at + 1)
        assert await second(session) == after
        assert session.length == length
        assert not session.cancelled

    asyncio.run(run())


@covering(kv=KV, depth=DEPTHS, count=(1, 2, 6))
def test_no_step_more_than_asked_for(model: Path, depth: int, kv: str, count: int) -> None:
    async def run() -> None:
        lab = await DecodeLab(ahead(depth, replay=False)).load(model)
        session = lab.session(kv)
        before = lab.launcher.counters.copy()
        assert len(await tokens(session, PROMPT, count)) == count
        spent = lab.launcher.counters.since(before)
        assert session.length == len(PROMPT) + count - 1
        assert spent.readbacks == count
        assert_alone(session)

    asyncio.run(run())


@covering(kv=KV, depth=DEPTHS, context=(3, 4, 8))
def test_the_context_is_filled_and_no_more(
    model: Path, expected: Sequence[TokenEvent], depth: int, kv: str, context: int
) -> None:
    async def run() -> None:
        lab = await DecodeLab(ahead(depth)).load(model)
        session = lab.session(kv, context)
        events = await tokens(session, PROMPT, 100)
        assert ids(events) == ids(expected)[: context - 2], "the last token needs no place"
        assert session.length == context
        assert_alone(session)
        with pytest.raises(ContextFull):
            await tokens(session, [1], 1)
        session.close()
        lab.close()

    asyncio.run(run())


# ---- consumers that leave -------------------------------------------------------------------------------------------


@covering(
    kv=KV,
    depth=(0, 1, 4),
    how=("aclosing", "dropped", "dropped, a turn later", "kept", "kept, closed in mid-flight"),
    at=(0, 5),
)
def test_a_consumer_that_breaks_out(model: Path, kv: str, depth: int, how: str, at: int) -> None:
    """However the iterator ends, or does not: the next generation goes on behind what was committed."""

    async def run() -> None:
        lab = await DecodeLab(ahead(depth)).load(model)
        lab.device.turns = 3
        session = lab.session(kv)
        events: Any = session.generate(PROMPT, Generation(max_tokens=40))
        async for event in events:
            if event.index == at:
                break
        length = session.length
        assert length == len(PROMPT) + at
        late: list[asyncio.Task[None]] = []
        if how == "aclosing":
            await events.aclose()
            assert_alone(session)
        elif how.startswith("dropped"):
            del events  # the event loop closes it, some time
            gc.collect()
            if how != "dropped":
                await asyncio.sleep(0)
        elif how != "kept":
            late = [asyncio.ensure_future(events.aclose())]
            await asyncio.sleep(0)  # it waits for what is in flight, as the next generation will
        found = []
        async for event in session.generate(NEXT, Generation(max_tokens=12)):
            found.append(event.id)
            await asyncio.sleep(0)
        after, end = await reference(model, at + 1)
        assert found == after
        assert session.length == end
        if how == "kept":
            with pytest.raises(BadRequest, match="a later generation of this session"):
                await events.__anext__()
        await asyncio.gather(*late)
        assert_alone(session)
        session.close()
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_session_that_is_closed_while_reads_are_pending(model: Path, kv: str, depth: int) -> None:
    """Its staging buffers are mapped: they serve nobody else, and nothing of it is left."""

    async def run() -> None:
        lab = await DecodeLab(ahead(depth)).load(model)
        lab.device.turns = 30
        session, other = lab.session(kv), lab.session(kv)
        events: Any = session.generate(PROMPT, Generation(max_tokens=40))
        async for event in events:
            if event.index == 5:
                break
        session.close()
        session.close()
        lab.pool.flush()
        free = [lab.pool.acquire(4, Role.STAGING, "next") for _ in range(depth + 2)]
        assert not any(lab.device.get(buffer.id, FakeBuffer, "test").mapped for buffer in free)
        for buffer in free:
            lab.pool.release(buffer)
        found = ids(await tokens(other, PROMPT, 20))
        fresh = await DecodeLab(MAIN).load(model)
        assert found == ids(await tokens(fresh.session(), PROMPT, 20))
        await events.aclose()
        other.close()
        lab.pool.flush()
        assert lab.pool.report().by_role[Role.STAGING].in_use_bytes == 0
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("depth", [0, 4])
def test_a_task_that_is_cancelled_in_mid_flight(model: Path, kv: str, depth: int) -> None:
    """asyncio's own cancellation, at any await: the session can be used again, and given back."""

    async def run(turns: int) -> bool:
        lab = await DecodeLab(ahead(depth)).load(model)
        lab.device.turns = 6
        session = lab.session(kv)
        task = asyncio.ensure_future(tokens(session, PROMPT, 4))
        for _ in range(turns):
            await asyncio.sleep(0)
        over = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        length = session.length
        assert len(session.history) == length
        more = await tokens(session, NEXT, 3)
        assert [event.position for event in more] == [length + 2, length + 3, length + 4]
        assert_alone(session)
        session.close()
        lab.close()
        return over

    turns = 0
    while not asyncio.run(run(turns)):
        turns += 1
    assert turns > 10


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("policy", ["adaptive", "disabled"])
def test_out_of_memory_at_every_create(model: Path, expected: Sequence[TokenEvent], kv: str, policy: str) -> None:
    async def run(index: int | None) -> tuple[int, int]:
        lab = await DecodeLab(ahead(4), policy, out_of_memory=() if index is None else [index]).load(model)
        loaded, in_use = lab.device.creates, lab.pool.ledger.in_use_bytes
        session = lab.session(kv)
        events = await tokens(session, PROMPT, 10)
        assert ids(events) == ids(expected)[:10], index
        assert list(session.history) == [*PROMPT, *ids(events)[:-1]]
        if index is not None:
            assert lab.pool.budget.failed_at is not None
        session.close()
        lab.pool.flush()
        assert lab.pool.ledger.in_use_bytes - lab.launcher.kernels.workspace_bytes == in_use
        lab.close()
        return loaded, lab.device.creates

    first, last = asyncio.run(run(None))
    assert last - first > 12
    for index in range(first, last):
        asyncio.run(run(index))


@pytest.mark.parametrize("kv", KV_MODES)
def test_a_loss_at_every_submit_and_replay(model: Path, expected: Sequence[TokenEvent], kv: str) -> None:
    async def submits() -> tuple[int, int]:
        lab = await DecodeLab(ahead(4)).load(model)
        loaded = lab.device.submits
        await tokens(lab.session(kv), PROMPT, 10)
        return loaded, lab.device.submits

    async def run(dies_at: int) -> None:
        lab = await DecodeLab(ahead(4), dies_at=dies_at).load(model)
        session = lab.session(kv)
        found: list[int] = []
        with pytest.raises(DeviceLost):
            async for event in session.generate(PROMPT, Generation(max_tokens=10)):
                found.append(event.id)  # noqa: PERF401  (what came before the loss counts)
        assert found == ids(expected)[: len(found)]
        assert list(session.history) == ([*PROMPT, *found[:-1]] if found else [])
        assert (lab.pool.ledger.reserved_bytes, lab.pool.ledger.in_use_bytes) == (0, 0)
        session.close()
        lab.launcher.release_run()
        lab.launcher.close()
        lab.model.close()
        # the same pool, another device: load again and prefill the history
        lab.device = DecodeDevice()
        lab.pool.rebuild(lab.device)
        lab.launcher = lab.another(ahead(4))
        await lab.load(model)
        again = lab.session(kv)
        rest = await tokens(again, [*PROMPT, *found], 10 - len(found))
        assert [event.position for event in rest] == list(range(3 + len(found), 13))
        again.close()
        lab.close()

    first, last = asyncio.run(submits())
    assert last - first >= 10
    for dies_at in range(first, last):
        asyncio.run(run(dies_at))


@pytest.mark.parametrize("kv", KV_MODES)
def test_a_hard_budget_that_is_met_in_mid_decode(model: Path, expected: Sequence[TokenEvent], kv: str) -> None:
    """Too tight for so many sets in flight, wide enough for one step: slower, and the same tokens."""

    async def run() -> None:
        lab = await DecodeLab(ahead(4)).load(model)
        session = lab.session(kv)
        found = []
        async for event in session.generate(PROMPT, Generation(max_tokens=40)):
            found.append(event.id)
            if event.index == 6:
                lab.pool.set_budget(lab.pool.ledger.in_use_bytes + 65_536, hard=True)
        assert found == ids(expected)
        session.close()
        lab.close()

    try:
        asyncio.run(run())
    except BudgetExceeded as error:
        pytest.fail(f"one step had room: {error}")


@pytest.mark.parametrize("create", range(2))
@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_that_is_tried_again_makes_the_room_of_one_token(model: Path, depth: int, create: int) -> None:
    """Memory that runs out for a slab is no reason to ask for a slab of the whole context."""

    async def run(fails: bool) -> list[int]:
        lab = await DecodeLab(ahead(depth)).load(model)
        session = lab.session("paged", context=512)
        found: list[int] = []
        async for event in session.generate([7] * 20, Generation(max_tokens=24)):
            assert event.counters is not None
            found.append(event.counters.kv_class_bytes)
            if fails and event.index == 12:
                lab.device.out_of_memory = frozenset({lab.device.creates + create})
        assert not lab.device.out_of_memory or lab.device.creates > max(lab.device.out_of_memory)
        session.close()
        lab.close()
        return found

    undisturbed = asyncio.run(run(False))
    assert undisturbed[12] < undisturbed[-1]
    assert asyncio.run(run(True))[-1] == undisturbed[-1]


# ---- counters -------------------------------------------------------------------------------------------------------


@covering(kv=KV, depth=(0, 4), arm=[name for name, _ in ABLATION])
def test_the_tokens_counters_add_up_to_the_launchers(model: Path, kv: str, depth: int, arm: str) -> None:
    options = dict(ABLATION)[arm]

    async def run() -> None:
        lab = await DecodeLab(LaunchOptions.from_dict({**options.as_dict(), "readback_depth": depth})).load(model)
        session = lab.session(kv)
        for prompt in (PROMPT, [1] * 70):
            before, created = lab.launcher.counters.copy(), lab.pool.ledger.created
            events = await tokens(session, prompt, 14)
            spent = lab.launcher.counters.since(before)
            for name in COUNTERS:
                if name != "replayed":  # of tokens: a recording's trial is none
                    assert sum(getattr(e.counters, name) for e in events) == getattr(spent, name), name
            assert sum(e.counters.buffers_created for e in events if e.counters) <= lab.pool.ledger.created - created
            if not options.replay:
                launches = [event.counters.launches for event in events[1:] if event.counters]
                assert launches == sorted(launches), "each token has the cost of its own step"
                more = {b - a for a, b in pairwise(launches)} - {0}
                assert more <= ({LAYERS} if kv == "paged" else set()), "one for a slab, in each layer"

    asyncio.run(run())


@pytest.mark.parametrize("depth", DEPTHS)
def test_reads_that_take_long(model: Path, expected: Sequence[TokenEvent], depth: int) -> None:
    async def run() -> None:
        lab = await DecodeLab(ahead(depth)).load(model)
        lab.device.turns = 7
        session = lab.session()
        assert ids(await tokens(session, PROMPT, 40)) == ids(expected)
        session.close()
        lab.close()

    asyncio.run(run())


def test_what_is_not_measured_costs_nothing_and_says_nothing(
    model: Path, expected: list[TokenEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No counter is read for a token that nobody asks them of; the tokens are the same."""

    async def run(measure: bool) -> list[TokenEvent]:
        lab = await DecodeLab(ahead(1)).load(model)
        session = lab.session()
        await session.prepare(Generation(measure=measure), len(PROMPT))

        def read(*_: object) -> None:
            raise AssertionError("a counter was read")

        monkeypatch.setattr("stepwell.decode.timing.Cost.since", read)
        return await tokens(session, PROMPT, 12, measure=measure)

    events = asyncio.run(run(False))
    assert ids(events) == ids(expected)[:12]
    assert all(event.counters is None for event in events)
    with pytest.raises(AssertionError, match="a counter was read"):
        asyncio.run(run(True))
