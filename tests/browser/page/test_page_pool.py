"""The page's workload, comparison, policy options and pool panel, with the stub in place of the worker."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.page.stub_page import Opened, open_page, run, sent, settle, state, table_rows

pytestmark = pytest.mark.browser
__all__ = ["open_page"]  # the fixture


def ready(open_page: Opened, query: str = "", **options: Any) -> Page:
    page = open_page(query, **options)
    state(page, "ready")
    return page


def test_a_workload_needs_no_model_and_no_prompt(open_page: Opened) -> None:
    page = ready(open_page, model=False)
    expect(page.locator("#pattern")).to_be_hidden()
    page.fill("#prompt", "")
    page.check("[name=model][value=kv64]")
    expect(page.locator("#pattern")).to_be_visible()
    expect(page.locator("#prompt")).to_be_hidden()
    expect(page.locator("[name=temperature]")).to_be_hidden()
    run(page, start="2036", tokens="5", policy="bucket", kv="grow")
    assert sent(page, "load") == []
    (message,) = sent(page, "run")
    assert message["request"] == {"workload": "kv64", "start": 2036, "policy": "bucket", "kv": "grow", "tokens": 5}
    assert page.evaluate("stepwell.record.tokens[0].position") == 2036
    assert page.evaluate("stepwell.error") is None
    assert "2 decode steps; the fill and the two steps after it" in page.inner_text("#answer-panel .figures + .note")
    assert "(2,036 positions)" in page.inner_text("#latency .note")
    page.check("[name=model][value=file]")
    expect(page.locator("#prompt")).to_be_visible()
    assert open_page.problems == []


def test_start_end_and_tokens_follow_each_other(open_page: Opened) -> None:
    page = ready(open_page, "?model=kv64&start=2000&tokens=100")
    expect(page.locator("#pattern-end")).to_have_value("2099")
    page.fill("#pattern-end", "2199")
    expect(page.locator("[name=tokens]")).to_have_value("200")
    page.fill("[name=start]", "3000")
    expect(page.locator("#pattern-end")).to_have_value("3199")
    page.fill("[name=tokens]", "10")
    expect(page.locator("#pattern-end")).to_have_value("3009")
    assert "64 tensors grow from 5.86\xa0MiB to 5.88\xa0MiB" in page.inner_text("#pattern")


def test_what_the_device_cannot_hold_is_refused_with_numbers(open_page: Opened) -> None:
    page = ready(open_page, "?model=kv64&start=2000&tokens=2000000")
    expect(page.locator("#pattern .note")).to_contain_text("this device allows 2\xa0GiB: 1,048,576 positions")
    page.click("#run")
    assert sent(page, "run") == []
    page.fill("[name=tokens]", "3")
    page.click("#run")
    state(page, "done")


def test_options_of_the_chosen_policy_and_a_budget_reach_the_request(open_page: Opened) -> None:
    page = ready(open_page)
    page.locator("#cache summary").click()
    page.fill("[name=option-window]", "4")
    page.select_option("[name=option-stagger]", "false")
    page.fill("[name=budget]", "1500")
    page.check("[name=hard]")
    run(page, tokens="3", policy="adaptive")
    expected = {"policy_options": {"window": 4, "stagger": False}, "budget_mib": 1500, "hard_budget": True}
    assert {name: sent(page, "run")[-1]["request"].get(name) for name in expected} == expected
    page.check("[name=policy][value=bucket]")  # its options take the place of the other's
    expect(page.locator("[name=option-window]")).to_have_count(0)
    page.select_option("[name=option-era]", "A")
    page.fill("[name=option-limits]", "4 MiB:64")
    run(page)
    assert sent(page, "run")[-1]["request"]["policy_options"] == {"era": "A", "limits": "4 MiB:64"}
    again = open_page(page.url.partition("/?")[2].join(["?", ""]))
    state(again, "ready")
    again.click("#run")
    state(again, "done")
    assert sent(again, "run")[0]["request"] == sent(page, "run")[-1]["request"]


def test_an_option_out_of_range_is_not_sent(open_page: Opened) -> None:
    page = ready(open_page)
    page.locator("#cache summary").click()
    page.fill("[name=option-window]", "0")
    page.click("#run")
    assert sent(page, "run") == []


def test_compare_runs_the_arms_in_turns_and_pairs_them(open_page: Opened) -> None:
    page = ready(open_page, "?model=kv64&start=2036&tokens=6&policy=adaptive&option-window=4")
    page.fill("#rounds", "2")
    page.click("#compare")
    state(page, "done")
    settle(page)
    requests = [message["request"] for message in sent(page, "run")]
    order = [(request["policy"], request["kv"]) for request in requests]
    bucket, adaptive, static = ("bucket", "grow"), ("adaptive", "grow"), ("adaptive", "static")
    assert order == [bucket, adaptive, static, adaptive, static, bucket]
    assert [request.get("policy_options") for request in requests[:3]] == [None, {"window": 4}, None]
    rows = {row[0]: row[1:] for row in table_rows(page, "comparison")}
    assert rows["bucket"] == ["6", "30", "30", "40", "3.00 [3.00, 3.00]"]
    assert rows["static"] == ["6", "10", "10", "0", "1.00 [1.00, 1.00]"]
    assert len(table_rows(page, "runs")) == 6


def test_stop_ends_a_comparison(open_page: Opened) -> None:
    page = ready(open_page, "?model=kv64&start=9&tokens=2000")
    page.click("#compare")
    state(page, "running")
    page.click("#cancel")
    state(page, "done")
    assert len(sent(page, "run")) == 1
    assert page.evaluate("stepwell.record.finish_reason") == "cancelled"


def test_the_pool_panel_shows_classes_fill_drain_and_go(open_page: Opened) -> None:
    page = ready(open_page, "?model=kv64&start=2036")
    run(page, tokens="3")
    kv = page.locator("#pool .class[data-role=kv]")
    assert 4 <= kv.count() <= 12  # 64 classes share rows
    squares = "".join(kv.locator(".squares").all_inner_texts())
    assert (squares.count("■"), squares.count("□")) == (64, 64)
    assert "hit 75 %" in kv.first.inner_text()
    other = page.locator("#pool .class", has_text="activation").inner_text()
    assert "activation 6\xa0KiB" in other and "■■□" in other and "keeps all" in other
    expect(page.locator("#pool .finding")).to_have_text("adaptive explains itself.")
    assert page.locator("#pool .gone").count() == 0
    run(page, tokens="6")
    assert page.locator("#pool .gone").inner_text().strip().startswith("4\xa0MiB")
    expect(page.locator("#pool .gone")).to_contain_text("left behind · 2 dropped")
    squares = "".join(kv.locator(".squares").all_inner_texts())
    assert (squares.count("■"), squares.count("□")) == (63, 63)
    label = kv.nth(1).locator(".squares").get_attribute("aria-label") or ""
    assert label.endswith("free") and "live" in label
    assert open_page.problems == []
