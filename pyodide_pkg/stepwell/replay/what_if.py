"""The cost of a recorded trace under every policy, and the setting to take: plain data, nothing is printed.

A *setting* is a policy with some of its options.  Each is replayed by the simulator, without a GPU.  Creates and MiB
per token are those of ``simulate``, over all tokens.  Times leave out the first two, which fill the pool under any
policy, and are estimates: a cost per create, and one per MiB of it.

*Which setting.*  Candidates save nearly all that can be saved, and reserve hardly more than the least of those that do.
Taken is the fastest of them, or its policy's defaults where they are as good: a saving too small to notice is none.

*Attached.*  A trace of a runtime that was watched has ``attach`` in its metadata: no pool is compared with one under it
(``attached.py``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

from stepwell.errors import BadTrace
from stepwell.memory.buffer import Role
from stepwell.replay.attached import attach_code, is_attached
from stepwell.replay.simulator import WARM_UP_TOKENS, Simulation, Token
from stepwell.replay.simulator_report import MIB, figures
from stepwell.replay.traces import ACQUIRE, RUN, Event
from stepwell.replay.what_if_classes import WatchedPolicy, hurting
from stepwell.replay.what_if_outcome import Outcome, Survey
from stepwell.replay.what_if_settings import (
    CREATE_US,
    CREATE_US_PER_MIB,
    Costs,
    Setting,
    recorded_costs,
    recorded_setting,
    settings,
)
from stepwell.replay.what_if_words import sentence

__all__ = ["CREATE_US", "CREATE_US_PER_MIB", "Costs", "Setting", "recorded_costs", "recorded_setting", "settings"]

WORTH_MS = 0.1
"""Milliseconds per token that are worth saving."""
NEARLY_ALL = 0.95
"""The part of the largest saving that counts as nearly all of it."""
HARDLY_MORE = 1.08
"""Memory over the least memory that counts as hardly more."""
SERIES_POINTS = 240
"""The most points that a chart shows."""


class WhatIf(TypedDict):
    """The whole answer.

    ``recommended`` is the label of a row of ``settings``, or None: nothing to gain.  ``code``: the line that attaches
    the recommended pool, if the trace is of a runtime that was watched.
    """

    unit: str
    runs: int
    create_us: float
    create_us_per_mib: float
    costs_from: str
    budget_bytes: int | None
    baseline: Outcome
    baseline_from: str
    settings: list[Outcome]
    over_budget: list[str]
    recommended: str | None
    code: str | None
    sentence: str


def survey(events: Iterable[Event], metadata: Mapping[str, object] | None = None) -> Survey:
    """The survey of ``events``, read once.  A run with KV tensors is a token, and so is one of a watched runtime.

    BadTrace if there is nothing to compare.
    """
    attached = is_attached(metadata or {})
    runs = acquires = 0
    unit = "token" if attached else "run"
    for op, _, request in events:
        if op == RUN:
            runs += 1
        elif op == ACQUIRE:
            acquires += 1
            if request.role is Role.KV:
                unit = "token"
    if not runs:
        how = "call the attachment's mark()" if attached else "call the pool's begin_run"
        raise BadTrace(f"the trace has no run: {how} before each token and record it again.")
    if not acquires:
        raise BadTrace(
            f"the trace has {runs:,} runs and no KV, activation or workspace buffer, which are all that a policy "
            "serves. Record it while the model runs."
        )
    return Survey(runs, unit, attached)


class Trial:
    """The replay of a trace through one ``setting``: feed it the events in pieces, then take the outcome.

    ``unit``: the word for a run.
    """

    def __init__(self, setting: Setting, costs: Costs, unit: str, budget_bytes: int | None = None) -> None:
        self._setting, self._costs, self._unit = setting, costs, unit
        self._policy = WatchedPolicy(setting.make())
        self._simulation = Simulation(self._policy, budget_bytes)

    def feed(self, events: Iterable[Event]) -> None:
        """Replay the next ``events``."""
        self._simulation.feed(events)

    def outcome(self) -> Outcome:
        """The costs of the setting; ``saved_ms_per_token`` is not known yet, and 0."""
        replay, setting, costs = self._simulation.result(), self._setting, self._costs
        found = figures(replay, [])
        steady = replay.tokens[WARM_UP_TOKENS:] or replay.tokens
        creates, nbytes = sum(token.creates for token in steady), sum(token.created_bytes for token in steady)
        return {
            "label": setting.label,
            "policy": setting.policy,
            "options": dict(setting.options),
            "creates_per_token": found["creates_per_token"],
            "mib_per_token": found["mib_per_token"],
            "steady_creates_per_token": creates / len(steady),
            "steady_mib_per_token": nbytes / MIB / len(steady),
            "max_creates_in_token": found["max_creates_in_token"],
            "peak_bytes": replay.peak_reserved_bytes,
            "ms_per_token": costs.ms(creates, nbytes) / len(steady),
            "saved_ms_per_token": 0.0,
            "hurting": hurting(self._policy, costs.ms, self._unit),
            "series": list(_series(steady, len(replay.tokens) - len(steady) + 1)),
        }


def try_setting(
    events: Iterable[Event], setting: Setting, costs: Costs, unit: str, budget_bytes: int | None = None
) -> Outcome:
    """The outcome of all ``events`` replayed through ``setting``."""
    trial = Trial(setting, costs, unit, budget_bytes)
    trial.feed(events)
    return trial.outcome()


def compare(
    found: Survey,
    outcomes: Sequence[Outcome],
    baseline: Outcome,
    baseline_from: str,
    costs: Costs,
    budget_bytes: int | None = None,
) -> WhatIf:
    """The answer for a trace surveyed as ``found``: the ``outcomes`` of the settings beside the ``baseline``.

    ``budget_bytes`` leaves settings out; the baseline has no budget.
    """
    for outcome in outcomes:
        outcome["saved_ms_per_token"] = baseline["ms_per_token"] - outcome["ms_per_token"]
    kept = [outcome for outcome in outcomes if budget_bytes is None or outcome["peak_bytes"] <= budget_bytes]
    best = _best(kept, baseline)
    return {
        "unit": found.unit,
        "runs": found.runs,
        "create_us": costs.create_us,
        "create_us_per_mib": costs.create_us_per_mib,
        "costs_from": costs.source,
        "budget_bytes": budget_bytes,
        "baseline": baseline,
        "baseline_from": baseline_from,
        "settings": kept,
        "over_budget": [outcome["label"] for outcome in outcomes if outcome not in kept],
        "recommended": best["label"] if best is not None else None,
        "code": attach_code(best["policy"], best["options"], budget_bytes) if best and found.attached else None,
        "sentence": sentence(best, kept, baseline, found, budget_bytes),
    }


def _best(outcomes: Sequence[Outcome], baseline: Outcome) -> Outcome | None:
    """The outcome to take; None if no setting saves enough."""
    most = max((outcome["saved_ms_per_token"] for outcome in outcomes), default=0.0)
    if most < WORTH_MS:
        return None
    near = [outcome for outcome in outcomes if outcome["saved_ms_per_token"] >= NEARLY_ALL * most]
    least = min(outcome["peak_bytes"] for outcome in near)
    small = [outcome for outcome in near if outcome["peak_bytes"] <= HARDLY_MORE * least]
    fastest = min(small, key=lambda outcome: round(outcome["ms_per_token"], 2))
    for outcome in small:
        if outcome["policy"] == fastest["policy"] and not outcome["options"]:
            return outcome if outcome["ms_per_token"] < fastest["ms_per_token"] + WORTH_MS else fastest
    return fastest


def _series(tokens: Sequence[Token], first: int) -> Iterator[tuple[int, float]]:
    """Mean creates of successive tokens, at most SERIES_POINTS of them; ``first``: the number of the first token."""
    step = -(-len(tokens) // SERIES_POINTS)
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        yield first + start, sum(token.creates for token in part) / len(part)
