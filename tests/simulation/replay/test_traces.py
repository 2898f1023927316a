"""Trace files: what is written is read back, what is damaged is refused; a recorder sees all that a pool is asked."""

import asyncio
import gzip
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.decode.kv_pattern import KVPattern
from stepwell.errors import BadTrace
from stepwell.gpu.fake_device import FakeDevice
from stepwell.launch.launcher import Launcher
from stepwell.memory.buffer import CHOSEN_ROLES, Buffer, Role
from stepwell.memory.policies import POLICIES, make_policy
from stepwell.memory.policies.base import Request
from stepwell.memory.pool import BufferPool
from stepwell.replay.simulator import served, simulate
from stepwell.replay.traces import (
    ACQUIRE,
    FLUSH,
    NO_REQUEST,
    RELEASE,
    RUN,
    Cause,
    Event,
    TraceRecorder,
    check_events,
    read_metadata,
    read_trace,
    write_trace,
)
from stepwell.replay.what_if import recorded_setting
from tests.support.pattern_lab import kernels

HEADER = 'stepwell-trace 1 {"model": "tiny"}\n'
EVENTS: list[Event] = [
    (RUN, 7, NO_REQUEST),
    (FLUSH, Cause.UPLOAD, NO_REQUEST),
    (ACQUIRE, 0, Request(4_196_352, Role.KV, 17)),
    (ACQUIRE, 1, Request(96, Role.WORKSPACE, 0)),
    (RELEASE, 0, NO_REQUEST),
    (FLUSH, Cause.DOWNLOAD, NO_REQUEST),
    (RELEASE, 1, NO_REQUEST),
]
TEXT = HEADER + "b 7\nf u\n+ 4196352 k 17\n+ 96 o\n- 0\nf r\n- 1\n. 7\n"


ANY_SIZE = st.integers(1, 1 << 40)


@st.composite
def event_lists(
    draw: st.DrawFn, sizes: st.SearchStrategy[int] = ANY_SIZE, roles: Sequence[Role] = tuple(Role), length: int = 40
) -> list[Event]:
    """Any order of events in which every lease is released at most once."""
    events: list[Event] = []
    live: list[int] = []
    leases = 0
    for _ in range(draw(st.integers(0, length))):
        op = draw(st.sampled_from([ACQUIRE, ACQUIRE, ACQUIRE, RELEASE, RELEASE, FLUSH, RUN]))
        if op == ACQUIRE:
            request = Request(draw(sizes), draw(st.sampled_from(roles)), draw(st.integers(0, 99)))
            events.append((ACQUIRE, leases, request))
            live.append(leases)
            leases += 1
        elif op == RELEASE and live:
            events.append((RELEASE, live.pop(draw(st.integers(0, len(live) - 1))), NO_REQUEST))
        elif op == FLUSH:
            events.append((FLUSH, draw(st.sampled_from(Cause)), NO_REQUEST))
        elif op == RUN:
            events.append((RUN, draw(st.integers(0, 1 << 40)), NO_REQUEST))
    return events


def test_the_format_is_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    assert write_trace(path, EVENTS, {"model": "tiny"}) == 7
    assert path.read_text() == TEXT
    assert list(read_trace(path)) == EVENTS
    assert read_metadata(path) == {"model": "tiny"}


@pytest.mark.parametrize("name", ["a.trace", "a.trace.gz"])
@given(events=event_lists())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read_back(name: str, events: Sequence[Event], tmp_path: Path) -> None:
    path = tmp_path / name
    assert write_trace(path, events) == len(events)
    assert list(read_trace(path)) == events


def test_every_role_and_cause_has_a_letter_of_its_own(tmp_path: Path) -> None:
    events: list[Event] = [(ACQUIRE, index, Request(16, role, 0)) for index, role in enumerate(Role)]
    events += [(FLUSH, cause, NO_REQUEST) for cause in Cause]
    path = tmp_path / "a.trace"
    write_trace(path, events)
    assert list(read_trace(path)) == events
    assert len(set(path.read_text().splitlines())) == len(events) + 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("GGUF\x03\n", r"begins with 'GGUF.x03'.*Is it a trace"),
        ("stepwell-trace 2 {}\n. 0\n", "version '2'; this stepwell reads version 1"),
        ("stepwell-trace 1\n. 0\n", "metadata is not JSON"),
        ("stepwell-trace 1 [1]\n. 0\n", "must be a JSON object"),
        (HEADER + "b 1\n", "after 1 events without its end mark"),
        (HEADER + "b 1\n. 2\n", "end mark says '2' events, 1 were read"),
        (HEADER + ". 0\nb 1\n", "line 3: 'b 1' after the end mark"),
        (HEADER + "x 1\n. 1\n", "line 2: 'x 1' is no event"),
        (HEADER + "f x\n. 1\n", "line 2: 'f x' is no event"),
        (HEADER + "b -1\n. 1\n", "line 2: '-1' where a number"),
        (HEADER + "b 1.5\n. 1\n", "line 2: '1.5' where a number"),
        (HEADER + "b ²\n. 1\n", "line 2: '²' where a number"),
        (HEADER + f"b {'9' * 5000}\n. 1\n", "line 2: '9+…' where a number"),
        (HEADER + "+ 16\n. 1\n", "line 2: an acquire of '16'"),
        (HEADER + "+ 16 z\n. 1\n", "line 2: an acquire of '16 z'"),
        (HEADER + "+ 16 k 1 2\n. 1\n", "line 2: an acquire of '16 k 1 2'"),
        (HEADER + "+ 0 k\n. 1\n", "at 2: acquire of 0 B"),
        (HEADER + "- 0\n. 1\n", "at 2: release of lease 0, which was never acquired"),
        (HEADER + "+ 16 k\n- 0\n- 0\n. 3\n", "at 4: release of lease 0, which was released already"),
    ],
)
def test_damaged_traces_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    path.write_text(text)
    with pytest.raises(BadTrace, match=message):
        list(read_trace(path))


