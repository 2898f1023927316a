"""What there is to know of one size class of one role: its buffers, who got them, and why they were destroyed."""

from collections import Counter
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


class ClassStats:
    """One role's buffers of one size.  The pool counts in it directly: it is on the path of every acquire."""

    __slots__ = (
        "borrows",
        "buffers",
        "created",
        "evictions",
        "first_eviction_run",
        "high_water",
        "hits",
        "last_eviction_run",
        "live",
        "misses",
        "role",
        "size",
    )

    def __init__(self, role: Role, size: int) -> None:
        self.role, self.size = role, size
        self.buffers = self.live = self.high_water = 0
        self.hits = self.misses = self.created = 0
        self.borrows = 0  # leases to requests of a smaller class
        self.evictions: Counter[str] = Counter()
        self.first_eviction_run = self.last_eviction_run = -1

    def row(self, target: int | None) -> ClassRow:
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
