"""Plans in a decode: a replayed token is a live one, whatever is given up, changes or goes wrong in between."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stepwell.decode.generation import Generation
from stepwell.decode.kv_cache import GrowKV
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.session import DecodeSession
from stepwell.decode.timing import TokenEvent
from stepwell.errors import UsageError
from stepwell.gpu.device import Device
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.fake_objects import FakeBuffer
from stepwell.kernels.kv import KVShape
from stepwell.launch.options import ABLATION, LaunchOptions, Params
from stepwell.launch.plan import DEFAULT_PLANS
from stepwell.memory.buffer import Role
from stepwell.memory.pool import BufferPool
from tests.support.decode_lab import DecodeLab, ids, short_slabs, templates_rendered_once, tokens, write_model

__all__ = ["short_slabs", "templates_rendered_once"]  # fixtures for every test here
PROMPT = [5, 6, 7]
MAIN = ABLATION[0][1]
COUNT = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[TokenEvent]:
    """Live steps, with no switch on."""

    async def run() -> list[TokenEvent]:
        lab = await DecodeLab(MAIN).load(model)
        return await tokens(lab.session("static", 256), PROMPT, COUNT, digest=True)

    return asyncio.run(run())


def reasons(events: Sequence[TokenEvent]) -> Counter[str | None]:
    return Counter(event.counters.refused for event in events if event.counters)


# ---- a replay is the live step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("params", [mode.value for mode in Params if mode is not Params.AUTO])
def test_replayed_tokens_are_the_live_ones(model: Path, expected: Sequence[TokenEvent], kv: str, params: str) -> None:
    async def run() -> None:
        lab = await DecodeLab(LaunchOptions(params=Params(params))).load(model)
        session = lab.session(kv, 256)
        events = await tokens(session, PROMPT, COUNT, digest=True)
        assert ids(events) == ids(expected)
        assert [event.digest for event in events] == [event.digest for event in expected]
        refused = reasons(events)
        assert refused[None] > COUNT / 2
        plans = lab.launcher.report()["plans"]
        assert refused["recorded"] == plans["recorded"]
        assert plans["replayed"] == refused[None] + refused["recorded"], "each recording is tried once"
        assert {reason: n for reason, n in refused.items() if reason not in (None, "recorded", "prefill")} == plans[
            "refused"
        ]
        session.close()
        lab.close()

    asyncio.run(run())


def test_three_calls_per_token_at_most(model: Path) -> None:
    """In the steady state a token is a replay and a read."""

    async def run() -> None:
        lab = await DecodeLab().load(model)
        session = lab.session("static", 256)
        calls: list[str] = []
        per_token = []

        def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                calls.append(name if all(isinstance(arg, int) for arg in args) else f"{name} of more than numbers")
                return method(*args)

            return call

        for name in vars(Device):
            if not name.startswith("_") and name != "info":
                setattr(lab.device, name, counting(name, getattr(lab.device, name)))
        async for event in session.generate(PROMPT, Generation(max_tokens=30)):
            if 3 <= event.index < 27:
                per_token.append(tuple(calls))
            calls.clear()
        # once the pool's policy has given up what the prompt needed
        assert {calls for calls in per_token if "destroy" not in calls} == {("replay", "read_buffer")}
        assert sum("destroy" in calls for calls in per_token) <= 1

    asyncio.run(run())


def test_a_decode_step_costs_what_was_promised(model: Path) -> None:
    async def run(name: str) -> list[TokenEvent]:
        lab = await DecodeLab(dict(ABLATION)[name]).load(model)
        return (await tokens(lab.session("static"), PROMPT, 20))[3:]

    def levels(events: Sequence[TokenEvent], counter: str) -> set[int]:
        return {getattr(event.counters, counter) for event in events}

    main, full = asyncio.run(run("main")), asyncio.run(run(ABLATION[-1][0]))
    (launches,) = levels(main, "launches")
    assert levels(full, "launches") == {launches}
    assert levels(main, "passes") == levels(main, "bind_groups_created") == {launches}
    assert min(levels(main, "uploads")) >= launches
    assert levels(full, "bind_groups_created") == levels(full, "uploads") == {0}
    assert levels(full, "submits") == {1 + launches // 64}
    assert {event.counters.refused for event in full if event.counters} == {None}


# ---- the growing cache ----------------------------------------------------------------------------------------------


def test_one_plan_per_direction_of_a_growing_cache(model: Path, expected: Sequence[TokenEvent]) -> None:
    """Past and present change places: two plans between two size classes, new ones behind each, never more than fit."""

    async def run() -> None:
        lab = await DecodeLab().load(model)
        session = lab.session("grow", 256)
        events: list[TokenEvent] = []
        replayed: list[int] = []
        plan_of_token: list[int] = []
        directions: set[int] = set()
        lab.device.spoil = lambda _, scalars: replayed.append(scalars[0])  # which plan
        async for event in session.generate(PROMPT, Generation(max_tokens=COUNT)):
            events.append(event)
            assert len(lab.launcher.plans) <= DEFAULT_PLANS
            if len(replayed) == len(plan_of_token):
                replayed.append(0)  # none
            plan_of_token.append(replayed[-1])
            del replayed[len(plan_of_token) :]
        assert ids(events) == ids(expected)
        classes = [event.counters.kv_class_bytes for event in events if event.counters]
        crossings = [i for i, (before, after) in enumerate(pairwise(classes), 1) if after != before]
        assert len(crossings) >= 3
        for begin, end in pairwise([*crossings, COUNT]):
            inside = slice(begin + 8, end - 1)  # until the buffers have come twice, then two that are recorded
            if end - 1 - (begin + 8) < 4:
                continue
            assert reasons(events[inside]) == {None: len(events[inside])}
            first, second, *others = plan_of_token[inside]
            assert first != second
            assert others == [(first, second)[i % 2] for i in range(len(others))]
            directions |= {first, second}
        assert len(directions) >= 6, "new ones behind each crossing"
        session.close()
        assert len(lab.launcher.plans) == 0
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize("replay", [True, False])
def test_bindings_repeat_while_the_cache_grows(model: Path, replay: bool) -> None:
    """A deterministic pool: of 300 tokens' launches nearly all find a bind group (the rate is in the record)."""

    async def run() -> float:
        lab = await DecodeLab(LaunchOptions(replay=replay)).load(model)
        session = lab.session("grow", 512)
        before = lab.launcher.counters.copy()
        events = await tokens(session, PROMPT, 300)
        spent = lab.launcher.counters.since(before)
        rate = spent.bind_groups_reused / (spent.bind_groups_reused + spent.bind_groups_created)
        # in the record: since the launcher was made, with the few launches of the load
        assert lab.launcher.report()["identity_rate"] == pytest.approx(rate, abs=0.01)
        classes = [event.counters.kv_class_bytes for event in events if event.counters]
        steady = [
            event.counters.bind_groups_created
            for i, event in enumerate(events)
            if event.counters and i >= 5 and len(set(classes[i - 5 : i + 1])) == 1
        ]
        assert len(steady) > 200
        assert sum(created > 4 for created in steady) == 0
        return rate

    assert asyncio.run(run()) > 0.95


