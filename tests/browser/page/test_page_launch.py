"""The page's launch path: its switches, counters, A/B and trace, with the stub in place of the worker."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.page.stub_page import Opened, open_page, run, sent, settle, state, table_rows

pytestmark = pytest.mark.browser
__all__ = ["open_page"]  # the fixture

MAIN = {"shared_pass": False, "bind_group_cache": False, "replay": False, "params": "uniform_pool", "readback_depth": 0}


def ready(open_page: Opened, query: str = "?tokens=4", **options: Any) -> Page:
    page = open_page(query, **options)
    state(page, "ready")
    return page


def asked(page: Page) -> list[dict[str, Any]]:
    return [message["request"] for message in sent(page, "run")]


def compare(page: Page, rounds: int) -> None:
    page.fill("#ab-rounds", str(rounds))
    page.click("#ab-run")
    state(page, "done")
    settle(page)


# ---- the switches ------------------------------------------------------------------------------------------------


def test_the_form_lists_the_packages_options_with_their_defaults(open_page: Opened) -> None:
    page = ready(open_page)
    found = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('[name^="launch-"]')].map(e => [
          e.name.slice(7), [e.type, e.type === "checkbox" ? e.defaultChecked : e.value || e.placeholder]]))"""
    )
    assert found == {
        "shared_pass": ["checkbox", True], "bind_group_cache": ["checkbox", True], "replay": ["checkbox", True],
        "submit_every": ["number", "0"], "submit_every_ms": ["number", "0"], "params": ["select-one", "auto"],
        "readback_depth": ["number", "auto"], "bind_groups": ["number", "2048"],
    }  # fmt: skip
    switches = page.locator("#launch .option").first
    assert switches.inner_text().splitlines() == ["Shared compute pass", "what shared_pass does"]
    choices = page.locator("[name=launch-params] option").all_text_contents()
    assert choices == ["auto (default)", "uniform_pool", "call_site", "immediates"]


def test_only_what_differs_from_the_default_is_sent(open_page: Opened) -> None:
    page = ready(open_page)
    run(page, prompt="Hi")
    untouched = asked(page)[-1]
    assert {"launch", "digest", "gpu_time", "trace", "kernel_times"} & untouched.keys() == set()
    page.locator("#launch summary").click()
    page.uncheck("[name=launch-replay]")
    page.fill("[name=launch-submit_every]", "64")
    page.fill("[name=launch-submit_every_ms]", "0.0")  # its default, typed
    page.fill("[name=launch-bind_groups]", "2048")  # also
    page.fill("[name=launch-readback_depth]", "0")  # not the default: that is automatic
    page.select_option("[name=launch-params]", "call_site")
    page.check("[name=digest]")
    page.check("[name=gpu_time]")
    run(page)
    launch = {"replay": False, "submit_every": 64, "readback_depth": 0, "params": "call_site"}
    assert asked(page)[-1] == {**untouched, "launch": launch, "digest": True, "gpu_time": True}
    page.get_by_role("button", name="Defaults").click()
    page.uncheck("[name=digest]")
    page.uncheck("[name=gpu_time]")
    run(page)
    assert asked(page)[-1] == untouched
    assert open_page.problems == []


def test_all_off_is_the_first_arm_of_the_ablation(open_page: Opened) -> None:
    page = ready(open_page)
    page.get_by_role("button", name="All off (main)").focus()
    page.keyboard.press("Enter")
    page.focus("[name=launch-shared_pass]")
    run(page)
    page.keyboard.press("Tab")  # the button Run keeps the focus where it was pressed
    page.focus("[name=launch-shared_pass]")
    page.keyboard.press("Space")
    run(page)
    assert [request["launch"] for request in asked(page)] == [
        MAIN, {name: value for name, value in MAIN.items() if name != "shared_pass"}
    ]  # fmt: skip
    assert [row[0] for row in table_rows(page, "runs")] == ["A adaptive, grow, main", "B adaptive, grow, +shared pass"]


