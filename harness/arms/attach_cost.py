"""The cost of a pair of createBuffer and destroy with ``attach`` in its path, when every buffer is a reused one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Browser
from rich.table import Table

from harness import RunError
from harness.arms.schedule import Arm, Schedule
from harness.site.process import Report

PAGE = Path(__file__).with_name("attach_cost.html")
"""The page that measures."""
BOOT_MS = 120_000
"""Milliseconds that Pyodide may take to start."""
STEPS = 30
"""Steps per arm and round."""

Keeping = tuple[str, str]
"""Who decides about a freed buffer (bare: nobody; js; python), and ``zero`` of attach."""

_SETTINGS = (("bare", ""), ("js", "always"), ("js", "never"), ("python", "always"), ("python", "never"))
ARMS = tuple(Arm(f"{decides} {zero}".strip(), (decides, zero)) for decides, zero in _SETTINGS)
"""Every way of keeping a freed buffer."""


@dataclass(frozen=True, slots=True)
class PairTimes:
    """The times of an ``arm`` per buffer, an entry per step: of createBuffer, of destroy, and of the submit after them.

    That submit clears the buffers that are handed out again.
    """

    arm: Arm[Keeping]
    create_us: list[float] = field(default_factory=list)
    destroy_us: list[float] = field(default_factory=list)
    submit_us: list[float] = field(default_factory=list)

    @property
    def pair_us(self) -> float:
        """The median step's pair of createBuffer and destroy."""
        return median(a + b for a, b in zip(self.create_us, self.destroy_us, strict=True))

    def add(self, found: dict[str, Any]) -> None:
        """Add the steps that the page measured, ``found``.  RunError when a buffer was not a reused one."""
        if found["created"]:
            raise RunError(
                f"{self.arm.name}: {found['created']} buffers were created in steps that were to reuse all of theirs."
            )
        for create, destroy, submit in found["times"]:
            self.create_us.append(create)
            self.destroy_us.append(destroy)
            self.submit_us.append(submit)


def measure(
    browser: Browser, url: str, rounds: int, report: Report = lambda _: None, steps: int = STEPS
) -> list[PairTimes]:
    """The times of every arm, ``rounds`` times ``steps`` steps each, all in one page of the site at ``url``."""
    times = {arm.name: PairTimes(arm) for arm in ARMS}
    page = browser.new_page()
    try:
        page.set_default_timeout(BOOT_MS)
        headers = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
        body = PAGE.read_text(encoding="utf-8")
        page.route(
            "**/attach_cost.html", lambda route: route.fulfill(body=body, content_type="text/html", headers=headers)
        )
        page.goto(f"{url.rstrip('/')}/attach_cost.html")
        page.wait_for_function("() => window.measure")
        for turn in Schedule(arms=ARMS, rounds=rounds, steps=steps):
            report(f"round {turn.round + 1} of {rounds}: {turn.arm.name}")
            decides, zero = turn.arm.settings
            times[turn.arm.name].add(page.evaluate("measure", {"arm": decides, "zero": zero, "steps": steps}))
    finally:
        page.close()
    return list(times.values())


def table(rows: Sequence[PairTimes]) -> Table:
    """A table of the medians over steps."""
    found = Table("decides", "zero", "createBuffer", "destroy", "both", "submit", caption="microseconds per buffer")
    for row in rows:
        figures = (median(row.create_us), median(row.destroy_us), row.pair_us, median(row.submit_us))
        decides, zero = row.arm.settings
        found.add_row(decides, zero or "-", *(f"{time:.2f}" for time in figures))
    return found
