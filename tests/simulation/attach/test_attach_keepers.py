"""The keepers and policies of stepwell.attach in Python and in JavaScript: the same calls, the same answers."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.attach.keeper import Keeper, policy_maker
from stepwell.errors import BadRequest, PolicyError, StaleBuffer, StepwellError
from stepwell.memory.buffer import Role
from stepwell.memory.policies import POLICIES
from stepwell.memory.policies.base import Request
from stepwell.memory.policies.bucket import Bucket
from stepwell.memory.policies.simple import Simple
from stepwell.replay.kv_shapes import PHI4_MINI, QWEN35_4B
from stepwell.replay.traces import ACQUIRE, FLUSH, RELEASE, RUN, Event
from stepwell.replay.workloads import growing
from tests.support.attach_lab import NodeError, NodeModules, node_modules

MIB = 1 << 20
JS = """
import { Keeper } from "./keeper.js";
import { POLICIES } from "./policies/index.js";

export function answer({ table, keeper, calls }) {
  if (table) return Object.entries(POLICIES).map(([name, { options }]) => [name, options]);
  const subject = new Keeper(keeper);
  return calls.map(([method, ...args]) => {
    try {
      return subject[method](...args) ?? null;
    } catch (error) {
      return [error.name, error.message];
    }
  });
}
"""
Settings = dict[str, Any]
SETTINGS: list[Settings] = [
    *({"policy": name} for name, entry in POLICIES.items() if entry.attached),
    {"options": {"window": 1}},
    {"options": {"window": 3, "growth": 1.5, "stagger": False}, "budget": 700 * MIB},
    {"policy": "bucket", "options": {"era": "A"}},
    {
        "policy": "bucket",
        "options": {"era": "C", "limits": "64: 2, 4 MiB: 30, 8 MiB:64, 0.125MiB:7"},
        "budget": 5 * MIB,
    },
    {"policy": "bucket", "options": {"limits": {"4096": 1, "1048576": 3}}},
    {"policy": "simple", "budget": 3 * MIB},
    {"policy": "exact", "options": {"cap": 3, "largest_bytes": "1048576"}, "budget": 2_000_001},
    {"policy": "disabled", "budget": 1},
]


@pytest.fixture(scope="module")
def js() -> Iterator[NodeModules]:
    with node_modules(JS) as modules:
        yield modules


@dataclass
class Caller:
    """Drives a Keeper as the pool does, and notes every call and its answer."""

    keeper: Keeper
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    creates: int = 0

    def call(self, method: str, *args: int) -> Any:
        self.calls.append((method, *args))
        try:
            answer = getattr(self.keeper, method)(*args)
        except StepwellError as error:
            answer = [error.code, str(error)]
        self.answers.append(answer)
        return answer

    def get(self, usage: int, nbytes: int) -> int:
        buffer_id: int = self.call("acquire", usage, nbytes)
        if not buffer_id:
            self.call("room", nbytes)
            buffer_id = self.call("created", usage, nbytes)
            self.creates += 1
        self.live.append(buffer_id)
        return buffer_id

    def put(self, index: int) -> None:
        if self.live:
            self.call("release", self.live.pop(index % len(self.live)))

    def compare(self, js: NodeModules, settings: Settings) -> None:
        self.call("stats")
        found = js.ask({"keeper": settings, "calls": self.calls})
        for index, (call, mine, other) in enumerate(zip(self.calls, self.answers, found, strict=True)):
            if call[0] == "stats":
                mine, other = json.loads(mine), json.loads(other)
            assert mine == other, f"call {index}, {call}: Python {mine!r}, JavaScript {other!r}"


def keeper_of(settings: Settings) -> Keeper:
    """The Python keeper with the settings that the JS one is given."""
    make = policy_maker(settings.get("policy", "adaptive"), settings.get("options", {}))
    return Keeper(make, settings.get("budget"))


def caller(settings: Settings) -> Caller:
    return Caller(keeper_of(settings))


# ---- traces ---------------------------------------------------------------------------------------------------------


def under_ort(events: Iterable[Event]) -> Iterator[Event]:
    """What ONNX Runtime creates for the events, if it reuses nothing itself: sizes of its classes."""
    classes = Bucket()
    for op, value, request in events:
        yield op, value, Request(classes.size_class(request), Role.ACTIVATION, 0, True) if op == ACQUIRE else request


def replay(caller: Caller, events: Iterable[Event], usages: tuple[int, ...] = (140,)) -> list[int]:
    """The events through a keeper; returns the creates of each run."""
    leases: dict[int, int] = {}
    per_run: list[int] = []
    before = 0
    for op, value, request in events:
        if op == ACQUIRE:
            leases[value] = caller.get(usages[value % len(usages)], request.nbytes)
        elif op == RELEASE:
            caller.call("release", leases.pop(value))
        elif op == FLUSH:
            caller.call("flush")
        elif op == RUN:
            per_run.append(caller.creates - before)
            before = caller.creates
            caller.call("begin_run")
    return [*per_run[1:], caller.creates - before]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.get("policy", "adaptive"))
def test_growing_kv_is_decided_alike(js: NodeModules, settings: Settings) -> None:
    many, few = caller(settings), caller(settings)
    creates = replay(many, under_ort(growing(PHI4_MINI, 2040, 2054)))
    # 64 tensors, two classes and two usages; memory runs out once
    replay(few, chain(under_ort(growing(QWEN35_4B, 4090, 4100)), [(FLUSH, 0, Request(0, Role.KV))]), (140, 132))
    few.call("shrink")
    few.live.clear()
    replay(few, under_ort(growing(QWEN35_4B, 4101, 4104)), (132, 140))
    if settings == {"policy": "adaptive"}:
        assert creates[-4:] == [0, 0, 0, 0]  # past the crossing at 2,048
    if settings == {"policy": "bucket"}:
        assert creates[-4:] == [54, 54, 54, 54]
    many.compare(js, settings)
    few.compare(js, settings)


OPS = st.one_of(
    st.tuples(st.just("get"), st.sampled_from([140, 132, 0x1AC]), st.sampled_from([4, 64, 4096, 8192, MIB, 5 * MIB])),
    st.tuples(st.sampled_from(["put"] * 4 + ["forget", "release"]), st.integers(0, 40)),
    st.tuples(st.sampled_from(["flush", "begin_run", "begin_run", "begin_run", "drain", "shrink", "stats", "idle"])),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SETTINGS), st.lists(OPS, max_size=120))
def test_anything_is_decided_alike(js: NodeModules, settings: Settings, ops: list[tuple[Any, ...]]) -> None:
    subject = caller(settings)
    for op, *args in ops:
        if op in ("get", "put"):
            getattr(subject, op)(*args)
        elif op == "idle":  # runs in which nothing is asked for
            for _ in range(9):
                subject.call("begin_run")
        else:
            if op == "forget" and args[0] in subject.live:
                subject.live.remove(args[0])
            if op == "release" and args[0] in subject.live:
                subject.live.remove(args[0])
            subject.call(op, *args)
        check_books(subject)
    subject.compare(js, settings)


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("budget", [None, 40 * MIB])
def test_demand_that_comes_and_goes_is_decided_alike(js: NodeModules, window: int, budget: int | None) -> None:
    """Long enough for windows to widen and narrow, classes to be forgotten, and victims to be chosen by credit."""
    settings: Settings = {"options": {"window": window}, "budget": budget}
    subject = caller(settings)
    random = Random(window)
    sizes = [4096, 8192, 12288, MIB, MIB + 4, 2 * MIB, 3 * MIB, 5 * MIB, 6 * MIB, 8 * MIB]
    rest = dict.fromkeys(sizes, 0)  # runs until more of the size are asked for
    between = dict.fromkeys(sizes, 0)  # what is asked for until then
    for _ in range(1500):
        subject.call("begin_run")
        for size in sizes:
            rest[size] -= 1
            for _ in range(between[size] if rest[size] >= 0 else random.randint(2, 3)):
                subject.get(140, size)
            if rest[size] < 0 and random.random() < 0.3:
                rest[size] = random.choice([1, 1, 2, random.randint(window, 8 * window), 35 * window])
                between[size] = random.randint(0, 1)
        while len(subject.live) > random.randint(0, 4):
            subject.put(random.randrange(99))
    subject.compare(js, settings)


def test_windows_widen_and_narrow_alike(js: NodeModules) -> None:
    """Each size has its own peaks: a second one after every distance, or a third one after it widened the window."""
    settings: Settings = {"options": {"window": 2}}
    subject = caller(settings)
    peaks = [{3, 3 + gap} for gap in range(1, 24)] + [{3, 8, 8 + gap} for gap in range(50, 90)]
    for run in range(110):
        subject.call("begin_run")
        for index, times in enumerate(peaks):
            for _ in range(3 if run in times else 1):
                subject.get(140, 4096 * (1 + index))
        while subject.live:
            subject.put(0)
    subject.compare(js, settings)


def check_books(subject: Caller) -> None:
    """The books add up, and say what the caller knows."""
    stats = json.loads(subject.keeper.stats())
    assert stats["live_buffers"] == len(subject.live)
    assert stats["created"] - stats["destroyed"] == stats["live_buffers"] + stats["free_buffers"]
    assert stats["peak_bytes"] >= stats["live_bytes"] + stats["free_bytes"]
    assert all(value >= 0 for name, value in stats.items() if name != "budget_bytes")


def test_a_budget_rises_again(js: NodeModules) -> None:
    settings: Settings = {"budget": 64 * MIB}
    subject = caller(settings)
    for _ in range(3):
        subject.get(140, 10 * MIB)
    subject.put(0)
    assert subject.call("shrink") == "1"
    assert json.loads(subject.call("stats"))["budget_bytes"] == 21 * MIB
    for _ in range(24_000):
        subject.call("begin_run")
        if len(subject.calls) % 1000 == 0:
            subject.call("stats")
    assert json.loads(subject.call("stats"))["budget_bytes"] == 64 * MIB
    subject.compare(js, settings)


# ---- a keeper's own rules -------------------------------------------------------------------------------------------


def test_what_is_live_is_all_that_exceeds_a_budget() -> None:
    subject = caller({"budget": 8 * MIB})
    for _ in range(4):
        subject.get(140, 2 * MIB)
    for _ in range(4):
        subject.put(0)
    assert subject.call("acquire", 132, 5 * MIB) == 0
    assert subject.call("room", 5 * MIB) == "1 2 3"
    subject.call("created", 132, 5 * MIB)
    assert json.loads(subject.call("stats"))["peak_bytes"] == 8 * MIB
    assert subject.call("acquire", 132, 9 * MIB) == 0
    assert subject.call("room", 9 * MIB) == "4"


def test_sizes_that_never_come_back_are_not_kept() -> None:
    """Under a runtime that does not round sizes a growing tensor is never served: then it must cost nothing."""
    events = [
        (op, value, request._replace(exact=True) if op == ACQUIRE else request)
        for op, value, request in growing(PHI4_MINI, 1000, 1020)
    ]
    subject = caller({})
    creates = replay(subject, events)
    assert creates[-1] == 64
    assert json.loads(subject.keeper.stats())["peak_bytes"] <= 1.01 * 2 * 64 * 2048 * 1020


def test_a_size_of_every_other_run_is_learned(js: NodeModules) -> None:
    subject = caller({})
    creates = []
    for run in range(12):
        subject.call("begin_run")
        before = subject.creates
        subject.get(140, MIB if run % 2 else 2 * MIB)
        subject.put(0)
        creates.append(subject.creates - before)
    assert creates == [1, 1, 1, 1] + [0] * 8
    subject.compare(js, {})


def test_a_size_of_one_run_goes_when_the_next_goes_on_without_it(js: NodeModules) -> None:
    subject = caller({})
    freed = []
    for size in [MIB, 0, 0, 2 * MIB, 2 * MIB, 0, 4 * MIB, 4 * MIB]:
        freed.append(subject.call("begin_run"))
        if size:
            subject.get(140, size)
            subject.put(0)
    assert freed == ["", "", "", "", "1", "", "", ""]  # 2 MiB were asked for by two runs: the window counts
    subject.compare(js, {})


def test_usages_and_sizes_do_not_mix() -> None:
    subject = caller({})
    first = subject.get(140, 4096)
    subject.put(0)
    assert subject.call("acquire", 132, 4096) == 0
    assert subject.call("acquire", 140, 4100) == 0
    assert subject.call("acquire", 140, 4096) == first


def test_a_buffer_that_is_gone_serves_nobody() -> None:
    subject = caller({"policy": "exact"})
    gone, kept = subject.get(140, 64), subject.get(140, 64)
    subject.put(1)
    subject.put(0)
    subject.call("forget", gone)
    assert subject.call("acquire", 140, 64) == 0
    assert subject.call("drain") == str(kept)
    assert subject.call("forget", gone) is None


def test_a_policy_of_the_callers() -> None:
    keeper = Keeper(policy_maker(Simple, {}))
    assert keeper.acquire(140, 64) == 0
    assert keeper.release(keeper.created(140, 64)) == ""
    keeper.flush()
    assert keeper.acquire(140, 64) == 1
    with pytest.raises(BadRequest, match="callable that sets them itself"):
        policy_maker(Simple, {"cap": 1})


class Wrong(Simple):
    """Hands out buffer 1 except to the first request, and gives it up at each flush."""

    asked = 0

    def acquire(self, request: Request, size: int) -> int | None:
        self.asked += 1
        return 1 if self.asked > 1 else None

    def flush(self) -> list[int]:
        return [1]


def test_a_policy_that_breaks_its_contract() -> None:
    keeper = Keeper(Wrong)
    assert keeper.acquire(140, 64) == 0
    assert keeper.created(140, 64) == 1
    with pytest.raises(PolicyError, match="Wrong handed out buffer 1, which is not free"):
        keeper.acquire(140, 64)
    with pytest.raises(PolicyError, match="gave up buffer 1, which is not free"):
        keeper.flush()
    keeper.release(1)
    with pytest.raises(PolicyError, match="buffer 1 of 64 B for 128 B"):
        keeper.acquire(140, 128)


def test_released_twice() -> None:
    keeper = keeper_of({})
    keeper.acquire(140, 64)
    keeper.release(keeper.created(140, 64))
    with pytest.raises(StaleBuffer, match="buffer 1 was released, and is free already"):
        keeper.release(1)
    with pytest.raises(StaleBuffer, match="buffer 2 was released, and is not there"):
        keeper.release(2)


# ---- names, options, errors -----------------------------------------------------------------------------------------


def test_the_tables_of_options_are_the_same(js: NodeModules) -> None:
    found = js.ask({"table": True})
    assert [name for name, _ in found] == [name for name, entry in POLICIES.items() if entry.attached]
    assert [name for name, entry in POLICIES.items() if entry.tried_attached and not entry.attached] == []
    for name, options in found:
        mine = [
            {"name": option.name, "kind": option.kind.value, "default": option.default}
            | ({"minimum": option.minimum, "maximum": option.maximum} if option.kind in ("int", "float") else {})
            | ({"choices": list(option.choices)} if option.choices else {})
            for option in POLICIES[name].options
        ]
        assert json.loads(json.dumps(mine, default=dict)) == options


BAD: list[Settings] = [
    {"policy": "pow2"},
    {"policy": "best"},
    {"policy": "simple", "options": {"cap": 1}},
    {"policy": "exact", "options": {"size": 1, "count": 2}},
    {"options": {"window": 0}},
    {"options": {"window": 257}},
    {"options": {"window": 1.5}},
    {"options": {"window": "eight"}},
    {"options": {"window": ""}},
    {"options": {"growth": 0.5}},
    {"options": {"growth": "nan"}},
    {"options": {"growth": 2.5}},
    {"options": {"stagger": "perhaps"}},
    {"options": {"stagger": 1}},
    {"policy": "exact", "options": {"cap": -1}},
    {"policy": "exact", "options": {"largest_bytes": 1 << 41}},
    {"policy": "bucket", "options": {"era": "D"}},
    {"policy": "bucket", "options": {"limits": ""}},
    {"policy": "bucket", "options": {"limits": "4 MB:3"}},
    {"policy": "bucket", "options": {"limits": "6:3"}},
    {"policy": "bucket", "options": {"limits": {"-4": 3}}},
    {"policy": "bucket", "options": {"limits": {"1048576": -3}}},
    {"policy": "bucket", "options": {"limits": 3}},
    {"budget": 0},
    {"budget": -4096},
]


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_what_is_refused_is_refused_alike(js: NodeModules, settings: Settings) -> None:
    with pytest.raises(BadRequest) as mine:
        keeper_of(settings)
    with pytest.raises(NodeError) as other:
        js.ask({"keeper": settings, "calls": []})
    assert (other.value.name, other.value.message) == ("BadRequest", str(mine.value))


def test_a_policy_without_sizes_of_its_own_is_named() -> None:
    with pytest.raises(
        BadRequest, match=r"'pow2': attach has none.*adaptive, bucket, simple, exact, lazy_release, dis"
    ):
        policy_maker("pow2", {})
