"""``exact``: exact sizes with a count per size, as the pool of jax-js (TensorFlow.js has the same without the count).

A free buffer serves only a request of exactly its size (multiples of 4 B), at once and the latest released first.  A
release beyond ``cap`` free buffers of that size, or of more than ``largest_bytes``, is given up.
Source: jax-js src/backend/webgpu.ts (64 per size, at most 64 MiB each).
"""

from collections.abc import Sequence

from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Policy, Request, round_up
from stepwell.memory.policies.free_lists import FreeLists

CAP = 64
"""Free buffers kept per size."""
LARGEST_BYTES = 64 << 20
"""The largest buffer that is kept."""


class Exact(Policy):
    """Exact sizes: keeps ``cap`` free buffers of each, and none of more than ``largest_bytes``."""

    def __init__(self, cap: int = CAP, largest_bytes: int = LARGEST_BYTES) -> None:
        self._cap = cap
        self._largest_bytes = largest_bytes
        self._free = FreeLists()

    def size_class(self, request: Request) -> int:
        return round_up(request.nbytes, 4)

    def acquire(self, request: Request, size: int) -> int | None:
        return self._free.pop(size)

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        if size > self._largest_bytes or self._free.count(size) >= self._cap:
            return (buffer_id,)
        self._free.push(size, buffer_id)
        return ()

    def reclaim(self, nbytes: int) -> Sequence[int]:
        return self._free.reclaim(nbytes)

    def drain(self) -> Sequence[int]:
        return self._free.drain()

    def target(self, size: int, role: Role) -> int | None:
        return self._cap if size <= self._largest_bytes else 0
