"""``adaptive``: keeps what a run needs, as measured: per size class the high-water mark of the last runs.

*How many.*  In each run, from one begin_run to the next, a class counts acquires minus releases; the maximum is its
high-water mark: the free buffers it needs at the start of such a run to create none.  A class keeps the largest mark
of the last ``window`` runs and gives up the rest at begin_run.  Releases that come after a run's submit fall into the
same window.  A class that the KV cache has outgrown is dropped after two runs without demand.

*Which sizes.*  Powers of two up to 512 KiB (at least 256 B); above, a geometric series of ratio 1.25 whose phase
depends on the site.  Equal tensors of different sites therefore outgrow their class on different tokens, one at a time,
instead of all creating a new buffer on the same token.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from stepwell.errors import BadRequest
from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Request, round_up

RATIO = 1.25
PHASES = 64
MIB = 1 << 20
LARGEST_CLASS = 1 << 36
_KV_PATIENCE_RUNS = 2


class _SizeClass:
    __slots__ = ("for_kv", "free", "marks", "outstanding", "peak")

    def __init__(self, window: int) -> None:
        self.free: list[int] = []
        self.outstanding = 0  # acquires minus releases since begin_run; below 0 when older leases come back
        self.peak = 0
        self.marks: deque[int] = deque(maxlen=window)
        self.for_kv = True  # nothing but KV has used it


class Adaptive:
    """``window``: for how many runs a high-water mark is remembered."""

    def __init__(self, window: int = 8) -> None:
        if window < 1:
            raise BadRequest(f"adaptive: a window of {window} runs; it must be 1 or more.")
        self._window = window
        self._series: dict[int, list[int]] = {}
        self._classes: dict[int, _SizeClass] = {}
        self._kv_demand = False

    def size_class(self, request: Request) -> int:
        phase = request.site % PHASES
        series = self._series.get(phase)
        if series is None:
            series = self._series[phase] = size_series(phase)
        index = bisect_left(series, request.nbytes)
        return series[index] if index < len(series) else round_up(request.nbytes, 256)

    def acquire(self, request: Request, size: int) -> int | None:
        found = self._class(size)
        found.outstanding += 1
        if found.outstanding > found.peak:
            found.peak = found.outstanding
        if request.role is Role.KV:
            self._kv_demand = True
        else:
            found.for_kv = False
        return found.free.pop() if found.free else None

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        found = self._class(size)
        found.outstanding -= 1
        found.free.append(buffer_id)
        return ()

    def flush(self) -> Sequence[int]:
        return ()

    def begin_run(self) -> Sequence[int]:
        destroyed: list[int] = []
        idle: list[int] = []
        for size, found in self._classes.items():
            found.marks.append(found.peak)
            found.outstanding = found.peak = 0
            keep = 0 if self._kv_has_left(found) else max(found.marks)
            surplus = len(found.free) - keep
            if surplus > 0:
                # the front is the least recently used
                destroyed += found.free[:surplus]
                del found.free[:surplus]
            if not keep:
                idle.append(size)
        for size in idle:
            del self._classes[size]
        self._kv_demand = False
        return destroyed

    def reclaim(self, nbytes: int) -> Sequence[int]:
        given_up: list[int] = []
        for size, found in sorted(self._classes.items(), reverse=True):
            while found.free and nbytes > 0:
                given_up.append(found.free.pop(0))
                nbytes -= size
        return given_up

    def drain(self) -> Sequence[int]:
        kept: list[int] = []
        for found in self._classes.values():
            kept += found.free
            found.free.clear()
        return kept

    def target(self, size: int) -> int | None:
        found = self._classes.get(size)
        return max(found.marks, default=0) if found is not None else 0

    def _class(self, size: int) -> _SizeClass:
        found = self._classes.get(size)
        if found is None:
            found = self._classes[size] = _SizeClass(self._window)
        return found

    def _kv_has_left(self, found: _SizeClass) -> bool:
        """KV asked for buffers in the run that ended, but for none of this class in the last runs."""
        if not (self._kv_demand and found.for_kv) or len(found.marks) < _KV_PATIENCE_RUNS:
            return False
        return not any(found.marks[-1 - back] for back in range(_KV_PATIENCE_RUNS))


def size_series(phase: int) -> list[int]:
    """The size classes of a phase (0 to 63), ascending.

    The geometric part replaces the power of two at 1 MiB, which all sites would outgrow together; it starts one step
    below, so that no class is more than twice the one before.
    """
    sizes = [1 << exponent for exponent in range(8, 20)]
    step = -1
    while sizes[-1] < LARGEST_CLASS:
        sizes.append(round_up(int(MIB * RATIO ** (step + phase / PHASES)), 256))
        step += 1
    return sizes