# ---- given up in between --------------------------------------------------------------------------------------------


async def trims(lab: DecodeLab, session: DecodeSession) -> None:
    lab.pool.trim()


async def other_prompts(lab: DecodeLab, session: DecodeSession) -> None:
    """Another session prefills: its widths push kernels out, its launches push bind groups out."""
    other = lab.session("static")
    for rows in (1, 3, 13, 40):
        await tokens(other, [1] * rows, 2)
    other.close()


async def workspaces_go(lab: DecodeLab, session: DecodeSession) -> None:
    lab.launcher.kernels.release_workspaces()
    lab.pool.trim()


async def runs_end(lab: DecodeLab, session: DecodeSession) -> None:
    lab.launcher.release_run()


async def another_policy(lab: DecodeLab, session: DecodeSession) -> None:
    lab.pool.set_policy("bucket" if lab.pool.policy.__class__.__name__ == "Adaptive" else "adaptive")


CASES: dict[str, tuple[Callable[[DecodeLab, DecodeSession], Awaitable[None]], LaunchOptions]] = {
    "pool.trim": (trims, LaunchOptions()),
    "kernel eviction": (other_prompts, LaunchOptions(variants_per_node=1)),
    "bind-group eviction": (other_prompts, LaunchOptions(bind_groups=40)),
    "workspaces": (workspaces_go, LaunchOptions()),
    "the end of a run": (runs_end, LaunchOptions()),
    "another policy": (another_policy, LaunchOptions()),
}


