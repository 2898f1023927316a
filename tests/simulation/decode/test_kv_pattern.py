"""The growing-KV workload on FakeDevice: what it creates under each policy, and that wrong work is noticed."""

import asyncio
from typing import Any

import pytest

from stepwell.decode.kv_pattern import CACHES, KVPattern
from stepwell.decode.timing import TokenEvent
from stepwell.errors import BadRequest, DeviceError, DeviceLost, OutOfMemory
from stepwell.gpu.fake_device import FakeDevice
from stepwell.launch.launcher import Launcher
from stepwell.memory.policies import POLICIES
from stepwell.memory.pool import BufferPool
from stepwell.replay.kv_shapes import KV_WORKLOADS
from tests.support.pattern_lab import kernels

LAUNCHES_PER_LAYER = 7 + 4  # mixes; append and sum of K and of V


def events_of(pattern: KVPattern) -> list[TokenEvent]:
    async def run() -> list[TokenEvent]:
        await pattern.prepare()
        return [event async for event in pattern.run()]

    return asyncio.run(run())


def open_pattern(policy: str, name: str = "kv64", *, start: int, tokens: int, kv: str = "grow") -> KVPattern:
    device = FakeDevice(log_limit=0)
    return KVPattern(name, Launcher(device, BufferPool(device, policy)), kv=kv, start=start, tokens=tokens)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """FakeDevice computes nothing by itself: for tests that only count."""
    monkeypatch.setattr(KVPattern, "_check", lambda *_: None)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("start", "creates", "class_mib"), [(2000, 44, 4), (2100, 54, 8), (4200, 54, 12), (6200, 54, 16)]
)
def test_bucket_creates_what_issue_32017_counts(start: int, creates: int, class_mib: int) -> None:
    events = events_of(open_pattern("bucket", start=start, tokens=6))
    assert [event.counters.buffers_created for event in events[2:]] == [creates] * 4
    assert {event.counters.kv_class_bytes for event in events} == {class_mib << 20}
    assert [event.position for event in events] == list(range(start, start + 6))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("start", [2000, 2100, 4200, 6200])
def test_adaptive_creates_at_most_one_buffer_per_token(start: int) -> None:
    created = [e.counters.buffers_created for e in events_of(open_pattern("adaptive", start=start, tokens=24))[3:]]
    assert max(created) <= 1
    assert created.count(0) > len(created) // 2


@pytest.mark.usefixtures("unchecked")
def test_kv16_fits_the_limits_of_bucket() -> None:
    created = [e.counters.buffers_created for e in events_of(open_pattern("bucket", "kv16", start=2100, tokens=8))[2:]]
    assert set(created) == {6}  # 16 tensors, 10 kept: no staircase to see


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_static_control_creates_no_tensor(policy: str) -> None:
    events = events_of(open_pattern(policy, "kv16", start=300, tokens=5, kv="static"))
    recycled = policy not in ("disabled", "lazy_release")
    assert {event.counters.buffers_created for event in events[2:]} == ({0} if recycled else {6 * 8})
    grown = events_of(open_pattern(policy, "kv16", start=300, tokens=5))
    for static, grow in zip(events, grown, strict=True):  # the same commands
        assert (static.counters.launches, static.counters.copies) == (grow.counters.launches, grow.counters.copies)
    assert events[-1].counters.launches == 8 * LAUNCHES_PER_LAYER + 1
    assert events[-1].counters.copies == 16 + 16 + 1
    assert {event.counters.submits for event in events} == {1}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv", CACHES)
def test_nothing_is_left_after_a_run(policy: str, kv: str) -> None:
    device = FakeDevice(log_limit=0)
    pool = BufferPool(device, policy)
    launcher = Launcher(device, pool)
    pattern = KVPattern("kv16", launcher, kv=kv, start=10, tokens=3)
    assert len(events_of(pattern)) == 3
    pattern.close()
    pattern.close()
    assert pool.report().in_use_bytes == 0
    launcher.close()
    pool.close()
    assert device.table_sizes() == dict.fromkeys(("buffers", "pipelines", "bind_groups", "plans"), 0)


def computing(policy: str, kv: str, skip: str = "", start: int = 5, tokens: int = 4) -> KVPattern:
    device = FakeDevice(log_limit=0, kernels=kernels("kv16", skip))
    return KVPattern("kv16", Launcher(device, BufferPool(device, policy)), kv=kv, start=start, tokens=tokens)


@pytest.mark.parametrize("kv", CACHES)
@pytest.mark.parametrize("policy", ["adaptive", "bucket", "disabled"])
def test_results_are_right_under_every_policy(policy: str, kv: str) -> None:
    events = events_of(computing(policy, kv))
    assert [event.position for event in events] == [5, 6, 7, 8]
    assert [event.id for event in events] == [event.id for event in events_of(computing("simple", "grow"))]
    assert len({event.id for event in events}) == 4


