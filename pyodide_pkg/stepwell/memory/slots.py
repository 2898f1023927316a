"""What the pool knows of each GPU buffer it owns, and of the destroyed ones that the GPU may still be using."""

from collections import deque

from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.class_stats import ClassStats
from stepwell.memory.policies.base import Policy, Request


class Route:
    """How requests of a role reach their policy: looked up once per acquire.

    ``limit``: no size in bytes exceeds it; -1: nothing is served.
    """

    __slots__ = ("acquire", "limit", "policy", "release", "size_class")

    def __init__(self, policy: Policy, limit: int) -> None:
        self.policy, self.limit = policy, limit
        self.size_class, self.acquire, self.release = policy.size_class, policy.acquire, policy.release


class Slot:
    """A GPU buffer from creation to destruction; between leases ``lease`` is None.

    Serial numbers are those of flushes: ``used_until`` is that of the flush after the last release, behind which the
    GPU has no work left with the buffer; ``born`` that of the flush before which it was created.
    """

    __slots__ = (
        "born",
        "condemned",
        "dirty_bytes",
        "id",
        "lease",
        "pins",
        "request",
        "role",
        "route",
        "session",
        "size",
        "stats",
        "suspect",
        "used_until",
    )

    def __init__(self, buffer_id: int, size: int, role: Role, stats: ClassStats, born: int, session: int) -> None:
        self.id, self.size, self.role, self.stats = buffer_id, size, role, stats
        self.lease: Buffer | None = None
        self.request: Request  # of the lease, or of the last one
        self.route: Route  # to the policy under which it was leased
        self.born = born
        self.used_until = 0
        self.dirty_bytes = 0  # from the start of the buffer: what leases may have written since it was zero
        self.session = session  # of the last lease
        self.condemned = False  # to destroy at the flush
        self.suspect = False  # created when memory ran out: it may have no memory behind it
        self.pins = 0


class InFlight:
    """Bytes of destroyed buffers, until the GPU is done with the flush after which nothing uses them."""

    __slots__ = ("_entries", "nbytes")

    def __init__(self) -> None:
        self._entries: deque[tuple[int, int]] = deque()
        self.nbytes = 0

    def add(self, serial: int, nbytes: int) -> None:
        self.nbytes += nbytes
        if self._entries and self._entries[-1][0] >= serial:
            last, there = self._entries.pop()
            serial, nbytes = last, there + nbytes
        self._entries.append((serial, nbytes))

    def settle(self, completed: int) -> None:
        """The GPU has finished everything up to the flush ``completed``."""
        entries = self._entries
        while entries and entries[0][0] <= completed:
            self.nbytes -= entries.popleft()[1]