@pytest.mark.filterwarnings("ignore:a step of")
@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("case", CASES)
def test_what_is_given_up_takes_its_plans_with_it(
    model: Path, expected: Sequence[TokenEvent], kv: str, case: str
) -> None:
    """Nothing is destroyed under a plan (the device would complain), and the tokens stay what they are."""
    happens, options = CASES[case]

    async def run() -> None:
        lab = await DecodeLab(LaunchOptions.from_dict({**options.as_dict(), "readback_depth": 0})).load(model)
        session = lab.session(kv, 256)
        found, refused = [], []
        async for event in session.generate(PROMPT, Generation(max_tokens=60)):
            found.append(event.id)
            assert event.counters is not None
            refused.append(event.counters.refused)
            if event.index % 9 == 8:
                await happens(lab, session)
        assert found == ids(expected)[:60]
        assert refused.count(None) > 5, "it recovers"
        recorded = lab.launcher.plans.recorded
        assert recorded > 2 or kv != "grow"
        if case == "the end of a run" and kv == "static":
            assert (recorded, lab.launcher.plans.invalidated) == (7, 0)
        if case in ("kernel eviction", "bind-group eviction", "workspaces"):
            assert lab.launcher.plans.invalidated >= 5
        session.close()
        lab.close()

    asyncio.run(run())


# ---- a replay that goes wrong ---------------------------------------------------------------------------------------


def spoil(what: str, lab: DecodeLab, scalars: tuple[int, ...]) -> None:
    """A replay did something else than its step."""
    logits = [lease.id for lease in lab.pool.inventory.leases() if lease.label == "logits"]
    for handle in [scalars[-1]] if what == "token" else logits:
        lab.device.get(handle, FakeBuffer, "test").view(0, 4)[:] = b"\x2a\x00\x00\x00"
    for lease in lab.pool.inventory.leases():  # and its KV is wrong as well
        if lease.label in ("k.0", "v.1"):
            view = lab.device.get(lease.id, FakeBuffer, "test").view(scalars[1] * 128, 128)
            view[:] = bytes(128)


@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("what", ["token", "logits"])
@pytest.mark.parametrize("depth", [0, 4])
def test_a_first_replay_that_differs(
    model: Path, expected: Sequence[TokenEvent], kv: str, what: str, depth: int
) -> None:
    """The plan goes, the step is done once more, and steps stay live: right tokens, and the record says why."""

    async def run() -> None:
        lab = await DecodeLab(LaunchOptions(readback_depth=depth)).load(model)
        in_use = lab.pool.ledger.in_use_bytes
        lab.device.spoil = lambda number, scalars: spoil(what, lab, scalars)
        session = lab.session(kv, 256)
        events = await tokens(session, PROMPT, 40)
        assert ids(events) == ids(expected)[:40]
        assert lab.device.replays == 1
        refused = reasons(events)
        assert refused[None] == refused["recorded"] == 0
        assert refused["differs"] > 10
        report = lab.launcher.report()["plans"]
        assert report["refused"]["differs"] == refused["differs"]
        assert (report["recorded"], report["invalidated"]) == (1, 1)
        assert len(lab.launcher.plans) == 0
        labels = Counter(lease.label for lease in lab.pool.inventory.leases())
        assert labels["logits"] == labels["normed"] == 1, "the step that was done again took nothing twice"
        session.close()
        lab.pool.flush()
        assert lab.pool.ledger.in_use_bytes - lab.launcher.kernels.workspace_bytes == in_use
        # another session may be luckier
        lab.device.spoil = None
        other = lab.session("static", 256)
        assert reasons(await tokens(other, PROMPT, 40))[None] > 20
        other.close()
        lab.close()

    asyncio.run(run())


