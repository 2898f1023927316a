"""What a pair of createBuffer and destroy costs with ``attach`` in its path, when every buffer is a reused one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Browser
from rich.table import Table

from harness import RunError
from harness.arms.compare import rotated

PAGE = Path(__file__).with_name("attach_cost.html")
BOOT_MS = 120_000
STEPS = 30


@dataclass
class Arm:
    """``name``: bare (the browser alone), or who decides, js or python; ``zero`` as in ``attach``.

    Times per buffer, an entry per step: of createBuffer, of destroy, and of the submit after them, which clears what
    is to be handed out again.
    """

    name: str
    zero: str = ""
    create_us: list[float] = field(default_factory=list)
    destroy_us: list[float] = field(default_factory=list)
    submit_us: list[float] = field(default_factory=list)

    @property
    def pair_us(self) -> float:
        """The median step's pair of createBuffer and destroy."""
        return median(a + b for a, b in zip(self.create_us, self.destroy_us, strict=True))


ARMS = (("bare", ""), ("js", "always"), ("js", "never"), ("python", "always"), ("python", "never"))


def measure(
    browser: Browser, url: str, rounds: int, tell: Callable[[str], None] = lambda _: None, steps: int = STEPS
) -> list[Arm]:
    """Every arm ``rounds`` times for ``steps`` steps, in turns in one page, each round in another order."""
    arms = [Arm(*names) for names in ARMS]
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
        for number in range(rounds):
            for arm in rotated(arms, number):
                tell(f"round {number + 1} of {rounds}: {arm.name} {arm.zero}")
                found = page.evaluate("measure", {"arm": arm.name, "zero": arm.zero, "steps": steps})
                _add(arm, found)
    finally:
        page.close()
    return arms


def _add(arm: Arm, found: dict[str, Any]) -> None:
    if found["created"]:
        raise RunError(
            f"{arm.name}: {found['created']} buffers were created in steps that were to reuse all of theirs."
        )
    for create, destroy, submit in found["times"]:
        arm.create_us.append(create)
        arm.destroy_us.append(destroy)
        arm.submit_us.append(submit)


def table(arms: Sequence[Arm]) -> Table:
    """Medians of the steps."""
    found = Table("decides", "zero", "createBuffer", "destroy", "both", "submit", caption="microseconds per buffer")
    for arm in arms:
        times = (median(arm.create_us), median(arm.destroy_us), arm.pair_us, median(arm.submit_us))
        found.add_row(arm.name, arm.zero or "-", *(f"{time:.2f}" for time in times))
    return found
