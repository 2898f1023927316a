"""The preparation of a machine: a browser, and the fonts it needs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from playwright.sync_api import sync_playwright

from harness import SetupError
from harness.page.browser import HOW_TO_GET_FONTS, find_browser, how_to_get
from harness.site.process import Report

APT = ("apt-get", "install", "-y", "--no-install-recommends", "chromium", "fonts-dejavu-core")
"""The command that installs a browser and a font."""
FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts")
"""The folders in which Linux has fonts."""


def installed_browser() -> str | None:
    """The path of the browser that a run would start, or None."""
    with sync_playwright() as playwright:
        try:
            return find_browser(playwright_chromium=lambda: playwright.chromium.executable_path)
        except SetupError:
            return None


def has_fonts(folders: Iterable[str] = FONT_FOLDERS, system: str = sys.platform) -> bool:
    """Whether there is a font in ``folders``: without one, Chromium on Linux dies with the first page that has text."""
    if not system.startswith("linux"):
        return True
    suffixes = (".ttf", ".otf", ".ttc", ".pfb", ".pcf.gz")
    return any(
        path.name.lower().endswith(suffixes) for folder in folders for path in Path(folder).expanduser().rglob("*.*")
    )


def ensure_browser(
    report: Report,
    *,
    find: Callable[[], str | None] = installed_browser,
    fonts: Callable[[], bool] = has_fonts,
    command: Callable[[], list[list[str]]] = lambda: install_commands(),
    call: Callable[[list[str]], int] = subprocess.call,
) -> str | None:
    """The path of a browser, installed first where this user may; None, with advice in ``report``, where not."""
    found = find()
    if found and fonts():
        return found
    missing = "no font" if found else "no browser"
    for step in command():
        report(f"{missing} found: " + " ".join(step))
        if call(step) != 0:
            break
    found = find()
    if not found:
        report(f"no Chrome or Chromium was found: the demo and the browser tests need one. {how_to_get()}")
    elif not fonts():
        report(f"no font was found, and Chromium needs one to show a page. {HOW_TO_GET_FONTS}")
    return found


def install_commands(
    *,
    os_release: Path = Path("/etc/os-release"),
    as_root: bool = hasattr(os, "geteuid") and os.geteuid() == 0,
    which: Callable[[str], str | None] = shutil.which,
) -> list[list[str]]:
    """The commands by which root installs Chromium here; none for other users and systems, who are told instead.

    Ubuntu's package of that name only points to a snap, which needs a running snapd: there Playwright's build is taken.
    """
    if not as_root or not os_release.is_file() or which("apt-get") is None:
        return []
    fields = dict(line.split("=", 1) for line in os_release.read_text(encoding="utf-8").splitlines() if "=" in line)
    distribution = fields.get("ID", "").strip('"')
    if distribution == "debian":
        return [["apt-get", "update"], list(APT)]
    if distribution == "ubuntu":
        return [[sys.executable, "-m", "playwright", "install", "--with-deps", "chromium"]]
    return []