def test_an_unsound_step_is_looked_at_once(
    model: Path, expected: Sequence[TokenEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def refuses(*args: Any) -> int:
        looks.append(args)
        raise UsageError("it breaks a rule")

    monkeypatch.setattr("stepwell.launch.launcher.verify", refuses)

    async def run() -> None:
        lab = await DecodeLab().load(model)
        session = lab.session("static", 256)
        events = await tokens(session, PROMPT, 20)
        assert ids(events) == ids(expected)[:20]
        assert reasons(events) == {"prefill": 1, "unsound": 19}
        assert len(looks) == 1
        assert lab.launcher.plans.refused == {"unsound: it breaks a rule": 1, "unsound": 18}
        assert lab.pool.report().by_role[Role.PINNED].in_use_bytes == 0
        session.close()
        lab.close()

    asyncio.run(run())


def test_a_step_that_cannot_be_issued_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a plan that is refused: nothing was computed, and what is read back is the token before."""

    async def run() -> None:
        lab = await DecodeLab().load(model)
        session = lab.session("static", 256)

        def refuses(*args: Any) -> int:
            raise UsageError("no such buffer")

        with pytest.raises(UsageError, match="no such buffer"):
            async for event in session.generate(PROMPT, Generation(max_tokens=20)):
                assert event.index == 0
                monkeypatch.setattr(lab.device, "submit", refuses)
        monkeypatch.undo()
        assert lab.launcher.plans.refused == {}
        session.close()

    asyncio.run(run())


# ---- books ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("policy", ["adaptive", "bucket", "disabled"])
def test_pins_are_balanced(model: Path, kv: str, policy: str) -> None:
    async def run() -> None:
        lab = await DecodeLab(policy=policy).load(model)
        before = lab.pool.report()
        assert before.by_role[Role.PINNED].in_use_bytes == 0
        for _ in range(2):
            session = lab.session(kv, 256)
            events = await tokens(session, PROMPT, 20)
            if lab.launcher.plans.recorded:
                assert reasons(events)["recorded"] >= 1
                assert lab.pool.report().by_role[Role.PINNED].in_use_bytes > 0
            session.close()
            assert lab.pool.report().by_role[Role.PINNED].in_use_bytes == 0
            after = lab.pool.report()
            assert after.in_use_bytes - lab.launcher.kernels.workspace_bytes == before.in_use_bytes
        assert kv in ("grow", "paged") or lab.launcher.plans.recorded == 2
        lab.close()

    asyncio.run(run())


def test_every_reason_is_counted(model: Path) -> None:
    """``off`` and ``prefill`` are of the switch and the step: they are in the token's record, not a plan's refusal."""

    async def run(options: LaunchOptions, kv: str) -> tuple[Counter[str | None], dict[str, int]]:
        lab = await DecodeLab(options).load(model)
        events = await tokens(lab.session(kv, 256), PROMPT, 60)
        return reasons(events), lab.launcher.report()["plans"]["refused"]

    off, counted = asyncio.run(run(LaunchOptions(replay=False), "static"))
    assert off == {"prefill": 0, "off": 59} | {"prefill": off["prefill"]}
    assert counted == {}
    ahead, counted = asyncio.run(run(LaunchOptions(readback_depth=4), "grow"))
    assert ahead["buffers changed"] > 0 and ahead["in flight"] > 0 and ahead["recorded"] > 0
    assert counted == {reason: ahead[reason] for reason in ("buffers changed", "in flight")}


# ---- together -------------------------------------------------------------------------------------------------------


async def interleave(lab: DecodeLab, sessions: Sequence[DecodeSession], count: int) -> list[list[int]]:
    """Token by token in turns, each with steps of its own in flight."""
    streams = [
        session.generate([PROMPT[0] + number, *PROMPT[1:]], Generation(max_tokens=count))
        for number, session in enumerate(sessions)
    ]
    found: list[list[int]] = [[] for _ in streams]
    for _ in range(count):
        for stream, into in zip(streams, found, strict=True):
            into.append((await anext(stream)).id)
    for stream in streams:
        await stream.aclose()
    return found


def alone(model: Path, number: int, count: int) -> list[int]:
    async def run() -> list[int]:
        lab = await DecodeLab(MAIN).load(model)
        return ids(await tokens(lab.session("static", 256), [PROMPT[0] + number, *PROMPT[1:]], count))

    return asyncio.run(run())


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("params", ["uniform_pool", "call_site", "immediates"])
def test_sessions_in_turns_on_one_launcher(model: Path, depth: int, params: str) -> None:
    async def run() -> list[list[int]]:
        options = LaunchOptions.from_dict({"readback_depth": depth, "params": params})
        lab = await DecodeLab(options).load(model)
        sessions = [lab.session(kv, 256) for kv in ("static", "grow", "static")]
        found = await interleave(lab, sessions, 40)
        assert lab.launcher.plans.replayed > 60
        for session in sessions:
            session.close()
        lab.close()
        return found

    assert asyncio.run(run()) == [alone(model, number, 40) for number in range(3)]


@pytest.mark.parametrize("kv", KV_MODES)
def test_launchers_in_turns_on_one_pool(model: Path, kv: str) -> None:
    """An engine per set of options, as the ablation has them: they share buffers, and nothing else."""

    async def run() -> list[list[int]]:
        lab = await DecodeLab().load(model)
        options = [LaunchOptions(), LaunchOptions(params=Params.CALL_SITE), MAIN, LaunchOptions(bind_group_cache=False)]
        launchers = [lab.another(some) for some in options]
        sessions = [lab.session(kv, 256, launcher) for launcher in launchers]
        found = await interleave(lab, sessions, 40)
        assert [launcher.plans.replayed > 4 for launcher in launchers] == [True, True, False, True]
        for launcher, session in zip(launchers, sessions, strict=True):
            session.close()
            lab.pool.trim()
            launcher.close()
        lab.close()
        return found

    assert asyncio.run(run()) == [alone(model, number, 40) for number in range(4)]


@pytest.mark.parametrize("kv", KV_MODES)
def test_what_a_step_brings_back_is_in_the_key(model: Path, expected: Sequence[TokenEvent], kv: str) -> None:
    """Generations of one session that want other things each have plans of their own."""
    wants: list[dict[str, Any]] = [
        {}, {"digest": True}, {}, {"ban_eos": True, "eog_ids": frozenset({3})}, {"digest": True},
    ]  # fmt: skip

    async def run(options: LaunchOptions) -> list[list[TokenEvent]]:
        lab = await DecodeLab(options).load(model)
        session = lab.session(kv, 256)
        answers = [await tokens(session, PROMPT, 16, **want) for want in wants]
        session.close()
        lab.close()
        return answers

    live, replayed = asyncio.run(run(MAIN)), asyncio.run(run(LaunchOptions()))
    for one, other in zip(live, replayed, strict=True):
        assert ids(one) == ids(other)
        assert [event.digest for event in one] == [event.digest for event in other]
    assert sum(reasons(answer)[None] for answer in replayed) > 20


def test_past_and_present_are_in_the_key() -> None:
    """The same present behind another past is another step."""
    pool = BufferPool(FakeDevice(), "exact")
    cache = GrowKV(pool, KVShape(1, 256), 8)
    sets = [cache.extend(1), cache.extend(1), cache.extend(1)]
    assert cache.key == tuple(buffer.id for pairs in sets[1:] for pair in pairs for buffer in pair.buffers)
    cache.commit()
    assert cache.key == tuple(buffer.id for pairs in sets[1:] for pair in pairs for buffer in pair.buffers)


def test_a_session_that_ends_leaves_the_others_plans(model: Path) -> None:
    async def run() -> None:
        lab = await DecodeLab().load(model)
        first, second = lab.session("static", 256), lab.session("static", 256)
        await tokens(first, PROMPT, 10)
        await tokens(second, PROMPT, 10)
        assert len(lab.launcher.plans) == 2
        first.close()
        assert len(lab.launcher.plans) == 1
        events = await tokens(second, PROMPT, 10)
        assert reasons(events) == {"prefill": 1, None: 9}
        second.close()
        lab.close()

    asyncio.run(run())
