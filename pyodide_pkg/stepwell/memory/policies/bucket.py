"""``bucket``: ONNX Runtime's storage-buffer pool as of June 2026 (onnxruntime-web 1.26 to 1.29), the baseline.

A request is rounded up to one of 26 sizes and served only by a free buffer of exactly that size, the latest released
first.  Each size keeps a fixed number of free buffers.  A release beyond it waits for the flush, and is destroyed there
if there is still no room.  Requests above the largest size are exact (multiples of 16) and never kept.
Source: core/providers/webgpu/buffer_manager.cc; microsoft/onnxruntime issue 32017 shows what the limits cost.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from stepwell.errors import BadRequest
from stepwell.memory.policies.base import Request, round_up

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


class Bucket:
    """``limits`` replaces ONNX Runtime's table: class bytes (multiples of 4) → free buffers kept."""

    def __init__(self, limits: Mapping[int, int] = ORT_LIMITS) -> None:
        for size, limit in limits.items():
            if size <= 0 or size % 4 or limit < 0:
                raise BadRequest(
                    f"bucket limits: {size:,} B keeps {limit}; need a multiple of 4 B and a count of 0 or more."
                )
        self._limits = dict(limits)
        self._classes = sorted(limits)
        self._free: dict[int, list[int]] = {size: [] for size in self._classes}
        self._pending: list[tuple[int, int]] = []

    def size_class(self, request: Request) -> int:
        index = bisect_left(self._classes, request.nbytes)
        return self._classes[index] if index < len(self._classes) else round_up(request.nbytes, 16)

    def acquire(self, request: Request, size: int) -> int | None:
        free = self._free.get(size)
        return free.pop() if free else None

    def release(self, buffer_id: int, request: Request, size: int) -> Sequence[int]:
        if not self._keep(buffer_id, size):
            self._pending.append((size, buffer_id))
        return ()

    def flush(self) -> Sequence[int]:
        destroyed = [buffer_id for size, buffer_id in self._pending if not self._keep(buffer_id, size)]
        self._pending.clear()
        return destroyed

    def begin_run(self) -> Sequence[int]:
        return ()

    def drain(self) -> Sequence[int]:
        kept = [buffer_id for free in self._free.values() for buffer_id in free]
        kept += [buffer_id for _, buffer_id in self._pending]
        for free in self._free.values():
            free.clear()
        self._pending.clear()
        return kept

    def _keep(self, buffer_id: int, size: int) -> bool:
        free = self._free.get(size)
        if free is None or len(free) >= self._limits[size]:
            return False
        free.append(buffer_id)
        return True
