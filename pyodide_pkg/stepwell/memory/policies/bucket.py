"""``bucket``: ONNX Runtime's storage-buffer pool, the baseline.

A request is rounded up to one of 26 sizes and served only by a free buffer of exactly that size, the latest released
first.  Each size keeps a fixed number of free buffers.  Requests above the largest size are exact (multiples of 16) and
never kept.  When a released buffer can serve again differs by era:

* ``A`` (until mid 2025): every release waits for the flush; there it is kept if there is room, else destroyed.
* ``B`` (onnxruntime-web 1.26 to 1.29): kept at once if there is room, else it waits for the flush and is tested again.
* ``C`` (September 2026): while recorded work is unsubmitted it waits for the flush; otherwise it is kept, or destroyed,
  at once.

Source: core/providers/webgpu/buffer_manager.cc; microsoft/onnxruntime issue 32017 shows what the limits cost.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from stepwell.errors import BadRequest
from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Policy, Request, round_up
from stepwell.options import parse_limits

ORT_LIMITS: Mapping[int, int] = {
    64: 250,
    128: 200,
    256: 200,
    512: 200,
    2048: 230,
    4096: 200,
    8192: 50,
    16384: 50,
    32768: 50,
    65536: 50,
    131072: 50,
    262144: 50,
    524288: 50,
    1048576: 50,
    2097152: 30,
    4194304: 20,
    8388608: 10,
    12582912: 10,
    16777216: 10,
    26214400: 15,
    33554432: 22,
    44236800: 2,
    58982400: 6,
    67108864: 6,
    134217728: 6,
    167772160: 6,
}
"""Bytes of a size class → the number of free buffers it keeps."""

ERAS = ("A", "B", "C")  # versions of the pool in onnxruntime-web


class Bucket(Policy):
    """Size classes with a fixed number of free buffers each, ``limits``: class bytes (multiples of 4) → buffers kept.

    ``era``: when a released buffer can serve again.
    """

    def __init__(self, limits: Mapping[int, int] = ORT_LIMITS, era: str = "B") -> None:
        if era not in ERAS:
            raise BadRequest(f"bucket: era {era!r}; it must be one of {', '.join(ERAS)}.")
        self._limits = dict(parse_limits(limits))
        self._era = era
        self._classes = sorted(self._limits)
        self._free: dict[int, list[int]] = {size: [] for size in self._classes}
        self._pending: list[tuple[int, int]] = []

    def size_class(self, request: Request) -> int:
        index = bisect_left(self._classes, request.nbytes)
        return self._classes[index] if index < len(self._classes) else round_up(request.nbytes, 16)

    def acquire(self, request: Request, size: int) -> int | None:
        free = self._free.get(size)
        return free.pop() if free else None

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        waits = self._era == "A" or (self._era == "C" and recorded)
        if not waits and self._keep(buffer_id, size):
            return ()
        if self._era == "C" and not recorded:
            return (buffer_id,)
        self._pending.append((size, buffer_id))
        return ()

    def flush(self) -> Sequence[int]:
        destroyed = [buffer_id for size, buffer_id in self._pending if not self._keep(buffer_id, size)]
        self._pending.clear()
        return destroyed

    def reclaim(self, nbytes: int) -> Sequence[int]:
        given_up: list[int] = []
        for size in reversed(self._classes):
            free = self._free[size]
            count = min(len(free), max(0, -(-nbytes // size)))
            given_up += free[:count]
            del free[:count]
            nbytes -= count * size
        return given_up

    def drain(self) -> Sequence[int]:
        kept = [buffer_id for free in self._free.values() for buffer_id in free]
        kept += [buffer_id for _, buffer_id in self._pending]
        for free in self._free.values():
            free.clear()
        self._pending.clear()
        return kept

    def target(self, size: int, role: Role) -> int | None:
        return self._limits.get(size, 0)

    def _keep(self, buffer_id: int, size: int) -> bool:
        free = self._free.get(size)
        if free is None or len(free) >= self._limits[size]:
            return False
        free.append(buffer_id)
        return True
