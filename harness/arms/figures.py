"""Figures of the runs of a comparison: medians and counts of each arm, and ratios that are paired round by round."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from statistics import fmean, median
from typing import Any, Generic, Self, TypeVar

from rich.markup import escape
from rich.table import Table

from harness.arms.schedule import Schedule
from harness.page.summary import percentile, plain_table

RESAMPLES = 4000
"""Resamples of a bootstrapped interval."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ratio:
    """The ratios of single rounds (or of pairs of steps), their median, and the 95 % interval of that median."""

    values: tuple[float, ...]

    @classmethod
    def paired(cls, above: Mapping[int, float], below: Mapping[int, float]) -> Self:
        """Divide ``above`` by ``below``, both by round, in each round that has both."""
        return cls(tuple(value / below[key] for key, value in above.items() if below.get(key)))

    @property
    def median(self) -> float:
        """The middle of ``values``."""
        return median(self.values)

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The bootstrap interval of the median."""
        return median_interval(self.values)

    def __format__(self, spec: str) -> str:
        """``MEDIAN [LOW, HIGH]``, each number in the format ``spec``."""
        low, high = self.interval
        return f"{self.median:{spec}} [{low:{spec}}, {high:{spec}}]"


def median_interval(values: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval (percentile method) of the median of ``values``.  The same values give the same."""
    random = Random(seed)
    medians = [median(random.choices(values, k=len(values))) for _ in range(resamples)]
    return percentile(medians, 0.025), percentile(medians, 0.975)


@dataclass(frozen=True, slots=True)
class ArmRun(Generic[Result]):
    """One run of one arm: its ``result``, and the parts of it that are compared.

    ``ms`` and ``created`` (buffers) have an entry for each step that counts; ``peak_bytes`` is of the whole run.
    """

    round: int
    start: int
    arm: str
    result: Result
    ms: list[float]
    created: list[int]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ArmFigures(Generic[Result]):
    """The figures of ``arm`` at one ``start``, over the ``n`` steps of its ``runs`` that count.

    ``created_mean`` and ``created_max`` are buffers per step.  ``ratios``: medians of each round over those of the arm
    that is the key, for every arm that ran in a round with this one.
    """

    start: int
    arm: str
    n: int
    median_ms: float
    max_ms: float
    created_mean: float
    created_max: int
    peak_bytes: int
    runs: list[ArmRun[Result]]
    ratios: dict[str, Ratio]

    def as_json(self) -> dict[str, Any]:
        """The fields that the files of all comparisons have for an arm."""
        names = ("start", "arm", "n", "median_ms", "max_ms", "created_mean", "created_max")
        return {name: getattr(self, name) for name in names}


def figures(schedule: Schedule[Any], runs: Sequence[ArmRun[Result]]) -> list[ArmFigures[Result]]:
    """The figures of ``runs``, for each start and each arm that ran, in the order of ``schedule``."""
    found = []
    for start in schedule.starts:
        own = {arm.name: [run for run in runs if (run.start, run.arm) == (start, arm.name)] for arm in schedule.arms}
        medians = {arm: {run.round: median(run.ms) for run in some} for arm, some in own.items()}
        for arm, some in own.items():
            if some:
                ratios = {other: Ratio.paired(medians[arm], medians[other]) for other in own}
                found.append(_figures(start, arm, some, {key: ratio for key, ratio in ratios.items() if ratio.values}))
    return found


def _figures(start: int, arm: str, runs: list[ArmRun[Result]], ratios: dict[str, Ratio]) -> ArmFigures[Result]:
    ms = [value for run in runs for value in run.ms]
    created = [count for run in runs for count in run.created]
    peak = max(run.peak_bytes for run in runs)
    return ArmFigures(start, arm, len(ms), median(ms), max(ms), fmean(created), max(created), peak, runs, ratios)


def table_by_start(title: str, caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for people of ``rows`` that begin with their start, with a gap between one start and the next."""
    shown = plain_table(title, caption)
    for name in columns:
        shown.add_column(name, justify="left" if name == "arm" else "right")
    last = None
    for row in rows:
        if last not in (None, row[0]):
            shown.add_row()
        last = row[0]
        shown.add_row(*map(escape, row))
    return shown
