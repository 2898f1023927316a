"""Every byte the pool owns, by role and by size class: reserved, in use and asked for, now and at the peak; counters.

*Reserved* is the size of the buffers that exist, *in use* that of the acquired ones, *requested* what their callers
asked for; the difference of the last two is padding.  A free buffer stays on the account of the role that used it last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stepwell.memory.buffer import Role
from stepwell.memory.class_stats import ClassStats, Eviction


@dataclass(frozen=True, slots=True)
class RoleReport:
    """One role's bytes and number of existing buffers."""

    reserved_bytes: int
    in_use_bytes: int
    requested_bytes: int
    peak_reserved_bytes: int
    buffers: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """A snapshot of the ledger.  Counters count from the pool's start: take differences of two reports."""

    reserved_bytes: int
    in_use_bytes: int
    requested_bytes: int
    peak_reserved_bytes: int
    peak_in_use_bytes: int
    created: int
    destroyed: int
    hits: int
    misses: int
    bytes_created: int
    bytes_destroyed: int
    cleared: int
    bytes_cleared: int
    by_role: Mapping[str, RoleReport]
    allocated_by_role: Mapping[str, int]  # bytes, from the pool's start, with buffers that came from other roles
    freed_by_role: Mapping[str, int]

    @property
    def free_bytes(self) -> int:
        return self.reserved_bytes - self.in_use_bytes

    @property
    def padding_bytes(self) -> int:
        return self.in_use_bytes - self.requested_bytes


class Account:
    """One role's reserved bytes."""

    __slots__ = ("allocated", "buffers", "freed", "peak_reserved", "reserved")

    def __init__(self) -> None:
        self.allocated = self.buffers = self.freed = self.peak_reserved = self.reserved = 0

    def reserve(self, size: int) -> None:
        self.buffers += 1
        self.allocated += size
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved

    def give_up(self, size: int) -> None:
        self.buffers -= 1
        self.freed += size
        self.reserved -= size


MOST_CLASSES = 4096
"""With exact sizes every token of a growing cache brings a new class: beyond this many, empty ones are forgotten."""


