"""The ablation: the arms and their order, what is counted, the statistics, and what is said about the results."""

import json
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness import RunError, SetupError
from harness.arms import ablate, ablate_report
from harness.arms.ablate import Ablation, AblationResult, choose_arms
from harness.arms.schedule import Arm
from harness.cli import app as cli
from harness.cli import page as cli_page
from harness.page.scenario import Scenario
from stepwell.launch.options import ABLATION
from tests.support.run_records import make_record
from tests.unit.harness.test_cli import FakePage, exit_code, refusal

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
TWO = choose_arms("+shared pass")


def record_of(times: list[float], *, digests: bool = False, **figures: Any) -> dict[str, Any]:
    """A record of the page; ``figures`` go into every token."""
    record = make_record(times)
    for token in record["tokens"]:
        token |= figures
        if digests:
            token["digest"] = f"{token['id']:016x}"
    record["launch"] |= {"params": "uniform_pool", "plans": {**record["launch"]["plans"], "refused": {}}}
    return record


def plan_of(arms: tuple[Arm[Any], ...] = TWO, tokens: int = 4, rounds: int = 2, skip: int = 2) -> Ablation:
    return Ablation(arms=arms, steps=tokens, rounds=rounds, skip=skip, base=Scenario("Hi"))


def found_of(plan: Ablation, *times: tuple[float, ...], **changes: dict[str, Any]) -> AblationResult:
    """One tuple of the arms' ms per round; ``changes`` by the arm's index go into each token of that arm."""
    figures = [changes.get(f"arm{i}", {}) for i in range(len(plan.arms))]
    checks = [record_of([1.0] * plan.steps, digests=True, **figure) for figure in figures]
    first, rest = [99.0] * plan.skip, plan.steps - plan.skip
    rounds = [tuple(record_of(first + [ms] * rest, **figures[i]) for i, ms in enumerate(turn)) for turn in times]
    return AblationResult(plan, tuple(checks), tuple(rounds))


def test_arms_are_those_of_the_package_and_main_always_runs() -> None:
    assert [(arm.name, arm.settings) for arm in choose_arms(None)] == list(ABLATION)
    assert [arm.name for arm in choose_arms(" +plan replay, +shared pass")] == ["main", "+shared pass", "+plan replay"]
    with pytest.raises(SetupError, match=r"no arm 'replay'; there are main, \+shared pass"):
        choose_arms("replay")


def test_every_arm_is_a_greedy_run_with_its_launch_options() -> None:
    base = Scenario("Hi", kv="grow", policy="bucket", raw=True)
    plan = Ablation(arms=choose_arms(None), steps=24, rounds=1, base=base)
    main, replay = (plan.scenario(plan.arms[i], digest=bool(i)) for i in (0, 6))
    assert main == Scenario(
        "Hi", tokens=24, kv="grow", policy="bucket", raw=True, ban_eos=True,
        launch={
            "shared_pass": "False", "bind_group_cache": "False", "skip_uploads": "False", "params": "uniform_pool",
            "replay": "False", "readback_depth": "0",
        },
    )  # fmt: skip
    assert replay.launch == {"submit_every": "140", "readback_depth": "0"}
    assert (main.digest, replay.digest) == (False, True)


def test_runs_that_are_too_short_are_refused() -> None:
    assert plan_of(choose_arms(None), tokens=16, skip=8).lag == 4
    with pytest.raises(SetupError, match=r"15 tokens: 8 are warm-up, and times are means of 4 .* for 16"):
        plan_of(choose_arms(None), tokens=15, skip=8)
    assert plan_of().lag == 1


def test_digests_first_then_rounds_in_rotating_order() -> None:
    plan = plan_of(choose_arms("+shared pass,+skip uploads"), rounds=3)
    order: list[tuple[str, bool]] = []
    names = {json.dumps(dict(plan.scenario(arm).launch)): arm.name for arm in plan.arms}
    said: list[str] = []

    def run(scenario: Scenario) -> dict[str, Any]:
        order.append((names[json.dumps(dict(scenario.launch))], scenario.digest))
        return record_of([1.0] * 4, digests=scenario.digest)

    found = ablate.run_all(plan, run, said.append)
    main, shared, skip = (arm.name for arm in plan.arms)
    assert order[:3] == [(main, True), (shared, True), (skip, True)]
    assert [name for name, _ in order[3:]] == [main, shared, skip, shared, skip, main, skip, main, shared]
    assert not any(digest for _, digest in order[3:])
    assert said[0] == "digests, 1 of 3: main"
    assert said[-1] == "round 3 of 3: +shared pass"
    assert len(found.rounds) == 3
    assert all(row.bit_identical for row in found.rows)


