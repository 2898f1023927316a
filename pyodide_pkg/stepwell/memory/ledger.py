"""Every byte the pool owns, by role and by size class: reserved, in use and asked for, now and at the peak; counters.

*Reserved* is the size of the buffers that exist, *in use* that of the acquired ones, *requested* what their callers
asked for; the difference of the last two is padding.  A free buffer stays on the account of the role that used it last.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        """Bytes of the buffers that nobody has leased."""
        return self.reserved_bytes - self.in_use_bytes

    @property
    def padding_bytes(self) -> int:
        """Bytes in use that nobody asked for."""
        return self.in_use_bytes - self.requested_bytes


@dataclass(slots=True)
class Account:
    """One role's bytes and number of buffers: now, at the peak, and moved in and out from the pool's start."""

    reserved: int = 0
    peak_reserved: int = 0
    buffers: int = 0
    allocated: int = 0
    freed: int = 0

    def reserve(self, size: int) -> None:
        """Enter a buffer of ``size`` bytes."""
        self.buffers += 1
        self.allocated += size
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved

    def give_up(self, size: int) -> None:
        """Take a buffer of ``size`` bytes off."""
        self.buffers -= 1
        self.freed += size
        self.reserved -= size


MOST_CLASSES = 4096
"""With exact sizes every token of a growing cache brings a new class: beyond this many, empty ones are forgotten."""


@dataclass(slots=True)
class Ledger:
    """The pool's books.  The totals are plain attributes, cheap enough to be read before and after every token.

    ``classes``: the size classes by (role, bytes).  Counters count from the pool's start.
    """

    reserved_bytes: int = 0
    in_use_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_in_use_bytes: int = 0
    created: int = 0
    destroyed: int = 0
    hits: int = 0
    misses: int = 0
    bytes_created: int = 0
    bytes_destroyed: int = 0
    cleared: int = 0
    bytes_cleared: int = 0
    classes: dict[tuple[Role, int], ClassStats] = field(default_factory=dict)
    _accounts: dict[Role, Account] = field(default_factory=lambda: {role: Account() for role in Role})

    def stats(self, role: Role, size: int) -> ClassStats:
        """The size class of ``size`` bytes of ``role``, a new one if need be."""
        found = self.classes.get((role, size))
        if found is None:
            if len(self.classes) >= MOST_CLASSES:
                self._forget_empty_classes()
            found = self.classes[role, size] = ClassStats(role, size)
        return found

    def note_created(self, stats: ClassStats, missed: bool = True) -> None:
        """Count a buffer that was created: because no free one fitted (``missed``), or ahead of its need."""
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
        """Move a buffer of class ``old`` that is not leased to the account of ``role``; returns its new class."""
        old.buffers -= 1
        self._accounts[old.role].give_up(old.size)
        new = self.stats(role, old.size)
        new.buffers += 1
        self._accounts[role].reserve(old.size)
        return new

    def note_destroyed(self, stats: ClassStats, cause: Eviction, run: int) -> None:
        """Count a buffer of the class that was destroyed in ``run``."""
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
        """Count a lease of the class that began; ``BufferPool.acquire`` does the same without the call."""
        stats.live += 1
        if stats.live > stats.high_water:
            stats.high_water = stats.live
        self.in_use_bytes += stats.size
        if self.in_use_bytes > self.peak_in_use_bytes:
            self.peak_in_use_bytes = self.in_use_bytes

    def note_released(self, stats: ClassStats) -> None:
        """Count a lease of the class that ended."""
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
        """A snapshot.  ``requested``: bytes that the leases of each role asked for; the ledger does not follow it."""
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
