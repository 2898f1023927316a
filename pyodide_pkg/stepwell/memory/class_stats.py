"""What there is to know of one size class of one role: its buffers, who got them, and why they were destroyed."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypedDict

from stepwell.memory.buffer import Role


class Eviction(StrEnum):
    """Why a buffer was destroyed."""

    LIMIT = "limit"  # the policy keeps no more free buffers of its size
    WINDOW = "window"  # no recent run needed it
    BUDGET = "budget"
    OOM = "oom"
    TRIM = "trim"  # the caller asked for it
    POLICY = "policy"  # the policy was replaced
    CLOSE = "close"
    LOST = "lost"  # it died with its device


class ClassRow(TypedDict):
    """One size class of one role, as a page or a report shows it; sizes in bytes, everything else counts buffers."""

    role: str
    size: int
    live: int
    free: int
    hits: int
    misses: int
    borrows: int
    evictions: dict[str, int]
    high_water: int
    target: int | None


@dataclass(slots=True, eq=False)
class ClassStats:
    """One role's buffers of one size.  The pool counts in it directly: it is on the path of every acquire."""

    role: Role
    size: int
    buffers: int = 0
    live: int = 0
    high_water: int = 0
    hits: int = 0
    misses: int = 0
    created: int = 0
    borrows: int = 0  # leases to requests of a smaller class
    evictions: Counter[str] = field(default_factory=Counter)
    first_eviction_run: int = -1
    last_eviction_run: int = -1

    def row(self, target: int | None) -> ClassRow:
        """The class as plain data; ``target``: how many free buffers its policy would keep now, None: no limit."""
        return {
            "role": self.role.value,
            "size": self.size,
            "live": self.live,
            "free": self.buffers - self.live,
            "hits": self.hits,
            "misses": self.misses,
            "borrows": self.borrows,
            "evictions": dict(self.evictions),
            "high_water": self.high_water,
            "target": target,
        }
