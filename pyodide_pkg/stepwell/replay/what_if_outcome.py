"""The outcome of a replay of a trace through one setting, as plain data."""

from typing import NamedTuple, TypedDict

from stepwell.replay.what_if_classes import ClassFigures


class Survey(NamedTuple):
    """A trace at a glance: ``runs``, and ``unit``, the word for one.  ``attached``: whether a runtime was watched."""

    runs: int
    unit: str
    attached: bool = False


class Outcome(TypedDict):
    """The costs of one setting.  ``steady``: without the first two tokens.

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
