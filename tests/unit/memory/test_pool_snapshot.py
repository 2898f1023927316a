"""Snapshots that PyTorch's memory viewer and Chrome's trace viewer open, and the explanation in plain words."""

import asyncio
import json
import pickle
import pickletools
from itertools import pairwise
from typing import Any

import pytest

from stepwell.errors import OutOfMemory
from stepwell.gpu.fake_device import FakeDevice
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.events import EventLog
from stepwell.memory.explain import explain
from stepwell.memory.pool import BufferPool
from stepwell.memory.recovery import retrying
from stepwell.memory.snapshot import chrome_trace, torch_pickle, torch_snapshot
from tests.support.policy_lab import LARGE, MIB, GrowingKv

# The opcodes that the viewer's own unpickler has (pytorch torch/utils/viz/MemoryViz.js).
VIEWER_OPCODES = """
APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST FRAME LONG1 LONG_BINGET MARK MEMOIZE PROTO SETITEMS
SHORT_BINUNICODE STOP TUPLE2 APPEND NEWFALSE BINPUT BINUNICODE EMPTY_TUPLE NEWTRUE NONE BINFLOAT TUPLE TUPLE1 TUPLE3
LONG_BINPUT LIST DICT SETITEM
"""


def busy_pool(log_limit: int = 100_000) -> tuple[BufferPool, EventLog]:
    pool, log = BufferPool(FakeDevice(limits=LARGE, log_limit=0), "bucket"), EventLog(log_limit)
    pool.observe(log)
    past: list[Buffer] = []
    pool.acquire(1000, Role.WEIGHTS, "embedding")
    for positions in range(2040, 2055):
        pool.begin_run()
        temporary = pool.acquire(70_000, Role.ACTIVATION, "scores")
        present = [pool.acquire(2048 * positions, Role.KV, f"k.{site}", site) for site in range(24)]
        pool.release(temporary)
        pool.flush()
        for buffer in past:
            pool.release(buffer)
        past = present
    return pool, log


def simulate_viewer(snapshot: dict[str, Any]) -> tuple[dict[int, int], dict[int, int]]:
    """Undo the whole trace from the final state, as the viewer does to draw its beginning: (segments, blocks)."""
    segments = {segment["address"]: segment["total_size"] for segment in snapshot["segments"]}
    blocks = {}
    for segment in snapshot["segments"]:
        offset = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == offset, "the viewer places blocks one behind the other"
            if block["state"] == "active_allocated":
                blocks[offset] = block["size"]
            offset += block["size"]
        assert offset == segment["address"] + segment["total_size"], "blocks fill their segment"
    for event in reversed(snapshot["device_traces"][0]):
        match event["action"]:
            case "free_completed":
                assert event["addr"] not in blocks
                blocks[event["addr"]] = event["size"]
            case "alloc":
                assert blocks.pop(event["addr"]) == event["size"]
            case "segment_free":
                segments[event["addr"]] = event["size"]
            case "segment_alloc":
                assert segments.pop(event["addr"]) == event["size"]
                assert event["addr"] not in blocks
            case action:
                assert action in ("free_requested", "oom")
    return segments, blocks


