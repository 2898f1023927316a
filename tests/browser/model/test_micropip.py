"""The wheel by micropip in a bare Pyodide page: the README's own snippet runs as it is printed there."""

import re

import pytest
from playwright.sync_api import Browser

from harness.site.build import Site
from tests.browser.conftest import open_lab
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser
README = ROOT / "README.md"


def test_readme_snippet(browser: Browser, server_url: str, site: Site) -> None:
    snippet = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert snippet is not None
    code = snippet.group(1)
    placeholder = re.search(r'micropip\.install\("([^"]+)"\)', code)
    assert placeholder is not None
    wheel = f"{server_url.rstrip('/')}/{site.manifest['wheel']}"
    code = code.replace(placeholder.group(1), wheel)
    lab = open_lab(browser, server_url, packages=("micropip",))
    loaded = lab.js("() => Object.keys(lab.py.loadedPackages)")
    assert "stepwell" not in loaded
    body = "\n".join(f"    {line}" for line in code.splitlines())
    result = lab.run(f"async def main(args):\n{body}\n    return [list(result), pool.report().in_use_bytes]")
    assert result == [[2.0 * i for i in range(256)], 0]
    lab.page.close()