@pytest.mark.parametrize("mode", ["seed", "mix", "append", "sum"])
def test_work_that_is_left_out_is_noticed(mode: str) -> None:
    with pytest.raises(DeviceError, match=r"kv16 at 5 positions: the sum of .* it must be"):
        events_of(computing("adaptive", "grow", skip=mode))


def test_a_lost_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.decode.kv_cache.GrowKV.record_copies", lambda *_: None)
    device = FakeDevice(log_limit=0, kernels=kernels("kv16"))
    pool = BufferPool(device, "adaptive")
    pattern = KVPattern("kv16", Launcher(device, pool), kv="grow", start=5, tokens=4)
    with pytest.raises(DeviceError, match="kv16 at 6 positions"):
        events_of(pattern)
    pattern.close()
    assert pool.report().in_use_bytes == 0


@pytest.mark.usefixtures("unchecked")
def test_cancel_ends_after_the_step() -> None:
    pattern = open_pattern("adaptive", "kv16", start=4, tokens=9)

    async def run() -> int:
        await pattern.prepare()
        seen = 0
        async for _ in pattern.run():
            seen += 1
            pattern.cancel()
        return seen

    assert asyncio.run(run()) == 1
    assert pattern.cancelled


@pytest.mark.usefixtures("unchecked")
def test_memory_that_runs_out_once_costs_nothing_but_time() -> None:
    device = FakeDevice(log_limit=0)
    pool = BufferPool(device, "disabled")
    pattern = KVPattern("kv16", Launcher(device, pool), kv="grow", start=4, tokens=5)
    device.fail_next_create = OutOfMemory
    assert [event.position for event in events_of(pattern)] == [4, 5, 6, 7, 8]
    pattern.close()
    pool.flush()
    assert pool.report().in_use_bytes == 0


@pytest.mark.usefixtures("unchecked")
def test_a_lost_device_is_an_error_and_leaves_nothing_behind() -> None:
    device = FakeDevice(log_limit=0)
    pool = BufferPool(device, "adaptive")
    pattern = KVPattern("kv16", Launcher(device, pool), kv="grow", start=4, tokens=9)

    async def run() -> None:
        await pattern.prepare()
        async for event in pattern.run():
            if event.index == 2:
                device.lose()

    with pytest.raises(DeviceLost):
        asyncio.run(run())
    pattern.close()
    assert pool.report().in_use_bytes == 0


@pytest.mark.usefixtures("unchecked")
def test_a_budget_holds_to_one_class() -> None:
    device = FakeDevice(log_limit=0)
    budget = 1500 << 20
    pool = BufferPool(device, "adaptive", budget_bytes=budget)
    pattern = KVPattern("kv64", Launcher(device, pool), kv="grow", start=4090, tokens=12)
    events = events_of(pattern)
    assert max(event.counters.reserved_bytes for event in events) <= budget
    assert max(event.counters.buffers_created for event in events[3:]) <= 1


@pytest.mark.usefixtures("unchecked")
def test_buffers_are_made_and_touched_ahead_of_the_crossing() -> None:
    pattern = open_pattern("adaptive", "kv64", start=2100, tokens=30)
    events = events_of(pattern)[3:]
    created = [event.counters.buffers_created for event in events]
    assert sum(created) > 4
    assert {event.counters.pool_misses for event in events} == {0}  # no step found its buffer missing
    assert max(created) == 1
    submits = [event.counters.submits for event in events]
    assert submits == [1 + made for made in created]  # a buffer made ahead is cleared at once, by a submit of its own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "kv9"}, "no workload named 'kv9'; there are kv64, kv16"),
        ({"kv": "paged"}, "no KV mode named 'paged'"),
        ({"start": 0}, "from 0 positions for 2 tokens"),
        ({"tokens": 0}, "for 0 tokens"),
        ({"start": 65_536}, r"tensors of 134,219,776 B; the device allows 134,217,728 B \(max.*65,536 positions"),
        ({"start": 70_000}, "143,362,048 B"),
    ],
)
def test_what_the_device_cannot_hold_is_refused_with_numbers(changes: dict[str, Any], message: str) -> None:
    device = FakeDevice(log_limit=0)
    pool = BufferPool(device)
    arguments = {"name": "kv64", "kv": "grow", "start": 100, "tokens": 2, **changes}
    with pytest.raises(BadRequest, match=message):
        KVPattern(arguments.pop("name"), Launcher(device, pool), **arguments)
    assert pool.report().in_use_bytes == 0


def test_more_rows_than_a_dispatch_has_are_refused() -> None:
    device = FakeDevice(limits={"maxStorageBufferBindingSize": 1 << 30, "maxBufferSize": 1 << 30}, log_limit=0)
    with pytest.raises(BadRequest, match="the device fills 65,535 at once"):
        KVPattern("kv16", Launcher(device, BufferPool(device)), kv="grow", start=65_536, tokens=1)


def test_the_workloads() -> None:
    assert {name: shape.tensors for name, shape in KV_WORKLOADS.items()} == {"kv64": 64, "kv16": 16}