def test_a_run_that_ends_early_is_an_error() -> None:
    with pytest.raises(RunError, match=r"main gave 3 of 4 tokens \(length\)"):
        ablate.run_all(plan_of(), lambda _: record_of([1.0] * 3, digests=True), lambda _: None)


def test_complete_rounds_survive_a_cancelled_one() -> None:
    answers = [record_of([1.0] * 4, digests=True) for _ in range(5)] + [
        {**record_of([1.0]), "finish_reason": "cancelled"}
    ]
    found = ablate.run_all(plan_of(rounds=9), lambda _: answers.pop(0), lambda _: None)
    assert len(found.rounds) == 1
    assert "stopped: 1 of 9 rounds are complete." in list(ablate_report.notes(found))
    cancelled = {**record_of([1.0]), "finish_reason": "cancelled"}
    with pytest.raises(RunError, match="before the first round"):
        ablate.run_all(plan_of(), lambda _: cancelled, lambda _: None)


def test_figures_are_of_the_counted_tokens_and_ratios_are_paired_by_round() -> None:
    plan = plan_of(tokens=6, rounds=3)
    found = found_of(
        plan, (10, 5), (30, 10), (20, 16), arm0={"passes": 9, "uploads": 9}, arm1={"passes": 2, "uploads": 3}
    )
    main, shared = found.rows
    assert main.to_main.values == (1, 1, 1)
    assert main.to_previous is None
    assert shared.to_main.values == (2, 3, 1.25)
    assert (shared.to_main.median, shared.to_main.interval) == (2, (1.25, 3))
    assert shared.to_previous == shared.to_main
    assert (main.ms, main.tokens_per_s, shared.ms) == (20, 50, 10)
    assert (main.counts["passes_per_token"], shared.counts["passes_per_token"]) == (9, 2)
    assert shared.counts["uploads_per_token"] == 3
    assert shared.encode_ms == 1  # a tenth of ms, by make_record
    assert shared.counts["launches_per_token"] == 7


def test_tokens_that_arrive_in_bursts_have_the_time_that_they_took() -> None:
    plan = plan_of(choose_arms("+readback K=4"), tokens=8 + 16 + 4, skip=8)
    burst = record_of([50.0] * 8 + [0.0, 0.0, 0.0, 40.0] * 4 + [0.0] * 4)  # the last four: nothing is issued any more
    assert plan.typical_ms(burst) == 10
    assert median(token["ms"] for token in burst["tokens"][8:]) == 0  # what the median alone would say
    assert len(plan.counted(burst)) == 16


def test_any_difference_is_found_and_named() -> None:
    plan = plan_of()
    found = found_of(plan, (1, 1), (1, 1))
    assert found.rows[1].difference == ""
    found.rounds[1][1]["token_ids"][3] = 7
    assert (
        AblationResult(plan, found.checks, found.rounds).rows[1].difference == "round 2, token id 3 is 7, main's is 103"
    )
    found.checks[1]["tokens"][2]["digest"] = "f" * 16
    row = AblationResult(plan, found.checks, found.rounds).rows[1]
    assert row.difference == f"logits digest 2 is {'f' * 16}, main's is {102:016x}"
    assert not row.bit_identical
    found.checks[1]["token_ids"][0] = 7
    assert "token id 0 is 7" in AblationResult(plan, found.checks, found.rounds).rows[1].difference


def test_slower_arms_and_what_did_not_happen_are_noted() -> None:
    plan = plan_of(choose_arms("+immediates,+plan replay"), rounds=2)
    found = found_of(plan, (10, 10, 20), (10, 9, 20))
    notes = list(ablate_report.notes(found))
    assert any(note.startswith("2 rounds: the intervals") for note in notes)
    assert "+plan replay is slower than the arm before it: 0.475 [0.450, 0.500] times as fast." in notes
    assert "+immediates: this device has no immediates; parameters went through uniform_pool." in notes
    assert "+plan replay: no step was replayed (no reason is given)." in notes
    assert not any(note.startswith("main") for note in notes)
    found.checks[2]["launch"] |= {"params": "immediates", "plans": {"refused": {"prefill": 2}}}
    for record in found.rounds[0]:
        for token in record["tokens"]:
            token["replayed"] = 1
    assert (
        "+plan replay: no step of the run with digests was replayed (prefill: 2): they say less."
        in ablate_report.notes(AblationResult(plan, found.checks, found.rounds))
    )


