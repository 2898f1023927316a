"""Arms of one workload, interleaved in one browser: medians, and ratios to the control paired round by round.

An arm is ``static`` (the control: the same commands on tensors that are allocated once) or a policy with a growing KV
cache, with options of its own after a colon: ``adaptive``, ``adaptive:window=4``, ``bucket:era=A;limits=4 MiB:64``.
Each round runs every arm once at every start, in an order that rotates, so that what drifts on the machine falls on
all arms alike.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.markup import escape
from rich.table import Table

from harness import SetupError
from harness.page.record import Record
from harness.page.scenario import Kv, Scenario, read_options
from harness.page.summary import percentile, plain_table, size

CONTROL = "static"
WARM_UP = 3  # the fill, and the two steps in which every policy makes the first sets of tensors
SCHEMA = 1
AnyArm = TypeVar("AnyArm")


@dataclass(frozen=True, slots=True)
class Arm:
    """What is compared: a KV mode under a policy with options; ``name`` is how it was asked for."""

    name: str
    kv: Kv
    policy: str
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """``rounds`` of every arm at every start, ``tokens`` steps each; the first ``skip`` steps of a run do not count."""

    workload: str
    arms: tuple[Arm, ...]
    starts: tuple[int, ...]
    tokens: int
    rounds: int
    skip: int = WARM_UP
    budget_mib: int | None = None
    hard_budget: bool = False

    def __post_init__(self) -> None:
        if self.tokens <= self.skip:
            raise SetupError(
                f"{self.tokens} tokens, of which {self.skip} are warm-up: ask for {self.skip + 1} or more."
            )
        refuse_twins([arm.name for arm in self.arms])

    @property
    def control(self) -> str:
        """The arm that the others are divided by: ``static`` where it runs, else the first."""
        names = [arm.name for arm in self.arms]
        return CONTROL if CONTROL in names else names[0]

    def scenario(self, arm: Arm, start: int) -> Scenario:
        return Scenario(
            workload=self.workload, start=start, tokens=self.tokens, kv=arm.kv, policy=arm.policy,
            policy_options=arm.options, budget_mib=self.budget_mib, hard_budget=self.hard_budget,
        )  # fmt: skip

    def schedule(self) -> Iterator[tuple[int, int, Arm]]:
        """(round, start, arm) in the order of running."""
        return interleaved(self.arms, self.starts, self.rounds)


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One run of one arm."""

    turn: int
    start: int
    arm: str
    record: Record

    def steps(self, skip: int) -> list[dict[str, Any]]:
        return list(self.record["tokens"][skip:])


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of an arm at one start, over all rounds; ``ratios`` are medians of a round over the control's."""

    start: int
    arm: str
    n: int
    median_ms: float
    max_ms: float
    created_mean: float
    created_max: int
    peak_reserved_bytes: int
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return percentile(self.ratios, 0.5)

    @property
    def max_over_median(self) -> float:
        return self.max_ms / self.median_ms


def refuse_twins(names: Sequence[str]) -> None:
    """SetupError where two arms have one name: their figures would be mixed."""
    if len(set(names)) < len(names):
        raise SetupError(f"an arm is named twice: {', '.join(names)}.")


def interleaved(arms: Sequence[AnyArm], starts: Sequence[int], rounds: int) -> Iterator[tuple[int, int, AnyArm]]:
    """(round, start, arm): in every round each arm at each start, the arms in another order."""
    for turn in range(rounds):
        for start in starts:
            for arm in rotated(arms, turn):
                yield turn, start, arm


def rotated(arms: Sequence[AnyArm], turn: int) -> list[AnyArm]:
    """The arms in the order of round ``turn``: every round begins with another one."""
    shift = turn % len(arms)
    return [*arms[shift:], *arms[:shift]]


def parse_arms(text: str) -> tuple[Arm, ...]:
    """The arms of ``--arms``, separated by commas; options are separated by semicolons."""
    arms = []
    for part in text.split(","):
        name, _, options = part.strip().partition(":")
        given = read_options([option for option in options.split(";") if option.strip()])
        kv, policy = (Kv.STATIC, "adaptive") if name == CONTROL else (Kv.GROW, name)
        arms.append(Arm(part.strip(), kv, policy, given))
    return tuple(arms)


