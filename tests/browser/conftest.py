"""Fixtures of the browser tests: the built site, a server, Chromium, and a lab page that runs Python in Pyodide."""

import base64
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from harness import SetupError
from harness.page.browser import AdapterProfile, open_browser
from harness.site.build import Site, build_site
from harness.site.server import SiteServer
from tests.support.paths import DATA

PATIENCE_MS = 240_000
"""How long a page may take for anything: against hanging, also on a machine that does much else."""
expect.set_options(timeout=PATIENCE_MS)
LAB = """<!doctype html><meta charset="utf-8"><title>lab</title><link rel="icon" href="data:,"><script type="module">
import { loadPyodide } from "./vendor/pyodide/pyodide.mjs";
import { makeTokenizer } from "./tokenizer.js";
const py = await loadPyodide({ indexURL: "./vendor/pyodide/", packages: PACKAGES });
// source: Python with a coroutine `main(args)`; args and result are JSON values
window.makeTokenizer = makeTokenizer;
window.lab = {
  py,
  async run(source, args) {
    const globals = py.toPy({ ARGS: JSON.stringify(args) });
    try {
      return JSON.parse(await py.runPythonAsync(
        source + "\\nimport json as _json\\n_json.dumps(await main(_json.loads(ARGS)))", { globals }));
    } finally { globals.destroy(); }
  },
};
</script>"""


@pytest.fixture(scope="session")
def site() -> Site:
    """dist/, built with the demo model."""
    return build_site(with_model=True)


@pytest.fixture(scope="session")
def server_url(site: Site) -> Iterator[str]:
    with SiteServer(site.root) as server:
        yield server.url


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, with the software adapter unless $STEPWELL_PROFILE is ``hardware``.

    Without a browser the test is skipped here and fails in CI.
    """
    try:
        with open_browser(AdapterProfile(os.environ.get("STEPWELL_PROFILE", AdapterProfile.SOFTWARE))) as (browser, _):
            yield browser
    except SetupError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


class Lab:
    """A page with Pyodide and stepwell on it."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def run(self, source: str, **args: Any) -> Any:
        """Run Python that defines ``async def main(args)``; arguments and result are JSON values."""
        return self.page.evaluate("([source, args]) => lab.run(source, args)", [source, args])

    def js(self, expression: str) -> Any:
        return self.page.evaluate(expression)


def open_lab(browser: Browser, url: str, packages: tuple[str, ...] = ("stepwell",)) -> Lab:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    html = LAB.replace("PACKAGES", json.dumps(list(packages)))
    headers = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
    page.route("**/lab.html", lambda route: route.fulfill(body=html, content_type="text/html", headers=headers))
    page.on("pageerror", lambda error: print(f"page error: {error}"))
    page.on("console", lambda message: print(f"console {message.type}: {message.text}"))
    page.goto(f"{url.rstrip('/')}/lab.html")
    page.wait_for_function("() => window.lab")
    return Lab(page)


@pytest.fixture(scope="session")
def shared_lab(browser: Browser, server_url: str) -> Iterator[Lab]:
    lab = open_lab(browser, server_url)
    yield lab
    lab.page.close()


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, browser: Browser, server_url: str) -> Iterator[Lab]:
    """A page of the module's own.

    To start Pyodide takes seconds: modules whose calls leave nothing behind, each with a device that it opens and
    closes, say ``SHARES_A_PAGE`` and have one together.
    """
    if getattr(request.module, "SHARES_A_PAGE", False):
        yield request.getfixturevalue("shared_lab")
        return
    lab = open_lab(browser, server_url)
    yield lab
    lab.page.close()


@pytest.fixture(scope="session")
def oracle() -> dict[str, Any]:
    path = DATA / "smollm2-oracle.json"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def encode(data: bytes) -> str:
    """Bytes for a lab argument."""
    return base64.b64encode(data).decode()
