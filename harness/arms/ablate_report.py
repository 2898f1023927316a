"""The result of an ablation as tables, notes and files."""

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from harness.arms.ablate import MAIN, AblationResult, PerToken
from harness.arms.figures import RESAMPLES
from harness.page.record import Record
from harness.page.summary import adapter_name, is_software, plain_table
from stepwell.launch.options import Params

SCHEMA = 1
"""The version of the JSON."""
FEW_ROUNDS = 5
"""Rounds below which intervals say little."""
_COUNTS = {
    "passes": "passes_per_token",
    "groups": "bind_groups_per_token",
    "uploads": "uploads_per_token",
    "submits": "submits_per_token",
}


def table(found: AblationResult) -> Table:
    """A table of the arms of ``found``, for the terminal."""
    plan = found.plan
    shown = plain_table(
        f"{_model(found)}, {_kv(found)} KV: {_count(len(found.rounds), 'round')} of {plan.steps} tokens",
        f"per token, without the first {plan.skip} and the last {plan.lag} of a run; bind: bind groups created; vs: "
        f"how many times as fast, median of the rounds' ratios; 95 %: the interval of that to {MAIN}",
    )
    shown.add_column("arm", no_wrap=True)
    for name in ("pass", "bind", "up-\nloads", "sub-\nmits", "enc.\nms", "tok/s", "vs\nmain", "95 %", "vs\nprev"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        low, high = row.to_main.interval
        before = f"{row.to_previous.median:.3f}" if row.to_previous else ""
        shown.add_row(
            escape(row.arm.name), *_counts(row), f"{row.encode_ms:.2f}", f"{row.tokens_per_s:.2f}",
            f"{row.to_main.median:.3f}", f"{low:.2f}-{high:.2f}", before,
            style=None if row.bit_identical else "bold red",
        )  # fmt: skip
    return shown


def notes(found: AblationResult) -> Iterator[str]:
    """Sentences about ``found`` that its figures do not say by themselves."""
    asked, rounds = found.plan.rounds, len(found.rounds)
    if rounds < asked:
        yield f"stopped: {rounds} of {asked} rounds are complete."
    if rounds < FEW_ROUNDS:
        yield f"{_count(rounds, 'round')}: the intervals span little more than the least and the greatest ratio."
    for row, check in zip(found.rows, found.checks, strict=True):
        name, launch, before = row.arm.name, check["launch"], row.to_previous
        if before and before.interval[1] < 1 and rounds > 1:
            yield f"{name} is slower than the arm before it: {before:.3f} times as fast."
        if row.arm.settings.params is Params.AUTO and launch["params"] != Params.IMMEDIATES:
            yield f"{name}: this device has no immediates; parameters went through {launch['params']}."
        if row.arm.settings.replay:
            if not row.counts["replayed_per_token"]:
                yield f"{name}: no step was replayed ({_refused(launch)})."
            elif not any(token["replayed"] for token in check["tokens"]):
                yield f"{name}: no step of the run with digests was replayed ({_refused(launch)}): they say less."


def identical(found: AblationResult) -> str:
    """The sentence that all arms of ``found`` gave the same results."""
    return (
        f"{len(found.rows)} arms gave the same {found.plan.steps} token ids in {len(found.rounds) + 1} runs each and "
        "the same logits at every step, bit by bit."
    )


def as_json(found: AblationResult) -> dict[str, Any]:
    """``found`` as a JSON object: the plan, the figures of each arm, and the times of each run."""
    plan, scenario = found.plan, found.reference["scenario"]
    return {
        "schema": SCHEMA,
        "environment": found.reference["environment"],
        "model": scenario["model"],
        "sha256": scenario["sha256"],
        "prompt": plan.base.prompt,
        "prompt_tokens": len(found.reference["prompt_ids"]),
        "kv": str(plan.base.kv),
        "kv_type": str(plan.base.kv_type),
        "policy": plan.base.policy,
        "tokens": plan.steps,
        "warm_up": plan.skip,
        "lag": plan.lag,
        "rounds": len(found.rounds),
        "resamples": RESAMPLES,
        "arms": [_arm(row, check) for row, check in zip(found.rows, found.checks, strict=True)],
        "notes": list(notes(found)),
        "runs": [
            {"round": turn, "arm": arm.name, **_times(record)}
            for turn, records in enumerate(found.rounds, 1)
            for arm, record in zip(plan.arms, records, strict=True)
        ],
    }


def _arm(row: PerToken, check: Record) -> dict[str, Any]:
    low, high = row.to_main.interval
    before = row.to_previous
    before_low, before_high = before.interval if before else (None, None)
    return {
        "name": row.arm.name,
        **row.counts,
        "encode_ms": row.encode_ms,
        "wait_ms": row.wait_ms,
        "ms": row.ms,
        "tokens_per_s": row.tokens_per_s,
        "paired_ratio": row.to_main.median,
        "ci_low": low,
        "ci_high": high,
        "ratios": list(row.to_main.values),
        "ratio_to_previous": before.median if before else None,
        "previous_ci_low": before_low,
        "previous_ci_high": before_high,
        "bit_identical": row.bit_identical,
        "difference": row.difference,
        "launch": check["launch"],
    }


def _times(record: Record) -> dict[str, list[float]]:
    return {name: [token[name] for token in record["tokens"]] for name in ("ms", "encode_ms", "wait_ms")}


def markdown(found: AblationResult) -> str:
    """``found`` as a document: the table, and where its figures come from."""
    plan, environment = found.plan, found.reference["environment"]
    kind = "software adapter: its times are those of a CPU" if is_software(found.reference) else "hardware adapter"
    columns = ("arm", *_COUNTS, "encode ms", "tokens/s", f"vs {MAIN} [95 %]", "vs arm before [95 %]", "bit-identical")
    lines = [
        f"# Ablation of the launch path: {_model(found)}, {_kv(found)} KV, {adapter_name(found.reference)}",
        "",
        f"- {adapter_name(found.reference)} ({kind}); {environment['browser']}; timer of "
        f"{environment['timer_resolution_us']:g} µs; Pyodide {environment['pyodide']}; stepwell "
        f"{environment['stepwell']}",
        f"- browser flags: `{' '.join(environment['flags']) or 'none'}`",
        f"- {_model(found)} (sha256 {found.reference['scenario']['sha256'] or 'unknown'}); prompt of "
        f"{len(found.reference['prompt_ids'])} tokens, {plan.steps} generated greedily, {_kv(found)} KV, policy "
        f"{plan.base.policy}",
        f"- {_count(len(found.rounds), 'round')}, arms in turns in one page; per token, without the first {plan.skip} "
        f"and the last {plan.lag} of a run; times are means of {plan.lag} consecutive tokens; ratios: median over "
        f"the rounds, bootstrap interval of {RESAMPLES:,} resamples",
        f"- `{command(found)}`",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(_cells(row))} |" for row in found.rows),
        "",
        *(f"- {note}" for note in notes(found)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def command(found: AblationResult) -> str:
    """The command line that repeats ``found``, without the options that choose a browser."""
    plan = found.plan
    kind = f" --kv-type {plan.base.kv_type}" if plan.base.kv_type != "f32" else ""
    return (
        f"python -m harness ablate --model {plan.base.model} --tokens {plan.steps} --rounds {plan.rounds} "
        f"--kv {plan.base.kv}{kind} --policy {plan.base.policy} --warm-up {plan.skip}"
    )


def _cells(row: PerToken) -> list[str]:
    before = f"{row.to_previous:.3f}" if row.to_previous else ""
    same = "yes" if row.bit_identical else f"**no**: {row.difference}"
    figures = (f"{row.encode_ms:.2f}", f"{row.tokens_per_s:.2f}", f"{row.to_main:.3f}")
    return [row.arm.name, *_counts(row), *figures, before, same]


def _counts(row: PerToken) -> list[str]:
    return [f"{row.counts[key]:,.4g}" for key in _COUNTS.values()]


def _refused(launch: dict[str, Any]) -> str:
    refused = launch["plans"]["refused"]
    return "; ".join(f"{reason}: {count}" for reason, count in refused.items()) or "no reason is given"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _kv(found: AblationResult) -> str:
    base = found.plan.base
    return str(base.kv) if base.kv_type == "f32" else f"{base.kv} {base.kv_type}"


def _model(found: AblationResult) -> str:
    return str(found.reference["scenario"]["model"])
