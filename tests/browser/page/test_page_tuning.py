"""The page's part in tuning, with the stub in place of the worker: it asks for it once and keeps what comes of it."""

import pytest
from playwright.sync_api import expect

from tests.browser.page.stub_page import Opened, open_page, run, sent, state, table_rows

pytestmark = pytest.mark.browser
__all__ = ["open_page"]  # the fixture


def test_a_run_is_tuned_once_and_the_next_page_brings_what_was_kept(open_page: Opened) -> None:
    page = open_page("?tokens=3&tune=1&tune_ms=2500")
    state(page, "ready")
    assert sent(page, "boot") == [{"type": "boot", "tuning": None}]
    expect(page.locator("[name=tune]")).to_be_checked()
    run(page, prompt="Hi")
    run(page)
    first, second = (message["request"] for message in sent(page, "run"))
    assert (first["tune"], first["tune_ms"]) == (True, 2500)
    assert "tune" not in second and "tune_ms" not in second
    note = page.locator("#tuning .note").inner_text()
    assert note == (
        "4 of 5 products measured in the time; for 1 another way is faster than the rule's. Remembered in this browser."
    )
    assert table_rows(page, "tuning") == [
        ["norm + swiglu, u4, 2,048 \N{MULTIPLICATION SIGN} 64", "31", "27.5", "wide 8, per 2"]
    ]
    expect(page.locator("#notices")).to_contain_text("matvec 1 is wrong")
    assert page.evaluate("stepwell.tuning.notices") == ["matvec 1 is wrong"]
    page.reload()
    state(page, "ready")
    assert sent(page, "boot") == [{"type": "boot", "tuning": "tuned for 2500"}]
    assert open_page.problems == []


def test_compared_runs_and_workloads_are_not_tuned(open_page: Opened) -> None:
    page = open_page("?tokens=3&tune=1")
    state(page, "ready")
    page.fill("#ab-rounds", "1")
    page.click("#ab-run")
    state(page, "done")
    page.check("[name=tune]")
    run(page, model="kv64")
    assert [message["request"].get("tune") for message in sent(page, "run")] == [None] * 3
    expect(page.locator("#tuning")).to_be_hidden()


def test_a_notice_about_what_was_kept_is_shown(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    page.evaluate("localStorage.setItem('stepwell-tuning', 'corrupt')")
    page.reload()
    state(page, "ready")
    expect(page.locator("#notices")).to_contain_text("It cannot be read.")
    assert open_page.problems == []


def test_a_browser_that_keeps_nothing_says_so(open_page: Opened) -> None:
    page = open_page("?tokens=3&tune=1")
    state(page, "ready")
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('full'); }; }")
    run(page, prompt="Hi")
    expect(page.locator("#tuning .note")).to_contain_text("This browser keeps nothing")
    assert open_page.problems == []
