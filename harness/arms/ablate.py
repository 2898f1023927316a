"""The ablation: arms that each add one switch of the launch path, and what each of them saves per token.

All arms run in one page, each with an engine of its own on the same device, pool and model.  Every arm runs
once untimed, with a digest of each step's logits: ids and digests must equal those of ``main``.  Timed rounds without
digests come after that.

A token's time is the time since the token before.  Where ids are read back up to K steps late, tokens may arrive K at
a time, and the last K arrive when nothing is issued any more.  Times of all arms are therefore means of K consecutive
tokens (K: the largest lag of any arm), and the last K tokens of a run do not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median
from typing import Any

from harness import RunError, SetupError
from harness.arms.figures import Ratio
from harness.arms.schedule import Arm, Schedule
from harness.page.record import Record
from harness.page.scenario import Scenario
from harness.site.process import Report
from stepwell.launch.options import ABLATION, LaunchOptions

MAIN = ABLATION[0][0]
"""The first arm: no switch on."""
WARM_UP = 8  # the prefill, the steps that record and verify plans, and those that fill the readback ring
COUNTS = {
    "passes_per_token": "passes",
    "bind_groups_per_token": "bind_groups_created",
    "uploads_per_token": "uploads",
    "submits_per_token": "submits",
    "launches_per_token": "launches",
    "replayed_per_token": "replayed",
}
"""The counts of the table, and the counters they are means of."""
RunScenario = Callable[[Scenario], Record]
"""A function that runs a scenario and returns its record."""


@dataclass(frozen=True, kw_only=True)
class Ablation(Schedule[LaunchOptions]):
    """A schedule of runs of ``base`` (model, prompt, KV mode, policy), whose first arm is ``main``."""

    base: Scenario
    skip: int = WARM_UP

    def _refuse_short(self) -> None:
        least = self.skip + 2 * self.lag
        if self.steps < least:
            raise SetupError(
                f"{self.steps} tokens: {self.skip} are warm-up, and times are means of {self.lag} without the last "
                f"{self.lag}: ask for {least} or more."
            )

    @property
    def lag(self) -> int:
        """The most steps by which token ids are late in any arm, at least 1."""
        return max(1, *(1 if depth is None else depth for depth in (arm.settings.readback_depth for arm in self.arms)))

    def scenario(self, arm: Arm[LaunchOptions], *, digest: bool = False) -> Scenario:
        """A greedy run of ``arm`` that ends at the number of tokens alone."""
        launch = {name: str(value) for name, value in arm.settings.changes().items()}
        return self.base.but(tokens=self.steps, ban_eos=True, launch=launch, digest=digest)

    def counted(self, record: Record) -> list[dict[str, Any]]:
        """The tokens of ``record`` that count."""
        return list(record["tokens"][self.skip : self.steps - self.lag])

    def typical_ms(self, record: Record) -> float:
        """Milliseconds per token of ``record``: the median of the means of ``lag`` consecutive tokens."""
        times: list[float] = [token["ms"] for token in self.counted(record)]
        return median(mean(times[i : i + self.lag]) for i in range(len(times) - self.lag + 1))


@dataclass(frozen=True, slots=True)
class PerToken:
    """The figures of one arm over all rounds; ``counts`` by the names of COUNTS, times in ms per token.

    ``to_main`` and ``to_previous`` are how many times as fast as that arm it is.  ``difference`` says where its results
    differ from main's; it is empty where every bit is the same.
    """

    arm: Arm[LaunchOptions]
    counts: dict[str, float]
    encode_ms: float
    wait_ms: float
    ms: float
    to_main: Ratio
    to_previous: Ratio | None
    difference: str

    @property
    def bit_identical(self) -> bool:
        """Whether the arm's results are main's in every bit."""
        return not self.difference

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second at the median round's time."""
        return 1000 / self.ms


