"""Which browser is taken, how it is started, and what is said when there is none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import SetupError
from harness.page.browser import AdapterProfile, browser_flags, find_browser, how_to_get
from harness.page.setup import APT, ensure_browser, has_fonts, install_commands

CHROME, BUNDLED, DEBIAN = "/opt/google/chrome/chrome", "/cache/chromium/chrome", "/usr/lib/chromium/chromium"


def find(
    *present: str,
    choice: str | None = None,
    environ: dict[str, str] | None = None,
    system: str = "linux",
    path: str | None = None,
) -> str:
    return find_browser(
        choice,
        environ=environ or {},
        system=system,
        playwright_chromium=lambda: BUNDLED,
        exists=lambda name: name in present,
        which=lambda name: path if path and path.endswith(f"/{name}") else None,
    )


def test_the_order() -> None:
    everything = ["/mine", "/variable", CHROME, BUNDLED, DEBIAN]
    environ = {"STEPWELL_BROWSER": "/variable"}
    assert find(*everything, choice="/mine", environ=environ) == "/mine"
    assert find(*everything, environ=environ) == "/variable"
    assert find(*everything) == CHROME
    assert find(BUNDLED, DEBIAN) == BUNDLED
    assert find(DEBIAN, path="/somewhere/chromium") == DEBIAN
    assert find(path="/somewhere/chromium") == "/somewhere/chromium"


def test_other_systems() -> None:
    mac = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    assert find(mac, system="darwin") == mac
    windows = r"C:\Programs\Google\Chrome\Application\chrome.exe"
    assert find(windows, system="win32", environ={"PROGRAMFILES": r"C:\Programs"}) == windows
    with pytest.raises(SetupError, match="winget"):
        find(windows, system="win32")


def test_a_name_on_the_path_may_be_asked_for() -> None:
    assert find(choice="chromium", path="/somewhere/chromium") == "/somewhere/chromium"


@pytest.mark.parametrize(("choice", "environ"), [("/gone", {}), (None, {"STEPWELL_BROWSER": "/gone"})])
def test_what_was_asked_for_is_never_replaced(choice: str | None, environ: dict[str, str]) -> None:
    with pytest.raises(SetupError, match="/gone"):
        find(CHROME, choice=choice, environ=environ)


@pytest.mark.parametrize("system", ["linux", "darwin", "win32", "freebsd"])
def test_none_found_says_how_to_get_one(system: str) -> None:
    with pytest.raises(SetupError) as caught:
        find(system=system)
    assert how_to_get(system) in str(caught.value)
    assert "playwright install chromium" in str(caught.value)
    assert caught.value.exit_code == 2


def test_flags_of_the_profiles() -> None:
    software = browser_flags(AdapterProfile.SOFTWARE, system="linux", as_root=False)
    hardware = browser_flags(AdapterProfile.HARDWARE, system="linux", as_root=True)
    mac = browser_flags(AdapterProfile.HARDWARE, system="darwin", as_root=False)
    for flags in (software, hardware, mac):
        assert {"--headless=new", "--enable-unsafe-webgpu", "--disable-background-networking"} <= set(flags)
    assert "--use-webgpu-adapter=swiftshader" in software
    assert not any("swiftshader" in flag for flag in [*hardware, *mac])
    assert "--use-angle=vulkan" in hardware
    assert not any("ulkan" in flag for flag in [*software, *mac])
    assert ("--no-sandbox" in hardware, "--no-sandbox" in software) == (True, False)
    assert not any(flag.startswith("--headless") for flag in browser_flags(AdapterProfile.SOFTWARE, headed=True))


def test_features_become_one_flag() -> None:
    extra = ["--enable-features=A,B", "--x", "--enable-features=B,C"]
    flags = browser_flags(AdapterProfile.HARDWARE, extra, system="linux", as_root=False)
    merged = [flag for flag in flags if flag.startswith("--enable-features=")]
    off = "HeapProfilerReporting:stable-probability/0/nonstable-probability/0"
    assert merged == [f"--enable-features=CDPScreenshotNewSurface,{off},Vulkan,A,B,C"]
    assert "--x" in flags
    software = browser_flags(AdapterProfile.SOFTWARE, system="linux")
    assert [flag for flag in software if "--enable-features" in flag] == [
        f"--enable-features=CDPScreenshotNewSurface,{off}"
    ]


OS_RELEASES = {
    "debian": 'NAME="Debian"\nID=debian\n',
    "ubuntu": 'ID="ubuntu"\nID_LIKE=debian\n',
    "fedora": "ID=fedora\n",
}


@pytest.mark.parametrize("name", OS_RELEASES)
def test_only_root_on_debian_or_ubuntu_installs(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    release = tmp_path_factory.mktemp("etc") / "os-release"
    release.write_text(OS_RELEASES[name])

    def commands(as_root: bool, apt: str | None = "/usr/bin/apt-get") -> list[list[str]]:
        return install_commands(os_release=release, as_root=as_root, which=lambda _: apt)

    assert commands(as_root=False) == []
    assert commands(as_root=True, apt=None) == []
    last = {"debian": list(APT), "ubuntu": ["install", "--with-deps", "chromium"], "fedora": []}[name]
    found = commands(as_root=True)
    assert (found[-1][-len(last) :] if found else []) == last


def finder(*answers: str | None) -> Callable[[], str | None]:
    left = list(answers)
    return lambda: left.pop(0)


def test_ensure_browser() -> None:
    said: list[str] = []
    called: list[list[str]] = []

    def call(command: list[str]) -> int:
        called.append(command)
        return 0

    steps = [["apt-get", "update"], ["apt-get", "install"]]
    assert ensure_browser(said.append, find=finder(CHROME), command=lambda: steps, call=call) == CHROME
    assert (said, called) == ([], [])
    assert ensure_browser(said.append, find=finder(None, CHROME), command=lambda: steps, call=call) == CHROME
    assert called == steps
    assert ensure_browser(said.append, find=finder(None, None), command=lambda: steps, call=lambda _: 1) is None
    assert how_to_get() in said[-1]


def test_fonts_are_part_of_a_browser(tmp_path: Path) -> None:
    """Chromium on Linux dies with the first text when there is no font: a browser without one is half installed."""
    assert not has_fonts([str(tmp_path), str(tmp_path / "none")], "linux")
    assert has_fonts([], "darwin")
    (tmp_path / "truetype").mkdir()
    (tmp_path / "truetype" / "Some.TTF").touch()
    assert has_fonts([str(tmp_path)], "linux")

    said: list[str] = []
    called: list[list[str]] = []

    def call(command: list[str]) -> int:
        called.append(command)
        return 0

    fonts = iter([False, True])
    found = ensure_browser(
        said.append, find=lambda: CHROME, fonts=lambda: next(fonts), command=lambda: [list(APT)], call=call
    )
    assert found == CHROME
    assert called == [list(APT)]
    assert "no font found" in said[0]
    ensure_browser(said.append, find=lambda: CHROME, fonts=lambda: False, command=list, call=call)
    assert "fonts-dejavu-core" in said[-1]
