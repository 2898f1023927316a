"""Every byte the pool owns, by role: what is reserved, in use and asked for, now and at the peak; and the counters.

*Reserved* is the size of the buffers that exist, *in use* that of the acquired ones, *requested* what their callers
asked for.  A free buffer stays on the account of the role that used it last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stepwell.memory.buffer import Role


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
    by_role: Mapping[str, RoleReport]

    @property
    def free_bytes(self) -> int:
        return self.reserved_bytes - self.in_use_bytes


class _Account:
    __slots__ = ("buffers", "in_use", "peak_reserved", "requested", "reserved")

    def __init__(self) -> None:
        self.buffers = self.in_use = self.peak_reserved = self.requested = self.reserved = 0

    def reserve(self, size: int) -> None:
        self.buffers += 1
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved


class Ledger:
    """The pool's books.  The totals are plain attributes, cheap enough to be read before and after every token."""

    __slots__ = (
        "_accounts",
        "bytes_created",
        "bytes_destroyed",
        "created",
        "destroyed",
        "hits",
        "in_use_bytes",
        "misses",
        "peak_in_use_bytes",
        "peak_reserved_bytes",
        "requested_bytes",
        "reserved_bytes",
    )

    def __init__(self) -> None:
        self._accounts = {role: _Account() for role in Role}
        self.reserved_bytes = self.in_use_bytes = self.requested_bytes = 0
        self.peak_reserved_bytes = self.peak_in_use_bytes = 0
        self.created = self.destroyed = self.hits = self.misses = 0
        self.bytes_created = self.bytes_destroyed = 0

    def note_created(self, size: int, role: Role) -> None:
        """A buffer was created because no free one fitted (a miss)."""
        self.misses += 1
        self.created += 1
        self.bytes_created += size
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        self._accounts[role].reserve(size)

    def note_reused(self, size: int, role: Role, last_role: Role) -> None:
        """A free buffer is handed out again (a hit), perhaps to another role than before."""
        self.hits += 1
        if role is not last_role:
            account = self._accounts[last_role]
            account.buffers -= 1
            account.reserved -= size
            self._accounts[role].reserve(size)

    def note_acquired(self, size: int, requested: int, role: Role) -> None:
        self.in_use_bytes += size
        self.requested_bytes += requested
        if self.in_use_bytes > self.peak_in_use_bytes:
            self.peak_in_use_bytes = self.in_use_bytes
        account = self._accounts[role]
        account.in_use += size
        account.requested += requested

    def note_released(self, size: int, requested: int, role: Role) -> None:
        self.in_use_bytes -= size
        self.requested_bytes -= requested
        account = self._accounts[role]
        account.in_use -= size
        account.requested -= requested

    def note_destroyed(self, size: int, role: Role) -> None:
        self.destroyed += 1
        self.bytes_destroyed += size
        self.reserved_bytes -= size
        account = self._accounts[role]
        account.buffers -= 1
        account.reserved -= size

    def reset_peaks(self) -> None:
        """Measure peaks from here on: a run's peak is not that of the runs before it."""
        self.peak_reserved_bytes, self.peak_in_use_bytes = self.reserved_bytes, self.in_use_bytes
        for account in self._accounts.values():
            account.peak_reserved = account.reserved

    def reserved_by_role(self) -> dict[str, int]:
        """Reserved bytes of every role that has any."""
        return {role.value: account.reserved for role, account in self._accounts.items() if account.reserved}

    def report(self) -> MemoryReport:
        by_role = {
            role.value: RoleReport(a.reserved, a.in_use, a.requested, a.peak_reserved, a.buffers)
            for role, a in self._accounts.items()
        }
        return MemoryReport(
            reserved_bytes=self.reserved_bytes,
            in_use_bytes=self.in_use_bytes,
            requested_bytes=self.requested_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            peak_in_use_bytes=self.peak_in_use_bytes,
            created=self.created,
            destroyed=self.destroyed,
            hits=self.hits,
            misses=self.misses,
            bytes_created=self.bytes_created,
            bytes_destroyed=self.bytes_destroyed,
            by_role=MappingProxyType(by_role),
        )