def test_the_query_string_has_the_switches(open_page: Opened) -> None:
    page = ready(
        open_page, "?tokens=3&launch-replay=0&launch-submit_every=64&launch-params=immediates&digest=1&trace=1"
    )
    run(page)
    request = asked(page)[0]
    assert request["launch"] == {"replay": False, "submit_every": 64, "params": "immediates"}
    assert (request["digest"], request["trace"], request.get("gpu_time")) == (True, True, None)
    again = ready(open_page, page.url.partition("/?")[2].join(["?", ""]))
    run(again)
    assert asked(again)[0] == request
    unknown = ready(open_page, "?launch-magic=1&launch-params=sorcery")
    expect(unknown.locator("#notices")).to_contain_text("launch-magic=1")
    expect(unknown.locator("#notices")).to_contain_text("launch-params=sorcery")
    run(unknown, tokens="3")
    assert "launch" not in asked(unknown)[0]


def test_a_workload_has_the_switches_and_no_digest(open_page: Opened) -> None:
    page = ready(open_page, "?model=kv64&start=9&tokens=4&launch-shared_pass=0&digest=1&gpu_time=1&kernel_times=1")
    page.locator("#launch summary").click()
    expect(page.locator("[name=digest]")).to_be_hidden()
    expect(page.locator("[name=kernel_times]")).to_be_hidden()
    run(page)
    (request,) = asked(page)
    assert request["launch"] == {"shared_pass": False} and request["gpu_time"] is True
    assert {"digest", "kernel_times"} & request.keys() == set()


def test_what_is_out_of_range_is_shown_and_not_sent(open_page: Opened) -> None:
    page = ready(open_page, "?launch-readback_depth=65")
    expect(page.locator("#launch details")).not_to_have_attribute("open", "")
    page.click("#run")
    expect(page.locator("#launch details")).to_have_attribute("open", "")
    assert asked(page) == []


def test_an_older_worker_has_no_launch_path_and_everything_else(open_page: Opened) -> None:
    page = ready(open_page, "?tokens=4&digest=1&trace=1", older=True)
    expect(page.locator("#launch")).to_be_hidden()
    run(page)
    assert {"launch", "digest", "trace"} & asked(page)[0].keys() == set()
    rows = {row[0]: row[1:] for row in table_rows(page, "counters")}
    assert rows["Kernel launches"] == ["244", "244", "244"]
    assert {"Steps replayed", "Immediates set", "… in passes, by the GPU's clock"} & rows.keys() == set()
    expect(page.locator("#launch")).to_be_hidden()
    assert open_page.problems == []


# ---- counters and trace ------------------------------------------------------------------------------------------


def test_counters_of_the_launch_path(open_page: Opened) -> None:
    page = ready(open_page, "?tokens=11&gpu_time=1")
    run(page)
    rows = {row[0]: row[1:] for row in table_rows(page, "counters")}
    assert rows["Bind groups reused"] == ["244", "244", "244"]
    assert rows["Uploads skipped"] == ["244", "244", "244"]
    assert rows["Immediates set"] == ["1", "1", "1"]
    assert rows["… in passes, by the GPU's clock"] == ["2.50\xa0ms"] * 3
    assert rows["Steps replayed"] == ["9 of 10 (90\xa0%)"]
    assert rows["Not replayed"] == ["recorded 1"]
    assert rows["Bindings seen before"] == ["98\xa0%"]
    assert rows["Step's scalars by"] == ["immediates"]
    assert rows["Plans"] == ["2 recorded, 1 invalidated"]
    assert rows["Bind groups kept"] == ["488, 3 evicted"]
    assert rows["Kernel variants"] == ["5 for 2 nodes"] and rows["… evicted"] == ["2"]
    assert rows["Workspaces"] == ["3\xa0MiB"]
    asides = page.locator("#launch .aside[data-option]").all_inner_texts()
    assert asides == ["1 pass", "0 new", "90\xa0%"]
    page.get_by_role("button", name="All off (main)").click()
    run(page)
    assert page.locator("#launch .aside[data-option]").all_inner_texts() == ["244 passes", "244 new", "0\xa0%"]
    rows = {row[0]: row[1:] for row in table_rows(page, "counters")}
    assert rows["Not replayed"] == ["off 10"]