def test_snapshot_in_the_schema_of_pytorchs_viewer() -> None:
    pool, log = busy_pool()
    snapshot = torch_snapshot(pool, log)
    assert set(snapshot) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    assert json.loads(json.dumps(snapshot)) == snapshot
    segments = snapshot["segments"]
    assert sum(segment["total_size"] for segment in segments) == pool.ledger.reserved_bytes
    assert sum(segment["allocated_size"] for segment in segments) == pool.ledger.in_use_bytes
    assert sum(segment["requested_size"] for segment in segments) == pool.report().requested_bytes
    assert len(segments) == pool.ledger.created - pool.ledger.destroyed
    ends = [(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends)), "no two overlap"
    assert simulate_viewer(snapshot) == ({}, {}), "undone, the trace leads back to the empty pool"
    trace = snapshot["device_traces"][0]
    assert [event["time_us"] for event in trace] == sorted(event["time_us"] for event in trace)
    actions = {event["action"] for event in trace}
    assert actions == {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"}
    names = {frame["name"] for event in trace for frame in event["frames"]}
    assert {"embedding", "scores", "k.0", "limit"} <= names


def test_the_viewer_can_unpickle_it() -> None:
    pool, log = busy_pool()
    snapshot = torch_snapshot(pool, log)
    data = torch_pickle(snapshot)
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= set(VIEWER_OPCODES.split())
    assert pickle.loads(data) == snapshot


def test_a_snapshot_without_a_log_has_no_trace() -> None:
    pool, _ = busy_pool()
    assert torch_snapshot(pool)["device_traces"] == [[]]


def test_a_log_that_starts_late_still_fits() -> None:
    pool, log = busy_pool(log_limit=200)
    assert len(log.events) == 200
    simulate_viewer(torch_snapshot(pool, log))
    trace = chrome_trace(log)
    assert all(entry["args"]["free"] >= 0 for entry in trace["traceEvents"] if entry["ph"] == "C")


def test_failures_are_in_the_trace() -> None:
    async def run() -> None:
        device = FakeDevice()
        pool, log = BufferPool(device), EventLog()
        pool.observe(log)
        attempts = []

        async def step() -> None:
            if not attempts:
                attempts.append(1)
                raise OutOfMemory("x")

        await retrying(pool, step)
        assert [event["action"] for event in torch_snapshot(pool, log)["device_traces"][0]] == ["oom"]

    asyncio.run(run())


def test_chrome_trace() -> None:
    pool, log = busy_pool()
    trace = chrome_trace(log)
    assert json.loads(json.dumps(trace)) == trace
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "b", "e", "C", "i"}
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        "weights", "kv", "activation",
    }  # fmt: skip
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert counters[-1] == {
        "in use": pool.ledger.in_use_bytes,
        "free": pool.ledger.reserved_bytes - pool.ledger.in_use_bytes,
    }
    spans: dict[int, int] = {}
    for event in events:
        if event["ph"] in "be":
            spans[event["id"]] = spans.get(event["id"], 0) + (1 if event["ph"] == "b" else -1)
            assert spans[event["id"]] in (0, 1)
    assert sum(spans.values()) == len(list(pool.inventory.leases()))


# ---- explain --------------------------------------------------------------------------------------------------------


def test_bucket_is_explained_with_its_cause() -> None:
    run = GrowingKv("bucket", tensors=64, position_bytes=2048, positions=6200)
    run.steps(20)
    lines = explain(run.pool).splitlines()
    assert (
        "class 16.0 MiB (kv): 64 wanted, 10 kept, 54 made and destroyed per run: the limit is the cause. "
        "Raise the limit of this class or choose adaptive."
    ) in lines
    assert lines[0] == (
        "2,048.0 MiB reserved: 1,024.0 MiB in use (246.5 MiB of it padding), 1,024.0 MiB free; peak 2,048.0 MiB."
    )
    assert lines[-1].endswith("Held by: kv 1,024.0 MiB in 64 buffers (unnamed 1,024.0 MiB).")


def test_adaptive_has_nothing_to_explain() -> None:
    run = GrowingKv("adaptive", tensors=64, position_bytes=2048, positions=6200)
    run.steps(60)
    text = explain(run.pool)
    assert "made and destroyed" not in text
    assert "none in use" not in text


def test_dead_weight_and_budget_are_explained() -> None:
    pool = BufferPool(FakeDevice(), "pow2", budget_bytes=64 * MIB)
    pool.release(pool.acquire(5 * MIB, Role.KV))
    pool.flush()
    pool.acquire(100, Role.KV)
    text = explain(pool)
    assert "class 8.0 MiB (kv): 1 free, none in use: this policy never gives them up." in text
    assert "soft budget 64.0 MiB: 13 % used." in text
    pool.trim()
    assert "8.0 MiB destroyed, but the GPU may still be using them." in explain(pool)


@pytest.mark.parametrize("policy", ["exact", "adaptive", "simple", "lazy_release"])
def test_an_empty_pool_is_explained(policy: str) -> None:
    assert explain(BufferPool(FakeDevice(), policy)).startswith("0 B reserved: 0 B in use")


def test_too_short_a_window_is_explained() -> None:
    pool = BufferPool(FakeDevice(log_limit=0))
    pool.set_policy("adaptive", window=1)
    for run in range(40):
        pool.begin_run()
        if run % 3 == 0:
            for buffer in [pool.acquire(4 * MIB, Role.ACTIVATION, site=site) for site in range(6)]:
                pool.release(buffer)
    assert pool.ledger.created < 40, "the window learns"
    assert "made and destroyed" not in explain(pool)
