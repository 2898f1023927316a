"""The harness against the real page: adapter assertion, a run through the form, cancelling, and clear failures."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from harness import RunError, SetupError
from harness.arms import ablate
from harness.page.adapter import assert_adapter
from harness.page.browser import AdapterProfile
from harness.page.run import PageRunner
from harness.page.scenario import Scenario
from harness.site.build import Site

pytestmark = pytest.mark.browser
FLAGS = ["--a-flag"]


@pytest.fixture(scope="module")
def runner(browser: Browser, server_url: str, site: Site) -> Iterator[PageRunner]:
    assert site.model("smollm2") is not None, "the demo model is part of the set-up: make setup fetches it"
    with PageRunner(browser, server_url, AdapterProfile.SOFTWARE, FLAGS) as runner:
        yield runner


def test_the_adapter_is_asserted_by_computing(browser: Browser, server_url: str) -> None:
    page = browser.new_page()
    page.goto(server_url + "manifest.json")
    adapter = assert_adapter(page, AdapterProfile.SOFTWARE)
    assert adapter.is_software
    assert "swiftshader" in str(adapter)
    with pytest.raises(SetupError, match="hardware profile got"):
        assert_adapter(page, AdapterProfile.HARDWARE, patience_s=0)
    page.goto("data:text/html,")  # not a secure context
    with pytest.raises(SetupError, match="secure context"):
        assert_adapter(page, AdapterProfile.SOFTWARE)
    page.close()


def test_a_run_through_the_form(runner: PageRunner) -> None:
    said: list[str] = []
    scenario = Scenario(
        "What is the capital of France?", tokens=5, kv="grow", policy="bucket", top_logits=2, stop=("|",)
    )
    record = runner.run(scenario, said.append)
    asked = {"tokens": 5, "kv": "grow", "policy": "bucket", "stop": ["|"], "top_logits": 2, "raw": False}
    assert {name: record["scenario"][name] for name in asked} == asked
    assert record["environment"]["flags"] == FLAGS
    assert record["environment"]["cross_origin_isolated"] is True
    assert len(record["token_ids"]) == 5
    assert record["text"] == "".join(said)
    assert all(len(token["top_logits"]) == 2 for token in record["tokens"])


def test_a_workload_through_the_form(runner: PageRunner) -> None:
    scenario = Scenario(
        workload="kv16", start=300, tokens=4, kv="grow", policy="bucket", policy_options={"era": "A"}, budget_mib=900
    )
    record = runner.run(scenario)
    asked = {"workload": "kv16", "start": 300, "tokens": 4, "policy_options": {"era": "A"}, "budget_mib": 900}
    assert {name: record["scenario"][name] for name in asked} == asked
    assert [token["position"] for token in record["tokens"]] == [300, 301, 302, 303]
    again = runner.run(Scenario(workload="kv16", start=300, tokens=4, policy="bucket"))  # static; nothing is left over
    assert again["scenario"]["policy_options"] == {}
    assert again["scenario"]["budget_mib"] is None
    assert again["token_ids"] == record["token_ids"]


def test_a_synthetic_model_and_prompts_in_ids_through_the_form(runner: PageRunner) -> None:
    said: list[str] = []
    record = runner.run(Scenario(model="synthetic:smollm2-135m:Q4_1", prompt_ids=(5, 49_151), tokens=3), said.append)
    assert (record["scenario"]["model"], record["scenario"]["sha256"]) == ("synthetic:smollm2-135m:Q4_1", None)
    assert record["prompt_ids"] == record["scenario"]["prompt_ids"] == [5, 49_151]
    assert record["text"] == "".join(said) == "".join(f"<{token_id}>" for token_id in record["token_ids"])
    assert record["memory"]["by_role"]["weights"]["in_use_bytes"] >= 134_479_872 * 6 // 8  # u4m
    other = runner.run(Scenario(model="synthetic:smollm2-135m", prompt_length=12, tokens=2))
    assert (other["scenario"]["model"], len(other["prompt_ids"])) == ("synthetic:smollm2-135m", 12)
    with pytest.raises(RunError, match="prompt_ids has 49,152; the ids of synthetic:smollm2-135m go from 0 to 49,151"):
        runner.run(Scenario(model="synthetic:smollm2-135m", prompt_ids=(49_152,)))
    real = runner.run(Scenario("1, 2, 3,", tokens=2, raw=True))  # nothing is left in the form
    assert (real["scenario"]["prompt_ids"], real["scenario"]["prompt_length"]) == (None, None)
    assert real["scenario"]["sha256"]


def test_launches_digests_and_a_trace_through_the_form(runner: PageRunner) -> None:
    launch = {"shared_pass": "false", "submit_every": "32", "params": "uniform_pool", "replay": "False"}
    asked = Scenario("1, 2, 3,", tokens=6, raw=True, launch=launch, digest=True, trace=True, pool_trace=True)
    slow = runner.run(asked)
    typed = {"shared_pass": False, "submit_every": 32, "params": "uniform_pool", "replay": False}
    assert slow["scenario"]["launch"] == typed
    assert typed.items() <= slow["launch"]["options"].items()
    events = json.loads(runner.trace())["traceEvents"]
    assert {"encode", "submit", "wait"} <= {event["name"] for event in events if event["ph"] == "X"}
    assert runner.pool_trace().startswith('stepwell-trace 1 {"policy": "adaptive", "options": {}')
    fast = runner.run(Scenario("1, 2, 3,", tokens=6, raw=True))  # nothing of the run before is left in the form
    assert fast["scenario"]["launch"] == {}
    assert fast["token_ids"] == slow["token_ids"]
    assert "digest" not in fast["tokens"][0]
    assert fast["launch"]["plans"]["replayed"] > slow["launch"]["plans"]["replayed"] == 0
    assert max(token["passes"] for token in slow["tokens"]) > max(token["passes"] for token in fast["tokens"])
    with pytest.raises(RunError, match="has no trace"):
        runner.trace()
    with pytest.raises(RunError, match="has no trace of its pool"):
        runner.pool_trace()


def test_time_on_the_gpu_through_the_form(runner: PageRunner) -> None:
    scenario = Scenario("1, 2, 3,", tokens=3, raw=True, gpu_time=True)
    if "timestamp-query" in runner.run(Scenario("1", tokens=1, raw=True))["environment"]["features"]:
        first, *rest = (token["gpu_ms"] for token in runner.run(scenario)["tokens"])
        assert first > 0
        assert sum(rest) > 0  # of two steps; which token shows it depends on how far ids lag
    else:
        with pytest.raises(RunError, match="timestamp-query"):
            runner.run(scenario)


def test_gpu_time_per_kernel_through_the_form(runner: PageRunner) -> None:
    """The demo model's table; the browser of these tests may round the GPU's clock, and the record says so."""
    record = runner.run(Scenario("1, 2, 3,", tokens=4, raw=True, kernel_times=True))
    kernels = record["kernels"]
    assert kernels["launches_per_token"] == record["tokens"][-1]["launches"] == 274
    rows = kernels["rows"]
    assert sum(row["launches"] for row in rows) == 274
    for part in ("us", "net_us"):  # times are the machine's: only how they belong together is told here
        assert kernels[f"{part}_per_token"] == pytest.approx(sum(row[f"{part}_per_token"] for row in rows))
    assert all(row["share"] * kernels["net_us_per_token"] == pytest.approx(row["net_us_per_token"]) for row in rows)
    assert kernels["position"] == record["tokens"][-1]["position"]
    assert kernels["coarse_clock"] == (kernels["clock_us"] is None or kernels["clock_us"] >= 10)
    layers, hidden, turns_bytes = 30, 576, 20 * 32 * 2 * 4
    vectors_bytes = (2 * layers + 1) * 4 * hidden
    held = record["memory"]["by_role"]["weights"]["requested_bytes"]
    assert kernels["weights"]["bytes_per_token"] + vectors_bytes + turns_bytes == held
    products = kernels["weights"]
    assert products["launches"] == 4 * layers + 1  # of a layer q|k|v, o, gate|up and down; the logits
    assert products["net_us_per_token"] == pytest.approx(
        products["us_per_token"] - products["launches"] * kernels["pass_us"]
    )
    assert products["gb_s"] == pytest.approx(products["bytes_per_token"] / products["net_us_per_token"] / 1e3)
    assert products["share_of_plain_read"] == pytest.approx(products["gb_s"] / kernels["plain_read_gb_s"])
    panel = runner.page.locator("#kernels")
    assert panel.locator("tbody tr").count() == len(rows)
    assert panel.locator(".alarm").count() == int(kernels["coarse_clock"])
    assert runner.page.locator("#kernels tbody th").all_inner_texts() == [row["node"] for row in rows]


def test_an_ablation_of_some_arms(runner: PageRunner) -> None:
    arms = ablate.choose_arms("+plan replay")
    plan = ablate.Ablation(arms=arms, rounds=1, steps=9, skip=6, base=Scenario("1, 2, 3,", raw=True))
    main, replay = ablate.run_all(plan, runner.run, lambda _: None).rows
    assert [row.difference for row in (main, replay)] == [""] * 2
    assert main.counts["passes_per_token"] == main.counts["launches_per_token"] > 200
    assert main.counts["bind_groups_per_token"] == main.counts["launches_per_token"]
    assert main.counts["uploads_per_token"] >= main.counts["launches_per_token"]
    assert replay.counts["passes_per_token"] <= 2
    assert (replay.counts["bind_groups_per_token"], replay.counts["replayed_per_token"]) == (0, 1)
    assert replay.counts["uploads_per_token"] <= 1


def test_the_next_run_starts_from_a_clean_answer(runner: PageRunner) -> None:
    said: list[str] = []
    record = runner.run(Scenario("1, 2, 3,", tokens=3, raw=True), said.append)
    assert record["text"] == "".join(said)
    assert record["scenario"]["raw"] is True
    assert record["scenario"]["kv"] == "static"


def test_ctrl_c_stops_the_run_through_the_page(runner: PageRunner) -> None:
    said: list[str] = []

    def interrupt() -> None:
        while not said:
            time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    record = runner.run(
        Scenario("Count to one thousand.", tokens=400, ban_eos=True), lambda text: said.append(text) if text else None
    )
    assert record["finish_reason"] == "cancelled"
    assert 0 < len(record["token_ids"]) < 400


def test_a_long_prompt_is_told_in_parts_and_can_be_left_between_two(runner: PageRunner) -> None:
    """A prompt of 16 steps on a CPU: some seconds each, and hardly more than one after Ctrl-C."""
    said: list[str] = []

    def follow(text: str) -> None:
        said.append(text)
        if text.endswith("of 1,024 tokens") and sum(told.endswith("of 1,024 tokens") for told in said) == 1:
            signal.raise_signal(signal.SIGINT)

    record = runner.run(Scenario("", prompt_length=1024, tokens=8, ban_eos=True), on_phase=follow)
    parts = [int(text.split(": ")[1].split()[0].replace(",", "")) for text in said if text.endswith("of 1,024 tokens")]
    assert parts == sorted(set(parts))
    assert all(done % 64 == 0 and 0 < done < 1024 for done in parts)
    assert len(record["prompt_ids"]) == 1024
    assert (record["finish_reason"], record["tokens"], record["text"]) == ("cancelled", [], "")


def test_what_the_form_refuses_is_named(runner: PageRunner) -> None:
    with pytest.raises(RunError, match="prompt=: "):
        runner.run(Scenario(""))
    with pytest.raises(RunError, match="no model 'other', only smollm2"):
        runner.run(Scenario("x", model="other"))


def test_the_pages_own_error_is_reported(runner: PageRunner, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(10))
    with pytest.raises(RunError) as caught:
        runner.run(Scenario("x", model=str(broken)))
    assert caught.value.code == "BadFile"
    assert "broken.gguf" in str(caught.value)