def test_gpu_time_per_kernel_of_the_newest_run_that_has_it(open_page: Opened) -> None:
    page = ready(open_page, "?tokens=4")
    panel = page.locator("#kernels")
    run(page)
    expect(panel).to_be_hidden()
    page.locator("#launch summary").click()
    page.get_by_role("checkbox", name="GPU time per kernel").check()
    run(page)
    assert [request.get("kernel_times") for request in asked(page)] == [None, True]
    assert page.url.endswith("&kernel_times=1")
    expect(panel.locator(".aside")).to_have_text("run B, 24 steps at position 65")
    assert table_rows(page, "kernels") == [
        ["gate_up", "matvec", "576 x 3072 u4m", "30", "20", "13.3", "400", "3\xa0MiB", "2,000", "80\xa0%"],
        ["argmax", "argmax", "–", "1", "100", "100", "100", "–", "–", "20\xa0%"],  # noqa: RUF001
    ]
    found = panel.inner_text().replace("\xa0", " ")
    assert "90 MiB of weights per token in 400 µs: 2,000 GB/s" in found
    assert "50 % of the 4,000 GB/s of a kernel that only reads (1 GiB)" in found
    assert "All 31 launches: 500 µs net, 700 µs with their passes, of which an empty one takes 8 µs." in found
    expect(panel.locator(".alarm")).to_have_count(0)
    scroller = panel.get_by_role("region", name="GPU time per kernel of one decode step")
    expect(scroller).to_have_attribute("tabindex", "0")
    page.uncheck("[name=kernel_times]")
    scroller.evaluate("node => { node.mine = true; }")
    run(page)  # the table stays, and says whose it is
    expect(panel.locator(".aside")).to_contain_text("run B")
    assert scroller.evaluate("node => node.mine") is True
    assert open_page.problems == []


def test_a_coarse_gpu_clock_is_an_alarm(open_page: Opened) -> None:
    page = ready(open_page, "?tokens=4&kernel_times=1", software=True)
    run(page)
    expect(page.locator("#kernels [role=status]")).to_contain_text("moves in steps of 65.5 µs")
    expect(page.locator("#kernels .alarm")).to_contain_text("--enable-webgpu-developer-features")
    assert table_rows(page, "kernels")[0][8] == "–"  # noqa: RUF001


def test_the_trace_is_kept_for_scripts_and_to_download(open_page: Opened) -> None:
    page = ready(open_page)
    save = page.locator("#save-trace")
    run(page)
    expect(save).to_be_hidden()
    assert page.evaluate("stepwell.trace") is None
    page.locator("#launch summary").click()
    page.check("[name=trace]")
    run(page)
    expect(save).to_have_text("Download Chrome trace of run B")
    with page.expect_download() as download:
        save.click()
    assert download.value.suggested_filename == "stepwell-B-trace.json"
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert text == page.evaluate("stepwell.trace")
    assert json.loads(text)["traceEvents"] == [{"name": "encode", "ph": "X"}]
    page.uncheck("[name=trace]")
    run(page)
    expect(save).to_be_hidden()
    assert page.evaluate("stepwell.trace") is None


# ---- A/B ---------------------------------------------------------------------------------------------------------


def test_statistics(open_page: Opened) -> None:
    page = ready(open_page)
    found = page.evaluate(
        """async () => {
          const { pairedRatios, spread } = await import("./statistics.js");
          const ratios = pairedRatios(new Map([[2, 24], [0, 20], [5, 1]]), new Map([[0, 10], [2, 8], [3, 7]]));
          return [ratios, spread([3, 1, 2, 8]), Object.values(spread([])).map(Number.isNaN)];
        }"""
    )
    assert found == [
        [{"round": 0, "ratio": 2}, {"round": 2, "ratio": 3}],
        {"middle": 2.5, "least": 1, "greatest": 8},
        [True, True, True],
    ]


def test_ab_runs_both_arms_in_turns_and_pairs_them(open_page: Opened) -> None:
    page = ready(open_page)  # the model is not loaded yet
    page.locator("#launch summary").click()
    page.fill("[name=launch-submit_every]", "64")
    expect(page.locator("#ab")).to_be_hidden()
    expect(page.locator("#ab-run")).to_have_text("A/B against main")
    compare(page, 3)
    chosen = {"submit_every": 64}
    requests = asked(page)
    assert [request["launch"] for request in requests] == [MAIN, chosen, chosen, MAIN, MAIN, chosen]
    assert len({json.dumps({**request, "launch": None}, sort_keys=True) for request in requests}) == 1
    assert len(sent(page, "load")) == 1
    arms, rounds = page.locator("#ab table").all()
    cells = "rows => rows.map(row => [...row.children].map(cell => cell.innerText))"
    assert arms.locator("tbody tr").evaluate_all(cells) == [
        ["main", "9", "24", "244", "244", "244", "1", "1", "23"],  # 20, 26 and 24 ms
        ["chosen", "9", "10", "1", "0", "0", "1", "1", "9"],
    ]
    assert rounds.locator("tbody tr").evaluate_all(cells) == [
        ["1", "20", "10", "2.00"], ["2", "26", "10", "2.60"], ["3", "24", "10", "2.40"]
    ]  # fmt: skip
    finding = page.inner_text("#ab .finding").replace("\xa0", " ")
    assert "Median per token: 24 ms with main, 10 ms with the switches chosen; 2.40\u00d7 as fast" in finding
    assert "3 paired rounds [2.00, 2.60]" in finding
    assert "The token ids of 6 runs are equal." in finding
    expect(page.locator("#ab .note").last).to_contain_text("chosen: submit_every 64.")
    expect(page.locator("#ab .aside")).to_have_text("3 rounds")
    names = [row[0] for row in table_rows(page, "runs")]
    assert names[:2] == ["A adaptive, grow, main", "B adaptive, grow, submit_every 64"]
    run(page)  # an ordinary run leaves the comparison where it is
    assert len(page.locator("#ab tbody tr").all()) == 5
    expect(page.locator("#comparison")).to_be_hidden()
    assert open_page.problems == []


