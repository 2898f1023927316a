"""Arms of one workload, interleaved in one browser: medians, and ratios to the control paired round by round.

An arm is ``static`` (the control: the same commands on tensors that are allocated once) or a policy with a growing KV
cache, with options of its own after a colon: ``adaptive``, ``adaptive:window=4``, ``bucket:era=A;limits=4 MiB:64``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.table import Table

from harness.arms import figures
from harness.arms.figures import ArmFigures, ArmRun
from harness.arms.schedule import Arm, Schedule, Turn, read_arms
from harness.page.record import Record
from harness.page.scenario import Scenario
from harness.page.summary import size
from harness.site.process import Report

CONTROL = "static"
"""The arm that ratios are to."""
WARM_UP = 3  # the fill, and the two steps in which every policy makes the first sets of tensors
SCHEMA = 1
"""The version of the JSON."""
Fields = dict[str, Any]
"""Fields of a scenario, with their values."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Schedule[Fields]):
    """A schedule of runs of ``base``; an arm's settings are the fields of the scenario that it changes."""

    base: Scenario
    skip: int = WARM_UP

    UNIT: ClassVar[str] = "tokens"

    @property
    def control(self) -> str:
        """The arm that the others are divided by: ``static`` where it runs, else the first."""
        names = [arm.name for arm in self.arms]
        return CONTROL if CONTROL in names else names[0]

    def scenario(self, turn: Turn[Fields]) -> Scenario:
        """The scenario of ``turn``.  SetupError where the arm's policy or options are refused."""
        return self.base.but(start=turn.start, tokens=self.steps, **turn.arm.settings)

    def run_of(self, turn: Turn[Fields], record: Record) -> ArmRun[Record]:
        """The part of ``record`` that is compared, as a run of ``turn``."""
        steps = record["tokens"][self.skip :]
        ms, created = [step["ms"] for step in steps], [step["buffers_created"] for step in steps]
        peak = record["memory"]["peak_reserved_bytes"]
        return ArmRun(turn.round, turn.start, turn.arm.name, record, ms, created, peak)


def parse_arms(text: str) -> tuple[Arm[Fields], ...]:
    """The arms of ``--arms``, separated by commas; options are separated by semicolons."""
    arms = []
    for name, kind, options in read_arms(text):
        kv, policy = ("static", "adaptive") if kind == CONTROL else ("grow", kind)
        arms.append(Arm(name, {"kv": kv, "policy": policy, "policy_options": options}))
    return tuple(arms)


def run_all(plan: Comparison, run: Callable[[Scenario], Record], report: Report) -> list[ArmRun[Record]]:
    """Run ``plan`` by ``run``; ``report`` is told of each run.  A cancelled run is the last and is left out."""
    found = []
    for turn in plan:
        report(plan.progress(turn))
        record = run(plan.scenario(turn))
        if record["finish_reason"] == "cancelled":
            break
        found.append(plan.run_of(turn, record))
    return found


def as_json(plan: Comparison, runs: Sequence[ArmRun[Record]]) -> dict[str, Any]:
    """``plan``, the figures of ``runs``, and every record, as a JSON object."""
    return {
        "schema": SCHEMA,
        "workload": plan.base.workload,
        "control": plan.control,
        "starts": list(plan.starts),
        "tokens": plan.steps,
        "warm_up": plan.skip,
        "rounds": plan.rounds,
        "rows": [_row_json(row, plan.control) for row in figures.figures(plan, runs)],
        "runs": [{"round": run.round, "start": run.start, "arm": run.arm, "record": run.result} for run in runs],
    }


def _row_json(row: ArmFigures[Record], control: str) -> dict[str, Any]:
    ratio = row.ratios.get(control)
    ratios = {"ratios": list(ratio.values) if ratio else [], "ratio": ratio.median if ratio else None}
    return {**row.as_json(), "peak_reserved_bytes": row.peak_bytes, **ratios}


def table(plan: Comparison, runs: Sequence[ArmRun[Record]]) -> Table:
    """A table of the figures of ``runs``, for the terminal."""
    return figures.table_by_start(
        f"{plan.base.workload}: {plan.rounds} rounds of {plan.steps} tokens",
        f"ms per token without the first {plan.skip} of each run; ÷ {plan.control}: median of the rounds' ratios of "
        "medians [least, greatest]",
        ("from", "arm", "n", "median", "max", "max ÷ med", "creates", "most", f"÷ {plan.control}", "peak"),
        [_cells(row, plan.control) for row in figures.figures(plan, runs)],
    )


def _cells(row: ArmFigures[Record], control: str) -> list[str]:
    ratio = row.ratios.get(control)
    return [
        f"{row.start:,}", row.arm, str(row.n), f"{row.median_ms:.1f}", f"{row.max_ms:.1f}",
        f"{row.max_ms / row.median_ms:.2f}", f"{row.created_mean:.2f}", str(row.created_max),
        f"{ratio.median:.2f} [{min(ratio.values):.2f}, {max(ratio.values):.2f}]" if ratio else "-",
        size(row.peak_bytes),
    ]  # fmt: skip
