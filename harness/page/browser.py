"""A Chrome or Chromium on this machine, found and started for WebGPU.

Playwright's own headless build has no WebGPU, so a full browser is always started by path, in the new headless mode.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from playwright.sync_api import Browser, Error, sync_playwright

from harness import SetupError

VARIABLE = "STEPWELL_BROWSER"
FINE_GPU_CLOCK = "--enable-webgpu-developer-features"
"""Without it Chromium rounds timestamp queries to about 0.1 ms, which is longer than most kernels take."""


class AdapterProfile(StrEnum):
    """The adapter that a run is meant for: SwiftShader on the CPU, or the machine's GPU."""

    SOFTWARE = "software"
    HARDWARE = "hardware"


_CHROME = {  # where Playwright's "chrome" channel looks
    "linux": ["/opt/google/chrome/chrome"],
    "darwin": ["/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"],
    "win32": [rf"%{base}%\Google\Chrome\Application\chrome.exe" for base in ("LOCALAPPDATA", "PROGRAMFILES")],
}
_SYSTEM = {
    "linux": [
        "/usr/bin/google-chrome-stable",
        "/usr/bin/google-chrome",
        "/usr/lib/chromium/chromium",  # Debian, past its wrapper script, which would add flags of its own
        "/usr/bin/chromium",
        "/usr/bin/chromium-browser",
        "/snap/bin/chromium",
    ],
    "darwin": [
        "/Applications/Chromium.app/Contents/MacOS/Chromium",
        "/Applications/Google Chrome Canary.app/Contents/MacOS/Google Chrome Canary",
        "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    ],
    "win32": [
        r"%PROGRAMFILES(X86)%\Google\Chrome\Application\chrome.exe",
        r"%LOCALAPPDATA%\Chromium\Application\chrome.exe",
        r"%PROGRAMFILES(X86)%\Microsoft\Edge\Application\msedge.exe",
    ],
}
_ON_PATH = ("google-chrome", "chromium", "chromium-browser", "chrome")


def find_browser(
    choice: str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    system: str = sys.platform,
    playwright_chromium: Callable[[], str | None] = lambda: None,
    exists: Callable[[str], bool] = lambda path: os.access(path, os.X_OK) and Path(path).is_file(),
    which: Callable[[str], str | None] = shutil.which,
) -> str:
    """The path of ``choice``, $STEPWELL_BROWSER, Playwright's chrome or chromium channel, or the system's browser.

    SetupError when there is none, or when a browser that was asked for by name is not there.
    """
    for wanted, source in ((choice, "--browser"), (environ.get(VARIABLE), VARIABLE)):
        if wanted:
            found = wanted if exists(wanted) else which(wanted)
            if not found:
                raise SetupError(f"{source}: {wanted} is not an executable file.")
            return found
    for path in _expand(_CHROME.get(system, []), environ):
        if exists(path):
            return path
    bundled = playwright_chromium()
    if bundled and exists(bundled):
        return bundled
    for path in _expand(_SYSTEM.get(system, []), environ):
        if exists(path):
            return path
    for name in _ON_PATH:
        if found := which(name):
            return found
    raise SetupError(f"no Chrome or Chromium was found. {how_to_get(system)}")


HOW_TO_GET_FONTS = "Install a font package: `apt-get install fonts-dejavu-core` on Debian and Ubuntu."
"""Advice on getting fonts."""


def how_to_get(system: str = sys.platform) -> str:
    """Advice on getting a browser for ``system``."""
    install = {
        "linux": "`apt-get install chromium` (Debian), `snap install chromium` (Ubuntu)",
        "darwin": "`brew install --cask google-chrome`",
        "win32": "`winget install Google.Chrome`",
    }
    ways = [install.get(system, "install Google Chrome"), "`playwright install chromium`"]
    return f"Get one with {' or '.join(ways)}, or name yours with --browser PATH or {VARIABLE}=PATH."


def _expand(paths: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    """Fill in %NAME% from ``environ``; a path whose variable is not set is left out."""
    for path in paths:
        if path.startswith("%"):
            name, _, rest = path[1:].partition("%")
            if name in environ:
                yield environ[name] + rest
        else:
            yield path


_COMMON = (
    "--headless=new",
    "--enable-unsafe-webgpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
_SOFTWARE = ("--use-webgpu-adapter=swiftshader", "--enable-unsafe-swiftshader")
_HARDWARE_LINUX = (
    "--use-angle=vulkan",
    "--enable-features=Vulkan",
    "--disable-vulkan-surface",
    "--ignore-gpu-blocklist",
)
_FEATURES = "--enable-features="
_FEATURES_ON = (
    "CDPScreenshotNewSurface",  # Playwright's, which a second --enable-features would otherwise switch off
    # At one start in a hundred Chromium samples its own heap, and looks for frames beyond the end of the stack that a
    # WebAssembly coroutine runs on (Pyodide's runPythonAsync; the page calls Python without it): the tab dies
    # (Chromium 156).  The chances become 0.
    "HeapProfilerReporting:stable-probability/0/nonstable-probability/0",
)
_NOT_FOR_HARDWARE = ["--enable-unsafe-swiftshader"]  # Playwright's default


def browser_flags(
    profile: AdapterProfile,
    extra: Sequence[str] = (),
    *,
    headed: bool = False,
    system: str = sys.platform,
    as_root: bool = hasattr(os, "geteuid") and os.geteuid() == 0,
) -> list[str]:
    """The browser's arguments for ``profile``, with ``extra``.

    The browser heeds only the last --enable-features, so all of them become one.
    """
    flags = [flag for flag in _COMMON if not (headed and flag.startswith("--headless"))]
    if profile is AdapterProfile.SOFTWARE:
        flags += _SOFTWARE
    elif system.startswith("linux"):
        flags += _HARDWARE_LINUX
    if as_root:
        flags.append("--no-sandbox")
    flags += extra
    features = [
        name for flag in flags if flag.startswith(_FEATURES) for name in flag.removeprefix(_FEATURES).split(",")
    ]
    flags = [flag for flag in flags if not flag.startswith(_FEATURES)]
    return [*flags, _FEATURES + ",".join(dict.fromkeys([*_FEATURES_ON, *features]))]


@contextmanager
def open_browser(
    profile: AdapterProfile, flags: Sequence[str] = (), *, choice: str | None = None, headed: bool = False
) -> Iterator[tuple[Browser, list[str]]]:
    """Start a browser, ``choice`` or the one found; yields it and the flags it was given.

    SetupError when none is found or it does not start.
    """
    arguments = browser_flags(profile, flags, headed=headed)
    with sync_playwright() as playwright:
        path = find_browser(choice, playwright_chromium=lambda: playwright.chromium.executable_path)
        try:
            browser = playwright.chromium.launch(
                executable_path=path,
                headless=not headed,
                args=arguments,
                ignore_default_args=_NOT_FOR_HARDWARE if profile is AdapterProfile.HARDWARE else None,
                handle_sigint=False,  # Ctrl-C ends the run through the page, not under it
            )
        except Error as error:
            raise SetupError(f"{path} did not start.\n{error.message}") from error
        try:
            yield browser, arguments
        finally:
            browser.close()