def test_ab_shows_both_arms_while_it_runs(open_page: Opened) -> None:
    page = ready(open_page, "?tokens=60&prompt=slowly")
    page.fill("#ab-rounds", "2")
    page.click("#ab-run")
    expect(page.locator("#ab .aside")).to_have_text("round 1 of 2, running main")
    expect(page.locator("#ab-run")).to_be_disabled()
    expect(page.locator("#ab tbody tr")).to_have_count(1)
    expect(page.locator("#ab .aside")).to_have_text("round 1 of 2, running chosen")
    expect(page.locator("#ab .tables")).to_contain_text("The first ratio comes with the end of the first round")
    page.keyboard.press("Escape")
    state(page, "done")


def test_ab_can_be_stopped_and_pairs_only_whole_runs(open_page: Opened) -> None:
    page = ready(open_page, "?tokens=25&prompt=slowly")
    page.click("#ab-run")
    expect(page.locator("#ab .aside")).to_have_text("round 2 of 3, running chosen")
    page.click("#cancel")
    state(page, "done")
    settle(page)
    assert len(asked(page)) == 3
    assert page.evaluate("stepwell.record.finish_reason") == "cancelled"
    expect(page.locator("#ab .aside")).to_have_text("2 of 6 runs")
    assert page.locator("#ab table").nth(1).locator("tbody tr").count() == 1
    assert "1 paired round [2.00, 2.00]" in page.inner_text("#ab .finding").replace("\xa0", " ")
    assert "ids of 3 runs are equal" in page.inner_text("#ab .finding")
    expect(page.locator("#ab-run")).to_be_enabled()


def test_stopped_before_its_model_is_loaded_ab_does_not_begin(open_page: Opened) -> None:
    page = ready(open_page)
    page.evaluate("() => { document.querySelector('#ab-run').click(); document.querySelector('#cancel').click(); }")
    state(page, "ready")
    assert asked(page) == []
    run(page)
    assert len(asked(page)) == 1


@pytest.mark.parametrize(("prompt", "query", "what"), [
    ("differ", "", "differ in their token ids from token 3 on"), ("logits", "&digest=1", "logits from token 2 on")
])  # fmt: skip
def test_ab_that_changes_a_result_is_an_alarm(open_page: Opened, prompt: str, query: str, what: str) -> None:
    page = ready(open_page, f"?tokens=5&prompt={prompt}{query}")
    compare(page, 1)
    expect(page.locator("#ab [role=alert]")).to_contain_text(what)
    expect(page.locator("#ab .finding")).to_contain_text("The answers are not equal.")


def test_ab_with_digests_compares_them(open_page: Opened) -> None:
    page = ready(open_page, "?tokens=4&digest=1")
    compare(page, 1)
    expect(page.locator("#ab .finding")).to_contain_text("Token ids and digests of the logits of 2 runs are equal.")


def test_ab_of_a_workload_needs_no_model(open_page: Opened) -> None:
    page = ready(open_page, "?model=kv64&start=9&tokens=5")
    compare(page, 1)
    assert sent(page, "load") == []
    assert [request.get("launch") for request in asked(page)] == [MAIN, None]
    assert [request["workload"] for request in asked(page)] == ["kv64", "kv64"]
    expect(page.locator("#comparison")).to_be_hidden()
