"""The ablation: arms that add one switch of the launch path each, and what every one of them saves per token.

All arms run in one page, each with an engine of its own on the same device, pool and model.  First every arm runs once
untimed, with a digest of each step's logits: ids and digests must equal those of ``main``.  Then come timed rounds
without digests, in an order that rotates, so that what drifts on the machine falls on all arms alike.

A token's time is that since the token before.  Where ids are read back up to K steps behind, tokens may arrive K at a
time, and the last K arrive when nothing is issued any more.  So in every arm alike times are means of K consecutive
tokens (K: the largest lag of any arm) and the last K tokens of a run do not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from statistics import mean
from typing import Any

from harness import RunError, SetupError
from harness.arms.compare import rotated
from harness.page.record import Record
from harness.page.scenario import Scenario
from harness.page.summary import percentile
from stepwell.launch.options import ABLATION, LaunchOptions

MAIN = ABLATION[0][0]
WARM_UP = 8  # the prefill, the steps that record and verify plans, and those that fill the readback ring
RESAMPLES = 4000
COUNTS = {
    "passes_per_token": "passes",
    "bind_groups_per_token": "bind_groups_created",
    "uploads_per_token": "uploads",
    "submits_per_token": "submits",
    "launches_per_token": "launches",
    "replayed_per_token": "replayed",
}
Run = Callable[[Scenario], Record]


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    options: LaunchOptions


@dataclass(frozen=True, slots=True)
class Plan:
    """``rounds`` of every arm, ``tokens`` each; the first ``skip`` tokens of a run do not count.

    ``base`` says what is run: model, prompt, KV mode, policy.  The first arm is ``main``.
    """

    arms: tuple[Arm, ...]
    tokens: int
    rounds: int
    base: Scenario
    skip: int = WARM_UP

    def __post_init__(self) -> None:
        least = self.skip + 2 * self.lag
        if self.tokens < least:
            raise SetupError(
                f"{self.tokens} tokens: {self.skip} are warm-up, and times are means of {self.lag} without the last "
                f"{self.lag}: ask for {least} or more."
            )

    @property
    def lag(self) -> int:
        """Steps that token ids may lag behind in any arm, at least 1."""
        depths = (arm.options.readback_depth for arm in self.arms)
        return max(1, *(1 if depth is None else depth for depth in depths))

    def scenario(self, arm: Arm, *, digest: bool = False) -> Scenario:
        """Greedy, and with no end but the number of tokens."""
        launch = {name: str(value) for name, value in arm.options.changes().items()}
        return replace(self.base, tokens=self.tokens, eos="ban", launch=launch, digest=digest)

    def counted(self, record: Record) -> list[dict[str, Any]]:
        """The tokens of a run that count."""
        return list(record["tokens"][self.skip : self.tokens - self.lag])


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of one ratio per round, and the 95 % interval of that median."""

    median: float
    low: float
    high: float
    rounds: tuple[float, ...]

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> "Ratio":
        ratios = tuple(a / b for a, b in zip(numerators, denominators, strict=True))
        return cls(percentile(ratios, 0.5), *median_interval(ratios), ratios)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one arm over all rounds; ``counts`` by the names of COUNTS, times in ms per token.

    ``to_main`` and ``to_previous`` are how many times as fast as that arm it is.  ``difference`` says where its results
    differ from main's; it is empty where every bit is the same.
    """

    arm: Arm
    counts: dict[str, float]
    encode_ms: float
    wait_ms: float
    ms: float
    to_main: Ratio
    to_previous: Ratio | None
    difference: str

    @property
    def bit_identical(self) -> bool:
        return not self.difference

    @property
    def tokens_per_s(self) -> float:
        return 1000 / self.ms


@dataclass(frozen=True)
class Found:
    """What ran: ``checks`` with digests, one per arm; ``rounds`` of one timed record per arm, in the plan's order."""

    plan: Plan
    checks: tuple[Record, ...]
    rounds: tuple[tuple[Record, ...], ...]

    @property
    def reference(self) -> Record:
        return self.checks[0]

    @cached_property
    def rows(self) -> list[Row]:
        plan, arms = self.plan, range(len(self.plan.arms))
        times = [[typical_ms(plan, records[i]) for records in self.rounds] for i in arms]
        return [self._row(i, times) for i in arms]

    def _row(self, index: int, times: list[list[float]]) -> Row:
        timed = [records[index] for records in self.rounds]
        tokens = [token for record in timed for token in self.plan.counted(record)]
        return Row(
            arm=self.plan.arms[index],
            counts={name: mean(token[key] for token in tokens) for name, key in COUNTS.items()},
            encode_ms=percentile([token["encode_ms"] for token in tokens], 0.5),
            wait_ms=percentile([token["wait_ms"] for token in tokens], 0.5),
            ms=percentile(times[index], 0.5),
            to_main=Ratio.of(times[0], times[index]),
            to_previous=Ratio.of(times[index - 1], times[index]) if index else None,
            difference=difference(self.reference, self.checks[index], timed),
        )


