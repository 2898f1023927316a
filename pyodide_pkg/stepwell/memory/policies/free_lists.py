"""Free buffers by size: what the simple policies share."""

from collections import defaultdict


class FreeLists:
    """The ids of free buffers by size in bytes; the latest released is handed out first."""

    __slots__ = ("by_size",)

    def __init__(self) -> None:
        self.by_size: defaultdict[int, list[int]] = defaultdict(list)

    def pop(self, size: int) -> int | None:
        """The latest of ``size`` bytes, which is free no more; None if there is none."""
        free = self.by_size.get(size)
        return free.pop() if free else None

    def push(self, size: int, buffer_id: int) -> None:
        """Add a buffer of ``size`` bytes."""
        self.by_size[size].append(buffer_id)

    def count(self, size: int) -> int:
        """How many there are of ``size`` bytes."""
        free = self.by_size.get(size)
        return len(free) if free else 0

    def reclaim(self, nbytes: int) -> list[int]:
        """Forget buffers of ``nbytes`` or more in total; returns their ids.

        The largest go first, and the oldest among equals: the fewest creates lost.
        """
        ids: list[int] = []
        for size in sorted((size for size, free in self.by_size.items() if free), reverse=True):
            if nbytes <= 0:
                break
            free = self.by_size[size]
            count = min(len(free), -(-nbytes // size))
            ids += free[:count]
            del free[:count]
            nbytes -= count * size
        return ids

    def drain(self) -> list[int]:
        """Forget all; returns their ids."""
        ids = [buffer_id for free in self.by_size.values() for buffer_id in free]
        self.by_size.clear()
        return ids
