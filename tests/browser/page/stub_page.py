"""The page with ``stub_worker.js`` in place of its worker, for tests of the page alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import PATIENCE_MS

HERE = Path(__file__).parent
HEADERS = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
MODEL = {"id": "smollm2", "name": "SmolLM2", "file": "models/m.gguf", "bytes": 98 << 20, "sha256": "ab" * 32}
MODEL["licence"] = "Apache-2.0"
# What the page sends to its worker, and a navigator.gpu for browsers that were started without one.
SPY = """
window.sent = [];
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  window.sent.push(message);
  return post.call(this, message, ...rest);
};
Object.defineProperty(Navigator.prototype, "gpu", { configurable: true, get: () => GPU });
"""


class Opened:
    """The page in a context of its own, with what went wrong on it and what it asked for."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser, self._url = browser, url
        self._contexts: list[Any] = []
        self.problems: list[str] = []
        self.requests: list[str] = []

    def __call__(
        self, query: str = "", *, software: bool = False, gpu: bool = True, stub: bool = True, model: bool = True,
        manifest: bool = True, older: bool = False, options: str | None = None, **context: Any,
    ) -> Page:  # fmt: skip
        opened = self._browser.new_context(**context)
        self._contexts.append(opened)
        page = opened.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))
        page.on("request", lambda request: self.requests.append(request.url))
        page.add_init_script(SPY.replace("GPU", "({})" if gpu else "undefined"))
        if stub:
            fulfil(
                page, "**/worker.js", body=stub_script(software=software, older=older), content_type="text/javascript"
            )
        if options is not None:
            fulfil(page, "**/run_options.js", body=options, content_type="text/javascript")
        if manifest:
            fulfil(page, "**/manifest.json", json={"schema": 1, "models": [MODEL] if model else []})
        else:
            fulfil(page, "**/manifest.json", status=404)
        page.goto(self._url + query)
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()


def stub_script(*, software: bool = False, older: bool = False) -> str:
    """The stub worker: on a CPU adapter or not, and of a time before the launch path could be set or not."""
    text = (HERE / "stub_worker.js").read_text(encoding="utf-8")
    return text.replace("SOFTWARE", str(software).lower()).replace("OLDER", str(older).lower())


def fulfil(page: Page, pattern: str, **answer: Any) -> None:
    page.route(pattern, lambda route: route.fulfill(headers=HEADERS, **answer))


@pytest.fixture
def open_page(browser: Browser, server_url: str) -> Iterator[Opened]:
    opened = Opened(browser, server_url)
    yield opened
    opened.close()


def state(page: Page, name: str) -> None:
    expect(page.locator("html")).to_have_attribute("data-state", name)


def run(page: Page, **controls: str) -> None:
    for name, value in controls.items():
        if name in ("policy", "kv", "model"):
            page.check(f"[name={name}][value={value}]")
        else:
            page.fill(f"[name={name}]", value)
    page.click("#run")
    state(page, "done")
    settle(page)


def settle(page: Page) -> None:
    """Until the panels have drawn what they know: they do so in the next animation frame."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def sent(page: Page, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.evaluate("kind => sent.filter(({ type }) => type === kind)", kind)
    return found


def table_rows(page: Page, panel: str) -> list[list[str]]:
    rows: list[list[str]] = page.locator(f"#{panel} tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.children].map(cell => cell.innerText.trim()))"
    )
    return rows


def audit(page: Page, least: int = 100) -> None:
    """Names, contrast and target sizes of everything, ``least`` texts or more, once every transition has ended."""
    page.evaluate("() => document.querySelectorAll('details').forEach(details => { details.open = true; })")
    settle(page)
    page.evaluate("() => Promise.all(document.getAnimations().map(animation => animation.finished))")
    found = page.evaluate((HERE / "audit.js").read_text(encoding="utf-8").partition("\n\n")[2])
    assert found.pop("readable") > least
    assert found == {name: [] for name in found}
