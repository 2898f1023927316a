"""What-if: the recommendations follow docs/pool.md's figures, and every figure is the simulator's."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from stepwell.errors import BadRequest, BadTrace
from stepwell.gpu.fake_device import FakeDevice
from stepwell.memory.buffer import Role
from stepwell.memory.policies import POLICIES, make_policy
from stepwell.memory.pool import BufferPool
from stepwell.replay.cli import main
from stepwell.replay.simulator import simulate
from stepwell.replay.traces import Event, TraceRecorder, write_trace
from stepwell.replay.what_if import (
    Costs,
    Setting,
    WhatIf,
    compare,
    recorded_costs,
    recorded_setting,
    settings,
    survey,
    try_setting,
)
from stepwell.replay.what_if_html import page
from stepwell.replay.what_if_outcome import Outcome
from stepwell.replay.workloads import workload_events

MIB = 1 << 20
COSTS = recorded_costs({}, None, None)
Read = Callable[[], Iterator[Event]]


def answer_of(read: Read, baseline: str = "bucket", budget: int | None = None, costs: Costs = COSTS) -> WhatIf:
    found = survey(read())
    outcomes = [try_setting(read(), setting, costs, found.unit, budget) for setting in settings()]
    setting, source = recorded_setting({}, baseline)
    return compare(found, outcomes, try_setting(read(), setting, costs, found.unit), source, costs, budget)


def workload(name: str, first: int | None = None, last: int | None = None) -> Read:
    return lambda: workload_events(name, first, last)


def row(answer: WhatIf, label: str) -> Outcome:
    return next(found for found in answer["settings"] if found["label"] == label)


def test_64_growing_tensors_want_adaptive() -> None:
    answer = answer_of(workload("kv64", 2030, 2066))
    assert answer["unit"] == "token"
    assert answer["recommended"] == "adaptive"
    best, baseline = row(answer, "adaptive"), answer["baseline"]
    assert best["max_creates_in_token"] <= 1
    assert best["peak_bytes"] < baseline["peak_bytes"]
    assert best["saved_ms_per_token"] == pytest.approx(baseline["ms_per_token"] - best["ms_per_token"])
    assert answer["sentence"].startswith("Take adaptive: bucket creates 49")
    eight, four = baseline["hurting"]
    assert eight["why"].startswith(
        "class 8.0 MiB (kv): 64 buffers wanted per token, the class keeps 10: 54 are created anew each token "
        "(in 18 of 34 tokens;"
    )
    assert (four["wanted"], four["kept"], four["created"], four["runs"]) == (64, 20, 44, 16)
    assert best["hurting"] == []


def test_16_growing_tensors_gain_only_where_a_class_keeps_10() -> None:
    read = workload("kv16", 2100, 2130)
    answer = answer_of(read)
    assert answer["recommended"] == "adaptive growth=1.25"  # the least memory, and never more than one in a token
    assert row(answer, "adaptive growth=1.25")["max_creates_in_token"] <= 1
    (only,) = answer["baseline"]["hurting"]
    assert (only["wanted"], only["kept"], only["created"]) == (16, 10, 6)
    below = answer_of(workload("kv16", 1600, 1620))
    assert below["recommended"] is None
    assert below["sentence"].startswith("Nothing to gain: bucket creates 0 buffers per token (about 0.00 ms)")


def test_chats_that_come_and_go_want_adaptive() -> None:
    answer = answer_of(workload("sawtooth", 1030, 1062))
    best = answer["recommended"]
    assert best is not None
    assert row(answer, best)["policy"] == "adaptive"
    assert row(answer, "adaptive")["peak_bytes"] < answer["baseline"]["peak_bytes"]
    assert row(answer, "adaptive")["saved_ms_per_token"] > 0.9 * answer["baseline"]["ms_per_token"]


def test_shapes_that_repeat_have_nothing_to_gain_but_over_no_reuse() -> None:
    answer = answer_of(workload("static"))
    assert answer["unit"] == "run"
    assert answer["recommended"] is None
    assert answer["sentence"] == (
        "Nothing to gain: bucket creates 0 buffers per run (about 0.00 ms), "
        "and no setting saves more than 0.00 ms per run."
    )
    assert answer["baseline"]["hurting"] == []
    without = answer_of(workload("static"), "disabled")
    assert without["recommended"] == "exact"  # shapes that never change need no size classes
    assert without["baseline"]["hurting"][0]["why"].endswith("ms per run over all)")
    assert "the policy keeps none" in without["baseline"]["hurting"][0]["why"]


def test_a_baseline_that_is_the_best_has_nothing_to_gain() -> None:
    answer = answer_of(workload("kv16", 2100, 2120), "adaptive")
    assert answer["recommended"] is None
    assert answer["sentence"].startswith("Nothing to gain: adaptive creates 0 buffers per token")


@pytest.mark.parametrize(("defaults_ms", "recommended"), [(0.09, "adaptive"), (0.3, "adaptive window=2")])
def test_defaults_go_before_a_setting_that_is_hardly_faster(defaults_ms: float, recommended: str) -> None:
    read = workload("kv64", 2050, 2060)
    found = survey(read())
    baseline, slower, faster = (
        try_setting(read(), setting, COSTS, found.unit)
        for setting in (Setting("bucket"), Setting("adaptive"), Setting("adaptive", {"window": "2"}))
    )
    slower["ms_per_token"], faster["ms_per_token"] = defaults_ms, 0.0
    assert compare(found, [slower, faster], baseline, "as given", COSTS)["recommended"] == recommended


def test_a_size_for_every_token_is_told_in_one_sentence() -> None:
    outcome = try_setting(workload_events("kv64", 2030, 2066), Setting("exact"), COSTS, "token")
    (only,) = outcome["hurting"]
    assert (only["wanted"], only["created"], only["role"]) == (64, 64, "kv")
    assert only["why"].startswith(
        "34 sizes of 4.0 MiB to 4.0 MiB (kv): 64 buffers wanted per token, each time of a new"
    )


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.label)
def test_the_figures_are_the_simulators(setting: Setting) -> None:
    outcome = try_setting(workload_events("kv64", 2040, 2056), setting, COSTS, "token")
    replay = simulate(workload_events("kv64", 2040, 2056), make_policy(setting.policy, **setting.options))
    steady = replay.tokens[2:]
    creates, nbytes = sum(token.creates for token in steady), sum(token.created_bytes for token in steady)
    assert outcome["creates_per_token"] == sum(token.creates for token in replay.tokens) / 16
    assert outcome["mib_per_token"] == sum(token.created_bytes for token in replay.tokens) / 16 / MIB
    assert outcome["steady_creates_per_token"] == creates / 14
    assert outcome["peak_bytes"] == replay.peak_reserved_bytes
    assert outcome["ms_per_token"] == pytest.approx((creates * 100 + nbytes / MIB * 80) / 1000 / 14)
    assert outcome["series"] == [(number, token.creates) for number, token in enumerate(steady, 3)]
    told = sum(found["ms"] for found in outcome["hurting"])
    assert told <= outcome["ms_per_token"] * 1.000001
    if outcome["steady_creates_per_token"] > 2:
        assert told > 0.9 * outcome["ms_per_token"]  # the classes account for what is created


def test_settings_are_of_every_policy_and_differ() -> None:
    tried = settings()
    assert {setting.policy for setting in tried} == set(POLICIES)
    labels = [setting.label for setting in tried]
    assert len(set(labels)) == len(labels)
    assert [setting.label for setting in settings()] == labels
    for name in POLICIES:
        assert next(setting for setting in tried if setting.policy == name).options == {}


def test_a_series_is_short_and_its_mean_is_that_of_the_tokens() -> None:
    outcome = try_setting(workload_events("kv16", 2100, 2600), Setting("bucket"), COSTS, "token")
    assert len(outcome["series"]) <= 240
    assert outcome["series"][0][0] == 3
    assert outcome["series"][-1] == (498 // 3 * 3, 6)


def test_a_budget_leaves_out_what_exceeds_it() -> None:
    read = workload("kv64", 2030, 2066)
    answer = answer_of(read, budget=700 * MIB)
    assert answer["recommended"] == "adaptive"
    assert "pow2" in answer["over_budget"]
    assert all(found["peak_bytes"] <= 700 * MIB for found in answer["settings"])
    assert len(answer["settings"]) + len(answer["over_budget"]) == len(settings())
    assert answer["baseline"]["peak_bytes"] > 700 * MIB  # as it was, without the budget
    none = answer_of(read, budget=100 * MIB)
    assert none["settings"] == []
    assert none["recommended"] is None
    assert none["sentence"].startswith("No setting stays within 100.0 MiB: choose a larger budget")
    assert "No setting stays within" in page(none, "kv64")


def test_costs_are_given_or_recorded_or_assumed() -> None:
    recorded: Mapping[str, object] = {"create_us": 7, "create_us_per_mib": 3.5}
    assert recorded_costs(recorded, None, None) == Costs(7, 3.5, "recorded in the trace")
    assert recorded_costs({"create_us": 7}, None, None) == Costs(7, 0, "recorded in the trace")
    assert recorded_costs(recorded, 1.0, 2.0) == Costs(1, 2, "as given")
    assert recorded_costs({}, None, 5.0) == Costs(100, 5, "as given")
    assert (COSTS.create_us, COSTS.create_us_per_mib) == (100, 80)
    assert Costs(7, 3, "").ms(2, 4 * MIB) == pytest.approx(0.026)
    with pytest.raises(BadRequest, match=r"a cost of -1.0 µs per create; it must be 0 or more"):
        recorded_costs({}, -1.0, None)
    with pytest.raises(BadTrace, match="create_us 'much'; it must be a number of microseconds"):
        recorded_costs({"create_us": "much"}, None, None)


def test_the_baseline_is_given_or_recorded_or_assumed() -> None:
    setting, source = recorded_setting({"policy": "bucket", "options": {"era": "C"}}, None)
    assert (setting.label, source) == ("bucket era=C", "as recorded")
    assert recorded_setting({"policy": "bucket"}, "pow2") == (Setting("pow2"), "as given")
    assert recorded_setting({}, None)[0] == Setting("bucket")
    with pytest.raises(BadTrace, match=r"policy 'lru': there is none of that name.*Or pass --baseline"):
        recorded_setting({"policy": "lru"}, None)
    with pytest.raises(BadTrace, match="need a name and an object"):
        recorded_setting({"policy": "bucket", "options": 3}, None)
    with pytest.raises(BadRequest, match="policy 'lru'"):
        recorded_setting({}, "lru")


def recorded_session(path: Path, metadata: Mapping[str, object]) -> None:
    """24 tokens under ``bucket``: 24 growing tensors of 4.5 to 6 MiB, of which the class of 8 MiB keeps 10."""
    pool = BufferPool(FakeDevice(), "bucket")
    recorder = TraceRecorder(pool)
    past = []
    for token in range(24):
        pool.begin_run()
        present = [pool.acquire((4608 + 64 * token) << 10, Role.KV, site=site) for site in range(24)]
        pool.flush()
        for buffer in past:
            pool.release(buffer)
        past = present
    recorder.save(path, metadata)


def test_a_live_session_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, figures, report = tmp_path / "live.trace.gz", tmp_path / "out.json", tmp_path / "out.html"
    recorded_session(trace, {"policy": "bucket", "create_us": 50, "create_us_per_mib": 10})
    files = ["--json", str(figures), "--html", str(report)]
    assert main(["what-if", str(trace), "--jobs", "1", *files]) == 0
    shown = capsys.readouterr()
    document = json.loads(figures.read_text())
    assert document["trace"] == str(trace)
    assert document["baseline_from"] == "as recorded"
    assert document["costs_from"] == "recorded in the trace"
    assert document["baseline"]["steady_creates_per_token"] == 14
    assert document["baseline"]["ms_per_token"] == pytest.approx(14 * (50 + 8 * 10) / 1000)
    assert document["recommended"] in [found["label"] for found in document["settings"]]
    assert shown.out.startswith(document["sentence"])
    assert "24 buffers wanted per token, the class keeps 10: 14 are created anew each token" in shown.out
    assert f"Recommended: --policy {document['recommended'].split()[0]}" in shown.out
    text = report.read_text(encoding="utf-8")
    assert text.count("<polyline") == 2
    assert text.count('<th scope="row">') == len(document["settings"])
    assert "http" not in text  # self-contained
    assert "the class keeps 10" in text


def test_a_report_of_nothing_to_gain_has_one_line_and_escapes_the_name() -> None:
    text = page(answer_of(workload("static")), "<b>.trace")
    assert text.count("<polyline") == 1
    assert "Nothing to gain" in text
    assert "&lt;b&gt;.trace" in text
    assert "<b>" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "bad.trace is empty"),
        ('{"token_ids": []}', "Is it a trace?"),
        ("stepwell-trace 9 {}\n. 0\n", "this stepwell reads version 1"),
        ("stepwell-trace 1 [1]\n. 0\n", "it must be a JSON object"),
        ("stepwell-trace 1 {}\nb 1\n+ 4096 k\n", "without its end mark: it was cut off. Record it again."),
        ("stepwell-trace 1 {}\nb 1\n- 3\n. 2\n", "release of lease 3, which was never acquired"),
        ("stepwell-trace 1 {}\n+ 4096 k\n. 1\n", "no run: call the pool's begin_run before each token"),
        ("stepwell-trace 1 {}\nb 1\n+ 4096 w\n. 2\n", "no KV, activation or workspace buffer"),
        ('stepwell-trace 1 {"policy": "lru"}\nb 1\n. 1\n', "Or pass --baseline"),
        ('stepwell-trace 1 {"create_us": -4}\nb 1\n. 1\n', "a cost of -4.0 µs per create"),
    ],
)
def test_bad_traces_say_what_is_wrong(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "bad.trace"
    trace.write_text(content)
    assert main(["what-if", str(trace)]) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.trace"], "'no.trace': neither one of kv64, kv16, sawtooth, static nor a trace file. TraceRecorder"),
        (["static", "--baseline", "lru"], "policy 'lru': there is none of that name"),
        (["static", "--budget", "0"], "--budget 0.0: it must be more than 0 MiB"),
        (["static", "--create-us", "nan"], "a cost of nan µs per create"),
        (["static", "--html", "/no/such/folder/a.html"], "there is no folder /no/such/folder"),
        (["static", "--json", "/no/such/folder/a.json"], "there is no folder /no/such/folder"),
        (["static", "--from", "9", "--to", "3"], "need 1 <= from <= to"),
    ],
)
def test_refusals_of_what_if(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_help_says_how_to_record(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["what-if", "--help"])
    shown = capsys.readouterr().out
    for word in ("TraceRecorder(pool)", "--create-us-per-mib", "--budget", "--html", "create_us", "H200"):
        assert word in shown


def test_a_written_workload_gives_what_the_workload_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "kv16.trace"
    write_trace(trace, workload_events("kv16", 2100, 2112))
    assert main(["what-if", str(trace), "--jobs", "1"]) == 0
    first = capsys.readouterr().out
    assert main(["what-if", "kv16", "--from", "2100", "--to", "2112", "--jobs", "2"]) == 0
    assert capsys.readouterr().out == first
