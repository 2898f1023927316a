"""The size classes that create buffers again and again under a policy, and why, in words.

A ``WatchedPolicy`` is replayed in the place of the policy it wraps: it decides nothing, and counts per size class and
run the buffers asked for, those that had to be created, and those that the policy gave up.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypedDict

from stepwell.memory.buffer import Role, mib
from stepwell.memory.class_stats import Eviction
from stepwell.memory.policies.base import Policy, Request
from stepwell.replay.simulator import WARM_UP_TOKENS

HURTS_CREATES = 0.5
"""Creates, on average in a run that uses it, from which on a class hurts."""
HURTS_SHARE = 0.01
"""The share of the cost of all creates from which on a class hurts."""
MOST_CLASSES = 6
"""The most classes that are named."""
_BRIEF_RUNS = 4  # a class that was asked for in this many runs or fewer had no time to pay off
_MANY_BRIEF = 4  # this many of them are no accident
_AGAIN = {
    Eviction.WINDOW: "they are given up after a time without demand, and wanted again",
    Eviction.BUDGET: "the budget takes them back",
}


class ClassFigures(TypedDict):
    """A size class, or several that share a cause, over the runs after the first two.

    ``runs``: the runs that create in it; ``wanted`` and ``created``: buffers in the usual one of these.
    ``kept``: the policy's limit (None: it has none).  ``ms``: spread over all runs.
    """

    smallest_bytes: int
    largest_bytes: int
    role: str
    wanted: int
    kept: int | None
    created: int
    runs: int
    ms: float
    why: str


class _Use(NamedTuple):
    """The buffers of a class that one run asked for, and those that had to be created for it."""

    run: int
    wanted: int
    created: int


class _Class:
    """The uses of one size class; the last run's are open until the next run asks."""

    __slots__ = ("created", "evicted", "kept", "role", "run", "size", "uses", "wanted")

    def __init__(self, size: int, role: Role) -> None:
        self.size, self.role = size, role
        self.run = self.wanted = self.created = 0
        self.kept: int | None = None  # when the last buffer had to be created
        self.uses: list[_Use] = []
        self.evicted: Counter[Eviction] = Counter()

    def close(self) -> None:
        if self.wanted:
            self.uses.append(_Use(self.run, self.wanted, self.created))
        self.wanted = self.created = 0

    @property
    def none_kept(self) -> bool:
        """Whether the policy gives every released buffer up, and not only because the class is new."""
        return self.kept == 0 and self.evicted[Eviction.LIMIT] > 0

    def steady(self, runs: int) -> list[_Use]:
        """The uses without the first two runs, which fill the pool; all of them if there are no more."""
        self.close()
        first = WARM_UP_TOKENS if runs > WARM_UP_TOKENS else 0
        return [use for use in self.uses if use.run > first]


class WatchedPolicy:
    """The ``policy``, with every call counted per size class and role."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.size_class = policy.size_class
        self.drain = policy.drain
        self.target = policy.target
        self.runs = 0
        self.classes: dict[tuple[int, Role], _Class] = {}
        self._class_of: dict[int, _Class] = {}  # of the buffers that the policy has kept

    def acquire(self, request: Request, size: int) -> int | None:
        """The policy's answer, counted as wanted and, if it is None, as created."""
        key = (size, request.role)
        found = self.classes.get(key)
        if found is None:
            found = self.classes[key] = _Class(size, request.role)
        if found.run != self.runs:
            found.close()
            found.run = self.runs
        found.wanted += 1
        buffer_id = self._policy.acquire(request, size)
        if buffer_id is None:
            found.created += 1
            found.kept = self._policy.target(size, request.role)
        return buffer_id

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        """The ids that the policy gives up, counted as over its limit."""
        found = self.classes.get((size, request.role))
        if found is not None:  # else it was lent by a class that another role uses
            self._class_of[buffer_id] = found
        return self._note(self._policy.release(buffer_id, request, size, recorded), Eviction.LIMIT)

    def flush(self) -> Sequence[int]:
        """The ids that the policy gives up, counted as over its limit."""
        return self._note(self._policy.flush(), Eviction.LIMIT)

    def begin_run(self) -> Sequence[int]:
        """The ids that the policy gives up, counted as out of its window."""
        self.runs += 1
        return self._note(self._policy.begin_run(), Eviction.WINDOW)

    def reclaim(self, nbytes: int) -> Sequence[int]:
        """The ids that the policy gives up, counted as lost to the budget."""
        return self._note(self._policy.reclaim(nbytes), Eviction.BUDGET)

    def _note(self, given_up: Sequence[int], cause: Eviction) -> Sequence[int]:
        for buffer_id in given_up:
            found = self._class_of.pop(buffer_id, None)
            if found is not None:
                found.evicted[cause] += 1
        return given_up


