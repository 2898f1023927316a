"""A pool's memory as files that public viewers open.

``torch_snapshot``: the schema of ``torch.cuda.memory._snapshot()``, for https://pytorch.org/memory_viz (which reads
pickles: ``torch_pickle``).  A GPU buffer is a segment, a lease the block in it.  WebGPU shows no addresses: each buffer
gets a range of its own, in the order of the handles, never used again.

``chrome_trace``: the Trace Event Format of chrome://tracing and Perfetto: counters of bytes, a span per lease.
"""

from collections.abc import Iterable
from typing import Any

from stepwell.memory.events import Event, EventLog
from stepwell.memory.pool import BufferPool

_ALIGNMENT = 256
_LARGE_BYTES = 1 << 20
_TORCH_ACTIONS = {"created": "segment_alloc", "destroyed": "segment_free", "acquired": "alloc"}


def torch_snapshot(pool: BufferPool, log: EventLog | None = None) -> dict[str, Any]:
    """Segments of now, and ``log``'s events as the device's trace.  Everything in it is JSON."""
    events = list(log.events) if log is not None else []
    address = _addresses(pool, events)
    segments = []
    for slot in pool.inventory.slots.values():
        lease = slot.lease
        active = slot.size if lease is not None else 0
        requested = lease.requested if lease is not None else 0
        label = lease.label if lease is not None else ""
        frames = _frames(slot.role.value, label)
        segments.append(
            {
                "device": 0,
                "address": address[slot.id],
                "total_size": slot.size,
                "allocated_size": active,
                "active_size": active,
                "requested_size": requested,
                "stream": 0,
                "segment_type": "large" if slot.size > _LARGE_BYTES else "small",
                "segment_pool_id": [0, 0],
                "is_expandable": False,
                "frames": frames,
                "blocks": [
                    {
                        "address": address[slot.id],
                        "size": slot.size,
                        "requested_size": requested or slot.size,
                        "state": "active_allocated" if lease is not None else "inactive",
                        "frames": frames,
                    }
                ],
            }
        )
    segments.sort(key=lambda segment: segment["address"])
    trace = [entry for event in events for entry in _torch_entries(event, address)]
    return {"segments": segments, "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}


def torch_pickle(snapshot: dict[str, Any]) -> bytes:
    """A ``torch_snapshot`` as the viewer reads it: it knows protocols 2 to 4, and the opcodes of plain data."""
    import pickle

    return pickle.dumps(snapshot, protocol=4)


def chrome_trace(log: EventLog) -> dict[str, Any]:
    """Counters ``memory`` (in use, free) and one span per lease, on one track per role."""
    entries: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "stepwell buffer pool"}}
    ]
    tracks: dict[str, int] = {}
    reserved = in_use = 0
    for event in log.events:
        if event.role and event.role not in tracks:
            tracks[event.role] = len(tracks) + 1
            name = {"name": event.role}
            entries.append({"ph": "M", "pid": 1, "tid": tracks[event.role], "name": "thread_name", "args": name})
        base = {"pid": 1, "ts": event.time_us}
        match event.action:
            case "created":
                reserved += event.size
            case "destroyed":
                reserved -= event.size
            case "acquired" | "released":
                in_use += event.size if event.action == "acquired" else -event.size
                span = {
                    "ph": "b" if event.action == "acquired" else "e",
                    "cat": event.role,
                    "id": event.buffer,
                    "tid": tracks[event.role],
                    "name": event.label or event.role,
                    "args": {"bytes": event.size, "requested": event.requested, "run": event.run},
                }
                entries.append(base | span)
            case _:
                entries.append(
                    base | {"ph": "i", "s": "p", "tid": 0, "name": event.action, "args": {"what": event.detail}}
                )
                continue
        # a log that starts late has not seen every buffer's beginning
        counts = {"in use": max(0, in_use), "free": max(0, reserved - in_use)}
        entries.append(base | {"ph": "C", "tid": 0, "name": "memory", "args": counts})
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _addresses(pool: BufferPool, events: Iterable[Event]) -> dict[int, int]:
    """Buffer → the start of its range.  Handles ascend with time, so the ranges of one log's snapshots agree."""
    sizes = {event.buffer: event.size for event in events if event.buffer}
    sizes.update((slot.id, slot.size) for slot in pool.inventory.slots.values())
    address, found = _ALIGNMENT, {}
    for buffer, size in sorted(sizes.items()):
        found[buffer] = address
        address += -(-size // _ALIGNMENT) * _ALIGNMENT
    return found


def _torch_entries(event: Event, address: dict[int, int]) -> list[dict[str, Any]]:
    def entry(action: str, addr: int, size: int) -> dict[str, Any]:
        frames = _frames(event.role or event.action, event.label or event.detail)
        return {
            "action": action, "addr": addr, "size": size, "stream": 0, "time_us": event.time_us, "frames": frames,
        }  # fmt: skip

    if event.action == "released":
        return [
            entry("free_requested", address[event.buffer], event.size),
            entry("free_completed", address[event.buffer], event.size),
        ]
    if event.action in _TORCH_ACTIONS:
        return [entry(_TORCH_ACTIONS[event.action], address[event.buffer], event.size)]
    if event.action == "failed" and event.detail == "oom":
        return [entry("oom", 0, event.size) | {"device_free": 0}]
    return []


def _frames(role: str, label: str) -> list[dict[str, Any]]:
    """The viewer shows stack frames; a buffer's place in the program is its role and label."""
    return [{"filename": role, "name": label or "unnamed", "line": 0}]
