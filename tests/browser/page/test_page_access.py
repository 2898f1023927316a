"""Access to the page: names, contrast, targets, keyboard, narrow screens, screen readers."""

import pytest
from playwright.sync_api import Page, expect

from tests.browser.page.stub_page import Opened, audit, open_page, run, state

pytestmark = pytest.mark.browser
__all__ = ["open_page"]  # the fixture


@pytest.fixture(params=["light", "dark"])
def busy_page(request: pytest.FixtureRequest, open_page: Opened) -> Page:
    """Everything the page can show at once: two runs, a warning, a banner, an error, opened tables."""
    page = open_page("?kv=none&kernel_times=1", software=True, color_scheme=request.param)
    state(page, "ready")
    run(page, tokens="6", prompt="differ", policy="adaptive")
    run(page, policy="bucket")
    for summary in page.locator("summary").all():
        summary.click()
    page.fill("#prompt", "ask too much")
    page.click("#run")
    state(page, "error")
    expect(page.locator("#runs .alarm")).to_be_visible()
    expect(page.locator("#kernels .alarm")).to_be_visible()
    return page


def test_names_contrast_and_targets(busy_page: Page) -> None:
    audit(busy_page)
    assert busy_page.locator("html").get_attribute("lang") == "en"
    assert [busy_page.locator(tag).count() for tag in ("h1", "main", "header", "footer")] == [1, 1, 1, 1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_contrast_and_targets_of_a_workload(open_page: Opened, scheme: str) -> None:
    page = open_page("?model=kv64&start=2036&tokens=6", software=True, color_scheme=scheme)
    state(page, "ready")
    page.click("#compare")
    state(page, "done")
    expect(page.locator("#comparison table")).to_be_visible()
    expect(page.locator("#pool .gone")).to_be_visible()
    audit(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_contrast_and_targets_of_the_launch_path(open_page: Opened, scheme: str) -> None:
    page = open_page("?tokens=5&prompt=differ&trace=1", color_scheme=scheme)
    state(page, "ready")
    page.fill("#ab-rounds", "1")
    page.click("#ab-run")
    state(page, "done")
    expect(page.locator("#ab .alarm")).to_be_visible()
    expect(page.locator("#save-trace")).to_be_visible()
    audit(page)


def test_320_pixels_and_reduced_motion_need_no_sideways_scrolling(open_page: Opened) -> None:
    page = open_page(
        "?tokens=5&kernel_times=1", software=True, viewport={"width": 320, "height": 640}, reduced_motion="reduce"
    )
    state(page, "ready")
    page.locator("#launch summary").click()
    page.click("#ab-run")
    state(page, "done")
    run(page, tokens="30", policy="bucket")
    expect(page.locator("#latency canvas")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    beyond = """() => [...document.querySelectorAll("body *")]
      .filter(e => !e.closest(".scroller, .skip, .visually-hidden") && e.getBoundingClientRect().right > 320.5)
      .map(e => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(beyond) == []


def test_status_is_spoken_at_most_once_a_second(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    page.evaluate(
        "() => { window.spoken = 0; const region = document.querySelector('.progress [role=status]');"
        " new MutationObserver(() => (spoken += 1)).observe(region, { childList: true }); }"
    )
    run(page, tokens="60", prompt="slowly")
    assert page.evaluate("spoken") >= 2
    assert page.locator("#answer").get_attribute("aria-live") is None


def test_what_is_said_last_in_a_second_is_spoken_at_its_end(open_page: Opened) -> None:
    """By a clock that stands still until it is moved."""
    page = open_page()
    state(page, "ready")
    page.clock.install(time=0)
    page.clock.pause_at(10_000)
    page.evaluate(
        "async () => { const { announcer } = await import('./dom.js');"
        " window.region = document.createElement('p'); window.speak = announcer(region); }"
    )
    heard = []
    for said, ms in (("a", 1), ("b", 500), ("c", 498), ("", 2), ("", 5000), ("d", 1), ("e", 998), ("", 2)):
        page.evaluate("text => text && speak(text)", said)
        page.clock.run_for(ms)
        heard.append(page.evaluate("region.textContent"))
    assert heard == ["a", "a", "a", "c", "c", "d", "d", "e"]


def test_focus_is_visible(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    page.focus("#prompt")
    for selector in ("#run", "[name=policy]:checked", "[name=tokens]", "summary"):
        page.focus(selector)
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Tab")
        width = page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert (width >= 2, style) == (True, "solid"), selector