def hurting(policy: WatchedPolicy, ms: Callable[[int, int], float], unit: str) -> list[ClassFigures]:
    """The classes of ``policy`` worth a sentence, the dearest first.

    ``ms(creates, bytes)``: the milliseconds that creates cost.  ``unit``: the word for a run.
    """
    runs = policy.runs
    steady = max(1, runs - WARM_UP_TOKENS if runs > WARM_UP_TOKENS else runs)
    brief: dict[tuple[Role, bool], list[tuple[_Class, list[_Use]]]] = {}
    rows: list[ClassFigures] = []
    whole = 0.0
    for found in policy.classes.values():
        uses = found.steady(runs)
        created = sum(use.created for use in uses)
        cost = ms(created, created * found.size) / steady
        whole += cost
        if not created or created < HURTS_CREATES * len(uses):
            continue
        if len(uses) <= min(_BRIEF_RUNS, steady // 4):
            brief.setdefault((found.role, found.kept == 0), []).append((found, uses))
        else:
            rows.append(_row([found], uses, cost, steady, unit))
    for members in brief.values():
        # a few brief classes are those that were in use when the trace began or ended
        if len(members) >= _MANY_BRIEF or any(found.none_kept for found, _ in members):
            uses = [use for _, some in members for use in some]
            cost = sum(_cost(found, some, ms) for found, some in members) / steady
            rows.append(_row([found for found, _ in members], uses, cost, steady, unit))
    worth = [row for row in rows if row["ms"] >= HURTS_SHARE * whole]
    return sorted(worth, key=lambda row: -row["ms"])[:MOST_CLASSES]


def _cost(found: _Class, uses: Iterable[_Use], ms: Callable[[int, int], float]) -> float:
    created = sum(use.created for use in uses)
    return ms(created, created * found.size)


def _row(classes: Sequence[_Class], uses: Sequence[_Use], cost: float, steady: int, unit: str) -> ClassFigures:
    """The figures of one class, or of a group of brief classes, whose uses are joined run by run."""
    by_run: dict[int, tuple[int, int]] = {}
    for use in uses:
        wanted, created = by_run.get(use.run, (0, 0))
        by_run[use.run] = (wanted + use.wanted, created + use.created)
    creating = Counter(pair for pair in by_run.values() if pair[1])
    (wanted, created), _ = min(creating.items(), key=lambda item: (-item[1], item[0]))
    sizes = [found.size for found in classes]
    evicted: Counter[Eviction] = Counter()
    for found in classes:
        evicted += found.evicted
    row: ClassFigures = {
        "smallest_bytes": min(sizes),
        "largest_bytes": max(sizes),
        "role": classes[0].role.value,
        "wanted": wanted,
        "kept": classes[0].kept,
        "created": created,
        "runs": creating.total(),
        "ms": cost,
        "why": "",
    }
    why = _why(row, len(classes), any(found.none_kept for found in classes), evicted, unit)
    row["why"] = f"{_name(row, len(classes))}: {why} {_extent(row, steady, unit)}"
    return row


def _name(row: ClassFigures, count: int) -> str:
    if count == 1:
        return f"class {mib(row['largest_bytes'])} ({row['role']})"
    return f"{count:,} sizes of {mib(row['smallest_bytes'])} to {mib(row['largest_bytes'])} ({row['role']})"


def _why(row: ClassFigures, count: int, none_kept: bool, evicted: Counter[Eviction], unit: str) -> str:
    wanted = f"{row['wanted']:,} buffers wanted per {unit}"
    anew = f"{row['created']:,} are created anew each {unit}"
    if none_kept:
        return f"{wanted}, the policy keeps none: {anew}"
    if count > 1:
        return f"{wanted}, each time of a new size, which nothing that was kept fits: {anew}"
    cause = evicted.most_common(1)[0][0] if evicted else None
    if cause is Eviction.LIMIT and row["kept"] is not None:
        return f"{wanted}, the class keeps {row['kept']:,}: {anew}"
    if cause in _AGAIN:
        return f"{wanted}, {_AGAIN[cause]}: {anew}"
    return f"{wanted}, more than it ever had: {anew}"


def _extent(row: ClassFigures, steady: int, unit: str) -> str:
    """The number of runs in which that is so, and its cost, spread over all of them."""
    return f"(in {row['runs']:,} of {steady:,} {unit}s; {row['ms']:.2f} ms per {unit} over all)"
