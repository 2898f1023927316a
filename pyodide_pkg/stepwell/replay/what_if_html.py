"""The answer of ``what_if`` as one HTML file with a chart: no external asset, no script."""

from collections.abc import Sequence
from math import ceil, log10
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from stepwell.replay.what_if import WhatIf
from stepwell.replay.what_if_outcome import Outcome

_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 940, 30, 270
_TICKS = 5


class _Tick(NamedTuple):
    at: float
    text: str


class _Line(NamedTuple):
    label: str
    mean: float
    points: str


def page(answer: WhatIf, name: str) -> str:
    """The HTML text of ``answer``; ``name`` of the trace is in the title."""
    environment = Environment(
        loader=PackageLoader("stepwell.replay", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    best = next((found for found in answer["settings"] if found["label"] == answer["recommended"]), None)
    shown = [answer["baseline"], *([] if best is None else [best])]
    return environment.get_template("what_if.html.j2").render(answer=answer, name=name, chart=_chart(shown))


def _chart(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Creates per token over the tokens, as SVG coordinates; each point is the mean of successive tokens."""
    points = [point for outcome in outcomes for point in outcome["series"]]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    most = max(1.0, *(y for _, y in points))
    step = _round_step(most / _TICKS)
    count = ceil(most / step)
    top = step * count

    def x(token: int) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (token - first) / max(1, last - first), 1)

    def y(creates: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * creates / top, 1)

    numbers = sorted({first + (last - first) * index // _TICKS for index in range(_TICKS + 1)})
    return {
        "left": _LEFT,
        "right": _RIGHT,
        "top": _TOP,
        "bottom": _BOTTOM,
        "x_ticks": [_Tick(x(number), f"{number:,}") for number in numbers],
        "y_ticks": [_Tick(y(index * step), f"{index * step:g}") for index in range(count + 1)],
        "lines": [
            _Line(
                outcome["label"],
                outcome["steady_creates_per_token"],
                " ".join(f"{x(token)},{y(creates)}" for token, creates in outcome["series"]),
            )
            for outcome in outcomes
        ],
    }


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** ceil(log10(least) - 1)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.9999)
