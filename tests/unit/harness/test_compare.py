"""Comparing arms: how they are named, the order they run in, and the figures that come out."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness.arms import compare
from harness.arms.compare import Comparison
from harness.arms.figures import figures
from harness.arms.schedule import Arm
from harness.cli import app as cli
from harness.page.scenario import Scenario
from tests.support.run_records import make_record
from tests.unit.harness.test_cli import FakePage, exit_code, refusal

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
THREE_ARMS = compare.parse_arms("adaptive,bucket:era=A,static")


def plan_of(arms: tuple[Arm[Any], ...] = THREE_ARMS, *starts: int, tokens: int = 5, rounds: int = 2) -> Comparison:
    return Comparison(arms=arms, starts=starts, steps=tokens, rounds=rounds, base=Scenario(workload="kv64"))


def record_of(arm: str, times: list[float]) -> dict[str, Any]:
    record = make_record(times, policy=arm, kv="static" if arm == "static" else "grow")
    record["scenario"] |= {"workload": "kv64", "start": 2036, "policy": "adaptive" if arm == "static" else arm}
    return record


def test_arms_are_policies_with_options_or_the_control() -> None:
    assert list(THREE_ARMS) == [
        Arm("adaptive", {"kv": "grow", "policy": "adaptive", "policy_options": {}}),
        Arm("bucket:era=A", {"kv": "grow", "policy": "bucket", "policy_options": {"era": "A"}}),
        Arm("static", {"kv": "static", "policy": "adaptive", "policy_options": {}}),
    ]


def test_ratios_are_paired_by_round() -> None:
    plan = plan_of(compare.parse_arms("bucket,static"), 2036)
    times = {(0, "bucket"): 30, (0, "static"): 10, (1, "bucket"): 50, (1, "static"): 20}
    runs = []
    for turn in plan:
        ms = times[turn.round, turn.arm.name]
        runs.append(plan.run_of(turn, record_of(turn.arm.name, [900, 90, 90, ms, ms])))
    bucket, static = figures(plan, runs)
    assert (bucket.n, bucket.median_ms, bucket.max_ms) == (4, 40, 50)
    assert bucket.ratios["static"].values == (3.0, 2.5)
    assert bucket.ratios["static"].median == 2.75
    assert static.ratios["static"].values == (1.0, 1.0)
    assert (bucket.created_mean, bucket.created_max) == (0.5, 1)  # tokens 3 and 4 of the record: 1 and 0
    data = json.loads(json.dumps(compare.as_json(plan, runs)))
    assert [(row["arm"], row["ratios"], row["ratio"]) for row in data["rows"]] == [
        ("bucket", [3.0, 2.5], 2.75),
        ("static", [1.0, 1.0], 1.0),
    ]
    assert len(data["runs"]) == 4
    console = Console(width=200, record=True, file=StringIO())
    console.print(compare.table(plan, runs))
    shown = console.export_text()
    assert "2.75 [2.50, 3.00]" in shown
    assert "1.25" in shown  # max ÷ median


def test_without_static_the_first_arm_is_the_control() -> None:
    assert plan_of(compare.parse_arms("bucket,adaptive")).control == "bucket"
    assert plan_of(THREE_ARMS).control == "static"


def test_the_command_runs_every_arm_and_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = FakePage(*(record_of(arm, [900, 90, 90, 10, 10]) for arm in ("adaptive", "static", "static", "adaptive")))
    page.install(monkeypatch)
    out = tmp_path / "compare.json"
    arguments = ["compare", "--arms", "adaptive,static", "--from", "2036", "--tokens", "5", "--rounds", "2"]
    done = runner.invoke(cli.app, [*arguments, "--budget", "1500", "--json", str(out)])
    assert done.exit_code == 0, done.output
    shared = {"workload": "kv64", "start": 2036, "tokens": 5, "policy": "adaptive", "budget_mib": 1500}
    assert page.scenarios == [Scenario(kv=kv, **shared) for kv in ("grow", "static", "static", "grow")]
    assert "1.00 [1.00, 1.00]" in done.output
    assert len(json.loads(out.read_text())["runs"]) == 4


def test_arms_that_computed_different_things_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record_of(arm, [900, 90, 90, 10, 10]) for arm in ("adaptive", "static")]
    records[1]["token_ids"][2] = 7
    FakePage(*records).install(monkeypatch)
    arguments = ["compare", "--arms", "adaptive,static", "--tokens", "5", "--rounds", "1"]
    assert exit_code(monkeypatch, *arguments) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arms", "adaptive,nope"], "nope"),
        (["--arms", "adaptive:colour=red"], "colour"),
        (["--arms", "bucket,bucket"], "named twice"),
        (["--arms", " , "], "there is no arm to run"),
        (["--arms", "adaptive:window"], "arm 'adaptive:window': 'window' is not name=value"),
        (["--tokens", "3"], "ask for 4 or more"),
        (["--workload", "kv9"], "kv64, kv16"),
    ],
)
def test_bad_comparisons_are_refused_before_anything_starts(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(monkeypatch, capsys, "compare", *arguments)
