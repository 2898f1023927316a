"""What a recorded trace would have cost under every policy, and which setting to take: plain data, nothing is printed.

A *setting* is a policy with some of its options.  Each is replayed by the simulator, without a GPU.  Creates and MiB
per token are those of ``simulate``, over all tokens.  Times leave out the first two, which fill the pool under any
policy, and are estimates: a cost per create, and one per MiB of it.

*Which setting.*  Of those that save nearly all that can be saved, those that reserve hardly more than the least; of
them the fastest, or its policy's defaults where they are as good: a saving that no one would notice is none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from stepwell.errors import BadRequest, BadTrace
from stepwell.memory.buffer import Role
from stepwell.memory.policies import POLICIES, make_policy
from stepwell.memory.policies.bucket import ORT_LIMITS
from stepwell.memory.recovery import mib
from stepwell.memory.simulator import WARM_UP_TOKENS, Simulation, Token
from stepwell.memory.simulator_report import figures
from stepwell.memory.traces import ACQUIRE, RUN, Event
from stepwell.memory.what_if_classes import ClassFigures, WatchedPolicy, hurting

MIB = 1 << 20
CREATE_US = 100.0
CREATE_US_PER_MIB = 80.0
"""A buffer that is created and used for the first time, on an H200 under Chromium: docs/pool.md says how they follow
from the figures of docs/measurements.md."""
WORTH_MS = 0.1  # saved per token: less is nothing
NEARLY_ALL = 0.95  # of the most that can be saved
HARDLY_MORE = 1.08  # times the least memory
SERIES_POINTS = 240

_TRIED: Mapping[str, Sequence[Mapping[str, str]]] = {
    "adaptive": (
        {"growth": "1.1"},
        {"growth": "1.25"},
        {"growth": "2"},
        {"window": "2"},
        {"window": "32"},
        {"stagger": "false"},
    ),
    "bucket": (
        {"era": "A"},
        {"era": "C"},
        {"limits": ", ".join(f"{size}:{max(64, count)}" for size, count in ORT_LIMITS.items())},
    ),
    "exact": ({"cap": "16"},),
}
_LIMITS_LABEL = "limits of 64 or more"


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy and options as text, as ``simulate --option`` takes them."""

    policy: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        shown = [_LIMITS_LABEL if name == "limits" else f"{name}={value}" for name, value in self.options.items()]
        return " ".join([self.policy, *shown])


def settings() -> list[Setting]:
    """Every policy with its defaults, and a few settings of those that have options."""
    return [Setting(name, options) for name in POLICIES for options in ({}, *_TRIED.get(name, ()))]


@dataclass(frozen=True, slots=True)
class Costs:
    """What creating a buffer takes, in microseconds, and where that is from."""

    create_us: float
    create_us_per_mib: float
    source: str

    def __post_init__(self) -> None:
        for what, value in (("create", self.create_us), ("MiB", self.create_us_per_mib)):
            if not 0 <= value < float("inf"):
                raise BadRequest(f"a cost of {value} µs per {what}; it must be 0 or more.")

    def ms(self, creates: int, nbytes: int) -> float:
        return (creates * self.create_us + nbytes / MIB * self.create_us_per_mib) / 1000


class Survey(NamedTuple):
    """What a trace is of: how many runs, and what one is called."""

    runs: int
    unit: str


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


class WhatIf(TypedDict):
    """The whole answer.  ``recommended`` is the label of a row of ``settings``, or None: nothing to gain."""

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
    sentence: str


def survey(events: Iterable[Event]) -> Survey:
    """Reads a trace once.  A run with KV tensors is a token.  BadTrace where there is nothing to compare."""
    runs = acquires = 0
    unit = "run"
    for op, _, request in events:
        if op == RUN:
            runs += 1
        elif op == ACQUIRE:
            acquires += 1
            if request.role is Role.KV:
                unit = "token"
    if not runs:
        raise BadTrace("the trace has no run: call the pool's begin_run before each token and record it again.")
    if not acquires:
        raise BadTrace(
            f"the trace has {runs:,} runs and no KV, activation or workspace buffer, which are all that a policy "
            "serves. Record it while the model runs."
        )
    return Survey(runs, unit)


