"""``disabled``: no reuse.  A request creates a buffer, a release gives it up (ONNX Runtime: ``disabled``)."""

from collections.abc import Sequence

from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Policy, Request, round_up


class Disabled(Policy):
    """No reuse: a buffer per request."""

    def size_class(self, request: Request) -> int:
        return round_up(request.nbytes, 16)

    def acquire(self, request: Request, size: int) -> int | None:
        return None

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        return (buffer_id,)

    def reclaim(self, nbytes: int) -> Sequence[int]:
        return ()

    def drain(self) -> Sequence[int]:
        return ()

    def target(self, size: int, role: Role) -> int | None:
        return 0
