"""The table of GPU time per kernel in a record: for the terminal, for Markdown, for the HTML report."""

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from harness.page.record import Record
from harness.page.summary import adapter_name, kv_label, plain_table

TITLE = "GPU time per kernel of one decode step"
"""The title of the table."""
CAPTION = (
    "n: launches per token; µs: of a launch, with the compute pass that it had to itself; net: without what an empty "
    "pass takes (an estimate); µs/tok: net, of all launches; MB: that a launch must read (weights; K and V); GB/s and "
    "share: of net time"
)
"""The meaning of the columns."""
HEADER = ("node", "kernel", "matrix kxn", "n", "µs", "net", "µs/tok", "MB", "GB/s", "share")
"""The columns."""
LEFT = 3  # columns of text
NONE = "-"
"""The cell of a figure that cannot be told."""


def cells(kernels: dict[str, Any]) -> list[list[str]]:
    """A row of texts for each row of ``kernels``, in the order of HEADER; an unknown figure is a dash."""
    return [
        [
            row["node"] or NONE,
            row["kernel"],
            f"{row['shape'].replace(' ', '')} {row['format']}".strip() or NONE,
            f"{row['launches']}",
            f"{row['us_per_launch']:,.1f}",
            f"{row['net_us_per_launch']:,.1f}",
            f"{row['net_us_per_token']:,.0f}",
            _figure(row["bytes_per_launch"] / 1e6 or None),
            _figure(row["gb_s"]),
            NONE if row["share"] is None else f"{row['share']:.1%}",
        ]
        for row in kernels["rows"]
    ]


def lines(record: Record) -> Iterator[str]:
    """Sentences about the table of ``record``: its sums, how it was measured, and whether the clock was fine enough."""
    kernels = record["kernels"]
    weights, steps = kernels["weights"], kernels["steps"]
    yield (
        f"products with weights: {weights['bytes_per_token'] / 1e6:,.1f} MB per token in "
        f"{weights['net_us_per_token']:,.0f} µs net ({weights['us_per_token']:,.0f} µs with their "
        f"{weights['launches']} passes), {_figure(weights['gb_s'])} GB/s, {_share_of_plain(kernels)}"
    )
    yield (
        f"all {kernels['launches_per_token']} launches: {kernels['net_us_per_token']:,.0f} µs net, "
        f"{kernels['us_per_token']:,.0f} µs with their passes; an empty pass takes {kernels['pass_us']:,.1f} µs"
    )
    yield (
        f"medians of {steps} step{'' if steps == 1 else 's'} at position {kernels['position']:,}, measured after the "
        "run by repeating the step after its last token with a compute pass per launch: its own times are without that"
    )
    if kernels["coarse_clock"]:
        yield coarse(kernels)


def coarse(kernels: dict[str, Any]) -> str:
    """The warning about the clock of ``kernels``, and what to do."""
    tick = kernels["clock_us"]
    steps = f"moves in steps of {tick:,.1f} µs" if tick is not None else "did not move at all"
    return (
        f"THE GPU'S CLOCK WAS COARSE: it {steps}, so these times say little. Start the browser with "
        "--enable-webgpu-developer-features, as this harness does."
    )


def table(record: Record) -> Table:
    """The table of ``record``, for the terminal."""
    shown = plain_table(TITLE, CAPTION)
    for index, name in enumerate(HEADER):
        shown.add_column(name, justify="left" if index < LEFT else "right", overflow="fold", no_wrap=index != 1)
    for row in cells(record["kernels"]):
        shown.add_row(*map(escape, row))
    return shown


def markdown(record: Record) -> str:
    """The table of ``record`` and its sentences, as Markdown."""
    scenario = record["scenario"]
    text = [f"{scenario['model']} on {adapter_name(record)}, {kv_label(record)} KV. {CAPTION}.", ""]
    text += ["| " + " | ".join(row) + " |" for row in (HEADER, ["---"] * len(HEADER), *cells(record["kernels"]))]
    return "\n".join([*text, "", *(f"- {line}" for line in lines(record)), ""])


def _share_of_plain(kernels: dict[str, Any]) -> str:
    most, share = kernels["plain_read_gb_s"], kernels["weights"]["share_of_plain_read"]
    if most is None:
        return "no plain read to compare with (no room for its buffer, or a clock too coarse)"
    part = f"{share:.0%} of" if share is not None else "beside"
    return f"{part} the {_figure(most)} GB/s of a plain read of {kernels['plain_read_bytes'] / 2**20:,.0f} MiB"


def _figure(value: float | None) -> str:
    """``value`` with three digits; a dash for None."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
