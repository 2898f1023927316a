"""``adaptive``: keeps what a run needs, as measured: per size class the high-water mark of the last runs.

*How many.*  See ``SizeClass``.  Releases that come after a run's submit fall into the same window as the run.  A class
that the KV cache has left is dropped when two runs went on without it, unless that proved wrong before; a size that was
asked for exactly, by one run only, when the next went on without it (with a tensor that grows all sizes are like that).

*Which sizes.*  See ``size_classes``: KV tensors have classes of their own per site, so that a growing cache crosses
them one tensor at a time.  A few tensors share ONNX Runtime's classes instead: their crossing is a small burst, and
with those classes nothing creates less.  The other roles share finer ones.

*Borrowing.*  A request whose class is empty takes a free buffer of up to 1.25 times its bytes from a class that nothing
uses, before one is created.

*Under pressure.*  ``reclaim`` gives up what no recent run used, then what is cheapest to create again per byte, older
before newer (GreedyDual-Size: Cao and Irani 1997; Young 1998, "On-line file caching").

*Growth ahead.*  With the next sizes known, buffers can be made before they are needed: ``plan_growth``, ``adopt``.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from stepwell.errors import BadRequest
from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Policy, Request, round_up
from stepwell.memory.policies.high_water import WIDEST_WINDOW, SizeClass, cost_per_byte
from stepwell.memory.policies.size_classes import PHASES, even_series, phase_of, shared_series, staggered_series

WINDOW = 8
"""Runs whose high-water mark is remembered."""
GROWTH = 0.0
"""The ratio of KV size classes; 0: chosen by the number of KV tensors."""
FEW_TENSORS = 20
"""The free buffers that ``bucket`` keeps of its 4 MiB class: up to as many tensors, its fixed limits are enough."""
GROWTH_OF_MANY = 1.25
"""The ratio of KV size classes for more tensors."""
BORROW = 1.25
"""A request takes a free buffer of a larger class that is at most this many times its own."""
_KV_PATIENCE_RUNS = 2
_KV = Role.KV  # looking a member up on its class costs more than the comparison


class Adaptive(Policy):
    """What a run needs, as measured: per size class the high-water mark of the last ``window`` runs.

    ``growth``: the ratio of KV's classes; 0 is 1.25, or the shared classes of a few once a run has shown that there are
    no more than 20 KV tensors.  ``stagger``: whether each site has classes of its own.
    """

    def __init__(self, window: int = WINDOW, growth: float = GROWTH, stagger: bool = True) -> None:
        if not 1 <= window <= WIDEST_WINDOW:
            raise BadRequest(f"adaptive: a window of {window} runs; it must be 1 to {WIDEST_WINDOW}.")
        if growth and not 1.01 <= growth <= 2:
            raise BadRequest(f"adaptive: a growth of {growth}; it must be 1.01 to 2, or 0 to choose the classes.")
        self._window = window
        self._choosing = not growth
        self._growth = growth or GROWTH_OF_MANY
        self._kv_sites = 0  # the highest seen, and one
        self._few = False
        self._kv_series: list[list[int] | None] = [None] * PHASES
        self._stagger = stagger
        self._even = even_series()
        self._kv: dict[int, SizeClass] = {}
        self._other: dict[int, SizeClass] = {}
        self._borrowed: dict[int, SizeClass] = {}  # id → the class that asked for it
        self._run = 0
        self._inflation = 0.0  # the credit of the last victim

    def size_class(self, request: Request) -> int:
        nbytes, role, site, _ = request
        series = (self._kv_series[site % PHASES] or self._series(site % PHASES)) if role is _KV else self._even
        index = bisect_left(series, nbytes)
        return series[index] if index < len(series) else round_up(nbytes, 256)

    def acquire(self, request: Request, size: int) -> int | None:
        classes = self._kv if request.role is _KV else self._other
        found = classes.get(size)
        if found is None:
            found = classes[size] = SizeClass(size, self._window, request.exact)
        found.outstanding = outstanding = found.outstanding + 1
        if outstanding > found.peak:
            found.peak = outstanding
        free = found.free
        if free:
            if found.ahead:
                found.ahead -= 1
            return free.pop()
        lent = None if request.exact else self._borrow(found, request.nbytes, classes)
        if lent is None:
            found.regret(self._run)
        return lent

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        classes = self._kv if request.role is _KV else self._other
        owner = classes.get(size)
        if owner is None:
            owner = classes[size] = SizeClass(size, self._window)
        owner.free.append(buffer_id)
        if self._borrowed:
            owner = self._borrowed.pop(buffer_id, owner)
        owner.outstanding -= 1
        return ()

    def begin_run(self) -> Sequence[int]:
        run = self._run
        if self._choosing and self._few != (0 < self._kv_sites <= FEW_TENSORS):
            self._few = not self._few
            self._kv_series = [None] * PHASES
        given_up: list[int] = []
        for classes in (self._kv, self._other):
            goes_on = any(found.peak for found in classes.values())
            forgotten: list[int] = []
            for size, found in classes.items():
                if found.peak or found.marks or found.outstanding:
                    if found.peak:
                        found.credit = self._inflation + cost_per_byte(size)
                    found.turn(run)
                once = found.exact and found.runs == 1
                if goes_on and (once or classes is self._kv) and self._outgrown(found, once):
                    found.marks.clear()
                surplus = found.surplus(run)
                if surplus > 0:
                    given_up += found.give_up(surplus, run)
                if not found.free and not found.marks and run - found.last_used > 4 * found.window:
                    forgotten.append(size)
            for size in forgotten:
                del classes[size]
        self._run = run + 1
        return given_up

    def reclaim(self, nbytes: int) -> Sequence[int]:
        given_up: list[int] = []
        for found in sorted(self._classes(), key=self._keeping_order):
            while nbytes > 0 and found.free:
                count = min(len(found.free), -(-nbytes // found.size))
                given_up += found.give_up(count, self._run)
                nbytes -= count * found.size
                self._inflation = max(self._inflation, found.credit)
            if nbytes <= 0:
                break
        return given_up

    def drain(self) -> Sequence[int]:
        kept: list[int] = []
        for found in self._classes():
            kept += found.free
            found.free.clear()
            found.ahead = 0
        return kept

    def target(self, size: int, role: Role) -> int | None:
        found = (self._kv if role is _KV else self._other).get(size)
        return found.target if found is not None else 0

    # ---- growth ahead -----------------------------------------------------------------------------------------------

    def plan_growth(self, requests: Sequence[Request]) -> list[tuple[Request, int]]:
        """The buffers, with their sizes, that the KV ``requests`` to come will need and that are not there yet.

        The smallest come first: the smaller a site's next class, the sooner it outgrows the one it has.  A class
        that was not in use takes two per request: one for the token that enters it, one for the next, while the first
        still holds the past.
        """
        wanted: Counter[int] = Counter()
        plan: list[tuple[Request, int]] = []
        for request in requests:
            size = self.size_class(request)
            found = self._kv.get(size)
            if found is not None and found.last_used >= self._run - 1:
                continue
            wanted[size] += 2
            there = len(found.free) if found is not None else 0
            plan += [(request, size)] * min(2, max(0, wanted[size] - there))
        return sorted(plan, key=lambda entry: entry[1])

    def adopt(self, buffer_id: int, size: int, runs: int) -> None:
        """Keep a new KV buffer of ``size`` bytes that is not needed yet, for ``runs`` runs at most."""
        found = self._kv.get(size)
        if found is None:
            found = self._kv[size] = SizeClass(size, self._window)
        found.free.append(buffer_id)
        found.ahead += 1
        found.ahead_until = self._run + runs

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _series(self, site: int) -> list[int]:
        if self._few:
            series = shared_series()
        else:
            series = staggered_series(self._growth, phase_of(site) if self._stagger else 0)
        self._kv_series[site] = series
        self._kv_sites = max(self._kv_sites, site + 1)
        return series

    def _classes(self) -> list[SizeClass]:
        return [*self._kv.values(), *self._other.values()]

    def _outgrown(self, found: SizeClass, once: bool) -> bool:
        """Nothing was asked of this class in the last runs, or in the last one if one run only ever did (``once``)."""
        patience = 1 if once else _KV_PATIENCE_RUNS
        return self._run - found.last_used >= patience and found.window == found.base_window

    def _keeping_order(self, found: SizeClass) -> tuple[bool, float, int, int]:
        """Victims first: unused in this run and the last, then the least credit, the oldest use, the largest."""
        recent = bool(found.peak) or found.last_used >= self._run - 1
        return recent, found.credit, found.last_used, -found.size

    def _borrow(self, asked: SizeClass, nbytes: int, classes: dict[int, SizeClass]) -> int | None:
        """A free buffer of an idle class that is a little larger; the demand stays on the class that asked."""
        best: SizeClass | None = None
        for size, found in classes.items():
            if not found.free or not asked.size < size <= BORROW * nbytes or (best is not None and best.size < size):
                continue
            if not found.peak and found.last_used < self._run - 1 and not found.ahead:
                best = found
        if best is None:
            return None
        buffer_id = best.free.pop()
        self._borrowed[buffer_id] = asked
        return buffer_id
