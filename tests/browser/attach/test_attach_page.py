"""web/attach.html with onnxruntime-web, as it is: small sizes, on the adapter of the tests."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from stepwell.memory.policies import POLICIES
from stepwell.replay.traces import ACQUIRE, RUN, read_metadata, read_trace
from tests.browser.conftest import PATIENCE_MS
from tests.browser.page.stub_page import HEADERS, audit, stub_script

pytestmark = pytest.mark.browser
SIZES = "model=kv16&start=2050&steps=7&rounds=1"


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context()
    yield context
    context.close()


def open_example(context: BrowserContext, url: str, query: str = SIZES, **opened: Any) -> Page:
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: print(f"page error: {error}"))
    page.goto(f"{url}attach.html?{query}")
    return page


def state(page: Page, name: str) -> None:
    reached = "name => [name, 'error'].includes(document.documentElement.dataset.state)"
    page.wait_for_function(reached, arg=name)
    assert page.evaluate("document.documentElement.dataset.state") == name, page.evaluate("example.error")


def test_off_on_and_static_side_by_side(context: BrowserContext, server_url: str, tmp_path: Path) -> None:
    page = open_example(context, server_url)
    state(page, "ready")
    attached = [name for name, entry in POLICIES.items() if entry.attached]
    assert page.locator("[name=policy] option").all_text_contents() == attached
    assert page.locator("[name=model] option").all_text_contents() == ["64 growing tensors", "16 growing tensors"]
    page.fill("[name=budget]", "2000")
    page.keyboard.press("Enter")
    state(page, "running")
    state(page, "done")
    rows = {row["arm"]: row for row in page.evaluate("example.rows")}
    assert [rows[arm]["n"] for arm in ("off", "on", "static")] == [3, 3, 3]
    assert [rows[arm]["created"] for arm in ("off", "on", "static")] == [6, 0, 0]
    assert not any(row["wrong"] for row in rows.values())
    assert rows["on"]["peakBytes"] <= 2000 << 20
    text = page.inner_text("#work")
    assert "All runs gave bit-equal K and V." in text and "a step creates 0 buffers instead of 6" in text
    assert 'stepwell.attach({ policy: "adaptive", zero: "always", budget: 2097152000 });' in text
    assert page.locator("#work canvas").count() == 2
    assert "budget=2000" in page.url
    assert page.evaluate("Object.getOwnPropertyNames(globalThis).includes('stepwell')") is False  # it is the worker's
    page.click("#record")
    state(page, "running")
    state(page, "done")
    expect(page.locator("#code code")).to_contain_text("record: true")
    expect(page.locator("#trace .finding")).to_contain_text("stepwell.attach(")
    with page.expect_download() as download:
        page.click("#save-trace")
    path = tmp_path / download.value.suggested_filename
    assert path.name == "onnxruntime-web-kv16.trace.gz"
    path.write_bytes(gzip.compress(gzip.decompress(Path(download.value.path()).read_bytes())))
    events = list(read_trace(path))
    assert sum(op == RUN for op, _, _ in events) >= 5  # the first step is set-up
    large = sum(op == ACQUIRE and request.nbytes == 8 << 20 for op, _, request in events)
    assert large >= 5 * 6  # what the runtime's own pool lacked
    metadata = read_metadata(path)
    assert metadata["attach"] is True and metadata["create_us_per_mib"] >= 0
    audit(page, least=50)
    page.set_viewport_size({"width": 320, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    script = {"body": stub_script(), "content_type": "text/javascript", "headers": HEADERS}
    context.route(f"{server_url}worker.js", lambda route: route.fulfill(**script))  # what-if itself is tested elsewhere
    with context.expect_page() as opened:
        page.click("#open-what-if")
    other = opened.value
    expect(other.locator("#what-if .finding")).to_be_visible()
    assert "onnxruntime-web-kv16.trace: 7,168 tokens" in other.inner_text("#what-if")
    expect(other.locator("#what-if pre")).to_have_text('stepwell.attach({policy: "adaptive"})')


def test_sizes_are_chosen_by_the_adapter_and_checked(context: BrowserContext, server_url: str) -> None:
    page = open_example(context, server_url, "rounds=3")
    state(page, "ready")
    value = "name => document.querySelector(`[name=${name}]`).value"
    assert [page.evaluate(value, name) for name in ("model", "start", "rounds")] == ["kv16", "2040", "3"]
    page.fill("[name=start]", "900000")
    expect(page.locator("#workload .note")).to_contain_text("this GPU allows")
    page.click("#run")
    assert page.evaluate("document.documentElement.dataset.state") == "ready"
    page.fill("[name=start]", "2050")
    page.fill("[name=steps]", "400")
    page.click("#run")
    page.wait_for_function("() => example.turns[0]?.steps.length > 0")
    page.keyboard.press("Escape")
    state(page, "done")
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#run")).to_be_focused()


def test_320_pixels_and_no_webgpu(browser: Browser, server_url: str) -> None:
    context = browser.new_context(viewport={"width": 320, "height": 640}, reduced_motion="reduce")
    context.add_init_script("Object.defineProperty(Navigator.prototype, 'gpu', { get: () => undefined });")
    page = open_example(context, server_url)
    state(page, "error")
    expect(page.locator("#notices [role=alert]")).to_contain_text("No WebGPU here")
    expect(page.locator("#run")).to_be_disabled()
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    context.close()


FULL = """
const limits = { maxBufferSize: 2 ** 32, maxStorageBufferBindingSize: 2 ** 31 };
const adapter = { vendor: "stub", architecture: "", description: "" };
postMessage({ type: "ready", adapter, limits, software: false, policies: ["adaptive"] });
onmessage = () => postMessage({ type: "error", code: "Error", message: "failed to allocate memory for buffer" });
"""


def test_memory_that_is_full_is_said_with_what_to_do(context: BrowserContext, server_url: str) -> None:
    script = {"body": FULL, "content_type": "text/javascript", "headers": HEADERS}
    context.route("**/attach/worker.js", lambda route: route.fulfill(**script))
    page = open_example(context, server_url, "start=3000")
    state(page, "ready")
    page.fill("[name=steps]", "7")
    page.click("#run")
    state(page, "error")
    alert = page.locator("#notices [role=alert] .notice")
    expect(alert).to_be_focused()
    expect(alert).to_contain_text("failed to allocate memory")
    expect(alert).to_contain_text("choose 16 tensors, fewer positions")
    page.get_by_role("button", name="Restart").click()
    state(page, "ready")
    expect(alert).to_have_count(0)
    assert [page.input_value(f"[name={name}]") for name in ("start", "steps")] == ["3000", "7"]
