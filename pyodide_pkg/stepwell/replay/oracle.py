"""The bound of all policies: the fewest creates for given size classes, and a policy that knows the future.

A buffer serves one lease at a time.  With classes that do not lend to each other and memory without limit, a class
must create as many buffers as it has leases at once, at the most, and needs no more: leases are intervals, and the
buffers colour them (interval graphs are perfect).  Summed over the classes that is the exact lower bound.

Under a budget the fewest creates are hard to find (caching of items with sizes), so ``Clairvoyant`` is a strong
heuristic in the sense of Belady: of the free buffers it gives up the one that is needed last.  Without a budget it
reaches the bound exactly, and keeps nothing that is not needed again.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Request
from stepwell.replay.traces import ACQUIRE, RELEASE, Event

NEVER = 1 << 62
ClassOf = Callable[[Request], int]
"""The bytes of a request's size class."""


def least_creates(events: Iterable[Event], size_class: ClassOf) -> int:
    """The fewest creates for ``events``: the most leases of a ``size_class`` open at once, summed over the classes."""
    most: Counter[int] = Counter()
    now: Counter[int] = Counter()
    classes: dict[int, int] = {}
    for op, value, request in events:
        if op == ACQUIRE:
            size = classes[value] = size_class(request)
            now[size] += 1
            if now[size] > most[size]:
                most[size] = now[size]
        elif op == RELEASE:
            now[classes.pop(value)] -= 1
    return most.total()


class _Future:
    """One size class: when its open leases rise to each level (counted in acquires), and its free buffers now."""

    __slots__ = ("free", "open", "rises")

    def __init__(self) -> None:
        self.rises: list[array[int]] = []  # [level - 1]: when they rise from level - 1 to level
        self.open = 0
        self.free: list[int] = []  # the last released is at the end, and used first

    def next_use(self, now: int) -> int:
        """The time at which the least useful free buffer is needed: as many leases are open then as buffers exist."""
        buffers = self.open + len(self.free)
        if buffers > len(self.rises):
            return NEVER
        times = self.rises[buffers - 1]
        index = bisect_left(times, now)
        return times[index] if index < len(times) else NEVER


class Clairvoyant:
    """A policy for one trace, which has read all of ``events`` when the first of them is replayed.

    ``size_class``: that of each request.  Keeps a released buffer if it is needed again, and gives up under a budget
    the buffer that is needed last.  Free buffers are reused at once, the latest released first.
    """

    def __init__(self, events: Iterable[Event], size_class: ClassOf) -> None:
        self.size_class = size_class
        self._classes: dict[int, _Future] = {}
        self._now = 0  # acquires so far
        leases: dict[int, _Future] = {}
        for op, value, request in events:
            if op == ACQUIRE:
                future = leases[value] = self._future(size_class(request))
                future.open += 1
                if future.open > len(future.rises):
                    future.rises.append(array("q"))
                future.rises[future.open - 1].append(self._now)
                self._now += 1
            elif op == RELEASE:
                leases.pop(value).open -= 1
        self._now = 0
        for future in self._classes.values():
            future.open = 0

    def acquire(self, request: Request, size: int) -> int | None:
        """The free buffer of the class that was released last, or None."""
        self._now += 1
        future = self._classes[size]
        future.open += 1
        return future.free.pop() if future.free else None

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        """Keep the buffer.  Returns the oldest of its class if fewer will do for all that is to come."""
        future = self._classes[size]
        future.open -= 1
        future.free.append(buffer_id)
        return (future.free.pop(0),) if future.next_use(self._now) == NEVER else ()

    def flush(self) -> Sequence[int]:
        """Nothing is given up at a flush."""
        return ()

    def begin_run(self) -> Sequence[int]:
        """Nothing is given up when a run begins."""
        return ()

    def reclaim(self, nbytes: int) -> Sequence[int]:
        """Ids of ``nbytes`` in total, or as many as there are: the free buffers needed last."""
        given_up: list[int] = []
        holders = {size: future for size, future in self._classes.items() if future.free}
        while nbytes > 0 and holders:
            size = max(holders, key=lambda size: (holders[size].next_use(self._now), size))
            given_up.append(holders[size].free.pop(0))
            nbytes -= size
            if not holders[size].free:
                del holders[size]
        return given_up

    def drain(self) -> Sequence[int]:
        """The ids of all free buffers, which are forgotten."""
        kept = [buffer_id for future in self._classes.values() for buffer_id in future.free]
        for future in self._classes.values():
            future.free.clear()
        return kept

    def target(self, size: int, role: Role) -> int | None:
        """None: there is no fixed limit."""
        return None

    def _future(self, size: int) -> _Future:
        found = self._classes.get(size)
        if found is None:
            found = self._classes[size] = _Future()
        return found
