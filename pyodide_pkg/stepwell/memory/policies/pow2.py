"""``pow2``: powers of two from 64 KiB, never given up, as ONNX Runtime's DirectML allocator.

Few creates, because a growing tensor changes its class only when it doubles; up to twice the memory, and the classes
that a working set has left stay.  Source: core/providers/dml/…/BucketizedBufferAllocator.cpp.
"""

from collections.abc import Sequence

from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Policy, Request
from stepwell.memory.policies.free_lists import FreeLists

SMALLEST_CLASS = 64 << 10
"""Bytes of the smallest class."""


class Pow2(Policy):
    """Powers of two of bytes, all of them kept."""

    def __init__(self) -> None:
        self._free = FreeLists()

    def size_class(self, request: Request) -> int:
        return max(SMALLEST_CLASS, 1 << (request.nbytes - 1).bit_length())

    def acquire(self, request: Request, size: int) -> int | None:
        return self._free.pop(size)

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        self._free.push(size, buffer_id)
        return ()

    def reclaim(self, nbytes: int) -> Sequence[int]:
        return self._free.reclaim(nbytes)

    def drain(self) -> Sequence[int]:
        return self._free.drain()

    def target(self, size: int, role: Role) -> int | None:
        return None
