"""Comparing arms: how they are named, the order they run in, and the figures that come out."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness import SetupError
from harness.arms import compare
from harness.arms.compare import Arm, ArmRun, Plan
from harness.cli import app as cli
from harness.cli import page as cli_page
from harness.page.scenario import Kv, Scenario
from tests.support.run_records import make_record
from tests.unit.harness.test_cli import FakePage, exit_code

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
THREE_ARMS = compare.parse_arms("adaptive,bucket:era=A,static")


def record_of(arm: str, times: list[float]) -> dict[str, Any]:
    record = make_record(times, policy=arm, kv="static" if arm == "static" else "grow")
    record["scenario"] |= {"workload": "kv64", "start": 2036, "policy": "adaptive" if arm == "static" else arm}
    return record


def test_arms_are_policies_with_options_or_the_control() -> None:
    assert list(THREE_ARMS) == [
        Arm("adaptive", Kv.GROW, "adaptive"),
        Arm("bucket:era=A", Kv.GROW, "bucket", {"era": "A"}),
        Arm("static", Kv.STATIC, "adaptive"),
    ]
    (arm,) = compare.parse_arms(" adaptive:window=4;stagger=false ")
    assert arm.options == {"window": "4", "stagger": "false"}
    with pytest.raises(SetupError, match="name=value"):
        compare.parse_arms("adaptive:window")


def test_the_order_rotates() -> None:
    plan = Plan("kv64", THREE_ARMS, (2036, 4084), tokens=8, rounds=3)
    order = [(turn, start, arm.name[0]) for turn, start, arm in plan.schedule()]
    assert [letter for _, start, letter in order if start == 2036] == list("absbsasab")
    assert [turn for turn, _, _ in order] == [0] * 6 + [1] * 6 + [2] * 6


def test_ratios_are_paired_by_round() -> None:
    plan = Plan("kv64", compare.parse_arms("bucket,static"), (2036,), tokens=5, rounds=2)
    times = {(0, "bucket"): 30, (0, "static"): 10, (1, "bucket"): 50, (1, "static"): 20}
    runs = [ArmRun(turn, 2036, arm, record_of(arm, [900, 90, 90, ms, ms])) for (turn, arm), ms in times.items()]
    bucket, static = compare.rows(plan, runs)
    assert (bucket.n, bucket.median_ms, bucket.max_ms) == (4, 40, 50)
    assert bucket.ratios == (3.0, 2.5)
    assert bucket.ratio == 2.75
    assert static.ratios == (1.0, 1.0)
    assert (bucket.created_mean, bucket.created_max) == (0.5, 1)  # tokens 3 and 4 of the record: 1 and 0
    data = json.loads(json.dumps(compare.as_json(plan, runs)))
    assert [row["arm"] for row in data["rows"]] == ["bucket", "static"]
    assert len(data["runs"]) == 4
    console = Console(width=200, record=True, file=StringIO())
    console.print(compare.table(plan, runs))
    shown = console.export_text()
    assert "2.75 [2.50, 3.00]" in shown
    assert "1.25" in shown  # max ÷ median


def test_without_static_the_first_arm_is_the_control() -> None:
    assert Plan("kv64", compare.parse_arms("bucket,adaptive"), (9,), 5, 1).control == "bucket"
    assert Plan("kv64", THREE_ARMS, (9,), 5, 1).control == "static"


def test_the_command_runs_every_arm_and_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = FakePage(*(record_of(arm, [900, 90, 90, 10, 10]) for arm in ("adaptive", "static", "static", "adaptive")))
    page.install(monkeypatch)
    out = tmp_path / "compare.json"
    arguments = ["compare", "--arms", "adaptive,static", "--from", "2036", "--tokens", "5", "--rounds", "2"]
    done = runner.invoke(cli.app, [*arguments, "--budget", "1500", "--json", str(out)])
    assert done.exit_code == 0, done.output
    shared = {"workload": "kv64", "start": 2036, "tokens": 5, "policy": "adaptive", "budget_mib": 1500}
    assert page.scenarios == [Scenario(kv=kv, **shared) for kv in (Kv.GROW, Kv.STATIC, Kv.STATIC, Kv.GROW)]
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
        (["--tokens", "3"], "ask for 4 or more"),
        (["--workload", "kv9"], "kv64, kv16"),
    ],
)
def test_bad_comparisons_are_refused_before_anything_starts(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_page, "open_page", lambda *_: pytest.fail("a browser was started"))
    monkeypatch.setattr(cli_page.console, "width", 200, raising=False)
    assert exit_code(monkeypatch, "compare", *arguments) == 2
    assert words in capsys.readouterr().err
