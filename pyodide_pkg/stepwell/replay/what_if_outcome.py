"""What a replay of a trace through one setting found, as plain data."""

from typing import NamedTuple, TypedDict

from stepwell.replay.what_if_classes import ClassFigures


class Survey(NamedTuple):
    """What a trace is of: how many runs, and what one is called.  ``attached``: of a runtime that was watched."""

    runs: int
    unit: str
    attached: bool = False


class Outcome(TypedDict):
    """One setting.  ``steady``: without the first two tokens.

    ``series``: the mean creates of successive tokens, with the number of the first of them (from 1).
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
