"""WebGPU under an attached pool: a table of cases, each run bare and attached in Chromium, with equal answers."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route

from stepwell.attach.bundle import script
from tests.browser.conftest import PATIENCE_MS
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser
TESTS = ROOT / "tests"
URL = "http://localhost:9/"  # nothing listens there: routes answer
HTML = """<!doctype html><title>cases</title>
<script src="stepwell-attach.js"></script><script type="module" src="browser/attach/semantics/run.js"></script>"""
ZERO_IS_SEEN = "^(zero|work|map|bind|devices)/|/alive$|/destroyed in flight$|^destroy/(a group|another)|a label that"


def answer(route: Route) -> None:
    name = route.request.url.removeprefix(URL)
    if name.endswith(".html"):
        route.fulfill(body=HTML, content_type="text/html")
    elif name == "stepwell-attach.js":
        route.fulfill(body=script(), content_type="text/javascript")
    elif (TESTS / name).is_file():
        route.fulfill(body=(TESTS / name).read_text(encoding="utf-8"), content_type="text/javascript")
    else:  # an unanswered request would wait until the test's end
        route.fulfill(status=404, body=f"no file {name}")


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: pytest.fail(f"page error: {error}"))
    page.route(f"{URL}**", answer)
    page.goto(f"{URL}cases.html")
    page.wait_for_function("() => globalThis.runCases")
    yield page
    page.close()


@pytest.fixture(scope="module")
def bare(page: Page) -> dict[str, Any]:
    """What the browser answers."""
    answers: dict[str, Any] = page.evaluate("runCases({})")
    assert len(answers) >= 140
    for name, case in answers.items():
        assert case["reused"] == 0
        assert not str(case["answer"]).startswith("threw"), (name, case)
    return answers


def unlike(answer: Any, expected: Any) -> list[tuple[str, str]]:
    """Where two answers part, part by part."""
    if isinstance(answer, list) and isinstance(expected, list) and len(answer) == len(expected) < 40:
        return [pair for parts in zip(answer, expected, strict=True) for pair in unlike(*parts)]
    return [] if answer == expected else [(json.dumps(answer)[:300], json.dumps(expected)[:300])]


def differences(page: Page, bare: dict[str, Any], **choices: Any) -> list[str]:
    """The cases that are answered otherwise, or without a buffer that was handed out again."""
    attached = page.evaluate("(choices) => runCases(choices)", choices)
    assert len(attached) >= 10
    found = []
    for name, case in attached.items():
        if case["answer"] != bare[name]["answer"]:
            pairs = unlike(case["answer"], bare[name]["answer"])
            found += [f"{name}: {left} instead of {right}" for left, right in pairs]
        if case["reused"] < case["reuses"]:
            found.append(f"{name}: {case['reused']} buffers were handed out again; {case['reuses']} show something")
    return found


def test_attached_and_bare_behave_alike(page: Page, bare: dict[str, Any]) -> None:
    assert differences(page, bare, options={}) == []


def test_alike_with_what_was_there_where_nobody_looks(page: Page, bare: dict[str, Any]) -> None:
    """`zero="never"`, and recorded: the cases in which it is not seen what a new buffer has in it."""
    choices = {"zero": "never", "record": True}
    assert differences(page, bare, options=choices, pattern=f"^(?!.*({ZERO_IS_SEEN}))") == []


def test_without_zeroing_it_is_seen(page: Page, bare: dict[str, Any]) -> None:
    """That the cases can tell."""
    found = differences(page, bare, options={"zero": "never"}, pattern="^zero/")
    assert sum("3735928559" in text for text in found) >= 5


def test_one_device_behaves_alike(page: Page, bare: dict[str, Any]) -> None:
    pattern = "^(zero|destroy|submit|map)/|stolen"
    assert differences(page, bare, options={}, alone=True, pattern=pattern) == []


def test_prototypes_are_as_before(page: Page) -> None:
    rounds = page.evaluate("detaching.prototypes()")
    assert rounds == [[True, [], True, True, True]] * 3


@pytest.mark.parametrize("alone", [False, True])
def test_no_native_buffer_is_kept(page: Page, alone: bool) -> None:
    """Four are left behind three times, and each time one of them lives on."""
    outcome = page.evaluate("(alone) => detaching.memory(alone)", alone)
    assert outcome["seen"][0] >= 6
    assert outcome["seen"][1:] == [3, 0]
    assert outcome["words"] == [0, 0, 0]
    assert outcome["prototypes"] == ["GPUDevice", "GPUQueue"]
    assert outcome["left"] == [True, True]  # their prototypes are WebGPU's own


def test_attach_and_detach_in_the_middle(page: Page) -> None:
    outcome = page.evaluate("detaching.inTheMiddle()")
    assert outcome["errors"] == []
    assert outcome["words"] == [5, 5, 6, 5, 5, 6, 5, 6, 5, 6]
    assert outcome["restored"]


def test_mistakes_are_typed(page: Page) -> None:
    messages, restored = page.evaluate("detaching.mistakes()")
    assert messages[0] == "AttachError: stepwell is attached already. Call detach() of that attachment first."
    names = [message.split(":")[0] for message in messages]
    assert names == ["AttachError"] * 5 + ["BadRequest"]
    assert restored


def test_a_worker_behaves_alike(page: Page, bare: dict[str, Any]) -> None:
    source = """async (choices) => {
      const worker = new Worker("browser/attach/semantics/worker.js", { type: "module" });
      const next = () => new Promise((resolve, reject) => {
        worker.onmessage = ({ data }) => resolve(data);
        worker.onerror = ({ message }) => reject(new Error(message));
      });
      await next();
      worker.postMessage(choices);
      const answers = await next();
      worker.terminate();
      return answers;
    }"""
    answers = page.evaluate(source, {"options": {}, "pattern": "^zero/"})
    assert len(answers) >= 10
    for name, case in answers.items():
        assert case["answer"] == bare[name]["answer"], name
        assert case["reused"] >= case["reuses"]
