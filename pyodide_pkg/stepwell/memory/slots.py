"""The books on each GPU buffer of the pool, and on destroyed ones that the GPU may still be using."""

from collections import deque
from dataclasses import dataclass, field

from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.class_stats import ClassStats
from stepwell.memory.policies.base import Policy, Request


class Route:
    """The way of a role's requests to their policy: looked up once per acquire.

    ``limit``: no size in bytes exceeds it; -1: nothing is served.
    """

    __slots__ = ("acquire", "limit", "policy", "release", "size_class")

    def __init__(self, policy: Policy, limit: int) -> None:
        self.policy, self.limit = policy, limit
        self.size_class, self.acquire, self.release = policy.size_class, policy.acquire, policy.release


@dataclass(slots=True, eq=False)
class Slot:
    """A GPU buffer from creation to destruction; between leases ``lease`` is None.

    Serial numbers are those of flushes.  ``born``: the flush before which it was created.  ``used_until``: the flush
    after its last release; the GPU has no later work with it.
    """

    id: int
    size: int
    role: Role
    stats: ClassStats
    born: int
    session: int  # of the last lease
    lease: Buffer | None = None
    request: Request = field(init=False)  # of the lease, or of the last one
    route: Route = field(init=False)  # to the policy under which it was leased
    used_until: int = 0
    dirty_bytes: int = 0  # from the start of the buffer: what leases may have written since it was zero
    condemned: bool = False  # to destroy at the flush
    suspect: bool = False  # created when memory ran out: it may have none
    pins: int = 0


class InFlight:
    """Bytes of destroyed buffers, until the GPU is done with the flush after which nothing uses them."""

    __slots__ = ("_entries", "nbytes")

    def __init__(self) -> None:
        self._entries: deque[tuple[int, int]] = deque()
        self.nbytes = 0

    def add(self, serial: int, nbytes: int) -> None:
        """Add ``nbytes`` that the GPU may be using until it has done what the flush ``serial`` submitted."""
        self.nbytes += nbytes
        if self._entries and self._entries[-1][0] >= serial:
            last, there = self._entries.pop()
            serial, nbytes = last, there + nbytes
        self._entries.append((serial, nbytes))

    def settle(self, completed: int) -> None:
        """Take off what the GPU has done: everything up to the flush ``completed``."""
        entries = self._entries
        while entries and entries[0][0] <= completed:
            self.nbytes -= entries.popleft()[1]