def choose_arms(text: str | None) -> tuple[Arm, ...]:
    """The arms of ``--arms``, separated by commas, in the ablation's order after ``main``; None: all."""
    known = [Arm(name, options) for name, options in ABLATION]
    if text is None:
        return tuple(known)
    wanted = {part.strip() for part in text.split(",") if part.strip()}
    if unknown := sorted(wanted - {arm.name for arm in known}):
        raise SetupError(f"there is no arm {unknown[0]!r}; there are {', '.join(arm.name for arm in known)}.")
    return tuple(arm for arm in known if arm.name == MAIN or arm.name in wanted)


def run_plan(plan: Plan, run: Run, report: Callable[[str], None]) -> Found:
    """Every run of the plan.  RunError when one ends early; a cancelled round and those after it are left out."""
    checks = []
    for number, arm in enumerate(plan.arms, 1):
        report(f"digests, {number} of {len(plan.arms)}: {arm.name}")
        checks.append(_complete(plan, arm, run(plan.scenario(arm, digest=True))))
    rounds: list[tuple[Record, ...]] = []
    for turn in range(plan.rounds):
        records: dict[str, Record] = {}
        for arm in rotated(plan.arms, turn):
            report(f"round {turn + 1} of {plan.rounds}: {arm.name}")
            record = run(plan.scenario(arm))
            if record["finish_reason"] == "cancelled" and rounds:
                return Found(plan, tuple(checks), tuple(rounds))
            records[arm.name] = _complete(plan, arm, record)
        rounds.append(tuple(records[arm.name] for arm in plan.arms))
    return Found(plan, tuple(checks), tuple(rounds))


def _complete(plan: Plan, arm: Arm, record: Record) -> Record:
    if record["finish_reason"] == "cancelled":
        raise RunError("stopped before the first round was complete", "Cancelled")
    if len(record["tokens"]) != plan.tokens:
        raise RunError(
            f"{arm.name} gave {len(record['tokens']):,} of {plan.tokens:,} tokens ({record['finish_reason']}); every "
            "arm must give all of them. Ask for fewer, or take a shorter prompt."
        )
    return record


def typical_ms(plan: Plan, record: Record) -> float:
    """Milliseconds per token of one run: the median of the means of ``plan.lag`` consecutive tokens."""
    times = [token["ms"] for token in plan.counted(record)]
    return percentile([mean(times[i : i + plan.lag]) for i in range(len(times) - plan.lag + 1)], 0.5)


def median_interval(values: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval (percentile method) of the median of ``values``.  The same values give the same."""
    random = Random(seed)
    medians = [percentile(random.choices(values, k=len(values)), 0.5) for _ in range(resamples)]
    return percentile(medians, 0.025), percentile(medians, 0.975)


def difference(reference: Record, check: Record, timed: Sequence[Record]) -> str:
    """Where an arm's results first differ from main's; empty where ids and digests are the same in every run."""
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
