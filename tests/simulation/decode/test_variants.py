"""24 prompt lengths through one engine on FakeDevice: what is kept, in every order, with a bound and without.

The growth is that of the second source: a kernel cache keyed by exact shapes keeps a set of workspaces for every prompt
length ever seen, largest first or last alike.
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from stepwell.decode.generation import Generation
from stepwell.decode.timing import TokenEvent
from stepwell.gpu.fake_device import FakeDevice
from stepwell.launch.options import VARIANTS_PER_NODE, LaunchOptions
from stepwell.launch.selection import tuning_for
from tests.simulation.decode.test_session import Rig, open_rig
from tests.support.tiny_llama import write_tiny_llama

LENGTHS = [1 + round(30.4 * i) for i in range(24)]  # 1, 31, 62, … 700
ORDERS = {
    "ascending": LENGTHS,
    "descending": LENGTHS[::-1],
    "shuffled": random.Random(7).sample(LENGTHS, len(LENGTHS)),
}
CONTEXT = 768
TOKENS = 4  # the prompt's, a recorded one, two replayed ones
HEADS, HEAD_DIM = 4, 16
CHUNK = tuning_for(FakeDevice().info).attention_chunk
EXACT = LaunchOptions(variants_per_node=0, width_ladder=False)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_llama(path, context=1024, n_heads=HEADS, head_dim=HEAD_DIM)
    return path


def chunks(positions: int) -> int:
    return -(-positions // CHUNK)


def workspace_bytes(width: int, count: int) -> int:
    """Of a variant of attention: partial values, then maxima and sums, per row, chunk and head."""
    return width * count * HEADS * (4 * HEAD_DIM + 8)


def exact_shapes(lengths: list[int]) -> set[tuple[int, int]]:
    """(rows, chunks) of every step, without classes; a step of one row is made for the whole context."""
    found = {(1, chunks(CONTEXT))}
    for length in lengths:
        rows = {64} if length >= 64 else set()
        rows |= {length % 64} - {0}
        found |= {(n, chunks(CONTEXT if n == 1 else length)) for n in rows}
    return found


def decode_variant(rig: Rig) -> dict[str, list[tuple[str, int]]]:
    """The handles that belong to steps of one token, per node."""
    kernels = rig.launcher.kernels
    return {
        node: sorted(
            [(str(variant), kernels[variant].pipeline) for variant in entry.pipelines]
            + [(label, buffer.id) for label, buffer in entry.workspaces.items()]
        )
        for node in kernels.report()
        for shape, entry in kernels.variants_of(node).items()
        if shape[:1] == (1,)
    }


async def answer(rig: Rig, length: int) -> list[TokenEvent]:
    session = rig.session("static", CONTEXT)
    prompt = [3 + i % 300 for i in range(length)]
    events = [event async for event in session.generate(prompt, Generation(max_tokens=TOKENS))]
    session.close()
    return events


@pytest.mark.parametrize("order", ORDERS)
def test_24_lengths_leave_one_variant_set(model_path: Path, order: str) -> None:
    """Whatever the order, and however often: at most a bound's worth of variants, and decode's stay what they were."""

    async def run() -> None:
        rig = await open_rig(model_path)
        kernels = rig.launcher.kernels
        await answer(rig, 1)
        decode = decode_variant(rig)
        assert set(decode) >= {"attention", "qkv", "ffn_down", "output"}
        assert len(decode["attention"]) == 4  # two pipelines, two workspaces
        largest = workspace_bytes(64, 1 << (chunks(max(LENGTHS)) - 1).bit_length())
        allowed = workspace_bytes(1, 1 << (chunks(CONTEXT) - 1).bit_length()) + (VARIANTS_PER_NODE - 1) * largest
        peaks, evictions = [], []
        for _ in range(3):
            held = []
            for length in ORDERS[order]:
                events = await answer(rig, length)
                assert [event.counters.replayed for event in events if event.counters] == [0, 0, 1, 1]
                assert decode_variant(rig) == decode
                assert max(node["shapes"] for node in kernels.report().values()) <= VARIANTS_PER_NODE
                account = rig.pool.report().by_role["workspace"]
                assert account.in_use_bytes == kernels.workspace_bytes
                assert account.requested_bytes <= allowed
                held.append(account.reserved_bytes)
            peaks.append(max(held))
            evictions.append(kernels.evictions)
        assert 0 < evictions[0] < evictions[1] < evictions[2]
        # the first round is followed by another length than it began with; then everything repeats
        assert peaks[1] == peaks[2], "what 48 lengths need is what 72 need"
        assert max(peaks) <= allowed + largest, "with what the pool keeps for the next variant"
        kept = {node: node_report["evicted"] for node, node_report in kernels.report().items()}
        assert {node for node, evicted in kept.items() if evicted} == {"attention"}, "the ladder's widths fit the bound"

    asyncio.run(run())


@pytest.mark.parametrize("order", ORDERS)
def test_without_bound_and_classes_they_pile_up(model_path: Path, order: str) -> None:
    """The ledger sees one set of workspaces per shape ever seen, to the byte."""

    async def run(options: LaunchOptions) -> list[int]:
        rig = await open_rig(model_path, launch=options)
        await answer(rig, 1)
        held, seen = [], []
        for length in ORDERS[order]:
            await answer(rig, length)
            seen.append(length)
            account = rig.pool.report().by_role["workspace"]
            assert account.in_use_bytes == rig.launcher.kernels.workspace_bytes
            if options == EXACT:
                assert account.requested_bytes == sum(workspace_bytes(*shape) for shape in exact_shapes(seen))
            held.append(account.reserved_bytes)
        assert rig.launcher.kernels.evictions == 0 or options != EXACT
        return held

    grown = asyncio.run(run(EXACT))
    assert grown == sorted(grown), "nothing ever goes"
    assert len(set(grown)) > 20
    bounded = asyncio.run(run(LaunchOptions()))
    print(f"{order}: workspaces of 24 lengths, {grown[-1]:,} B without a bound, at most {max(bounded):,} B with it")
    assert grown[-1] > 5 * max(bounded)


def test_an_open_session_replays_its_plan_through_it_all(model_path: Path) -> None:
    """Other prompts evict variants all the time; the plan of a session that waits refers to none that may go."""

    async def run() -> None:
        rig = await open_rig(model_path)
        session = rig.session("static", CONTEXT)
        stream: AsyncGenerator[TokenEvent, None] = session.generate([5, 6, 7], Generation(max_tokens=40))
        async with aclosing(stream):
            for _ in range(4):
                event = await anext(stream)
            for length in ORDERS["shuffled"]:
                await answer(rig, length)
                event = await anext(stream)
                assert event.counters is not None
                assert (event.counters.replayed, event.counters.refused) == (1, None)
        assert event.index == 27
        assert rig.launcher.kernels.evictions > 0
        assert rig.launcher.plans.invalidated == 0
        assert rig.launcher.plans.recorded == 1 + len(LENGTHS)

    asyncio.run(run())


def test_a_bound_that_is_too_small_recompiles_but_stays_right(model_path: Path) -> None:
    """A bound of one: decode and prefill take turns, and every plan that referred to what went is recorded anew."""

    async def run() -> None:
        rig = await open_rig(model_path, launch=LaunchOptions(variants_per_node=1))
        for length in (20, 100, 300):
            events = await answer(rig, length)
            assert [event.counters.replayed for event in events if event.counters] == [0, 0, 1, 1]
            assert {node["shapes"] for node in rig.launcher.kernels.report().values()} == {1}
        # prefill and decode in turn: the second and each later one evict
        evicted = {node: account["evicted"] for node, account in rig.launcher.kernels.report().items()}
        assert set(evicted.values()) == {0, 5}
        assert {node for node, count in evicted.items() if not count} == {"last_norm", "output", "argmax"}

    asyncio.run(run())
