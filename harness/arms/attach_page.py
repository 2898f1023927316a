"""The arms of ``attach`` in real pages: one page per run, so that nothing is left of the run before."""

from typing import Any

from playwright.sync_api import Browser, Error, Page

from harness import CRASHED, RunError
from harness.arms.attach import MeasuredStep

_WORK = """async ([what, limit, options]) => {
  const late = new Promise((_, reject) => {
    setTimeout(() => reject(new Error(`no result after ${limit} s`)), 1000 * limit);
  });
  const { Arm } = await import(new URL("/attach/arm.js", location.href).href);
  const open = async () => void (globalThis.arm = await Arm.open(options));
  return Promise.race([late, what === "open" ? open() : globalThis.arm[what]()]);
}"""


class PageArm:
    """A run in progress, in ``page``; ``timeout_s`` bounds its opening and each step."""

    def __init__(self, page: Page, timeout_s: float) -> None:
        self._page, self._timeout_s = page, timeout_s
        self._crashed = False
        page.on("crash", lambda _: setattr(self, "_crashed", True))

    def open(self, options: dict[str, Any]) -> None:
        """Begin the run with the ``options`` of Arm.open() (web/attach/arm.js)."""
        self._call("open", options)

    def next(self) -> MeasuredStep:
        """Run a step and measure it."""
        step: MeasuredStep = self._call("next")
        return step

    def finish(self) -> dict[str, Any]:
        """End the run; what the page says of it."""
        end: dict[str, Any] = self._call("finish")
        return end

    def close(self) -> None:
        """Close the page."""
        self._page.close()

    def _call(self, what: str, options: dict[str, Any] | None = None) -> Any:
        try:
            return self._page.evaluate(_WORK, [what, self._timeout_s, options])
        except Error as error:
            if self._crashed:
                raise RunError(CRASHED, "Crash") from error
            raise RunError(f"{what}: {error.message}") from error


class ArmPages:
    """A source of arms, each in a new page of the site at ``url``; ``timeout_s`` as in PageArm."""

    def __init__(self, browser: Browser, url: str, timeout_s: float) -> None:
        self._browser, self._url, self._timeout_s = browser, url, timeout_s

    def open(self, options: dict[str, Any]) -> PageArm:
        """Open an arm with the ``options`` of Arm.open() (web/attach/arm.js)."""
        page = self._browser.new_page()
        try:
            page.goto(self._url + "manifest.json")
            arm = PageArm(page, self._timeout_s)
            arm.open(options)
        except BaseException:
            page.close()
            raise
        return arm
