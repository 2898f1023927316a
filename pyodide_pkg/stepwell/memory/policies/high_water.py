"""One size class of ``adaptive``: its free buffers, and how many of them the last runs needed."""

from collections import deque
from dataclasses import dataclass, field

WIDEST_WINDOW = 256
"""The most runs that can be remembered."""
_CREATE_US = 50.0
_CREATE_US_PER_BYTE = 300 / (1 << 20)
_CHEAP_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class SizeClass:
    """One size class: counts acquires minus releases of a run; their maximum is the run's *high-water mark*.

    The mark is the number of buffers that must be free when such a run begins for it to create none.  The class keeps
    as many as the largest mark of the last ``window`` runs (``marks``: the candidates, in order of runs).
    A window that proved too short (the class creates again soon after it gave something up) doubles; it halves again
    after a long quiet time.
    """

    size: int
    window: int
    exact: bool = False  # a size that was asked for, not a class that many sizes share
    base_window: int = field(init=False)
    free: list[int] = field(default_factory=list)
    outstanding: int = 0  # below 0 when leases of earlier runs come back
    peak: int = 0
    marks: deque[tuple[int, int]] = field(default_factory=deque)
    last_used: int = -1  # the last run with demand
    runs: int = 0  # that had demand
    gave_up: int | None = None  # the run in which buffers were given up
    regretted: int = 0
    credit: float = 0.0
    ahead: int = 0  # free buffers that were created before they are needed
    ahead_until: int = -1

    def __post_init__(self) -> None:
        self.base_window = self.window

    @property
    def target(self) -> int:
        """The largest mark of the window: how many free buffers to keep."""
        return self.marks[0][1] if self.marks else 0

    def turn(self, run: int) -> None:
        """Let the mark of ``run``, which has ended, into the window, and those that are too old out of it."""
        peak, marks = self.peak, self.marks
        if peak:
            self.last_used = run
            self.runs += 1
            while marks and marks[-1][1] <= peak:
                marks.pop()
            marks.append((run, peak))
        self.outstanding = self.peak = 0
        while marks and marks[0][0] <= run - self.window:
            marks.popleft()
        if self.window > self.base_window and run - self.regretted > 16 * self.window:
            self.window = max(self.base_window, self.window // 2)
            self.regretted = run

    def regret(self, run: int) -> None:
        """Remember demand for longer if buffers were given up not long before ``run``, in which one must be created."""
        if self.gave_up is None:
            return
        if run - self.gave_up <= 4 * self.window:
            self.window = min(2 * self.window, WIDEST_WINDOW)
            self.regretted = run
        self.gave_up = None

    def surplus(self, run: int) -> int:
        """How many free buffers neither the window nor growth-ahead asks to keep in ``run``."""
        keep = self.target
        if self.ahead and run <= self.ahead_until:
            keep = max(keep, self.ahead)
        return len(self.free) - keep

    def give_up(self, count: int, run: int) -> list[int]:
        """Forget ``count`` free buffers, those unused for longest; returns their ids."""
        given_up = self.free[:count]
        del self.free[:count]
        self.ahead = min(self.ahead, len(self.free))
        if given_up:
            self.gave_up = run
        return given_up


def cost_per_byte(size: int) -> float:
    """What it costs to create a buffer of ``size`` bytes again, in µs per byte: a call, above 4 MiB also pages.

    Below 4 MiB the browser's own allocator recycles memory (Dawn); above, microsoft/onnxruntime issue 32017 fits
    0.3 ms per MiB.
    """
    pages_us = _CREATE_US_PER_BYTE * size if size > _CHEAP_BYTES else 0.0
    return (_CREATE_US + pages_us) / size
