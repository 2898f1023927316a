"""The pool under onnxruntime-web: arms on a growing KV cache, interleaved in one browser, with ratios to a control.

An arm is one of

    bare               the runtime as it is: its pool keeps a fixed number of buffers per size (`bucket`)
    static             the control: the same commands on two sets of tensors that are allocated once
    attached           the runtime with ``stepwell.attach()`` under it
    record             the recorder, which changes nothing, under every second step of the runtime

with options after a colon: ``bare:cache=lazyRelease``, ``attached:zero=never``, ``attached:policy=bucket;window=4``.
Each run has a page of its own.  The recorder costs a few per cent at most, less than two runs differ by: its ratio is
that of each recorded step to the one before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from harness import RunError, SetupError
from harness.arms.figures import ArmFigures, ArmRun, Ratio
from harness.arms.schedule import Arm, Schedule, Turn, read_arms
from harness.site.process import Report
from stepwell.replay.kv_shapes import KV_WORKLOADS

SCHEMA = 1
"""The version of the JSON."""
WARM_UP = 4  # the fill, the two steps in which every pool makes its sets of tensors, and one to settle
CONTROL, BARE = "static", "bare"
"""The arm that ratios are to, and the one without a pool."""
DEFAULT_ARMS = "bare,static,attached,attached:zero=never,record"
TENSORS = tuple(shape.tensors for shape in KV_WORKLOADS.values())
MeasuredStep = dict[str, Any]
"""A step as the page measured it."""
_BUDGET = "budget"
_ATTACH = ("policy", "zero")


@dataclass(frozen=True, slots=True)
class Runtime:
    """The settings of an arm: options of Arm.open() (web/attach/arm.js), with those of its decoder in ``decoding``."""

    decoding: Mapping[str, str] = field(default_factory=dict)
    attach: Mapping[str, Any] | None = None
    alternate: bool = False


class RunResult(NamedTuple):
    """The result of a run: its ``steps``, and what Arm.finish() of web/attach/arm.js said at its ``end``."""

    steps: list[MeasuredStep]
    end: dict[str, Any]

    @property
    def digests(self) -> list[int]:
        """Digests of each step's results, and of all K and V at the end."""
        return [*(step["digest"] for step in self.steps), self.end["digest"]]


