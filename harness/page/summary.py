"""Figures of a run for people to compare, and the tables that show them.  Times are in ms, of decode steps only."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from harness.page.record import Record

_FIRST_ROWS = 4


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0 to 1) of ``values`` by linear interpolation between neighbours; NaN for no values."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run over its ``n`` decode steps (``ttft_ms`` is the prefill); counts are means per step."""

    label: str
    n: int
    ttft_ms: float
    median_ms: float
    p90_ms: float
    max_ms: float
    tokens_per_s: float
    encode_ms: float
    wait_ms: float
    launches: float
    bind_groups_created: float
    buffers_created: float
    pool_hits: float
    peak_reserved_bytes: int


def steps(record: Record) -> list[dict[str, Any]]:
    """The decode steps of ``record``: every token but the one that the prefill gave."""
    return list(record["tokens"][1:])


def label(record: Record) -> str:
    """The KV mode and the policy of ``record``, as in ``static, adaptive``."""
    return f"{kv_label(record)}, {record['scenario']['policy']}"


def kv_label(record: Record) -> str:
    """The KV mode of ``record``, with the type of K and V unless it is f32, as in ``static f16``."""
    scenario = record["scenario"]
    kv_type = scenario.get("kv_type", "f32")
    return f"{scenario['kv']}{'' if kv_type == 'f32' else f' {kv_type}'}"


def summarise(record: Record) -> Summary:
    """The summary of ``record``; NaN where there is nothing to measure."""
    rows = steps(record)
    times = [row["ms"] for row in rows]
    mean = {
        key: sum(row[key] for row in rows) / len(rows) if rows else float("nan")
        for key in ("launches", "bind_groups_created", "buffers_created", "pool_hits")
    }
    return Summary(
        label=label(record),
        n=len(rows),
        ttft_ms=record["ttft_ms"] if record["ttft_ms"] is not None else float("nan"),
        median_ms=percentile(times, 0.5),
        p90_ms=percentile(times, 0.9),
        max_ms=max(times, default=float("nan")),
        tokens_per_s=1000 * len(times) / sum(times) if sum(times) else float("nan"),
        encode_ms=percentile([row["encode_ms"] for row in rows], 0.5),
        wait_ms=percentile([row["wait_ms"] for row in rows], 0.5),
        peak_reserved_bytes=record["memory"]["peak_reserved_bytes"],
        **mean,
    )


def boundaries(record: Record) -> list[tuple[dict[str, Any], int, int]]:
    """The steps of ``record`` at which the KV buffers enter another size class: (token, bytes before, bytes after)."""
    tokens = record["tokens"]
    return [
        (after, before["kv_class_bytes"], after["kv_class_bytes"])
        for before, after in pairwise(tokens)
        if 0 < before["kv_class_bytes"] != after["kv_class_bytes"] > 0
    ]


def adapter_name(record: Record) -> str:
    """Vendor, architecture and description of the adapter of ``record``, in one line."""
    adapter = record["environment"]["adapter"]
    names = dict.fromkeys(adapter[key] for key in ("vendor", "architecture", "description") if adapter[key])
    return " ".join(names) or "unnamed adapter"


def is_software(record: Record) -> bool:
    """Whether ``record`` is of a software adapter."""
    return bool(record["environment"]["adapter"]["is_software"])


def _kernels(path: dict[str, Any] | None) -> str:
    """The words for the launch's kernels; none for a workload, which has its own."""
    if path is None:
        return ""
    lanes = f", subgroups of {path['subgroups']}" if path["subgroups"] else ""
    arithmetic = "".join(f", {name}" for name in ("dot4", "f16") if path[name])
    return f"; kernels: {path['kernels']}{', fused' * path['fused']}{lanes}{arithmetic}"


