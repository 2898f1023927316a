"""The runs of ``attach`` as tables and as a file."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from harness.arms import figures
from harness.arms.attach import SCHEMA, Benchmark, RunResult
from harness.arms.figures import ArmFigures, ArmRun, Ratio
from harness.page.summary import size

COLUMNS = ("from", "arm", "n", "median", "max", "creates", "most", "MiB", "÷ static", "÷ bare", "peak")
"""The columns of the table."""


def table(plan: Benchmark, runs: Sequence[ArmRun[RunResult]]) -> Table:
    """A table of the figures of ``runs``, for the terminal."""
    return figures.table_by_start(
        f"onnxruntime-web, {plan.tensors} growing tensors: {plan.rounds} rounds of {plan.steps} steps",
        f"ms per step without the first {plan.skip} of each run; creates: storage buffers that the browser made, per "
        "step; ÷: median of the rounds' ratios of medians [95 % interval], record ÷ bare: of pairs of steps in a run; "
        "peak: all buffers",
        COLUMNS,
        cells(plan, runs),
    )


def markdown(plan: Benchmark, runs: Sequence[ArmRun[RunResult]]) -> str:
    """A Markdown table of the figures of ``runs``."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(row)} |" for row in cells(plan, runs)]
    return "\n".join(lines) + "\n"


def cells(plan: Benchmark, runs: Sequence[ArmRun[RunResult]]) -> list[list[str]]:
    """A row of texts for each start and arm, in the order of COLUMNS."""
    return [
        [
            f"{row.start:,}", row.arm, str(row.n), f"{row.median_ms:.1f}", f"{row.max_ms:.1f}",
            f"{row.created_mean:.2f}", str(row.created_max), f"{plan.created_mib(row):.0f}",
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in (plan.to_control(row), plan.to_bare(row))),
            size(row.peak_bytes),
        ]
        for row in figures.figures(plan, runs)
    ]  # fmt: skip


def as_json(plan: Benchmark, runs: Sequence[ArmRun[RunResult]], environment: dict[str, Any]) -> dict[str, Any]:
    """``plan``, the figures of ``runs``, and every run, as a JSON object with ``environment``."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        "model": plan.model,
        "starts": list(plan.starts),
        "steps": plan.steps,
        "warm_up": plan.skip,
        "rounds": plan.rounds,
        "arms": [{"name": arm.name, **asdict(arm.settings)} for arm in plan.arms],
        "rows": [_row_json(plan, row) for row in figures.figures(plan, runs)],
        "runs": [{"round": run.round, "start": run.start, "arm": run.arm, **run.result._asdict()} for run in runs],
    }


def _row_json(plan: Benchmark, row: ArmFigures[RunResult]) -> dict[str, Any]:
    return {
        **row.as_json(),
        "created_mib": plan.created_mib(row),
        "peak_bytes": row.peak_bytes,
        "to_static": _ratio_json(plan.to_control(row)),
        "to_bare": _ratio_json(plan.to_bare(row)),
    }


def _ratio_json(ratio: Ratio | None) -> dict[str, Any] | None:
    if ratio is None:
        return None
    low, high = ratio.interval
    return {"values": list(ratio.values), "median": ratio.median, "low": low, "high": high}