@dataclass(frozen=True, kw_only=True)
class Benchmark(Schedule[Runtime]):
    """A schedule of runs on a model of ``tensors`` growing tensors."""

    tensors: int
    skip: int = WARM_UP

    def __post_init__(self) -> None:
        if self.tensors not in TENSORS:
            raise SetupError(f"there is no model with {self.tensors} tensors; there are {TENSORS[0]} and {TENSORS[1]}.")
        super().__post_init__()

    @property
    def model(self) -> str:
        """The model's name in the site."""
        return f"kv{self.tensors}"

    def options(self, turn: Turn[Runtime]) -> dict[str, Any]:
        """The options of Arm.open() for ``turn``."""
        runtime = turn.arm.settings
        attached = {"attach": runtime.attach, "alternate": runtime.alternate}
        return {"model": self.model, "start": turn.start, "steps": self.steps, **attached, **runtime.decoding}

    def counted(self, steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
        """The ``steps`` of a run that count; where an attachment comes and goes, those with it."""
        return [step for step in steps[self.skip :] if step["attached"]] or list(steps[self.skip :])

    def run_of(self, turn: Turn[Runtime], result: RunResult) -> ArmRun[RunResult]:
        """The part of ``result`` that is compared, as a run of ``turn``."""
        counted = self.counted(result.steps)
        ms, created = [step["ms"] for step in counted], [step["created"] for step in counted]
        return ArmRun(turn.round, turn.start, turn.arm.name, result, ms, created, result.end["peak_bytes"])

    def created_mib(self, row: ArmFigures[RunResult]) -> float:
        """MiB of buffers that the runs of ``row`` created per step."""
        return fmean(step["created_bytes"] for run in row.runs for step in self.counted(run.result.steps)) / 2**20

    def to_control(self, row: ArmFigures[RunResult]) -> Ratio | None:
        """The times of ``row`` over those of ``static``; None for that arm itself, and where it did not run."""
        return row.ratios.get(CONTROL) if row.arm != CONTROL else None

    def to_bare(self, row: ArmFigures[RunResult]) -> Ratio | None:
        """The times of ``row`` over those of ``bare``, as in ``to_control``.

        Where an attachment comes and goes: each step with it over the one before, which had none.
        """
        pairs = [pair for run in row.runs for pair in pairwise(run.result.steps[max(0, self.skip - 1) :])]
        ratios = tuple(b["ms"] / a["ms"] for a, b in pairs if b["attached"] and not a["attached"])
        return Ratio(ratios) if ratios else row.ratios.get(BARE) if row.arm != BARE else None


class RunningArm(Protocol):
    """A run in progress (web/attach/arm.js)."""

    def next(self) -> MeasuredStep:
        """Run a step and measure it."""

    def finish(self) -> dict[str, Any]:
        """End the run; the digest of K and V, the peak, and the attachment's statistics."""

    def close(self) -> None:
        """Free the page of the run."""


OpenArm = Callable[[dict[str, Any]], RunningArm]
"""A function that opens a run, given the options of Arm.open()."""


def parse_arms(text: str, budget_mib: int | None = None) -> tuple[Arm[Runtime], ...]:
    """The arms of ``--arms``, separated by commas; attached ones without a budget of their own get ``budget_mib``."""
    return tuple(Arm(name, _runtime(name, kind, options, budget_mib)) for name, kind, options in read_arms(text))


def _runtime(name: str, kind: str, options: dict[str, str], budget_mib: int | None) -> Runtime:
    if kind == "attached":
        return Runtime(attach=_attach_options(name, options, budget_mib))
    known = {"bare": ["cache"], "static": ["cache"], "record": []}
    if kind not in known:
        raise SetupError(f"there is no arm {kind!r}; there are {', '.join([*known, 'attached'])}.")
    if unknown := sorted(set(options) - set(known[kind])):
        raise SetupError(f"arm {name!r}: {kind} has no option {unknown[0]!r}.")
    if kind == "record":
        return Runtime(attach={"record": True}, alternate=True)
    return Runtime({**options, "kv": "static"} if kind == CONTROL else options)


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


def run_all(
    plan: Benchmark, open_arm: OpenArm, report: Report, stopped: Callable[[], bool] = lambda: False
) -> list[ArmRun[RunResult]]:
    """Run ``plan``, each run opened by ``open_arm``; ``report`` is told of each step.

    Once ``stopped`` is true, the run in progress and those after it are left out.  RunError when a run's results are
    wrong, or are not those of the other arms.
    """
    found: list[ArmRun[RunResult]] = []
    for turn in plan:
        report(f"{plan.progress(turn)}, opening")
        running = open_arm(plan.options(turn))
        try:
            steps = []
            for index in range(plan.steps):
                if stopped():
                    return found
                report(f"{plan.progress(turn)}, step {index + 1} of {plan.steps}")
                steps.append(running.next())
            found.append(plan.run_of(turn, RunResult(steps, running.finish())))
        finally:
            running.close()
        _check(found)
    return found


def _check(runs: Sequence[ArmRun[RunResult]]) -> None:
    """RunError when the last run's results are wrong, or are not those of another arm at its start."""
    last = runs[-1]
    for number, step in enumerate(last.result.steps, 1):
        if step["wrong"]:
            where = f"{last.arm} from {last.start:,}: {step['wrong']:,} values of step {number}"
            raise RunError(f"{where} are wrong", "Divergence")
    first = next(run for run in runs if run.start == last.start)
    if first.result.digests != last.result.digests:
        raise RunError(f"from {last.start:,}, {last.arm} gave other results than {first.arm}", "Divergence")
