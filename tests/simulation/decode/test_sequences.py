"""Several sequences over one model: sessions that share weights, pool and launcher, token by token in turns or at once.

Each must get the ids that it gets alone, and each token the counters of its own session: their sums are what the
launcher and the ledger counted.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stepwell.decode.generation import Generation
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.session import DecodeSession
from stepwell.decode.timing import TokenEvent
from stepwell.errors import BadRequest
from stepwell.gpu.device import Layout
from stepwell.launch.counters import COUNTERS
from stepwell.launch.options import LaunchOptions
from stepwell.memory.buffer import Role
from tests.support.decode_lab import DecodeDevice, DecodeLab, ids, templates_rendered_once, tokens, write_model

__all__ = ["templates_rendered_once"]

STEPS = 24
MIXES = [(kv, "static") for kv in KV_MODES] + [tuple(KV_MODES), ("grow", "grow", "grow")]
LEDGER = {
    "buffers_created": "created", "bytes_created": "bytes_created", "buffers_destroyed": "destroyed",
    "bytes_destroyed": "bytes_destroyed", "pool_hits": "hits", "pool_misses": "misses",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def prompt(number: int) -> list[int]:
    return [7 + number, *range(11, 14 + 30 * number)]


def stream(session: DecodeSession, number: int, count: int = STEPS) -> AsyncGenerator[TokenEvent, None]:
    return session.generate(prompt(number), Generation(max_tokens=count))


async def by_hand(sessions: Sequence[DecodeSession]) -> list[list[TokenEvent]]:
    """One token of each in turn."""
    streams = [stream(session, number) for number, session in enumerate(sessions)]
    found: list[list[TokenEvent]] = [[] for _ in streams]
    for _ in range(STEPS):
        for one, into in zip(streams, found, strict=True):
            into.append(await anext(one))
    for one in streams:
        await one.aclose()
    return found


async def at_once(sessions: Sequence[DecodeSession]) -> list[list[TokenEvent]]:
    """A task for each."""

    async def all_of(session: DecodeSession, number: int) -> list[TokenEvent]:
        async with aclosing(stream(session, number)) as events:
            return [event async for event in events]

    return await asyncio.gather(*(all_of(session, number) for number, session in enumerate(sessions)))


SCHEDULES = {"in turns": by_hand, "at once": at_once}


@cache
def alone(model: Path, number: int, options: LaunchOptions, kv: str = "static") -> Sequence[TokenEvent]:
    async def run() -> list[TokenEvent]:
        lab = await DecodeLab(options).load(model)
        session = lab.session(kv, 256)
        await session.prepare(Generation(max_tokens=STEPS), len(prompt(number)))
        return await tokens(session, prompt(number), STEPS)

    return asyncio.run(run())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("replay", [False, True], ids=["live", "replayed"])
@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("kvs", MIXES, ids="+".join)
def test_ids_and_counters_are_each_session_s_own(
    model: Path, kvs: tuple[str, ...], depth: int, replay: bool, schedule: str
) -> None:
    options = LaunchOptions(readback_depth=depth, replay=replay)

    async def run() -> list[list[TokenEvent]]:
        lab = await DecodeLab(options).load(model)
        lab.device.turns = 3  # so that others come between a step and its result
        weights = lab.pool.ledger.reserved_by_role()[Role.WEIGHTS.value]
        sessions = [lab.session(kv, 256) for kv in kvs]
        for number, session in enumerate(sessions):
            await session.prepare(Generation(max_tokens=STEPS), len(prompt(number)))
        before, moved = lab.launcher.counters.copy(), ledger(lab)
        found = await SCHEDULES[schedule](sessions)
        issued = lab.launcher.counters.since(before).as_dict()
        counted = totals(found)
        assert {name: counted[name] for name in COUNTERS if name != "replayed"} == {
            name: issued[name] for name in COUNTERS if name != "replayed"
        }
        assert {name: counted[name] for name in LEDGER} == {
            name: after - moved[name] for name, after in ledger(lab).items()
        }
        assert lab.pool.ledger.reserved_by_role()[Role.WEIGHTS.value] == weights
        for session in sessions:
            session.close()
        lab.close()
        return found

    found = asyncio.run(run())
    for number, (kv, events) in enumerate(zip(kvs, found, strict=True)):
        assert ids(events) == ids(alone(model, number, options))
        if kv == "static":  # what a token takes does not depend on who else is there
            assert [own(event) for event in events] == [own(event) for event in alone(model, number, options)]


def own(event: TokenEvent) -> tuple[Any, ...]:
    counters = event.counters
    assert counters is not None
    return (
        counters.launches, counters.copies, counters.syncs, counters.readbacks, counters.readback_bytes,
        counters.immediates, counters.uploads, counters.refused, event.position,
    )  # fmt: skip


def totals(found: Sequence[Sequence[TokenEvent]]) -> dict[str, int]:
    names = [*COUNTERS, *LEDGER]
    return {name: sum(getattr(event.counters, name) for events in found for event in events) for name in names}


def ledger(lab: DecodeLab) -> dict[str, int]:
    return {name: getattr(lab.pool.ledger, attribute) for name, attribute in LEDGER.items()}


@pytest.mark.parametrize("kv", KV_MODES)
def test_closing_one_leaves_the_others_what_is_theirs(model: Path, kv: str) -> None:
    """Plans and buffers of the others are those of before, and their next tokens are replays."""
    expected = [ids(alone(model, number, LaunchOptions())) for number in range(3)]

    async def run() -> None:
        lab = await DecodeLab().load(model)
        sessions = [lab.session(kv, 256) for _ in range(3)]
        streams = [stream(session, number) for number, session in enumerate(sessions)]
        found: list[list[int]] = [[] for _ in streams]
        for _ in range(12):
            for one, into in zip(streams, found, strict=True):
                into.append((await anext(one)).id)
        await streams[1].aclose()
        plans, destroyed = len(lab.launcher.plans), lab.launcher.plans.invalidated
        sessions[1].close()
        assert 0 < len(lab.launcher.plans) < plans
        assert lab.launcher.plans.invalidated == destroyed
        for turn in range(12, STEPS):
            for number in (0, 2):
                event = await anext(streams[number])
                found[number].append(event.id)
                if kv == "static":
                    assert event.counters is not None and event.counters.refused is None, turn
        for number in (0, 2):
            await streams[number].aclose()
            assert found[number] == expected[number]
            sessions[number].close()
        lab.close()

    asyncio.run(run())


class SlowToCompile(DecodeDevice):
    async def create_pipeline(self, code: str, layout: Layout, label: str = "") -> int:
        for _ in range(5):
            await asyncio.sleep(0)
        return await super().create_pipeline(code, layout, label)


@pytest.mark.parametrize("kvs", MIXES, ids="+".join)
def test_a_step_that_waits_for_its_kernels_keeps_its_buffers(model: Path, kvs: tuple[str, ...]) -> None:
    """Nothing is compiled ahead: every first step is recorded, and waits, while the others would go on."""
    expected = [ids(alone(model, number, LaunchOptions())) for number in range(len(kvs))]

    async def run() -> None:
        lab = DecodeLab(LaunchOptions(variants_per_node=1), device=SlowToCompile())
        await lab.load(model)
        sessions = [lab.session(kv, 256) for kv in kvs]
        found = await at_once(sessions)
        assert [ids(events) for events in found] == expected
        for session in sessions:
            session.close()
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize("create", range(0, 60, 6))
def test_memory_that_runs_out_is_one_session_s_affair(model: Path, create: int) -> None:
    expected = [ids(alone(model, number, LaunchOptions())) for number in range(3)]

    async def run() -> None:
        lab = await DecodeLab().load(model)
        lab.device.turns = 2
        sessions = [lab.session(kv, 256) for kv in ("grow", "donate", "static")]
        lab.device.out_of_memory = frozenset({lab.device.creates + create})
        found = await at_once(sessions)
        assert [ids(events) for events in found] == expected
        for session in sessions:
            session.close()
        lab.close()

    asyncio.run(run())


def test_time_on_the_gpu_is_of_one_session(model: Path) -> None:
    """The passes that a device reports are those of all sessions: no token may count another one's."""

    async def run() -> None:
        lab = await DecodeLab().load(model)
        timed, other = lab.session(), lab.session("grow")
        lab.device.set_profile(spans=False, passes=True)
        first = timed.generate(prompt(0), Generation(max_tokens=3, gpu_time=True))
        event = await anext(first)
        assert event.counters is not None and event.counters.gpu_ms is not None
        with pytest.raises(BadRequest, match="gpu_time is of all that the device does, and 1 other generations"):
            await anext(stream(other, 1))
        await first.aclose()
        second = stream(other, 1)
        await anext(second)
        with pytest.raises(BadRequest, match="let them end first"):
            await anext(timed.generate([1], Generation(gpu_time=True)))
        await second.aclose()
        assert len(await tokens(timed, [1], 2, gpu_time=True)) == 2
        third = stream(other, 1)  # a session that is closed in the middle is not under way any more
        await anext(third)
        other.close()
        assert len(await tokens(timed, [1], 2, gpu_time=True)) == 2
        await third.aclose()
        timed.close()
        lab.close()

    asyncio.run(run())
