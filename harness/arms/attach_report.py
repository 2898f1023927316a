"""What ``attach`` found, for people and for programs."""

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from harness.arms.attach import SCHEMA, ArmRun, Plan, Ratio, Row, rows
from harness.page.summary import plain_table, size

COLUMNS = ("from", "arm", "n", "median", "max", "creates", "most", "MiB", "÷ static", "÷ bare", "peak")


def table(plan: Plan, runs: Sequence[ArmRun]) -> Table:
    """The rows for people."""
    shown = plain_table(
        f"onnxruntime-web, {plan.tensors} growing tensors: {plan.rounds} rounds of {plan.steps} steps",
        f"ms per step without the first {plan.skip} of each run; creates: storage buffers that the browser made, per "
        "step; ÷: median of the rounds' ratios of medians [95 % interval], record ÷ bare: of pairs of steps in a run; "
        "peak: all buffers",
    )
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name == "arm" else "right")
    last = None
    for row in rows(plan, runs):
        if last not in (None, row.start):
            shown.add_row()
        last = row.start
        shown.add_row(*map(escape, cells(row)))
    return shown


def markdown(plan: Plan, runs: Sequence[ArmRun]) -> str:
    """The rows for a document."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows(plan, runs)]
    return "\n".join(lines) + "\n"


def cells(row: Row) -> list[str]:
    counts = [f"{row.created_mean:.2f}", str(row.created_max), f"{row.created_mib:.0f}"]
    ratios = [_ratio(row.to_control), _ratio(row.to_bare)]
    times = [f"{row.median_ms:.1f}", f"{row.max_ms:.1f}"]
    return [f"{row.start:,}", row.arm, str(row.n), *times, *counts, *ratios, size(row.peak_bytes)]


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    low, high = ratio.interval
    return f"{ratio.median:.2f} [{low:.2f}, {high:.2f}]"


def as_json(plan: Plan, runs: Sequence[ArmRun], environment: dict[str, Any]) -> dict[str, Any]:
    """The plan, the figures, and every run."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        "model": plan.model,
        "starts": list(plan.starts),
        "steps": plan.steps,
        "warm_up": plan.skip,
        "rounds": plan.rounds,
        "arms": [
            {"name": arm.name, "decoding": dict(arm.decoding), "attach": arm.attach, "alternate": arm.alternate}
            for arm in plan.arms
        ],
        "rows": [
            {
                "start": row.start,
                "arm": row.arm,
                "n": row.n,
                "median_ms": row.median_ms,
                "max_ms": row.max_ms,
                "created_mean": row.created_mean,
                "created_max": row.created_max,
                "created_mib": row.created_mib,
                "peak_bytes": row.peak_bytes,
                "to_static": _ratio_json(row.to_control),
                "to_bare": _ratio_json(row.to_bare),
            }
            for row in rows(plan, runs)
        ],
        "runs": [
            {"round": run.turn, "start": run.start, "arm": run.arm, "steps": list(run.steps), "end": run.end}
            for run in runs
        ],
    }


def _ratio_json(ratio: Ratio | None) -> dict[str, Any] | None:
    if ratio is None:
        return None
    low, high = ratio.interval
    return {"values": list(ratio.values), "median": ratio.median, "low": low, "high": high}