class Ledger:
    """The pool's books.  The totals are plain attributes, cheap enough to be read before and after every token."""

    __slots__ = (
        "_accounts",
        "bytes_cleared",
        "bytes_created",
        "bytes_destroyed",
        "classes",
        "cleared",
        "created",
        "destroyed",
        "hits",
        "in_use_bytes",
        "misses",
        "peak_in_use_bytes",
        "peak_reserved_bytes",
        "reserved_bytes",
    )

    def __init__(self) -> None:
        self._accounts = {role: Account() for role in Role}
        self.classes: dict[tuple[Role, int], ClassStats] = {}
        self.reserved_bytes = self.in_use_bytes = 0
        self.peak_reserved_bytes = self.peak_in_use_bytes = 0
        self.created = self.destroyed = self.hits = self.misses = 0
        self.bytes_created = self.bytes_destroyed = 0
        self.cleared = self.bytes_cleared = 0

    def stats(self, role: Role, size: int) -> ClassStats:
        found = self.classes.get((role, size))
        if found is None:
            if len(self.classes) >= MOST_CLASSES:
                self._forget_empty_classes()
            found = self.classes[role, size] = ClassStats(role, size)
        return found

    def note_created(self, stats: ClassStats, missed: bool = True) -> None:
        """A buffer was created: because no free one fitted (a miss), or ahead of its need."""
        size = stats.size
        if missed:
            self.misses += 1
            stats.misses += 1
        stats.created += 1
        stats.buffers += 1
        self.created += 1
        self.bytes_created += size
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        self._accounts[stats.role].reserve(size)

    def moved(self, old: ClassStats, role: Role) -> ClassStats:
        """A buffer goes to the account of another role; returns its new class.  It must not be leased."""
        old.buffers -= 1
        self._accounts[old.role].give_up(old.size)
        new = self.stats(role, old.size)
        new.buffers += 1
        self._accounts[role].reserve(old.size)
        return new

    def note_destroyed(self, stats: ClassStats, cause: Eviction, run: int) -> None:
        size = stats.size
        if stats.first_eviction_run < 0:
            stats.first_eviction_run = run
        stats.last_eviction_run = run
        stats.buffers -= 1
        stats.evictions[cause.value] += 1
        self.destroyed += 1
        self.bytes_destroyed += size
        self.reserved_bytes -= size
        self._accounts[stats.role].give_up(size)

    def note_acquired(self, stats: ClassStats) -> None:
        """``BufferPool.acquire`` does the same without the call."""
        stats.live += 1
        if stats.live > stats.high_water:
            stats.high_water = stats.live
        self.in_use_bytes += stats.size
        if self.in_use_bytes > self.peak_in_use_bytes:
            self.peak_in_use_bytes = self.in_use_bytes

    def note_released(self, stats: ClassStats) -> None:
        stats.live -= 1
        self.in_use_bytes -= stats.size

    def reset_peaks(self) -> None:
        """Measure peaks from here on: a run's peak is not that of the runs before it.

        Classes without buffers are forgotten, with their counters.
        """
        self.peak_reserved_bytes, self.peak_in_use_bytes = self.reserved_bytes, self.in_use_bytes
        for account in self._accounts.values():
            account.peak_reserved = account.reserved
        self._forget_empty_classes()
        for stats in self.classes.values():
            stats.high_water = stats.live

    def _forget_empty_classes(self) -> None:
        self.classes = {key: stats for key, stats in self.classes.items() if stats.buffers}

    def reserved_by_role(self) -> dict[str, int]:
        """Reserved bytes of every role that has any."""
        return {role.value: account.reserved for role, account in self._accounts.items() if account.reserved}

    def report(self, requested: Mapping[Role, int]) -> MemoryReport:
        """``requested``: the bytes that the leases of each role asked for, which the ledger does not follow."""
        in_use = dict.fromkeys(Role, 0)
        for stats in self.classes.values():
            in_use[stats.role] += stats.live * stats.size
        by_role = {
            role.value: RoleReport(a.reserved, in_use[role], requested[role], a.peak_reserved, a.buffers)
            for role, a in self._accounts.items()
        }
        return MemoryReport(
            reserved_bytes=self.reserved_bytes,
            in_use_bytes=self.in_use_bytes,
            requested_bytes=sum(requested.values()),
            peak_reserved_bytes=self.peak_reserved_bytes,
            peak_in_use_bytes=self.peak_in_use_bytes,
            created=self.created,
            destroyed=self.destroyed,
            hits=self.hits,
            misses=self.misses,
            bytes_created=self.bytes_created,
            bytes_destroyed=self.bytes_destroyed,
            cleared=self.cleared,
            bytes_cleared=self.bytes_cleared,
            by_role=MappingProxyType(by_role),
            allocated_by_role=MappingProxyType({role.value: a.allocated for role, a in self._accounts.items()}),
            freed_by_role=MappingProxyType({role.value: a.freed for role, a in self._accounts.items()}),
        )


class Figures:
    """Single figures of a pool's report, for reading before and after every token."""

    ledger: Ledger

    @property
    def created(self) -> int:
        return self.ledger.created

    @property
    def destroyed(self) -> int:
        return self.ledger.destroyed

    @property
    def hits(self) -> int:
        return self.ledger.hits

    @property
    def misses(self) -> int:
        return self.ledger.misses

    @property
    def bytes_created(self) -> int:
        return self.ledger.bytes_created

    @property
    def bytes_destroyed(self) -> int:
        return self.ledger.bytes_destroyed

    @property
    def reserved_bytes(self) -> int:
        return self.ledger.reserved_bytes

    @property
    def in_use_bytes(self) -> int:
        return self.ledger.in_use_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self.ledger.peak_reserved_bytes
