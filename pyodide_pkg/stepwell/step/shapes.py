"""Shape classes: steps of similar sizes share the variants of a node, so that few are ever made.

A prompt of any length then needs a handful of compiled kernels and workspaces, which a small bound per node can keep
(bucketing first, the bound second: a bound below the number of classes in use would compile the same ones again and
again).
"""

from bisect import bisect_left
from dataclasses import dataclass

WIDTHS = (1, 4, 16, 64)
"""The widths of a step in tokens; a wider step has a power of two."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """How sizes are classed: with ``ladder`` by the classes below, else every size is a class of its own."""

    ladder: bool = True

    def width(self, rows: int) -> int:
        """The class of a step of ``rows`` tokens: at least ``rows``."""
        if not self.ladder:
            return rows
        place = bisect_left(WIDTHS, rows)
        return WIDTHS[place] if place < len(WIDTHS) else power_of_two(rows)

    def chunks(self, count: int) -> int:
        """The class of ``count`` chunks of positions: at least ``count``."""
        return power_of_two(count) if self.ladder else count


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
