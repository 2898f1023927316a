"""Other runtimes from npm, for tests only: no part of the site.  Fetched when a test first asks for them.

The pins are those of harness/site/pins.py in kind: digests are checked, and a package that is there is
not fetched again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, Route

from harness import CACHE
from harness.site import npm
from harness.site.pins import NpmPin
from tests.browser.conftest import PATIENCE_MS

WLLAMA = NpmPin(
    "@wllama/wllama",
    "3.13.0",
    "sha512-ZvoRdQAn+E+18EvQ9qS036gudiI9rbZRBJgG/qNICPPwrA0Y6SMMdbziz/j7K/0WxcbJlhaRraVIYsnEy732NA==",
    {"esm/index.min.js": "wllama/index.min.js", "esm/wasm/wllama.wasm": "wllama/wllama.wasm"},
)
TRANSFORMERS = NpmPin(
    "@huggingface/transformers",
    "4.3.2",
    "sha512-V3+dqf3iWlRYJ9I9GreM3zGQd0lAXnnoPeddmkOQYWAEE4l/+Fi6p7tx/qVUJlKQgLXGim2W76rTOzz+eC0i7g==",
    {"dist/transformers.web.min.js": "transformers/transformers.web.min.js"},
)
TYPES = {".js": "text/javascript", ".wasm": "application/wasm", ".json": "application/json", ".html": "text/html"}


def unpack(pin: NpmPin, folder: Path) -> None:
    """The package's files under ``folder``, where its pin puts them."""
    archive = npm.fetch(pin, CACHE, print)
    npm.extract(archive, {member: folder / path for member, path in pin.files.items()})


@contextmanager
def peer_page(browser: Browser, url: str, folder: Path, query: str = "") -> Iterator[Page]:
    """A page on the site's server that finds ``folder`` under ``peer/``; it is ``folder``'s ``page.html``.

    A failed request, an error on the page and one on its console fail the test.
    """
    context = browser.new_context()
    problems: list[str] = []

    def answer(route: Route) -> None:
        path = folder / route.request.url.split("/peer/", 1)[1].split("?")[0]
        if path.is_file():
            kind = TYPES.get(path.suffix, "application/octet-stream")
            route.fulfill(body=path.read_bytes(), content_type=kind)
        else:
            problems.append(f"no {path.name}")
            route.fulfill(status=404)

    context.route("**/peer/**", answer)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    try:
        page.goto(f"{url.rstrip('/')}/peer/page.html{query}")
        page.wait_for_function("() => window.ready")
        yield page
        assert not problems, problems
    finally:
        context.close()
