"""The settings of policies that ``what_if`` compares, the cost of a create, and a trace's word on either."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from stepwell.errors import BadRequest, BadTrace
from stepwell.memory.policies import POLICIES, make_policy
from stepwell.memory.policies.base import Policy
from stepwell.memory.policies.per_usage import PerUsage
from stepwell.replay.attached import BARE, is_attached
from stepwell.replay.simulator_report import MIB

NO_POOL = "no pool"
"""The label of a runtime that creates and destroys every buffer."""
CREATE_US = 100.0
CREATE_US_PER_MIB = 80.0
"""A buffer that is created and used for the first time, on an H200 under Chromium: docs/pool.md says how they follow
from the figures of docs/measurements.md."""

_LIMITS_LABEL = "limits of 64 or more"


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy and options as text, as ``simulate --option`` takes them.  ``attached``: a pool under a runtime."""

    policy: str
    options: Mapping[str, str] = field(default_factory=dict)
    attached: bool = False

    @property
    def label(self) -> str:
        """The policy and its options, for a table."""
        if self.attached and self.policy == BARE:
            return NO_POOL
        shown = [_LIMITS_LABEL if name == "limits" else f"{name}={value}" for name, value in self.options.items()]
        return " ".join([self.policy, *shown])

    def make(self) -> Policy:
        """A new policy object; BadRequest if there is no such policy, or for an option out of range."""
        policy = make_policy(self.policy, **self.options)
        return PerUsage(partial(make_policy, self.policy, **self.options)) if self.attached else policy


def settings(attached: bool = False) -> list[Setting]:
    """The settings of the table of policies; ``attached``: those for a pool under a runtime.

    There, policies without options come last: of equals that with a limit is the one to recommend.
    """
    if not attached:
        return [Setting(name, options) for name, entry in POLICIES.items() for options in ({}, *entry.tried)]
    rows = sorted(POLICIES.items(), key=lambda row: not row[1].options)
    return [Setting(name, options, True) for name, entry in rows for options in entry.tried_attached]


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of creating a buffer, in microseconds, and its source.  BadRequest unless both are 0 or more."""

    create_us: float
    create_us_per_mib: float
    source: str

    def __post_init__(self) -> None:
        for what, value in (("create", self.create_us), ("MiB", self.create_us_per_mib)):
            if not 0 <= value < float("inf"):
                raise BadRequest(f"a cost of {value} µs per {what}; it must be 0 or more.")

    def ms(self, creates: int, nbytes: int) -> float:
        """The milliseconds of ``creates`` buffers with ``nbytes`` in total."""
        return (creates * self.create_us + nbytes / MIB * self.create_us_per_mib) / 1000


def recorded_costs(metadata: Mapping[str, object], create_us: float | None, per_mib_us: float | None) -> Costs:
    """The costs given, else those in the trace's ``metadata``, else this project's assumption."""
    found = {name: _number(metadata, name) for name in ("create_us", "create_us_per_mib")}
    if create_us is not None or per_mib_us is not None:
        source = "as given"
    elif any(value is not None for value in found.values()):
        how = metadata.get("create_costs")
        source = f"recorded in the trace, {how}" if how else "recorded in the trace"
        # one that is not recorded is no cost of its own: what was measured includes it
        create_us, per_mib_us = found["create_us"] or 0.0, found["create_us_per_mib"] or 0.0
    else:
        how = "measureCosts() records" if is_attached(metadata) else "--create-us and --create-us-per-mib set"
        source = f"assumed, as measured on an H200; {how} yours"
    return Costs(
        CREATE_US if create_us is None else create_us,
        CREATE_US_PER_MIB if per_mib_us is None else per_mib_us,
        source,
    )


def recorded_setting(metadata: Mapping[str, object], policy: str | None) -> tuple[Setting, str]:
    """The baseline and its source: the caller's ``policy``, else the trace's own (``metadata``), else ``bucket``.

    For a runtime that was watched it is no pool, also if there was one: that is what attaching is compared with.
    BadTrace if the metadata's policy is wrong.
    """
    attached = is_attached(metadata)
    if policy is not None:
        make_policy(policy)
        return Setting(policy, attached=attached), "as given"
    if attached:
        return Setting(BARE, attached=True), "the runtime as it is"
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


def _number(metadata: Mapping[str, object], name: str) -> float | None:
    value = metadata.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadTrace(f"the trace's metadata has {name} {value!r}; it must be a number of microseconds.")
    return float(value)
