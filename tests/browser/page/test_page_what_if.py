"""What-if in the page: a trace dropped or chosen, its verdict, and traces of the page's own runs."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from stepwell.replay.traces import write_trace
from stepwell.replay.workloads import workload_events
from tests.browser.conftest import PATIENCE_MS
from tests.browser.page.stub_page import Opened, audit, open_page, run, sent, state, table_rows

pytestmark = pytest.mark.browser
__all__ = ["open_page"]  # the fixture

TRACE = b"stepwell-trace 1 {}\nb 1\n. 1\n"
DROP = """([name, text]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], name));
  dispatchEvent(new DragEvent("dragover", { dataTransfer, cancelable: true }));
  dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
}"""


def choose(page: Page, data: bytes = TRACE, name: str = "a.trace") -> None:
    page.set_input_files("#trace-file", {"name": name, "mimeType": "", "buffer": data})


def question(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = sent(page, "what_if")[-1]["question"]
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_chosen_trace_gets_its_verdict(open_page: Opened, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    state(page, "ready")
    choose(page)
    finding = page.locator("#what-if .finding")
    expect(finding).to_have_text("Take adaptive growth=2: it saves about 51.6 ms per token.")
    state(page, "ready")
    assert question(page) == dict.fromkeys(("baseline", "budget_mib", "create_us", "create_us_per_mib"))
    expect(page.locator("#what-if .why li")).to_contain_text("the class keeps 10: 54 are created anew")
    expect(page.locator("#what-if canvas")).to_be_visible()
    label = page.locator("#what-if .chart").get_attribute("aria-label") or ""
    assert "bucket: 52.6 on average" in label and "adaptive growth=2: 0.17 on average" in label
    rows = {row[0]: row[1:] for row in table_rows(page, "what-if")}
    assert list(rows) == ["adaptive growth=2 \N{BLACK LEFT-POINTING SMALL TRIANGLE}", "bucket"]
    assert rows["bucket"] == ["52.586", "580.69", "52.582", "64", "2,388", "51.72", "0.00"]
    assert "7,168 tokens. Baseline: bucket (as recorded)" in page.inner_text("#what-if")
    run(page, prompt="Hi", tokens="3")  # every panel shows something
    audit(page)
    page.fill("#what-if-budget_mib", "1500")
    page.fill("#what-if-create_us", "12.5")
    page.select_option("#what-if-baseline", "bucket")
    page.click("#what-if-again")
    expect(page.locator("#what-if")).to_contain_text("Over the budget and left out: pow2.")
    assert question(page) == {"baseline": "bucket", "budget_mib": 1500, "create_us": 12.5, "create_us_per_mib": None}
    page.click("#what-if-use")
    expect(page.locator("[name=policy][value=adaptive]")).to_be_checked()
    expect(page.locator("[name=option-growth]")).to_have_value("2")
    with page.expect_download() as download:
        page.click("#what-if-export")
    assert download.value.suggested_filename == "what-if-a.trace.json"
    assert json.loads(Path(download.value.path()).read_text())["recommended"] == "adaptive growth=2"
    assert open_page.problems == []


def test_what_is_dropped_goes_where_it_belongs(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    page.evaluate(DROP, ["notes.pdf", "x"])
    expect(page.locator("#notices")).to_contain_text("notes.pdf is neither a .gguf model nor a trace")
    page.evaluate(DROP, ["mine.GGUF", "x"])
    expect(page.locator("[name=model][value=file]")).to_be_checked()
    assert sent(page, "what_if") == []
    page.evaluate(DROP, ["photo.gz", "PNG"])
    state(page, "error")
    alert = page.locator("#notices [role=alert]")
    expect(alert).to_contain_text("BadTrace while replaying the trace")
    expect(alert).to_contain_text("Is it a trace?")
    page.evaluate(DROP, ["b.trace.gz", TRACE.decode()])
    expect(page.locator("#what-if .note", has_text="b.trace.gz: 7,168 tokens")).to_be_visible()
    expect(alert).not_to_contain_text("BadTrace")
    assert open_page.problems == []


def test_a_replay_shows_how_far_it_is_and_can_be_stopped(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    choose(page, TRACE + b"slowly")
    state(page, "replaying")
    bar = page.locator("#what-if progress")
    expect(bar).to_be_visible()
    page.wait_for_function("() => document.querySelector('#what-if progress').value > 2")
    expect(page.locator("#run")).to_be_disabled()
    expect(page.locator("#trace-file")).to_be_disabled()
    page.keyboard.press("Escape")
    state(page, "ready")
    expect(bar).to_be_hidden()
    assert page.locator("#what-if .finding").count() == 0
    assert len(sent(page, "cancel")) == 1
    choose(page)
    expect(page.locator("#what-if .finding")).to_be_visible()


def test_a_number_that_is_none_is_not_asked_and_does_not_stop_a_run(open_page: Opened) -> None:
    page = open_page("?tokens=3")
    state(page, "ready")
    page.locator("#what-if summary").click()
    page.fill("#what-if-budget_mib", "0")
    choose(page)
    assert sent(page, "what_if") == []
    run(page, prompt="Hi")


def test_own_runs_are_recorded_replayed_and_kept(open_page: Opened) -> None:
    page = open_page("?model=kv64&tokens=4&policy=bucket&pool_trace=1")
    state(page, "ready")
    run(page)
    assert sent(page, "run")[0]["request"]["pool_trace"] is True
    expect(page.locator("#what-if small", has_text="Recorded: run A-bucket")).to_be_visible()
    with page.expect_download() as download:
        page.click("#save-pool-trace")
    assert download.value.suggested_filename == "stepwell-A-bucket.trace.gz"
    assert gzip.decompress(Path(download.value.path()).read_bytes()).startswith(
        b'stepwell-trace 1 {"policy": "bucket"}'
    )
    page.click("#what-if-recorded")
    expect(page.locator("#what-if .note", has_text="stepwell-A-bucket.trace: 7,168")).to_be_visible()
    state(page, "done")  # as before it
    page.uncheck("[name=pool_trace]")
    run(page)
    assert "pool_trace" not in sent(page, "run")[1]["request"]


def test_python_replays_a_run_of_this_page(open_page: Opened, tmp_path: Path) -> None:
    page = open_page("?model=kv16&start=2040&tokens=12&policy=bucket&kv=grow&pool_trace=1", stub=False)
    page.set_default_timeout(PATIENCE_MS)
    expect(page.locator("html")).to_have_attribute("data-state", "ready")
    page.click("#run")
    expect(page.locator("html")).to_have_attribute("data-state", "done")
    write_trace(tmp_path / "long.trace.gz", workload_events("kv64", 2000, 2200))
    page.set_input_files("#trace-file", tmp_path / "long.trace.gz")
    page.click("#what-if-stop")
    state(page, "done")
    assert page.evaluate("stepwell.verdict") is None
    page.click("#what-if-recorded")
    expect(page.locator("#what-if .finding")).to_be_visible()
    verdict = page.evaluate("stepwell.verdict")
    assert (verdict["baseline"]["label"], verdict["runs"], verdict["unit"]) == ("bucket", 12, "token")
    created = page.evaluate("stepwell.record.tokens.map(token => token.buffers_created)")
    assert verdict["baseline"]["creates_per_token"] == pytest.approx(sum(created) / len(created), abs=0.5)
    choose(page, b"PK\x03\x04", "a.zip.gz")
    state(page, "error")
    expect(page.locator("#notices [role=alert]")).to_contain_text("Is it a trace?")
