"""The figures of a run that people compare, and the tables that show them.  Times in ms, of decode steps only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.markup import escape
from rich.table import Table

from harness.record import Record

_FIRST_ROWS = 4


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0 to 1) by linear interpolation between the sorted values; NaN for none."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """``n`` decode steps (the prefill is ``ttft_ms``); counts are means per decode step."""

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
    """The decode steps: every token but the one that the prefill gave."""
    return list(record["tokens"][1:])


def label(record: Record) -> str:
    """``static, adaptive``: the two choices that runs of one comparison differ in."""
    return f"{record['scenario']['kv']}, {record['scenario']['policy']}"


def summarise(record: Record) -> Summary:
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
    """The steps at which the KV buffers enter another size class: (token, bytes before, bytes after)."""
    tokens = record["tokens"]
    return [
        (after, before["kv_class_bytes"], after["kv_class_bytes"])
        for before, after in pairwise(tokens)
        if 0 < before["kv_class_bytes"] != after["kv_class_bytes"] > 0
    ]


def adapter_name(record: Record) -> str:
    adapter = record["environment"]["adapter"]
    names = dict.fromkeys(adapter[key] for key in ("vendor", "architecture", "description") if adapter[key])
    return " ".join(names) or "unnamed adapter"


def is_software(record: Record) -> bool:
    return bool(record["environment"]["adapter"]["is_software"])


def size(count: float) -> str:
    """Bytes in binary units, three significant digits: ``64 KiB``, ``128 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def token_table(record: Record) -> Table:
    """The first tokens, every size-class boundary and the last token, with their times and counters."""
    scenario = record["scenario"]
    table = Table(title=f"{escape(label(record))}: per token", title_justify="left", header_style="bold")
    columns = {
        "token": "index",
        "pos.": "position",
        "ms": "ms",
        "encode": "encode_ms",
        "wait": "wait_ms",
        "launches": "launches",
        "passes": "passes",
        "groups": "bind_groups_created",
        "uploads": "uploads",
        "created": "buffers_created",
        "reused": "pool_hits",
    }
    for name in [*columns, "in use", "reserved"]:
        table.add_column(name, justify="right")
    tokens = record["tokens"]
    crossed = {token["index"] for token, _, _ in boundaries(record)}
    shown = [*range(min(_FIRST_ROWS, len(tokens))), *sorted(crossed), len(tokens) - 1]
    last = -1
    for index in sorted({i for i in shown if i >= 0}):
        if index > last + 1:
            table.add_row("…")
        token, last = tokens[index], index
        cells = [f"{token[key]:,.1f}" if "ms" in key else f"{token[key]:,}" for key in columns.values()]
        table.add_row(
            *cells,
            size(token["in_use_bytes"]),
            size(token["reserved_bytes"]),
            style="cyan" if index == 0 else "yellow" if index in crossed else None,
        )
    table.caption = f"token 0 is the prefill of {len(record['prompt_ids'])} tokens; {scenario['tokens']} asked for"
    table.caption_justify = "left"
    return table


def summary_table(records: Iterable[Record]) -> Table:
    """One row per run."""
    table = Table(title="decode steps", title_justify="left", header_style="bold")
    for name in ("run", "n", "first token ms", "median ms", "p90 ms", "max ms", "tokens/s", "encode ms", "wait ms"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for name in ("launches", "groups", "created", "peak reserved"):
        table.add_column(name, justify="right")
    for record in records:
        row = summarise(record)
        times = (row.ttft_ms, row.median_ms, row.p90_ms, row.max_ms)
        table.add_row(
            escape(row.label),
            str(row.n),
            *(f"{value:,.1f}" for value in times),
            f"{row.tokens_per_s:.2f}",
            *(f"{value:,.1f}" for value in (row.encode_ms, row.wait_ms)),
            *(f"{value:,.1f}" for value in (row.launches, row.bind_groups_created, row.buffers_created)),
            size(row.peak_reserved_bytes),
        )
    return table
