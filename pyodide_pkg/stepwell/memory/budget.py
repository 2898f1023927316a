"""The budget of total bytes: reserved ones, and those of destroyed buffers that the GPU may still be using."""

from stepwell.errors import BadRequest

SHRINK = 0.7
"""The factor of the budget when memory ran out."""
GROW = 1.05
"""The factor by which a lowered budget grows again."""
RUNS_PER_GROWTH = 1000
"""Runs without running out after which it grows."""


class Budget:
    """A limit in bytes, or none; ``hard``: exceeding it is an error instead of a last resort.

    When the device runs out of memory the limit falls to SHRINK times what was reserved; it rises by GROW per
    RUNS_PER_GROWTH runs without such an error, up to what the caller had set (additive increase would need a scale).
    """

    __slots__ = ("_runs", "_set_by_caller", "failed_at", "hard", "limit")

    def __init__(self, limit: int | None, hard: bool) -> None:
        if limit is not None and limit <= 0:
            raise BadRequest(f"a budget of {limit:,} B; it must be 1 B or more.")
        if hard and limit is None:
            raise BadRequest("a hard budget without bytes: give budget_bytes.")
        self.limit = self._set_by_caller = limit
        self.hard = hard
        self.failed_at: int | None = None  # bytes reserved when the device last ran out of memory
        self._runs = 0

    def excess(self, nbytes: int) -> int:
        """By how much ``nbytes`` exceed the limit; 0 or less: they fit."""
        return nbytes - self.limit if self.limit is not None else 0

    def shrink(self, reserved: int) -> None:
        """Lower the limit: the device ran out of memory with ``reserved`` bytes."""
        limit = max(1, int(SHRINK * reserved))
        self.limit = limit if self.limit is None else min(self.limit, limit)
        self.failed_at, self._runs = reserved, 0

    def note_run(self) -> None:
        """Count a run that went well, and raise a lowered limit when it is time."""
        if self.failed_at is None or self.limit is None:
            return
        self._runs += 1
        if self._runs < RUNS_PER_GROWTH:
            return
        self._runs = 0
        ceiling = self.failed_at if self._set_by_caller is None else self._set_by_caller
        self.limit = min(int(self.limit * GROW) + 1, ceiling)
        if self.limit == ceiling:
            self.limit, self.failed_at = self._set_by_caller, None
