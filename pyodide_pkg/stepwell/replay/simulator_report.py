"""The figures of a replay per policy, as JSON and as a table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict

from stepwell.errors import BadTrace
from stepwell.memory.policies.bucket import ORT_LIMITS
from stepwell.replay.kv_shapes import POSITION_BYTES
from stepwell.replay.simulator import WARM_UP_TOKENS, Replay, Token

MIB, GIB = 1 << 20, 1 << 30
"""Bytes in a mebibyte and in a gibibyte."""

# ``from`` is a keyword, hence the functional form
RangeFigures = TypedDict("RangeFigures", {"from": int, "to": int, "creates_per_token": float})
"""The figures between two values of S."""


class PolicyFigures(TypedDict):
    """The figures of one policy.

    Averages are over all tokens; the worst token is not one of the first two, which fill the pool.  ``peak_over_live``:
    the largest reserved over the largest live bytes.  ``mean_*``: means over the tokens of the largest in each.
    """

    creates_per_token: float
    mib_per_token: float
    max_creates_in_token: int
    max_mib_in_token: float
    peak_reserved_bytes: int
    peak_over_live: float
    mean_over_live: float
    mean_reserved_bytes: float
    misses_over_oracle: float
    evictions: dict[str, int]
    ranges: list[RangeFigures]


def figures(replay: Replay, boundaries: Sequence[int]) -> PolicyFigures:
    """The figures of a replay; ``ranges`` are cut after each S in ``boundaries``.  BadTrace if no run was replayed."""
    tokens = replay.tokens
    if not tokens:
        raise BadTrace("the trace has no run: record at least one begin_run.")
    steady = tokens[WARM_UP_TOKENS:] or tokens
    live = sum(token.live_bytes for token in tokens)
    reserved = sum(token.reserved_bytes for token in tokens)
    return {
        "creates_per_token": sum(token.creates for token in tokens) / len(tokens),
        "mib_per_token": sum(token.created_bytes for token in tokens) / len(tokens) / MIB,
        "max_creates_in_token": max(token.creates for token in steady),
        "max_mib_in_token": max(token.created_bytes for token in steady) / MIB,
        "peak_reserved_bytes": replay.peak_reserved_bytes,
        "peak_over_live": replay.peak_reserved_bytes / max(1, replay.peak_live_bytes),
        "mean_over_live": reserved / max(1, live),
        "mean_reserved_bytes": reserved / len(tokens),
        "misses_over_oracle": replay.misses_over_oracle,
        "evictions": replay.evictions,
        "ranges": list(_ranges(tokens, boundaries)),
    }


def kv_boundaries() -> list[int]:
    """The largest S of each of ONNX Runtime's size classes from 1 MiB on, where ``bucket`` changes its step."""
    return [size // POSITION_BYTES for size in sorted(ORT_LIMITS) if size >= MIB]


def _ranges(tokens: Iterable[Token], boundaries: Sequence[int]) -> Iterable[RangeFigures]:
    """Creates per token between ``boundaries``, where there are ``tokens``; the ends are those of the tokens seen."""
    found: dict[int, list[Token]] = {}
    for token in tokens:
        index = sum(boundary < token.position for boundary in boundaries)
        found.setdefault(index, []).append(token)
    for index in sorted(found):
        inside = found[index]
        yield {
            "from": min(token.position for token in inside),
            "to": max(token.position for token in inside),
            "creates_per_token": sum(token.creates for token in inside) / len(inside),
        }


_COLUMNS: Mapping[str, Callable[[PolicyFigures, Replay], str]] = {
    "creates/token": lambda f, r: f"{f['creates_per_token']:.3f}",
    "MiB/token": lambda f, r: f"{f['mib_per_token']:.2f}",
    "most creates": lambda f, r: f"{f['max_creates_in_token']:,}",
    "of KV": lambda f, r: f"{max(token.kv_creates for token in r.tokens[WARM_UP_TOKENS:] or r.tokens):,}",
    "most MiB": lambda f, r: f"{f['max_mib_in_token']:,.0f}",
    "peak GiB": lambda f, r: f"{f['peak_reserved_bytes'] / GIB:,.2f}",
    "peak/live": lambda f, r: f"{f['peak_over_live']:,.2f}",
    "mean/live": lambda f, r: f"{f['mean_over_live']:,.2f}",
    "mean GiB": lambda f, r: f"{f['mean_reserved_bytes'] / GIB:,.2f}",
    "misses/oracle": lambda f, r: f"{f['misses_over_oracle']:,.2f}",
    "same buffer": lambda f, r: f"{r.identity_rate:.1%}",
}


def table(results: Mapping[str, tuple[PolicyFigures, Replay]]) -> str:
    """The figures of several policies, one a line, and below them what a line cannot hold."""
    rows = [["policy", *_COLUMNS]]
    rows += [[name, *(cell(found, replay) for cell in _COLUMNS.values())] for name, (found, replay) in results.items()]
    ranges = [(f"{row['from']:,}-{row['to']:,}", index) for index, row in enumerate(_first(results)["ranges"])]
    below = [["creates/token at S", *(label for label, _ in ranges), "evicted"]]
    for name, (found, _) in results.items():
        cells = [f"{found['ranges'][index]['creates_per_token']:.2f}" for _, index in ranges]
        evicted = ", ".join(f"{cause} {count:,}" for cause, count in found["evictions"].items()) or "none"
        below.append([name, *cells, evicted])
    return f"{align(rows)}\n\n{align(below)}\n"


def _first(results: Mapping[str, tuple[PolicyFigures, Replay]]) -> PolicyFigures:
    return next(iter(results.values()))[0]


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of text: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        name, *cells = row
        lines.append("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip())
    return "\n".join(lines)
