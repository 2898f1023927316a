"""The pool under onnxruntime-web: arms on a growing KV cache, interleaved in one browser, with ratios to a control.

An arm is one of

    bare               the runtime as it is: its pool keeps a fixed number of buffers per size (`bucket`)
    static             the control: the same commands on two sets of tensors that are allocated once
    attached           the runtime with ``stepwell.attach()`` under it
    record             the recorder, which changes nothing, under every second step of the runtime

with options after a colon: ``bare:cache=lazyRelease``, ``attached:zero=never``, ``attached:policy=bucket;window=4``.
Each round runs every arm once at every start, each in a page of its own, in an order that rotates.  The recorder
costs a few per cent at most, less than two runs differ by: its ratio is that of each recorded step to the one before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from harness import RunError, SetupError
from harness.arms.ablate import median_interval
from harness.arms.compare import interleaved, refuse_twins
from harness.page.summary import percentile

SCHEMA = 1
WARM_UP = 4  # the fill, the two steps in which every pool makes its sets of tensors, and one to settle
CONTROL, BARE = "static", "bare"
DEFAULT_ARMS = "bare,static,attached,attached:zero=never,record"
TENSORS = (64, 16)
Step = dict[str, Any]
Report = Callable[[str], None]
_BUDGET = "budget"
_ATTACH = ("policy", "zero")


@dataclass(frozen=True, slots=True)
class Arm:
    """``decoding``, ``attach`` and ``alternate`` are what the page's Arm.open() takes (web/attach/arm.js)."""

    name: str
    decoding: Mapping[str, str] = field(default_factory=dict)
    attach: Mapping[str, Any] | None = None
    alternate: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """``rounds`` of every arm at every start, ``steps`` steps each, of which the first ``skip`` do not count."""

    tensors: int
    arms: tuple[Arm, ...]
    starts: tuple[int, ...]
    steps: int
    rounds: int
    skip: int = WARM_UP

    def __post_init__(self) -> None:
        if self.tensors not in TENSORS:
            raise SetupError(f"there is no model with {self.tensors} tensors; there are {TENSORS[0]} and {TENSORS[1]}.")
        if self.steps <= self.skip:
            raise SetupError(f"{self.steps} steps, of which {self.skip} are warm-up: ask for {self.skip + 1} or more.")
        refuse_twins([arm.name for arm in self.arms])

    @property
    def model(self) -> str:
        return f"kv{self.tensors}"

    def options(self, arm: Arm, start: int) -> dict[str, Any]:
        attached = {"attach": arm.attach, "alternate": arm.alternate}
        return {"model": self.model, "start": start, "steps": self.steps, **attached, **arm.decoding}

    def schedule(self) -> Iterator[tuple[int, int, Arm]]:
        """(round, start, arm) in the order of running."""
        return interleaved(self.arms, self.starts, self.rounds)


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One run: its steps, and what was said at its ``end`` (Arm.finish() of web/attach/arm.js)."""

    turn: int
    start: int
    arm: str
    steps: tuple[Step, ...]
    end: dict[str, Any]

    def counted(self, skip: int) -> list[Step]:
        """The steps that count; where an attachment comes and goes, those with it."""
        return [step for step in self.steps[skip:] if step["attached"]] or list(self.steps[skip:])

    def pairs(self, skip: int) -> list[float]:
        """Each attached step over the one before, which was not."""
        pairs = pairwise(self.steps[max(0, skip - 1) :])
        return [b["ms"] / a["ms"] for a, b in pairs if b["attached"] and not a["attached"]]

    def median(self, skip: int) -> float:
        return percentile([step["ms"] for step in self.counted(skip)], 0.5)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of the ratios of the rounds (of medians) or of pairs of steps, and its 95 % bootstrap interval."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return percentile(self.values, 0.5)

    @property
    def interval(self) -> tuple[float, float]:
        return median_interval(self.values)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of an arm at one start over all rounds; a ratio is None where the other arm did not run."""

    start: int
    arm: str
    n: int
    median_ms: float
    max_ms: float
    created_mean: float
    created_max: int
    created_mib: float
    peak_bytes: int
    to_control: Ratio | None
    to_bare: Ratio | None


