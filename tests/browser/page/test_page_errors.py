"""The page in trouble: errors of the worker, no WebGPU, no manifest, no runtime."""

import pytest
from playwright.sync_api import expect

from harness.site.build import Site
from tests.browser.page.stub_page import Opened, fulfil, open_page, run, sent, state, stub_script, table_rows

pytestmark = pytest.mark.browser
__all__ = ["open_page"]  # the fixture


def test_error_is_announced_focused_and_over_with_the_next_run(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    page.fill("#prompt", "ask too much")
    page.click("#run")
    state(page, "error")
    alert = page.locator("#notices [role=alert] .notice")
    expect(alert).to_be_focused()
    expect(alert).to_contain_text("ContextFull while reading the prompt")
    expect(alert).to_contain_text("Ask for fewer tokens")
    assert page.evaluate("stepwell.error") == {
        "code": "ContextFull", "phase": "prefill",
        "message": "60 + 9,000 positions; the model has 8,192. Ask for fewer tokens.",
    }  # fmt: skip
    run(page, prompt="Hello", tokens="4")
    expect(alert).to_have_count(0)
    assert page.evaluate("stepwell.error") is None
    assert len(table_rows(page, "runs")) == 1


def test_failed_load_leaves_no_model_behind(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    page.set_input_files("#file", {"name": "broken.gguf", "mimeType": "", "buffer": b"GGU"})
    page.click("#run")
    state(page, "error")
    assert sent(page, "run") == []
    run(page, model="smollm2", tokens="4")
    assert [message["model"]["name"] for message in sent(page, "load")] == ["broken.gguf", "SmolLM2"]


def test_lost_device_restarts_the_worker_and_keeps_the_runs(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    run(page, tokens="4")
    page.fill("#prompt", "lose the device")
    page.click("#run")
    state(page, "error")
    expect(page.locator("#run")).to_be_disabled()
    page.get_by_role("button", name="Restart").click()
    state(page, "ready")
    run(page, prompt="Hello")
    assert len(sent(page, "boot")) == 2 and len(sent(page, "load")) == 2
    assert [row[0] for row in table_rows(page, "runs")] == ["A adaptive, grow", "C adaptive, grow"]


def test_without_webgpu_the_page_says_what_to_do(open_page: Opened) -> None:
    page = open_page(gpu=False)
    state(page, "error")
    notice = page.locator("#notices [role=alert]")
    expect(notice).to_contain_text("No WebGPU here")
    expect(notice).to_contain_text("chrome://gpu")
    assert page.evaluate("stepwell.error.code") == "NoWebGPU"
    assert not any("worker.js" in url for url in open_page.requests)
    expect(page.locator("#model .option").first).to_contain_text("SmolLM2")
    assert open_page.problems == []


def test_without_module_workers_the_page_says_what_to_do(open_page: Opened) -> None:
    page = open_page()
    page.add_init_script("window.Worker = class { constructor() {} terminate() {} };")
    page.reload()
    state(page, "error")
    expect(page.locator("#notices [role=alert]")).to_contain_text("module workers")


def test_without_manifest_a_local_file_still_works(open_page: Opened) -> None:
    page = open_page(manifest=False)
    state(page, "ready")
    expect(page.locator("#notices")).to_contain_text("python -m harness site")
    page.click("#run")
    state(page, "error")
    expect(page.locator("#notices [role=alert]")).to_contain_text("No model file is chosen")
    page.set_input_files("#file", {"name": "mine.gguf", "mimeType": "", "buffer": b"GGUF"})
    run(page, tokens="4")


def test_real_worker_reports_a_missing_runtime(open_page: Opened, site: Site) -> None:
    assert (site.root / "worker.js").is_file()
    page = open_page(stub=False)
    fulfil(page, "**/vendor/pyodide/pyodide.mjs", status=404)
    page.reload()
    state(page, "error")
    assert page.evaluate("stepwell.error.phase") == "runtime"
    expect(page.locator("#notices [role=alert]")).to_contain_text("build the site again")
    expect(page.get_by_role("button", name="Restart")).to_be_visible()


def test_missing_worker_is_an_error_not_a_silence(open_page: Opened) -> None:
    page = open_page(stub=False)
    fulfil(page, "**/worker.js", status=404)
    page.reload()
    state(page, "error")
    assert page.evaluate("stepwell.error.code") == "WorkerError"


def test_software_adapter_and_coarse_timer_are_said(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    expect(page.locator("#notices .notice")).to_have_count(0)
    page = open_page(software=True)
    state(page, "ready")
    expect(page.locator("#notices")).to_contain_text("say nothing about a GPU")
    expect(page.locator("#chips")).to_contain_text("CPU adapter")
    plain = stub_script().replace("self.crossOriginIsolated", "false")
    page = open_page(stub=False)
    fulfil(page, "**/worker.js", body=plain, content_type="text/javascript")
    page.reload()
    state(page, "ready")
    expect(page.locator("#notices")).to_contain_text("not cross-origin isolated")