@dataclass(frozen=True)
class AblationResult:
    """The records of an ablation: ``checks`` with digests, one per arm; ``rounds`` of one timed record per arm.

    Arms are in the order of ``plan``.
    """

    plan: Ablation
    checks: tuple[Record, ...]
    rounds: tuple[tuple[Record, ...], ...]

    @property
    def reference(self) -> Record:
        """The record of main with digests."""
        return self.checks[0]

    @cached_property
    def rows(self) -> list[PerToken]:
        """The figures of every arm, in the plan's order."""
        times = [dict(enumerate(map(self.plan.typical_ms, records))) for records in zip(*self.rounds, strict=True)]
        return [self._row(index, times) for index in range(len(self.plan.arms))]

    def _row(self, index: int, times: list[dict[int, float]]) -> PerToken:
        timed = [records[index] for records in self.rounds]
        tokens = [token for record in timed for token in self.plan.counted(record)]
        return PerToken(
            arm=self.plan.arms[index],
            counts={name: mean(token[key] for token in tokens) for name, key in COUNTS.items()},
            encode_ms=median(token["encode_ms"] for token in tokens),
            wait_ms=median(token["wait_ms"] for token in tokens),
            ms=median(times[index].values()),
            to_main=Ratio.paired(times[0], times[index]),
            to_previous=Ratio.paired(times[index - 1], times[index]) if index else None,
            difference=difference(self.reference, self.checks[index], timed),
        )


def choose_arms(text: str | None) -> tuple[Arm[LaunchOptions], ...]:
    """The arms of ``--arms``, separated by commas, in the ablation's order after ``main``; None: all."""
    known = [Arm(name, options) for name, options in ABLATION]
    if text is None:
        return tuple(known)
    wanted = {part.strip() for part in text.split(",") if part.strip()}
    if unknown := sorted(wanted - {arm.name for arm in known}):
        raise SetupError(f"there is no arm {unknown[0]!r}; there are {', '.join(arm.name for arm in known)}.")
    return tuple(arm for arm in known if arm.name == MAIN or arm.name in wanted)


def run_all(plan: Ablation, run: RunScenario, report: Report) -> AblationResult:
    """Run every arm of ``plan`` by ``run``; ``report`` is told of each.

    RunError when a run ends early; a cancelled round and those after it are left out.
    """
    checks = []
    for number, arm in enumerate(plan.arms, 1):
        report(f"digests, {number} of {len(plan.arms)}: {arm.name}")
        checks.append(_complete(plan, arm.name, run(plan.scenario(arm, digest=True))))
    rounds: list[dict[str, Record]] = [{} for _ in range(plan.rounds)]
    for turn in plan:
        report(f"round {turn.round + 1} of {plan.rounds}: {turn.arm.name}")
        record = run(plan.scenario(turn.arm))
        if record["finish_reason"] == "cancelled" and turn.round:
            break
        rounds[turn.round][turn.arm.name] = _complete(plan, turn.arm.name, record)
    whole = [records for records in rounds if len(records) == len(plan.arms)]
    return AblationResult(
        plan, tuple(checks), tuple(tuple(records[arm.name] for arm in plan.arms) for records in whole)
    )


def _complete(plan: Ablation, arm: str, record: Record) -> Record:
    if record["finish_reason"] == "cancelled":
        raise RunError("stopped before the first round was complete", "Cancelled")
    if len(record["tokens"]) != plan.steps:
        raise RunError(
            f"{arm} gave {len(record['tokens']):,} of {plan.steps:,} tokens ({record['finish_reason']}); every "
            "arm must give all of them. Ask for fewer, or take a shorter prompt."
        )
    return record


def difference(reference: Record, check: Record, timed: Sequence[Record]) -> str:
    """The first place where ids or digests of ``check`` and ``timed`` differ from main's ``reference``; empty: none."""
    compared = [
        ("token id", reference["token_ids"], check["token_ids"]),
        ("logits digest", _digests(reference), _digests(check)),
    ]
    for turn, record in enumerate(timed, 1):
        compared.append((f"round {turn}, token id", reference["token_ids"], record["token_ids"]))
    for what, expected, found in compared:
        for place, (a, b) in enumerate(zip(expected, found, strict=True)):
            if a != b:
                return f"{what} {place} is {b}, main's is {a}"
    return ""


def _digests(record: Record) -> list[str]:
    return [token["digest"] for token in record["tokens"]]