def run_plan(plan: Plan, run: Callable[[Scenario], Record], report: Callable[[str], None]) -> list[ArmRun]:
    """Every run of the plan; a run that was cancelled is the last and is left out."""
    wanted = list(plan.schedule())
    for _, start, arm in wanted:
        plan.scenario(arm, start)  # what is wrong with an arm is said before the first run
    found: list[ArmRun] = []
    for number, (turn, start, arm) in enumerate(wanted, 1):
        report(f"{number} of {len(wanted)}: {arm.name} from {start:,}, round {turn + 1}")
        record = run(plan.scenario(arm, start))
        if record["finish_reason"] == "cancelled":
            break
        found.append(ArmRun(turn, start, arm.name, record))
    return found


def rows(plan: Plan, runs: Sequence[ArmRun]) -> list[Row]:
    """One row per start and arm that ran."""
    made = []
    for start in plan.starts:
        medians = {(run.turn, run.arm): _median(run, plan.skip) for run in runs if run.start == start}
        for arm in plan.arms:
            own = [run for run in runs if (run.start, run.arm) == (start, arm.name)]
            if not own:
                continue
            steps = [step for run in own for step in run.steps(plan.skip)]
            created = [step["buffers_created"] for step in steps]
            pairs = [(medians[run.turn, arm.name], medians.get((run.turn, plan.control))) for run in own]
            made.append(
                Row(
                    start=start,
                    arm=arm.name,
                    n=len(steps),
                    median_ms=percentile([step["ms"] for step in steps], 0.5),
                    max_ms=max(step["ms"] for step in steps),
                    created_mean=sum(created) / len(created),
                    created_max=max(created),
                    peak_reserved_bytes=max(run.record["memory"]["peak_reserved_bytes"] for run in own),
                    ratios=tuple(mine / control for mine, control in pairs if control),
                )
            )
    return made


def _median(run: ArmRun, skip: int) -> float:
    return percentile([step["ms"] for step in run.steps(skip)], 0.5)


def as_json(plan: Plan, runs: Sequence[ArmRun]) -> dict[str, Any]:
    """The comparison as a file: the plan, the figures, and every record."""
    return {
        "schema": SCHEMA,
        "workload": plan.workload,
        "control": plan.control,
        "starts": list(plan.starts),
        "tokens": plan.tokens,
        "warm_up": plan.skip,
        "rounds": plan.rounds,
        "rows": [
            {
                "start": row.start,
                "arm": row.arm,
                "n": row.n,
                "median_ms": row.median_ms,
                "max_ms": row.max_ms,
                "created_mean": row.created_mean,
                "created_max": row.created_max,
                "peak_reserved_bytes": row.peak_reserved_bytes,
                "ratios": list(row.ratios),
                "ratio": row.ratio if row.ratios else None,
            }
            for row in rows(plan, runs)
        ],
        "runs": [{"round": run.turn, "start": run.start, "arm": run.arm, "record": run.record} for run in runs],
    }


def table(plan: Plan, runs: Sequence[ArmRun]) -> Table:
    """The rows for people."""
    shown = plain_table(
        f"{plan.workload}: {plan.rounds} rounds of {plan.tokens} tokens",
        f"ms per token without the first {plan.skip} of each run; ÷ {plan.control}: median of the rounds' ratios of "
        "medians [least, greatest]",
    )
    for name in ("from", "arm", "n", "median", "max", "max ÷ med", "creates", "most", f"÷ {plan.control}", "peak"):
        shown.add_column(name, justify="left" if name == "arm" else "right")
    last = None
    for row in rows(plan, runs):
        if last not in (None, row.start):
            shown.add_row()
        last = row.start
        ratios = f"{row.ratio:.2f} [{min(row.ratios):.2f}, {max(row.ratios):.2f}]" if row.ratios else "-"
        shown.add_row(
            f"{row.start:,}", escape(row.arm), str(row.n), f"{row.median_ms:.1f}", f"{row.max_ms:.1f}",
            f"{row.max_over_median:.2f}", f"{row.created_mean:.2f}", str(row.created_max), ratios,
            size(row.peak_reserved_bytes),
        )  # fmt: skip
    return shown
