"""The examples of docs/attach.md are run as they stand there, each in a page of its own."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from stepwell.replay.simulator import served
from stepwell.replay.traces import read_metadata, read_trace
from stepwell.replay.what_if import survey
from tests.browser.conftest import PATIENCE_MS
from tests.browser.page.stub_page import fulfil
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser

GUIDE = ROOT / "docs" / "attach.md"
RUNTIME = "/vendor/onnxruntime-web/ort.webgpu.bundle.min.mjs"
# transformers.js's web build imports the runtime by this name and makes its sessions in the same realm.
TRANSFORMERS = """
import * as ONNX_WEB from "onnxruntime-web/webgpu";
export async function pipeline(task, model, { device }) {
  const session = await ONNX_WEB.InferenceSession.create("./model.onnx", { executionProviders: [device] });
  return { session };
}"""
IMPORTS = {"onnxruntime-web/webgpu": RUNTIME, "@huggingface/transformers": "./transformers.js"}
# begin() counts what a realm's browser is asked for; probe() creates and destroys one size twenty times and says
# how often the browser made a buffer for it.
PROBE = """
globalThis.begin = async () => {
  const { countBuffers } = await import(new URL("/attach/count.js", location.href).href);
  globalThis.counter = countBuffers();
};
globalThis.probe = async (onDevice = () => {}) => {
  const device = await (await navigator.gpu.requestAdapter()).requestDevice();
  const before = counter.now().created;
  onDevice(device);
  for (let i = 0; i < 20; i += 1) {
    device.createBuffer({ size: 4096, usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST }).destroy();
    await device.queue.onSubmittedWorkDone();
  }
  device.destroy();
  return counter.now().created - before;
};
"""
START_WORKER = """(type) => new Promise((done, fail) => {
  const worker = new Worker(`/${type}.js`, { type });
  worker.onmessage = ({ data }) => done(data);
  worker.onerror = ({ message }) => fail(message);
})"""
WORKERS = {
    "classic": f"""{PROBE}
begin().then(() => {{
  importScripts("/stepwell-attach.js");
  stepwell.attach();
  return probe();
}}).then(postMessage);""",
    "module": f"""import "/stepwell-attach.js";
{PROBE}
await begin();
stepwell.attach();
postMessage(await probe());""",
}


def block(heading: str, index: int) -> str:
    """A JavaScript block of a section of the guide."""
    section = re.split(rf"^#+ {re.escape(heading)}$", GUIDE.read_text(encoding="utf-8"), flags=re.M)[1]
    section = re.split(r"^#+ ", section, flags=re.M)[0]
    return re.findall(r"^```js\n(.*?)^```$", section, flags=re.M | re.S)[index]


def open_with(browser: Browser, url: str, body: str) -> Page:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    html = f"""<!doctype html><meta charset="utf-8"><title>guide</title><link rel="icon" href="data:,">
<script type="importmap">{json.dumps({"imports": IMPORTS})}</script>
{body}"""
    fulfil(page, "**/guide.html", body=html, content_type="text/html")
    fulfil(page, "**/transformers.js", body=TRANSFORMERS, content_type="text/javascript")
    page.route("**/model.onnx", lambda route: route.continue_(url=f"{url}models/onnx/kv16.onnx"))
    page.on("pageerror", lambda error: print(f"page error: {error}"))
    page.goto(f"{url}guide.html")
    return page


def module(code: str, after: str) -> str:
    return f'<script type="module">\n{code}\n{after}\n</script>'


COUNT = (
    '<script type="module">import { countBuffers } from "./attach/count.js"; window.counter = countBuffers();</script>'
)
DECODE = """
import { decode } from "./attach/ort.js";
import * as runtime from "onnxruntime-web/webgpu";
await (session.session ?? session).release();
const steps = [];
for await (const step of decode(runtime, { model: "kv16", start: 2050, steps: 7 })) {
  steps.push([step.wrong, counter.now().created]);
}
window.steps = steps;
"""


@pytest.mark.parametrize("runtime", ["onnxruntime-web", "transformers.js"])
def test_the_two_lines_take_the_creates_away(runtime: str, browser: Browser, server_url: str) -> None:
    before, after = block(runtime, 0), block(runtime, 1)
    added = [line for line in after.splitlines() if line not in before.splitlines()]
    assert added == ['import "./stepwell-attach.js";', "stepwell.attach();"]
    after = after.replace("const generate", "const session")
    page = open_with(browser, server_url, COUNT + module(after, DECODE))
    page.wait_for_function("() => window.steps")
    wrong, created = zip(*page.evaluate("steps"), strict=True)
    assert set(wrong) == {0}
    assert created[-1] == created[3]  # six more at each step without it
    page.close()


def test_what_is_recorded_is_a_trace(browser: Browser, server_url: str, tmp_path: Path) -> None:
    code = block("Recording", 0)
    page = open_with(browser, server_url, COUNT + module(code.replace("const blob", f"{DECODE}\nwindow.blob"), ""))
    page.wait_for_function("() => window.blob")
    path = tmp_path / "session.trace"
    path.write_text(page.evaluate("blob.text()"), encoding="utf-8")
    found = survey(served(read_trace(path)))
    assert found.runs >= 6  # the first step is set-up
    metadata = read_metadata(path)
    assert (metadata["attach"], metadata["runtime"]) == (True, "onnxruntime-web")
    page.close()


def test_every_way_to_attach(browser: Browser, server_url: str) -> None:
    """The rows of the table: a page without modules, workers, a frame, one device; and detach."""
    page = open_with(browser, server_url, "<script src='./stepwell-attach.js'></script>")
    page.evaluate(f"() => {{ {PROBE} }}")
    page.evaluate("begin()")
    assert page.evaluate("probe()") == 20
    assert page.evaluate("(window.attachment = stepwell.attach(), probe())") < 5
    page.evaluate("attachment.detach()")
    assert page.evaluate("probe()") == 20
    assert page.evaluate("probe((device) => (window.attachment = stepwell.attach({ target: device })))") < 5
    page.evaluate("attachment.detach()")
    for kind, source in WORKERS.items():
        fulfil(page, f"**/{kind}.js", body=source, content_type="text/javascript")
        assert page.evaluate(START_WORKER, kind) < 5, kind
    page.evaluate("() => document.body.append(Object.assign(document.createElement('iframe'), { src: 'guide.html' }))")
    frame = page.frame_locator("iframe")
    frame.locator("body").wait_for(state="attached")
    inner = page.frames[1]
    inner.evaluate(f"() => {{ {PROBE} }}")
    inner.evaluate("begin()")
    assert inner.evaluate("probe()") == 20
    page.evaluate("() => { window.attachment = stepwell.attach({ target: frames[0] }); }")
    assert inner.evaluate("probe()") < 5
    assert page.evaluate("probe()") == 20  # another realm
    page.close()
