"""``lazy_release``: no reuse; released buffers are given up together at the flush (ONNX Runtime: ``lazyRelease``)."""

from collections.abc import Sequence

from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Policy, Request, round_up


class LazyRelease(Policy):
    """No reuse: a buffer per request, given up at the flush after its release."""

    def __init__(self) -> None:
        self._pending: list[int] = []

    def size_class(self, request: Request) -> int:
        return round_up(request.nbytes, 16)

    def acquire(self, request: Request, size: int) -> int | None:
        return None

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        self._pending.append(buffer_id)
        return ()

    def flush(self) -> Sequence[int]:
        return self.drain()

    def reclaim(self, nbytes: int) -> Sequence[int]:
        return self.drain()

    def drain(self) -> Sequence[int]:
        pending, self._pending = self._pending, []
        return pending

    def target(self, size: int, role: Role) -> int | None:
        return 0
