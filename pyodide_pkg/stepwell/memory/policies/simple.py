"""``simple``: exact sizes (multiples of 16), reused after the flush, never given up (ONNX Runtime, mode ``simple``).

Right for shapes that repeat; with a growing KV cache every size is new and nothing is ever reused.
A buffer waits for the flush before its next lease, so queue writes to it cannot overtake recorded work: that is why
uniforms use this policy.
"""

from collections import defaultdict
from collections.abc import Sequence

from stepwell.memory.policies.base import Request, round_up


class Simple:
    def __init__(self) -> None:
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._pending: list[tuple[int, int]] = []

    def size_class(self, request: Request) -> int:
        return round_up(request.nbytes, 16)

    def acquire(self, request: Request, size: int) -> int | None:
        free = self._free.get(size)
        return free.pop() if free else None

    def release(self, buffer_id: int, request: Request, size: int) -> Sequence[int]:
        self._pending.append((size, buffer_id))
        return ()

    def flush(self) -> Sequence[int]:
        for size, buffer_id in self._pending:
            self._free[size].append(buffer_id)
        self._pending.clear()
        return ()

    def begin_run(self) -> Sequence[int]:
        return ()

    def drain(self) -> Sequence[int]:
        self.flush()
        kept = [buffer_id for free in self._free.values() for buffer_id in free]
        self._free.clear()
        return kept