def recorded_costs(metadata: Mapping[str, object], create_us: float | None, per_mib_us: float | None) -> Costs:
    """The costs asked for, else those in the trace, else this project's assumption."""
    found = {name: _number(metadata, name) for name in ("create_us", "create_us_per_mib")}
    if create_us is not None or per_mib_us is not None:
        source = "as given"
    elif any(value is not None for value in found.values()):
        source = "recorded in the trace"
        # one that is not recorded is no cost of its own: what was measured includes it
        create_us, per_mib_us = found["create_us"] or 0.0, found["create_us_per_mib"] or 0.0
    else:
        source = "assumed, as measured on an H200; --create-us and --create-us-per-mib set yours"
    return Costs(
        CREATE_US if create_us is None else create_us,
        CREATE_US_PER_MIB if per_mib_us is None else per_mib_us,
        source,
    )


def recorded_setting(metadata: Mapping[str, object], policy: str | None) -> tuple[Setting, str]:
    """The baseline and where it is from: the caller's, else what the trace was recorded under, else ``bucket``."""
    if policy is not None:
        make_policy(policy)
        return Setting(policy), "as given"
    named = metadata.get("policy")
    if named is None:
        return Setting("bucket"), "assumed: the trace does not say under which policy it was recorded"
    options = metadata.get("options", {})
    if not isinstance(named, str) or not isinstance(options, Mapping):
        raise BadTrace(
            f"the trace's metadata has policy {named!r} with options {options!r}; need a name and an object."
        )
    setting = Setting(named, {str(name): str(value) for name, value in options.items()})
    try:
        make_policy(named, **setting.options)
    except BadRequest as error:
        raise BadTrace(
            f"the trace was recorded under a policy that is not here: {error} Or pass --baseline."
        ) from error
    return setting, "as recorded"


class Trial:
    """The replay of a trace through one setting: feed it the events, in as many pieces as they come in."""

    def __init__(self, setting: Setting, costs: Costs, unit: str, budget_bytes: int | None = None) -> None:
        self._setting, self._costs, self._unit = setting, costs, unit
        self._policy = WatchedPolicy(make_policy(setting.policy, **setting.options))
        self._simulation = Simulation(self._policy, budget_bytes)

    def feed(self, events: Iterable[Event]) -> None:
        self._simulation.feed(events)

    def outcome(self) -> Outcome:
        """What the setting costs; ``saved_ms_per_token`` is not known yet, and 0."""
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
    """Replay all ``events`` through one setting."""
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
    """The answer, from the outcomes of the settings (in their order) and that of the baseline, which has no budget."""
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
        "sentence": _sentence(best, kept, baseline, found.unit, budget_bytes),
    }


def _best(outcomes: Sequence[Outcome], baseline: Outcome) -> Outcome | None:
    """None where no setting saves what is worth it, or the baseline is the one to choose."""
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


def _sentence(
    best: Outcome | None, outcomes: Sequence[Outcome], baseline: Outcome, unit: str, budget_bytes: int | None
) -> str:
    now = f"{baseline['label']} creates {baseline['steady_creates_per_token']:.3g} buffers per {unit}"
    cost = f"about {baseline['ms_per_token']:.2f} ms"
    if not outcomes and budget_bytes is not None:
        return f"No setting stays within {mib(budget_bytes)}: choose a larger budget or a shorter context."
    if best is None:
        most = max(outcome["saved_ms_per_token"] for outcome in outcomes)
        return f"Nothing to gain: {now} ({cost}), and no setting saves more than {max(0.0, most):.2f} ms per {unit}."
    return (
        f"Take {best['label']}: {now} ({cost}), it {best['steady_creates_per_token']:.3g}, which saves about "
        f"{best['saved_ms_per_token']:.1f} ms per {unit}, nearly as much as any setting can, and with hardly more "
        f"memory than the least of those that do ({mib(best['peak_bytes'])} at the peak, "
        f"{baseline['label']} {mib(baseline['peak_bytes'])})."
    )


def _series(tokens: Sequence[Token], first: int) -> Iterator[tuple[int, float]]:
    """``first``: the number of the first token.  So many points that a chart can show them."""
    step = -(-len(tokens) // SERIES_POINTS)
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        yield first + start, sum(token.creates for token in part) / len(part)


def _number(metadata: Mapping[str, object], name: str) -> float | None:
    value = metadata.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadTrace(f"the trace's metadata has {name} {value!r}; it must be a number of microseconds.")
    return float(value)
