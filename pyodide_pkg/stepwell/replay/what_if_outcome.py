"""The outcome of replaying a trace through one setting, as plain data."""

from typing import NamedTuple, TypedDict

from stepwell.replay.what_if_classes import ClassFigures


class Survey(NamedTuple):
    """A trace's ``runs``, and the ``unit`` that one is called; ``attached``: it is of a runtime that was watched."""

    runs: int
    unit: str
    attached: bool = False


class Outcome(TypedDict):
    """The outcome of one setting; figures called ``steady`` leave the first two tokens out.

    ``series``: (number of a token, from 1; mean creates of it and those up to the next point).
    """

    label: str
    policy: str
    options: dict[str, str]
    creates_per_token: float
    mib_per_token: float
    steady_creates_per_token: float
    steady_mib_per_token: float
    max_creates_in_token: int
    peak_bytes: int
    ms_per_token: float
    saved_ms_per_token: float
    hurting: list[ClassFigures]
    series: list[tuple[int, float]]