def test_the_files_have_what_was_asked_for() -> None:
    found = found_of(plan_of(), (10, 5), (30, 10))
    data = json.loads(json.dumps(ablate_report.as_json(found), allow_nan=False))
    assert data["environment"] == found.reference["environment"]
    wanted = {
        "name", "passes_per_token", "bind_groups_per_token", "uploads_per_token", "encode_ms", "tokens_per_s",
        "paired_ratio", "ci_low", "ci_high", "bit_identical",
    }  # fmt: skip
    assert all(wanted <= set(arm) for arm in data["arms"])
    assert [(arm["name"], arm["paired_ratio"], arm["bit_identical"]) for arm in data["arms"]] == [
        ("main", 1.0, True),
        ("+shared pass", 2.5, True),
    ]
    assert [(run["round"], run["arm"], run["ms"][-1]) for run in data["runs"]] == [
        (1, "main", 10), (1, "+shared pass", 5), (2, "main", 30), (2, "+shared pass", 10),
    ]  # fmt: skip
    text = ablate_report.markdown(found)
    assert (
        "| +shared pass | 0 | 0 | 0 | 0 | 0.75 | 133.33 | 2.500 [2.000, 3.000] | 2.500 [2.000, 3.000] | yes |" in text
    )
    assert "software adapter: its times are those of a CPU" in text
    assert "Chromium 156" in text
    assert "python -m harness ablate --model smollm2 --tokens 4 --rounds 2 --kv static --policy adaptive" in text
    assert text.startswith("# Ablation of the launch path: tiny, static KV, ")
    console = Console(width=80, record=True, file=StringIO())
    console.print(ablate_report.table(found))
    assert "+shared pass    0    0     0    0 0.75 133.33 2.500 2.00-3.00 2.500" in console.export_text()


def test_the_table_of_all_arms_fits_80_columns() -> None:
    plan = plan_of(choose_arms(None), tokens=10, skip=2)
    counts = {"passes": 274, "bind_groups_created": 274, "uploads": 274, "submits": 274}
    found = found_of(plan, (4.05,) * 8, (4.15,) * 8, **{f"arm{i}": counts for i in range(8)})
    console = Console(width=80, record=True, file=StringIO())
    console.print(ablate_report.table(found))
    shown = console.export_text()
    assert all(arm.name in shown for arm in plan.arms)
    assert "…" not in shown


def test_the_command_runs_checks_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = FakePage(*(record_of([9.0] * 10, digests=turn == 0) for turn in (0, 1, 2) for _ in TWO))
    page.install(monkeypatch)
    files = {name: tmp_path / "deep" / f"ablate.{name}" for name in ("json", "markdown")}
    arguments = [
        "ablate",
        "--arms",
        "+shared pass",
        "--tokens",
        "10",
        "--rounds",
        "2",
        "--kv",
        "grow",
        "--kv-type",
        "f16",
        "--prompt",
        "Hi",
    ]
    for name, path in files.items():
        arguments += [f"--{name}", str(path)]
    done = runner.invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert "2 arms gave the same 10 token ids in 3 runs each" in done.output
    assert "Software adapter" in done.output
    assert [scenario.digest for scenario in page.scenarios] == [True, True, False, False, False, False]
    asked = Scenario("Hi", tokens=10, kv="grow", kv_type="f16", ban_eos=True)
    assert [scenario.but(digest=False, launch={}) for scenario in page.scenarios] == [asked] * 6
    data = json.loads(files["json"].read_text())
    assert (data["rounds"], data["kv"], data["kv_type"]) == (2, "grow", "f16")
    text = files["markdown"].read_text()
    assert text.startswith("# Ablation of the launch path: tiny, grow f16 KV, google swiftshader")
    assert "--kv grow --kv-type f16 --policy" in text


def test_an_arm_that_differs_fails_and_is_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record_of([9.0] * 10, digests=turn == 0) for turn in (0, 1) for _ in TWO]
    records[1]["tokens"][4]["digest"] = "0" * 16
    FakePage(*records).install(monkeypatch)
    monkeypatch.setattr(cli_page.console, "width", 200, raising=False)
    out = tmp_path / "ablate.json"
    arguments = ["--arms", "+shared pass", "--tokens", "10", "--rounds", "1", "--json", str(out)]
    assert exit_code(monkeypatch, "ablate", *arguments) == 1
    said = capsys.readouterr().err
    assert "Divergence: +shared pass: logits digest 4 is 0000000000000000, main's is" in said
    assert "✓" not in said
    assert [arm["bit_identical"] for arm in json.loads(out.read_text())["arms"]] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arms", "nope"], "no arm 'nope'"),
        (["--tokens", "9"], "ask for 16 or more"),
        (["--policy", "nope"], "nope"),
        (["--model", "/gone.gguf"], "/gone.gguf"),
        (["--rounds", "0"], "rounds"),
    ],
)
def test_bad_ablations_are_refused_before_anything_starts(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(monkeypatch, capsys, "ablate", *arguments)
