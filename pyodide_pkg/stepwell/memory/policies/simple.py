"""``simple``: exact sizes (multiples of 16), reused after the flush, never given up (ONNX Runtime, mode ``simple``).

Right for shapes that repeat; with a growing KV cache every size is new and nothing is ever reused.
A buffer waits for the flush before its next lease, so queue writes to it cannot overtake recorded work: that is why
uniforms use this policy.
"""

from collections.abc import Sequence

from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Policy, Request, round_up
from stepwell.memory.policies.free_lists import FreeLists


class Simple(Policy):
    """Exact sizes, free from the flush after the release on, all of them kept."""

    def __init__(self) -> None:
        self._free = FreeLists()
        self._pending: list[tuple[int, int]] = []

    def size_class(self, request: Request) -> int:
        return round_up(request.nbytes, 16)

    def acquire(self, request: Request, size: int) -> int | None:
        return self._free.pop(size)

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        self._pending.append((size, buffer_id))
        return ()

    def flush(self) -> Sequence[int]:
        for size, buffer_id in self._pending:
            self._free.push(size, buffer_id)
        self._pending.clear()
        return ()

    def reclaim(self, nbytes: int) -> Sequence[int]:
        return self._free.reclaim(nbytes)

    def drain(self) -> Sequence[int]:
        self.flush()
        return self._free.drain()

    def target(self, size: int, role: Role) -> int | None:
        return None