class RunningArm(Protocol):
    """A run in progress: its steps one after another, then what is said at its end (web/attach/arm.js)."""

    def next(self) -> Step: ...
    def finish(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


OpenArm = Callable[[dict[str, Any]], RunningArm]


def parse_arms(text: str, budget_mib: int | None = None) -> tuple[Arm, ...]:
    """The arms of ``--arms``, separated by commas; ``budget_mib`` is of attached arms without a budget of their own."""
    return tuple(_parse_arm(part.strip(), budget_mib) for part in text.split(",") if part.strip())


def _parse_arm(name: str, budget_mib: int | None) -> Arm:
    kind, _, rest = name.partition(":")
    options = dict(_option(name, part) for part in rest.split(";") if part.strip())
    if kind == "attached":
        return Arm(name, attach=_attach_options(name, options, budget_mib))
    known = {"bare": ["cache"], "static": ["cache"], "record": []}
    if kind not in known:
        raise SetupError(f"there is no arm {kind!r}; there are {', '.join([*known, 'attached'])}.")
    if unknown := sorted(set(options) - set(known[kind])):
        raise SetupError(f"arm {name!r}: {kind} has no option {unknown[0]!r}.")
    decoding = {**options, "kv": "static"} if kind == CONTROL else options
    return Arm(name, decoding, {"record": True} if kind == "record" else None, alternate=kind == "record")


def _option(arm: str, text: str) -> tuple[str, str]:
    name, equals, value = text.strip().partition("=")
    if not equals or not name or not value:
        raise SetupError(f"arm {arm!r}: {text.strip()!r} is not name=value.")
    return name, value


def _attach_options(arm: str, options: dict[str, str], budget_mib: int | None) -> dict[str, Any]:
    given: dict[str, Any] = {"policy": "adaptive", **{name: options[name] for name in _ATTACH if name in options}}
    mib = _value(options[_BUDGET]) if _BUDGET in options else budget_mib
    if mib is not None:
        if not isinstance(mib, int) or mib < 1:
            raise SetupError(f"arm {arm!r}: a budget is a whole number of MiB.")
        given["budget"] = mib << 20
    policy = {name: _value(value) for name, value in options.items() if name not in (*_ATTACH, _BUDGET)}
    return {**given, "options": policy} if policy else given


def _value(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def run_plan(
    plan: Plan, open_arm: OpenArm, report: Report, stopped: Callable[[], bool] = lambda: False
) -> list[ArmRun]:
    """Every run of the plan; when ``stopped``, the run in progress and those after it are left out."""
    wanted = list(plan.schedule())
    found: list[ArmRun] = []
    for number, (turn, start, arm) in enumerate(wanted, 1):
        where = f"{number} of {len(wanted)}: {arm.name} from {start:,}, round {turn + 1}"
        report(f"{where}, opening")
        running = open_arm(plan.options(arm, start))
        try:
            steps = []
            for index in range(plan.steps):
                if stopped():
                    return found
                report(f"{where}, step {index + 1} of {plan.steps}")
                steps.append(running.next())
            found.append(ArmRun(turn, start, arm.name, tuple(steps), running.finish()))
        finally:
            running.close()
        _check(found)
    return found


def _check(runs: Sequence[ArmRun]) -> None:
    """RunError when the last run's results are wrong, or are not those of another arm at its start."""
    last = runs[-1]
    for number, step in enumerate(last.steps, 1):
        if step["wrong"]:
            where = f"{last.arm} from {last.start:,}: {step['wrong']:,} values of step {number}"
            raise RunError(f"{where} are wrong", "Divergence")
    first = next(run for run in runs if run.start == last.start)
    if _digests(first) != _digests(last):
        raise RunError(f"from {last.start:,}, {last.arm} gave other results than {first.arm}", "Divergence")


def _digests(run: ArmRun) -> list[int]:
    return [*(step["digest"] for step in run.steps), run.end["digest"]]


def rows(plan: Plan, runs: Sequence[ArmRun]) -> list[Row]:
    """One row per start and arm that ran."""
    made = []
    for start in plan.starts:
        medians = {(run.turn, run.arm): run.median(plan.skip) for run in runs if run.start == start}
        for arm in plan.arms:
            own = [run for run in runs if (run.start, run.arm) == (start, arm.name)]
            if own:
                made.append(_row(plan, start, arm.name, own, medians))
    return made


def _row(plan: Plan, start: int, arm: str, own: list[ArmRun], medians: dict[tuple[int, str], float]) -> Row:
    steps = [step for run in own for step in run.counted(plan.skip)]
    pairs = tuple(ratio for run in own for ratio in run.pairs(plan.skip))
    return Row(
        start=start,
        arm=arm,
        n=len(steps),
        median_ms=percentile([step["ms"] for step in steps], 0.5),
        max_ms=max(step["ms"] for step in steps),
        created_mean=sum(step["created"] for step in steps) / len(steps),
        created_max=max(step["created"] for step in steps),
        created_mib=sum(step["created_bytes"] for step in steps) / len(steps) / 2**20,
        peak_bytes=max(run.end["peak_bytes"] for run in own),
        to_control=_ratio(arm, CONTROL, own, medians),
        to_bare=Ratio(pairs) if pairs else _ratio(arm, BARE, own, medians),
    )


def _ratio(arm: str, other: str, own: list[ArmRun], medians: dict[tuple[int, str], float]) -> Ratio | None:
    pairs = [(medians[run.turn, arm], medians.get((run.turn, other))) for run in own]
    found = tuple(mine / theirs for mine, theirs in pairs if theirs)
    return Ratio(found) if found and arm != other else None
