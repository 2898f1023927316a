"""Runs scenarios through the real page: fills its form, presses Run, follows the answer, takes the record."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from playwright.sync_api import Browser, ConsoleMessage, Error, Page

from harness import CRASHED, RunError, SetupError
from harness.page import record as records
from harness.page.adapter import Adapter, assert_adapter
from harness.page.browser import HOW_TO_GET_FONTS, AdapterProfile
from harness.page.record import Record
from harness.page.scenario import Scenario
from harness.page.setup import has_fonts

_POLL_S = 0.2
_CANCEL_S = 15.0
_STATE = """() => ({
  state: document.documentElement.dataset.state ?? "booting",
  text: document.querySelector("#answer")?.textContent ?? "",
  phase: document.querySelector("#status")?.textContent ?? "",
  error: window.stepwell?.error ?? null,
})"""
_INVALID = """() => [...document.querySelectorAll("#scenario :invalid")].filter((control) => control.name)
  .map((control) => `${control.name}=${control.value}: ${control.validationMessage}`)"""
# Shown, so that they can be filled; and without what an earlier scenario left there.
_RESET = """() => {
  const initial = ({ options }) => Math.max(0, [...options].findIndex((option) => option.defaultSelected));
  const form = document.querySelector("#scenario");
  for (const details of form.querySelectorAll("details:has([name])")) details.open = true;
  for (const control of form.querySelectorAll("[name]:not([type=radio], [type=file])")) {
    if (control.type === "checkbox") control.checked = control.defaultChecked;
    else if (control.options) control.selectedIndex = initial(control);
    else control.value = control.defaultValue;
  }
}"""
OnText = Callable[[str], None]


class Interrupt:
    """Set by the first Ctrl-C while inside ``catch``; a second one interrupts as usual."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def catch(self) -> Iterator[Self]:
        """Take the first Ctrl-C, in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def handle(number: int, frame: FrameType | None) -> None:
            if self.asked:
                signal.default_int_handler(number, frame)
            self.asked = True

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


class PageRunner:
    """The page of a served site, open in ``browser``: asserted adapter, then any number of runs one after another.

    ``url`` is the site's root; ``flags`` go into the records; ``timeout_s`` bounds the boot and each run; ``tuning`` is
    the text that the page's ``remembered.js`` keeps, as if it had kept it.
    """

    def __init__(
        self,
        browser: Browser,
        url: str,
        profile: AdapterProfile,
        flags: Sequence[str] = (),
        *,
        timeout_s: float = 600.0,
        tuning: str | None = None,
    ) -> None:
        self.url, self.profile, self.flags, self.timeout_s = url, profile, list(flags), timeout_s
        self._browser, self._tuning = browser, tuning
        self._faults: list[str] = []
        self._crashed = False

    def __enter__(self) -> Self:
        self._page = self._browser.new_page()
        self._page.set_default_timeout(20_000)
        try:
            self._page.goto(self.url + "manifest.json")
            self.adapter: Adapter = assert_adapter(self._page, self.profile)
            if self._tuning is not None:
                self._page.evaluate("text => localStorage.setItem('stepwell-tuning', text)", self._tuning)
            self._page.on("console", self._hear)
            self._page.on("pageerror", lambda error: self._faults.append(f"uncaught {error.name}: {error.message}"))
            self._page.on("crash", lambda _: setattr(self, "_crashed", True))
            self._open()
            self._wait_for("ready", "done")
        except BaseException:
            self._page.close()
            raise
        return self

    def _open(self) -> None:
        try:
            self._page.goto(self.url)
        except Error as error:
            if self._browser.is_connected():
                raise self._error(f"the page did not open: {error.message}") from error
            # it computed a moment ago, so it is the page that it died of: on Linux, for want of a font
            advice = "" if has_fonts() else f" There is no font on this machine. {HOW_TO_GET_FONTS}"
            raise SetupError(f"the browser died when it opened the page.{advice}") from error

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._page.close()

    @property
    def page(self) -> Page:
        """The page that is driven."""
        return self._page

    def run(self, scenario: Scenario, on_text: OnText = lambda _: None, on_phase: OnText = lambda _: None) -> Record:
        """One run of ``scenario``; the record is checked and carries the browser's flags.

        Ctrl-C presses the page's Cancel button: the record then says ``cancelled``.  Raises RunError.
        """
        try:
            self._fill(scenario)
            self._page.click("#run")
        except Error as error:
            raise self._error(f"the page's form did not take the scenario: {error.message}") from error
        if invalid := self._page.evaluate(_INVALID):
            raise RunError("the page's form refuses " + "; ".join(invalid), "BadRequest")
        with Interrupt().catch() as interrupt:
            self._follow(on_text, on_phase, interrupt)
        record: Record | None = self._page.evaluate("() => window.stepwell.record")
        if record is None:
            raise self._error("the page says that it is done but has no record")
        record["environment"]["flags"] = self.flags
        return records.check(record)

    def trace(self) -> str:
        """The last run's Chrome trace, as JSON text.  RunError when the page has none: the scenario must ask for it."""
        text = self._page.evaluate("() => window.stepwell.trace ?? null")
        if not isinstance(text, str):
            raise self._error("the page says that the run is done but has no trace of it")
        return text

    def pool_trace(self) -> str:
        """What the last run asked of the pool, as the text of a trace.  RunError as ``trace``."""
        text = self._page.evaluate("() => window.stepwell.poolTrace ?? null")
        if not isinstance(text, str):
            raise self._error("the page says that the run is done but has no trace of its pool")
        return text

    def tuning(self) -> str | None:
        """What the page keeps of its tuning, as text."""
        text: str | None = self._page.evaluate("() => localStorage.getItem('stepwell-tuning')")
        return text

    def tuned(self) -> dict[str, Any]:
        """What the page says of its tuning: ``notices``, and ``outcome`` (docs/protocol.md) if it was tuned."""
        found: dict[str, Any] = self._page.evaluate("() => window.stepwell.tuning ?? {outcome: null, notices: []}")
        return found

    def _fill(self, scenario: Scenario) -> None:
        page = self._page
        for name, value in scenario.radios.items():
            radio = page.locator(f'input[name="{name}"][value="{value}"]')
            if radio.count() == 0 or radio.is_disabled():
                values = page.locator(f'input[name="{name}"]').evaluate_all("all => all.map(radio => radio.value)")
                raise RunError(f"the page offers no {name} {value!r}, only {', '.join(values) or 'none'}", "BadRequest")
            radio.check(force=True)
        if scenario.file:
            page.set_input_files("#file", scenario.file)
        page.evaluate(_RESET)
        for name, value in scenario.fields.items():
            self._set(name, value)
        for name in scenario.switches:
            page.locator(f'input[name="{name}"]').check(force=True)

    def _set(self, name: str, value: str) -> None:
        """Type into a control, or choose."""
        control = self._page.locator(f'[name="{name}"]')
        kind = control.evaluate("node => node.type")
        if kind == "select-one":
            control.select_option(value, force=True)
        elif kind == "checkbox":
            control.set_checked(value.lower() == "true", force=True)
        else:
            control.fill(value, force=True)

    def _follow(self, on_text: OnText, on_phase: OnText, interrupt: Interrupt) -> None:
        """Until the run has ended: hand on the answer as it grows.  RunError when it failed or took too long."""
        shown = phase = ""
        deadline = time.monotonic() + self.timeout_s
        cancelled = False
        while True:
            now = self._look()
            if now["phase"] != phase:
                phase = str(now["phase"])
                on_phase(phase)
            # While the model loads, the page still shows the answer of the run before.
            if now["state"] in ("running", "done") and now["text"].startswith(shown):
                on_text(now["text"][len(shown) :])
                shown = now["text"]
            if now["state"] == "done":
                return
            if now["state"] == "error":
                raise self._page_error(now)
            if now["state"] == "ready":
                raise RunError("the run was cancelled before its first token: there is nothing to record", "Cancelled")
            if interrupt.asked and not cancelled:
                cancelled = True
                deadline = min(deadline, time.monotonic() + _CANCEL_S)
                self._page.locator("#cancel").click(force=True)
            if time.monotonic() > deadline:
                what = (
                    "the page did not end the cancelled run" if cancelled else f"no result after {self.timeout_s:g} s"
                )
                raise self._error(f"{what} (state {now['state']}, {phase or 'no phase'})", "Timeout")
            self._pause(_POLL_S)

    def _wait_for(self, *states: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            now = self._look()
            if now["state"] in states:
                return
            if now["state"] == "error":
                raise self._page_error(now)
            if time.monotonic() > deadline:
                raise self._error(f"the page was still {now['state']} after {self.timeout_s:g} s", "Timeout")
            self._pause(_POLL_S)

    def _look(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._page.evaluate(_STATE)
        except Error as error:
            raise self._error(f"the page cannot be reached: {error.message}") from error
        return found

    def _pause(self, seconds: float) -> None:
        """Wait while Playwright's events are still delivered."""
        try:
            self._page.wait_for_timeout(1000 * seconds)
        except Error as error:
            raise self._error(f"the page went away: {error.message}") from error

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._faults.append(message.text)

    def _page_error(self, now: dict[str, Any]) -> RunError:
        error = now["error"] or {}
        message = str(error.get("message") or "the page shows an error without a message")
        return RunError(message + self._heard(message), str(error.get("code") or "Error"))

    def _error(self, message: str, code: str = "") -> RunError:
        if self._crashed:
            message, code = CRASHED, "Crash"
        return RunError(message + self._heard(message), code)

    def _heard(self, message: str) -> str:
        """What the console said beside it: usually the cause."""
        lines = [line for line in dict.fromkeys(self._faults) if line not in message and message not in line]
        return "".join(f"\n  console: {line}" for line in lines[-6:])
