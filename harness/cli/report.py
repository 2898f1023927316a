"""The HTML report on runs of one model on one adapter: chart, tables, environment; one file, no external asset."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness import SetupError
from harness.cli import kernel_report
from harness.page.record import Record
from harness.page.summary import adapter_name, boundaries, is_software, label, percentile, size, steps, summarise

MAX_RUNS = 6  # as many colours and dashes as the template has
_DASHES = ("none", "7 4", "2 3", "10 3 2 3", "4 2", "1 2")
_COLUMNS = (
    "index",
    "position",
    "id",
    "ms",
    "encode_ms",
    "wait_ms",
    "launches",
    "passes",
    "submits",
    "bind_groups_created",
    "copies",
    "uploads",
    "replayed",
    "buffers_created",
    "buffers_destroyed",
    "pool_hits",
    "pool_misses",
    "kv_class_bytes",
    "in_use_bytes",
    "reserved_bytes",
)


@dataclass(frozen=True, slots=True)
class Check:
    """A sentence about several runs, and whether they agree."""

    holds: bool
    text: str


def same_tokens(records: Sequence[Record]) -> Check:
    """Check that ``records``, greedy runs of one prompt, gave the same tokens, whatever the policy and KV mode."""
    first = records[0]
    for other in records[1:]:
        pairs = zip(first["token_ids"], other["token_ids"], strict=False)
        differs = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if differs is not None:
            return Check(
                False, f"token {differs} differs between ({label(first)}) and ({label(other)}): this is a defect."
            )
    shared = min(len(record["token_ids"]) for record in records)
    return Check(True, f"All {len(records)} runs gave the same {shared} tokens.")


def same_results(groups: Sequence[Sequence[Record]]) -> Check:
    """Check ``same_tokens`` in each of ``groups``; the first check that fails, else the last."""
    checks = [same_tokens(group) for group in groups if group]
    return next((check for check in checks if not check.holds), checks[-1])


def render(records: Sequence[Record]) -> str:
    """The HTML of the report on ``records``.  SetupError when they do not belong in one chart."""
    _refuse_mixtures(records)
    first = records[0]
    environment = Environment(
        loader=PackageLoader("harness.cli", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    environment.filters["size"] = size
    runs = [
        {
            "record": record,
            "label": label(record),
            "series": series,
            "summary": summarise(record),
            "crossings": {token["index"] for token, _, _ in boundaries(record)},
            "kernels": kernel_report.cells(record["kernels"]) if "kernels" in record else [],
            "kernel_lines": list(kernel_report.lines(record)) if "kernels" in record else [],
        }
        for series, record in enumerate(records)
    ]
    return environment.get_template("report.html.j2").render(
        runs=runs,
        chart=chart(records),
        environment=first["environment"],
        adapter=adapter_name(first),
        software=is_software(first),
        model=first["scenario"]["model"],
        sha256=first["scenario"]["sha256"],
        checks=[same_tokens(records)] if len(records) > 1 else [],
        columns=_COLUMNS,
        kernel_columns=kernel_report.HEADER,
        kernel_caption=f"{kernel_report.TITLE}. {kernel_report.CAPTION}",
    )


def _refuse_mixtures(records: Sequence[Record]) -> None:
    if not 1 <= len(records) <= MAX_RUNS:
        raise SetupError(f"a report shows 1 to {MAX_RUNS} runs, not {len(records)}.")
    kinds = {(adapter_name(record), is_software(record), record["scenario"]["model"]) for record in records}
    if len(kinds) > 1:
        listed = "; ".join(sorted(f"{model} on {adapter}" for adapter, _, model in kinds))
        raise SetupError(
            f"runs of different models or adapters never share a chart: {listed}. Write one report for each."
        )


def chart(records: Sequence[Record], width: int = 960, height: int = 320) -> dict[str, Any]:
    """The geometry of the latency chart of ``records`` in SVG units: polylines, ticks and class boundaries.

    The y axis starts at 0 and ends at 1.25 times the largest 98th percentile, so that one outlier does not flatten the
    rest; steps above it are drawn at the edge, and the table has their values.
    """
    left, right, top, bottom = 64, width - 16, 28, height - 40
    points = [(token["position"], token["ms"]) for record in records for token in steps(record)]
    low, high = min((x for x, _ in points), default=0), max((x for x, _ in points), default=1)
    ceiling = (
        1.25 * max((percentile([t["ms"] for t in steps(r)], 0.98) for r in records if steps(r)), default=1.0) or 1.0
    )

    def x_at(position: float) -> float:
        return round(left + (right - left) * (position - low) / max(1, high - low), 1)

    def y_at(ms: float) -> float:
        return round(bottom - (bottom - top) * min(ms, ceiling) / ceiling, 1)

    return {
        "width": width,
        "height": height,
        "left": left,
        "right": right,
        "top": top,
        "bottom": bottom,
        "y_ticks": [{"at": y_at(v), "text": f"{v:g}"} for v in ticks(0, ceiling, 5)],
        "x_ticks": [{"at": x_at(v), "text": f"{v:g}"} for v in ticks(low, high, 8)],
        "lines": [
            {
                "series": series,
                "dash": _DASHES[series],
                "points": " ".join(f"{x_at(t['position'])},{y_at(t['ms'])}" for t in steps(record)),
            }
            for series, record in enumerate(records)
        ],
        "marks": [
            {"series": series, "at": x_at(token["position"]), "text": f"{size(before)} → {size(after)}"}
            for series, record in enumerate(records)
            for token, before, after in boundaries(record)
        ],
    }


def ticks(low: float, high: float, count: int) -> list[float]:
    """At most ``count`` + 1 round numbers (1, 2 or 5 times a power of ten apart) within ``low`` to ``high``."""
    least = max(high - low, 1e-9) / count
    magnitude = 10.0 ** floor(log10(least))
    step = next(digit * magnitude for digit in (1, 2, 5, 10) if digit * magnitude >= least * (1 - 1e-9))
    first = ceil(low / step - 1e-9)
    return [round((first + i) * step, 12) for i in range(int((high / step - first) + 1e-9) + 1)]
