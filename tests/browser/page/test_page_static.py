"""The page alone: the contract of its form and messages, runs and their panels, links, keyboard, files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from harness.page import record as records
from harness.site.build import options_script
from stepwell.page.run_options import RUN_OPTIONS
from tests.browser.page.stub_page import MODEL, Opened, open_page, run, sent, settle, state, table_rows
from tests.support.paths import ROOT
from tests.support.run_options import MADE_UP

pytestmark = pytest.mark.browser
__all__ = ["open_page"]  # the fixture

DOCS = ROOT / "docs" / "protocol.md"


# ---- the contract ------------------------------------------------------------------------------------------------


def test_message_types_are_those_of_the_document(open_page: Opened) -> None:
    text = DOCS.read_text(encoding="utf-8")
    to_worker, from_worker = text.split("### Page → worker")[1].split("### Worker → page")
    page = open_page()
    listed = page.evaluate(
        "async () => { const m = await import('./messages.js');"
        " return [Object.values(m.TO_WORKER), Object.values(m.FROM_WORKER)]; }"
    )
    written = [
        re.findall(r"^\| `(\w+)` \|", part.split("## The request")[0], flags=re.M) for part in (to_worker, from_worker)
    ]
    assert [sorted(part) for part in listed] == [sorted(part) for part in written]


def test_form_has_the_controls_of_the_document(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    kinds = page.evaluate(
        "() => Object.fromEntries([...document.forms[0].elements].filter(e => e.name).map(e => [e.name, e.type]))"
    )
    numbers = ("tokens", "context", "temperature", "top_k", "top_p", "seed", "top_logits", "start", "budget")
    numbers += ("prompt_length", "tune_ms")
    numbers += ("option-window", "option-growth")  # of the chosen policy
    numbers += tuple(f"launch-{name}" for name in ("submit_every", "submit_every_ms", "readback_depth", "bind_groups"))
    switches = ("raw", "hard", "digest", "gpu_time", "trace", "kernel_times", "pool_trace", "tune")
    switches += tuple(f"launch-{name}" for name in ("shared_pass", "bind_group_cache", "replay"))
    assert kinds == {
        **dict.fromkeys(("model", "kv", "policy"), "radio"), **dict.fromkeys(numbers, "number"),
        **dict.fromkeys(switches, "checkbox"), "option-stagger": "select-one", "launch-params": "select-one",
        "eos": "select-one", "format": "select-one", "kv_type": "select-one",
        "stop": "text", "prompt_ids": "text", "prompt": "textarea",
        "file": "file",
    }  # fmt: skip
    expect(page.locator("button#run")).to_be_enabled()
    expect(page.locator("button#cancel")).to_be_disabled()
    assert page.locator("input[type=file]#file").count() == 1
    radios = "name => [...document.querySelectorAll(`[name=${name}]`)].map(radio => radio.value)"
    assert page.evaluate(radios, "model") == ["smollm2", "kv64", "file", "synthetic:m"]
    assert page.evaluate(radios, "policy") == ["bucket", "adaptive"]
    assert page.evaluate(radios, "kv") == ["grow", "static"]


def test_a_made_up_option_is_in_the_form_the_link_and_the_request(
    open_page: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Any = RUN_OPTIONS
    monkeypatch.setitem(rows, MADE_UP.name, MADE_UP)
    page = open_page(options=options_script())
    state(page, "ready")
    control = page.get_by_label("Made up")
    found = control.evaluate(
        "node => [node.name, node.type, node.value, node.min, node.max, node.required, node.title]"
    )
    assert found == ["made_up", "number", "7", "1", "9", True, "nobody asked for it"]
    run(page, tokens="3", prompt="Hi")
    run(page, made_up="4")
    assert [message["request"].get("made_up") for message in sent(page, "run")] == [None, 4]
    assert "&made_up=4" in page.url
    page.fill("[name=made_up]", "10")
    page.click("#run")
    assert len(sent(page, "run")) == 2
    page.fill("[name=made_up]", "4")
    run(page, model="kv64")
    expect(control).to_be_hidden()
    assert "made_up" not in sent(page, "run")[-1]["request"]
    again = open_page("?made_up=5&run=1", options=options_script())
    state(again, "done")
    assert sent(again, "run")[0]["request"]["made_up"] == 5
    assert open_page.problems == []


def test_start_is_quiet_and_asks_for_nothing_large_or_foreign(open_page: Opened, server_url: str) -> None:
    page = open_page()
    state(page, "ready")
    assert open_page.problems == []
    assert all(url.startswith((server_url, "data:")) for url in open_page.requests)
    assert not any("models/" in url for url in open_page.requests)
    assert [message["type"] for message in page.evaluate("sent")] == ["boot"]
    note = page.locator("#model .option").first.inner_text()
    assert "98\xa0MiB" in note and "Apache-2.0" in note
    for panel in ("pattern", "comparison", "ab", "latency", "pool", "memory", "counters", "runs"):
        expect(page.locator(f"#{panel}")).to_be_hidden()
    assert page.evaluate("[stepwell.model, stepwell.record, stepwell.trace, stepwell.error]") == [None] * 4
    assert page.evaluate("stepwell.environment.browser") == "Stub 1.0"


def test_a_synthetic_model_is_offered_and_asked_for_by_name(open_page: Opened) -> None:
    page = open_page("?prompt_ids=1,2&model=synthetic:m&format=F16")
    state(page, "ready")
    expect(page.locator(".notice")).to_have_count(0)
    group = page.get_by_role("group", name="Synthetic (no download)")
    expect(group.locator(".aside")).to_have_text("16\xa0MiB")
    page.select_option("[name=format]", "Q4_0")
    expect(group.locator(".aside")).to_have_text("5\xa0MiB")
    run(page, tokens="2", prompt="")  # which the ids stand for
    page.select_option("[name=format]", "F16")
    run(page, prompt_ids="", prompt_length="9")
    run(page, prompt_length="", prompt="Hello")
    assert [message["model"] for message in sent(page, "load")] == [
        {"kind": "synthetic", "name": "synthetic:m"}, {"kind": "synthetic", "name": "synthetic:m:F16"},
    ]  # fmt: skip
    asked = [message["request"] for message in sent(page, "run")]
    prompts = [{name: value for name, value in request.items() if "prompt" in name} for request in asked]
    assert prompts == [{"prompt_ids": [1, 2]}, {"prompt_length": 9}, {"prompt": "Hello"}]
    assert "model=synthetic%3Am" in page.url and "format=F16" in page.url and "prompt_ids" not in page.url
    page.fill("[name=prompt]", "")
    page.click("#run")
    assert len(sent(page, "run")) == 3  # a text is needed again
    page.fill("[name=prompt_ids]", "1,x")
    page.click("#run")
    assert len(sent(page, "run")) == 3
    assert open_page.problems == []


def test_page_forbids_eval_and_foreign_requests(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    refused = page.evaluate(
        "() => new Promise(done => { addEventListener('securitypolicyviolation', e => done(e.effectiveDirective));"
        " fetch('https://example.org/').catch(() => {}); })"
    )
    assert refused == "connect-src"
    policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content") or ""
    assert "unsafe" not in policy and "default-src 'none'" in policy


# ---- runs --------------------------------------------------------------------------------------------------------


def test_first_run_loads_the_model_and_streams_the_answer(open_page: Opened, server_url: str) -> None:
    page = open_page()
    state(page, "ready")
    page.evaluate(
        "() => { window.seen = []; new MutationObserver(() => seen.push([document.documentElement.dataset.state,"
        " document.querySelector('#answer').getAttribute('aria-busy')]))"
        ".observe(document.documentElement, { attributeFilter: ['data-state'] }); }"
    )
    run(page, tokens="8", policy="adaptive", kv="grow", prompt="Hello")
    assert page.evaluate("seen") == [["loading", "false"], ["running", "true"], ["done", "false"]]
    load = {"kind": "url", "url": f"{server_url}models/m.gguf", "name": "SmolLM2", "sha256": MODEL["sha256"]}
    assert [message["model"] for message in sent(page, "load")] == [load]
    assert [message["request"] for message in sent(page, "run")] == [
        {
            "prompt": "Hello", "raw": False, "policy": "adaptive", "kv": "grow", "tokens": 8, "context": None,
            "temperature": 0, "top_k": 0, "top_p": 1, "seed": 0, "top_logits": 0, "ban_eos": False,
            "ignore_eos": False, "stop": [],
        }
    ]  # fmt: skip
    assert page.inner_text("#answer") == "w0 w1 w2 w3 w4 w5 w6 w7 end"
    assert page.evaluate("stepwell.record.token_ids") == list(range(100, 108))
    assert page.evaluate("stepwell.model.layers") == 30
    records.check(page.evaluate("stepwell.record"))
    figures = page.locator(".figures > div").all_inner_texts()
    pairs = dict(text.replace("\xa0", " ").split("\n") for text in figures)
    assert pairs["median per token"] == "10 ms" and pairs["first token"] == "5,000 ms"
    assert pairs["tokens/s"] == "100" and pairs["buffers created/token"] == "0"
    assert open_page.problems == []


def test_prefill_is_not_a_point_and_size_classes_are_marked(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    run(page, tokens="10", policy="bucket")
    page.locator("#latency summary").click()
    rows = table_rows(page, "latency")
    assert [row[0] for row in rows] == [str(position) for position in range(61, 70)]
    assert {row[1] for row in rows} == {"30"}
    assert [row[2] for row in rows] == ["48\xa0KiB"] * 4 + ["64\xa0KiB"] * 5
    label = page.locator("#latency .chart").get_attribute("aria-label") or ""
    assert "48 → 64 KiB at position 65" in label
    assert "5,000\xa0ms (60 tokens)" in page.inner_text("#latency .note")
    assert page.locator("#latency canvas").count() == 1


def test_policy_changes_between_runs_without_reload_and_runs_are_overlaid(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    run(page, tokens="6", policy="adaptive")
    run(page, policy="bucket")
    assert len(sent(page, "load")) == 1
    assert [message["request"]["policy"] for message in sent(page, "run")] == ["adaptive", "bucket"]
    assert page.locator("#latency .actions button").all_inner_texts() == ["A adaptive, grow", "B bucket, grow"]
    expect(page.locator("#latency .finding")).to_contain_text("A adaptive, grow is 3\u00d7 as fast as B bucket, grow")
    rows = table_rows(page, "runs")
    assert [row[:3] for row in rows] == [["A adaptive, grow", "5", "10"], ["B bucket, grow", "5", "30"]]
    dashes = page.locator("#latency .actions line").evaluate_all(
        "all => all.map(l => l.getAttribute('stroke-dasharray'))"
    )
    assert len(set(dashes)) == 2
    expect(page.locator(".option", has_text="fixed limits").locator(".aside")).to_have_text("40 /token")
    page.locator("#latency .actions button").first.click()
    expect(page.locator("#latency .actions button").first).to_have_attribute("aria-pressed", "false")
    page.get_by_role("button", name="Remove run A").click()
    settle(page)
    assert len(table_rows(page, "runs")) == 1


def test_different_answers_of_two_policies_raise_an_alarm(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    run(page, tokens="6", prompt="the same", policy="adaptive")
    run(page, policy="bucket")
    assert page.locator("#runs .alarm").count() == 0
    run(page, prompt="differ", policy="adaptive")
    run(page, policy="bucket")
    expect(page.locator("#runs [role=alert]")).to_contain_text("differ from token 3 on")


def test_export_as_json_and_markdown(open_page: Opened) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    state(page, "ready")
    run(page, tokens="5", policy="bucket")
    with page.expect_download() as download:
        page.click("#export")
    assert download.value.suggested_filename == "stepwell-A-bucket-grow.json"
    saved = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert saved == page.evaluate("stepwell.record")
    page.get_by_role("button", name="Copy as Markdown").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert lines[0].startswith("| run | model | n | median ms |")
    assert lines[2].startswith("| A bucket, grow | stub | 4 | 30 | 30 (max) |")
    assert "timer 5 µs" in lines[4] and "hardware adapter" in lines[4]


# ---- links, keyboard, files --------------------------------------------------------------------------------------


def test_query_string_sets_the_form_and_runs(open_page: Opened) -> None:
    query = "?policy=bucket&kv=static&kv_type=f16&tokens=5&temperature=0.7&seed=3&raw=1&eos=ban"
    query += "&stop=a%7C%5Cn%5Cn&prompt=Hi&run=1"
    page = open_page(query)
    state(page, "done")
    (request,) = [message["request"] for message in sent(page, "run")]
    expected = {
        "policy": "bucket", "kv": "static", "kv_type": "f16", "tokens": 5, "temperature": 0.7, "seed": 3,
        "raw": True, "ban_eos": True, "ignore_eos": False, "stop": ["a", "\n\n"], "prompt": "Hi",
    }  # fmt: skip
    assert {name: request[name] for name in expected} == expected
    assert "run=" not in page.url
    again = open_page(page.url.partition("/?")[2].join(["?", ""]))
    state(again, "ready")
    again.click("#run")
    state(again, "done")
    assert sent(again, "run")[0]["request"] == request


def test_query_string_with_unknown_values_says_so(open_page: Opened) -> None:
    page = open_page("?policy=magic&tokens=7")
    state(page, "ready")
    expect(page.locator("#notices")).to_contain_text("policy=magic")
    assert page.evaluate("document.forms[0].elements.policy.value") == "adaptive"
    assert page.input_value("[name=tokens]") == "7"


def test_keyboard_runs_and_stops(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    page.fill("#prompt", "slowly")
    page.keyboard.press("Control+Enter")
    state(page, "running")
    expect(page.locator("#run")).to_be_disabled()
    expect(page.locator("#answer")).to_contain_text("w2")
    page.keyboard.press("Escape")
    state(page, "done")
    assert page.evaluate("stepwell.record.finish_reason") == "cancelled"
    assert 3 <= page.evaluate("stepwell.record.tokens.length") < 64
    page.focus("#run")
    page.keyboard.press("Enter")
    state(page, "running")
    expect(page.locator("#cancel")).to_be_focused()
    page.keyboard.press("Enter")
    state(page, "done")
    expect(page.locator("#run")).to_be_focused()
    page.focus("[name=policy]:checked")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.forms[0].elements.policy.value") == "bucket"


def test_every_control_is_reached_by_tab(open_page: Opened) -> None:
    page = open_page()
    state(page, "ready")
    run(page, tokens="4")
    page.locator("body").press("Home")
    page.evaluate("document.activeElement.blur()")
    page.evaluate("document.querySelector('#launch details').open = true")
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    wanted = {
        "model",
        "file",
        "kv",
        "kv_type",
        "policy",
        "tokens",
        "context",
        "temperature",
        "seed",
        "top_k",
        "top_p",
        "top_logits",
    }
    wanted |= {
        "launch-shared_pass",
        "launch-replay",
        "launch-params",
        "digest",
        "gpu_time",
        "kernel_times",
        "trace",
        "ab-rounds",
        "ab-run",
    }
    assert wanted | {"eos", "stop", "raw", "prompt", "run", "export", "answer"} <= reached


def test_local_file_by_button_and_by_drop(open_page: Opened) -> None:
    page = open_page(model=False)
    state(page, "ready")
    expect(page.locator("#model")).to_contain_text("ships no model")
    page.set_input_files("#file", {"name": "mine.gguf", "mimeType": "", "buffer": b"GGUF" * 300})
    assert "mine.gguf" in page.inner_text("#model") and "1.17\xa0KiB" in page.inner_text("#model")
    run(page, tokens="4")
    (load,) = sent(page, "load")
    assert (load["model"]["kind"], load["model"]["name"]) == ("file", "mine.gguf")
    drop = """name => {
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File(["GGUF"], name));
      const target = document.querySelector("footer");
      for (const type of ["dragover", "drop"])
        target.dispatchEvent(new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true }));
    }"""
    page.evaluate(drop, "other.gguf")
    run(page)
    assert [message["model"]["name"] for message in sent(page, "load")] == ["mine.gguf", "other.gguf"]
    page.evaluate(drop, "notes.txt")
    expect(page.locator("#notices")).to_contain_text("notes.txt is neither a .gguf model nor a trace")
