"""How often the page is told: by a clock that stands still until it is moved."""

import json
from collections.abc import Callable

import pytest

from stepwell.page.outbox import Outbox


class Clock:
    """Milliseconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("stepwell.page.outbox.now_ms", clock)
    return clock


def outbox() -> tuple[Outbox, Callable[[], list[str]]]:
    """And the types of what it has sent."""
    sent: list[str] = []
    return Outbox(sent.append, "ready"), lambda: [json.loads(text)["type"] for text in sent]


def test_the_pool_is_due_once_per_frame(clock: Clock) -> None:
    out, sent = outbox()
    due = []
    for clock.now in (1000, 1001, 1015.9, 1016, 1031, 1032.5, 1048.4, 1048.5):
        due.append(out.pool_is_due)
        if out.pool_is_due:
            out.pool([])
    assert due == [True, False, False, True, False, True, False, True]
    assert sent() == ["pool"] * 4


def test_progress_comes_every_fifty_milliseconds_and_at_its_end(clock: Clock) -> None:
    out, sent = outbox()
    out.enter("weights", "Loading")
    report = out.progress("bytes")
    for done, clock.now in enumerate((1000, 1010, 1049, 1050, 1051), 1):
        report(done, 6)
    assert sent() == ["phase", "progress", "progress"]
    report(6, 6)
    assert sent() == ["phase", "progress", "progress", "progress"]