def launch_line(record: Record) -> str:
    """The launch path of ``record`` in one line: parameters, kernels, replays, reasons for none, known bindings."""
    launch, rows = record["launch"], steps(record)
    reasons = Counter(row["refused"] for row in rows if row["refused"])
    others = "".join(f", {reason}: {count}" for reason, count in reasons.most_common())
    rate = "" if launch["identity_rate"] is None else f"; {launch['identity_rate']:.0%} of bindings seen before"
    times = [row["gpu_ms"] for row in rows if row["gpu_ms"] is not None]
    gpu = f"; GPU {percentile(times, 0.5):.2f} ms per token (median)" if times else ""
    replayed = sum(row["replayed"] for row in rows)
    kernels = _kernels(launch["kernels"]) + (f", {len(launch['tuned'])} tuned" if launch["tuned"] else "")
    return (
        f"parameters: {launch['params']}{kernels}; {replayed} of {len(rows)} decode steps replayed{others}{rate}{gpu}"
    )


def tuning_lines(outcome: Record) -> list[str]:
    """The ``outcome`` of a page's tuner: counts, then each product that another way makes faster than the rule's."""
    counted = f"{outcome['measured']} of {outcome['products']} products measured"
    lines = [f"tuning: {counted}; for {outcome['faster']} another way is faster than the rule's"]
    for row in outcome["choices"]:
        around = f"{row['before']} + {row['after']}" if row["before"] else row["after"]
        spread = ", ".join(f"{name} {value}" for name, value in row["spread"].items())
        product = f"{around}, {row['format']} [{row['n']:,} x {row['k']:,}]"
        lines.append(f"  {product}: {row['default_us']:,.1f} -> {row['us']:,.1f} us with {spread}")
    return lines


def size(count: float) -> str:
    """``count`` bytes in binary units with three significant digits: ``64 KiB``, ``128 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def token_table(record: Record) -> Table:
    """Times and counters of tokens of ``record``: the first ones, those at size-class boundaries, the last."""
    scenario = record["scenario"]
    fills = f"{scenario['start']:,} positions" if scenario.get("workload") else f"{len(record['prompt_ids'])} tokens"
    table = plain_table(f"{label(record)}: per token", f"token 0 is the prefill of {fills}")
    for name in ("#", "pos", *_COLUMNS, "in use MiB", "reserved MiB"):
        table.add_column(name, justify="right")
    tokens = record["tokens"]
    crossed = {token["index"] for token, _, _ in boundaries(record)}
    shown = {*range(min(_FIRST_ROWS, len(tokens))), *crossed, len(tokens) - 1} if tokens else set()
    last = -1
    for index in sorted(shown):
        if index > last + 1:
            table.add_row("…")
        token, last = tokens[index], index
        table.add_row(
            str(index),
            str(token["position"]),
            *(_figure(token[key]) for key in _COLUMNS.values()),
            f"{token['in_use_bytes'] / 2**20:,.1f}",
            f"{token['reserved_bytes'] / 2**20:,.1f}",
            style="cyan" if index == 0 else "yellow" if index in crossed else None,
        )
    return table


def summary_table(records: Iterable[Record]) -> Table:
    """A table with a row for each of ``records``."""
    table = plain_table(
        "decode steps", "ms: median, 90th percentile, maximum; groups, new and reused are means per step"
    )
    for name in ("run", "n", "first", "median", "p90", "max", "tok/s", "encode", "groups", "new", "reused", "peak MiB"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for record in records:
        row = summarise(record)
        figures = (row.ttft_ms, row.median_ms, row.p90_ms, row.max_ms)
        counts = (row.encode_ms, row.bind_groups_created, row.buffers_created, row.pool_hits)
        table.add_row(
            escape(row.label),
            str(row.n),
            *map(_figure, figures),
            f"{row.tokens_per_s:.2f}",
            *map(_figure, counts),
            f"{row.peak_reserved_bytes / 2**20:,.1f}",
        )
    return table


_COLUMNS = {
    "ms": "ms",
    "encode": "encode_ms",
    "wait": "wait_ms",
    "launch": "launches",
    "groups": "bind_groups_created",
    "upload": "uploads",
    "new": "buffers_created",
    "reused": "pool_hits",
}


def plain_table(title: str, caption: str) -> Table:
    """An empty table in the style of all tables, narrow enough for 80 columns."""
    return Table(
        title=escape(title),
        caption=escape(caption),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        header_style="bold",
    )


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