@pytest.mark.parametrize("cut", [0, 1, 9, 25, -5])
def test_truncated_archives_are_refused(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "a.trace.gz"
    path.write_bytes(gzip.compress(TEXT.encode())[: cut or None])
    if cut == 0:
        assert list(read_trace(path)) == EVENTS
        return
    with pytest.raises(BadTrace, match=r"a\.trace\.gz"):
        list(read_trace(path))


@pytest.mark.parametrize("damaged", [b"\xff\xfe+ 16 k\n", b"stepwell-trace 1 {}\nb \xff\n"])
def test_bytes_that_are_no_text_are_refused(damaged: bytes, tmp_path: Path) -> None:
    for name, data in (("a.trace", damaged), ("b.trace.gz", damaged), ("c.trace.gz", gzip.compress(damaged))):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(BadTrace, match=f"{name}, after line .*damaged or cut off"):
            list(read_trace(path))


@pytest.mark.parametrize(
    "events",
    [
        [(RELEASE, 0, NO_REQUEST)],
        [(ACQUIRE, 1, Request(16, Role.KV, 0))],
        [(ACQUIRE, 0, Request(0, Role.KV, 0))],
        [(ACQUIRE, 0, Request(16, Role.KV, -1))],
        [(RUN, -1, NO_REQUEST)],
        [(9, 0, NO_REQUEST)],
    ],
)
def test_events_that_cannot_be_are_not_written(events: list[Event], tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="at 1: "):
        write_trace(tmp_path / "a.trace", events)


# ---- the recorder ---------------------------------------------------------------------------------------------------


def drive(pool: BufferPool) -> None:
    """Six decode steps with a growing KV cache, an activation each, and buffers of other roles that live throughout."""
    pool.acquire(1000, Role.WEIGHTS, "w")
    uniform = pool.acquire(16, Role.UNIFORM, "step")
    past = [pool.acquire(500_000 * 2, Role.KV, site=site) for site in range(4)]
    for step in range(6):
        pool.begin_run()
        activation = pool.acquire(4096, Role.ACTIVATION, "x")
        present = [pool.acquire(500_000 * (3 + step), Role.KV, site=site) for site in range(4)]
        pool.release(activation)
        pool.flush()
        for buffer in past:
            pool.release(buffer)
        past = present
    pool.release(uniform)
    pool.flush()


def test_recorder_sees_what_the_pool_is_asked() -> None:
    pool = BufferPool(FakeDevice(), "simple")
    before = pool.acquire(64, Role.WORKSPACE, "scores", 9)
    recorder = TraceRecorder(pool)
    buffer = pool.acquire(100, Role.KV, "k.0", 3)
    pool.begin_run()
    pool.release(buffer)
    pool.flush()
    again = pool.acquire(100, Role.KV, "k.0", site=3)
    assert again.id == buffer.id
    pool.release(before)
    recorder.stop()
    pool.release(again)
    assert recorder.events == [
        (ACQUIRE, 0, Request(64, Role.WORKSPACE, 9)),
        (ACQUIRE, 1, Request(100, Role.KV, 3)),
        (FLUSH, Cause.SUBMIT, NO_REQUEST),
        (RUN, 1, NO_REQUEST),
        (RELEASE, 1, NO_REQUEST),
        (FLUSH, Cause.SUBMIT, NO_REQUEST),
        (ACQUIRE, 2, Request(100, Role.KV, 3)),
        (RELEASE, 0, NO_REQUEST),
    ]


def test_the_policy_is_in_the_metadata_unless_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    pool = BufferPool(FakeDevice(), "bucket")
    recorder = TraceRecorder(pool)
    recorder.save(path)
    assert read_metadata(path) == {"policy": "bucket", "options": {}}
    pool.set_policy("bucket", era="C", limits={4096: 7, 8192: 2})
    recorder.save(path, {"model": "tiny"})
    assert read_metadata(path) == {"model": "tiny"}
    again = TraceRecorder(pool)
    again.save(path, {"options": {"era": "A"}})
    assert read_metadata(path) == {"policy": "bucket", "options": {"era": "A"}}
    again.save(path)
    assert read_metadata(path)["options"] == {"era": "C", "limits": "4096:7, 8192:2"}
    assert recorded_setting(read_metadata(path), None)[0].make().size_class(Request(4097, Role.KV)) == 8192
    pool.set_policy(make_policy("pow2"))
    TraceRecorder(pool).save(path)
    assert read_metadata(path) == {}


def test_a_lost_device_ends_the_leases_it_held() -> None:
    pool = BufferPool(FakeDevice(), "adaptive")
    recorder = TraceRecorder(pool)
    buffer = pool.acquire(100, Role.KV)
    pool.note_lost()
    pool.release(buffer)
    pool.rebuild(FakeDevice())
    pool.acquire(100, Role.KV)
    assert recorder.events == list(check_events(recorder.events))
    assert [op for op, _, _ in recorder.events] == [ACQUIRE, RELEASE, ACQUIRE]


@pytest.mark.parametrize("name", POLICIES)
def test_a_replay_decides_as_the_live_pool_did(name: str, tmp_path: Path) -> None:
    pool = BufferPool(FakeDevice(), name)
    recorder = TraceRecorder(pool)
    drive(pool)
    path = tmp_path / "live.trace.gz"
    assert recorder.save(path, {"policy": name}) == len(recorder.events) == 2 + 4 + 6 * (2 + 5 + 1 + 1 + 4) + 2
    replay = simulate(served(read_trace(path)), POLICIES[name].factory())
    others = 2  # weights and uniform: not the chosen policy's
    assert replay.misses == pool.ledger.created - others
    assert sum(replay.evictions.values()) == pool.ledger.destroyed
    assert replay.acquires == pool.ledger.hits + pool.ledger.misses - others
    assert [token.position for token in replay.tokens] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", POLICIES)
@given(
    events=event_lists(st.sampled_from([100, 300, 600, 1000]), CHOSEN_ROLES, 80),
    budget=st.one_of(st.none(), st.integers(1, 32).map(lambda count: 128 * count)),
)
@settings(max_examples=60, deadline=None)
def test_pool_and_simulator_agree_on_any_trace(name: str, events: Sequence[Event], budget: int | None) -> None:
    """The live pool and the simulator are two implementations of one mechanism: the same creates and destroys."""
    pool = BufferPool(FakeDevice(log_limit=0), name, budget)
    leases: dict[int, Buffer] = {}
    replayed: list[Event] = []
    for op, value, request in events:
        if op == ACQUIRE:
            leases[value] = pool.acquire(request.nbytes, request.role, "", request.site)
        elif op == RELEASE:
            pool.release(leases.pop(value))
        elif op == FLUSH:
            pool.flush()
            pool.inventory.note_complete(pool.inventory.serial)
        else:
            pool.begin_run()
            pool.inventory.note_complete(pool.inventory.serial)
            replayed.append((FLUSH, Cause.DOWNLOAD, NO_REQUEST))
        replayed.append((FLUSH, Cause.DOWNLOAD, NO_REQUEST) if op == FLUSH else (op, value, request))
    pool.flush()
    replayed.append((FLUSH, Cause.DOWNLOAD, NO_REQUEST))
    replay = simulate(replayed, POLICIES[name].factory(), budget)
    assert (replay.misses, sum(replay.evictions.values())) == (pool.ledger.misses, pool.ledger.destroyed)


def test_a_live_decode_is_replayed_through_another_policy(tmp_path: Path) -> None:
    """Recorded under adaptive, the KV pattern shows what bucket would have done: 44 creates per token, then 54."""
    pool = BufferPool(FakeDevice(log_limit=0, kernels=kernels("kv64")), "adaptive")
    recorder = TraceRecorder(pool)
    pattern = KVPattern("kv64", Launcher(pool.device, pool), kv="grow", start=2042, tokens=13)

    async def run() -> int:
        await pattern.prepare()
        return len([event async for event in pattern.run()])

    assert asyncio.run(run()) == 13
    path = tmp_path / "kv64.trace.gz"
    recorder.save(path, {"workload": "kv64"})
    kv_creates = [token.kv_creates for token in simulate(served(read_trace(path)), make_policy("bucket")).tokens]
    crossing = kv_creates.index(64, 3)
    assert kv_creates[3:crossing] == [44] * (crossing - 3)
    assert kv_creates[crossing : crossing + 2] == [64, 64]
    assert set(kv_creates[crossing + 2 :]) == {54}
    assert pool.ledger.misses < 400 < sum(kv_creates)
