"""``python -m stepwell.replay``: the figures it prints and writes, traces in and out, and its refusals."""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepwell.replay.cli import main

KEYS = {
    "creates_per_token",
    "mib_per_token",
    "max_creates_in_token",
    "max_mib_in_token",
    "peak_reserved_bytes",
    "peak_over_live",
    "mean_over_live",
    "mean_reserved_bytes",
    "misses_over_oracle",
    "evictions",
    "ranges",
}
ALL = ["adaptive", "bucket", "simple", "exact", "pow2", "lazy_release", "disabled", "bucket-A", "bucket-C"]


def test_every_policy_over_the_second_crossing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["simulate", "--workload", "kv64", "--from", "2040", "--to", "2060", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert list(document) == ["workload", "policies"]
    assert document["workload"] == "kv64"
    assert list(document["policies"]) == ALL
    for found in document["policies"].values():
        assert set(found) == KEYS
        assert [(row["from"], row["to"]) for row in found["ranges"]] == [(2041, 2048), (2049, 2060)]
        assert all(set(row) == {"from", "to", "creates_per_token"} for row in found["ranges"])
    bucket = document["policies"]["bucket"]
    assert bucket["ranges"][0]["creates_per_token"] == pytest.approx((64 + 6 + 7 * 44) / 8)
    assert bucket["ranges"][1]["creates_per_token"] == pytest.approx((2 * 64 + 10 * 54) / 12)
    assert bucket["max_creates_in_token"] == 64
    assert bucket["max_mib_in_token"] == 64 * 8
    assert document["policies"]["adaptive"]["max_creates_in_token"] <= 1
    text = capsys.readouterr()
    lines = text.out.splitlines()
    assert [line.split()[0] for line in lines[1:11]] == [*ALL, "clairvoyant"]
    assert lines[12].startswith("creates/token at S")
    assert "10/10" in text.err


def test_a_trace_gives_what_its_workload_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, of_trace, of_workload = tmp_path / "kv16.trace.gz", tmp_path / "a.json", tmp_path / "b.json"
    span = ["--workload", "kv16", "--from", "2100", "--to", "2120"]
    assert main(["trace", *span, str(trace)]) == 0
    assert "events" in capsys.readouterr().err
    assert main(["simulate", "--workload", str(trace), "--policy", "bucket", "--json", str(of_trace)]) == 0
    assert main(["simulate", *span, "--policy", "bucket", "--json", str(of_workload)]) == 0
    first, second = (json.loads(path.read_text())["policies"]["bucket"] for path in (of_trace, of_workload))
    assert first == second
    assert first["ranges"] == [{"from": 2101, "to": 2120, "creates_per_token": (16 + 6 + 19 * 6) / 20}]


def test_budget_and_options(tmp_path: Path) -> None:
    def peak(*arguments: str) -> dict[str, float]:
        out = tmp_path / "out.json"
        span = ["--workload", "kv64", "--from", "2100", "--to", "2110", "--policy", "bucket"]
        assert main(["simulate", *span, *arguments, "--json", str(out)]) == 0
        found: dict[str, float] = json.loads(out.read_text())["policies"]["bucket"]
        return found

    assert peak()["creates_per_token"] == pytest.approx((64 + 6 + 9 * 54) / 10)
    assert peak("--option", "limits=8 MiB:64, 64 KiB:8")["max_creates_in_token"] == 0
    eras = peak("--option", "era=A"), peak("--option", "era=C")
    assert eras[0]["max_creates_in_token"] == eras[1]["max_creates_in_token"] == 54
    assert peak("--budget", "1100")["peak_reserved_bytes"] <= 1100 * 1024 * 1024


def test_clairvoyant_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["simulate", "--workload", "static", "--policy", "clairvoyant", "--json", str(out)]
    assert main(arguments) == 0
    found = json.loads(out.read_text())["policies"]["clairvoyant"]
    assert found["misses_over_oracle"] == 1
    assert len(found["ranges"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--policy", "lru"], "'lru': choose all or one of adaptive, bucket"),
        (["simulate", "--workload", "kv65"], "'kv65': neither one of kv64, kv16, sawtooth, static nor a trace file"),
        (["simulate", "--from", "9000"], "need 1 <= from <= to"),
        (["simulate", "--option", "era=A"], "--option goes with one policy"),
        (["simulate", "--policy", "bucket", "--option", "era"], "write NAME=VALUE"),
        (["simulate", "--policy", "bucket", "--option", "era=Z", "--to", "1030"], "must be one of A, B, C"),
        (["simulate", "--policy", "bucket", "--budget", "-1", "--to", "1030"], "--budget -1.0: it must be more than 0"),
        (["simulate", "--policy", "bucket", "--budget", "nan", "--to", "1030"], "--budget nan: it must be more than 0"),
        (["bench", "--rounds", "0"], "--rounds 0: it must be 1 or more"),
        (["simulate", "--json", "/no/such/folder/out.json"], "there is no folder /no/such/folder"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_a_damaged_trace_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "cut.trace"
    trace.write_text("stepwell-trace 1 {}\nb 1\n+ 4096 a\n")
    for arguments in ([], ["--from", "3"]):
        assert main(["simulate", "--workload", str(trace), "--policy", "simple", *arguments]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: cut.trace ends after 2 events without its end mark")
    assert second.startswith("error: --from and --to cut workloads")


def test_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest of the rounds, less the loop, per pair: 3 s with the policy, 8 with the pool, 1 without either."""
    spent = (1, 2, 4, 3, 8, 9)  # two rounds of each
    clock = chain.from_iterable((100.0, 100.0 + seconds) for seconds in spent)
    monkeypatch.setattr("stepwell.replay.bench.time", SimpleNamespace(process_time=lambda: next(clock)))
    assert main(["bench", "--workload", "kv16", "--to", "1030", "--policy", "bucket", "--rounds", "2"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert "us per pair" in header
    name, policy_us, pool_us = row.replace(",", "").split()
    assert name == "bucket"
    assert next(clock, None) is None
    pairs = 16 + 6 * (32 * 6 + 16)  # the past of 1,024 positions; six steps of 32 layers, a quarter with K and V
    assert (float(policy_us), float(pool_us)) == pytest.approx((2e6 / pairs, 7e6 / pairs), abs=0.005)


def test_as_a_program_with_worker_processes() -> None:
    program = [sys.executable, "-m", "stepwell.memory"]
    shown = subprocess.run([*program, "--help"], capture_output=True, text=True, check=True).stdout
    for word in ("simulate", "bench", "trace", "kv64", "sawtooth", "adaptive", "growth", "bucket-A", "clairvoyant"):
        assert word in shown
    arguments = ["simulate", "--workload", "static", "--to", "2", "--jobs", "2"]
    lines = subprocess.run([*program, *arguments], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:11]] == [*ALL, "clairvoyant"]
