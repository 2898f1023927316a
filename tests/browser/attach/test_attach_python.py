"""``stepwell.attach`` from Pyodide: policies by name and of the caller's under a JS application that knows of none."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from harness.arms import attach_cost
from stepwell.memory.buffer import Role
from stepwell.replay.traces import ACQUIRE, read_metadata, read_trace
from tests.browser.conftest import Lab

pytestmark = pytest.mark.browser

SOURCE = """
import gc
import gzip
import json
import weakref
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from pyodide.code import run_js
from pyodide.ffi import create_proxy
import stepwell
from stepwell.attach.keeper import Keeper
from stepwell.errors import StepwellError, UsageError
from stepwell.memory.policies.adaptive import Adaptive
from stepwell.memory.policies.exact import Exact
from stepwell.memory.policies.lazy_release import LazyRelease
from stepwell.memory.policies.simple import Simple

OWN = {"adaptive": Adaptive, "exact": Exact, "lazy_release": LazyRelease}

made = []

class Watched(Keeper):
    def __init__(self, *args):
        super().__init__(*args)
        made.append(weakref.ref(self))

import stepwell.attach.attachment
sys.modules["stepwell.attach.attachment"].Keeper = Watched

def alive():
    gc.collect()
    return sum(ref() is not None for ref in made)

async def run_counted(steps):
    # the application's words, and which functions of stepwell were called how often meanwhile
    calls = Counter()
    events, tool = sys.monitoring, sys.monitoring.PROFILER_ID

    def count(code, offset):
        if "/stepwell/" in code.co_filename:
            calls[code.co_qualname] += 1

    events.use_tool_id(tool, "stepwell's calls")
    try:
        events.register_callback(tool, events.events.PY_START, count)
        events.set_events(tool, events.events.PY_START)
        words = await APP.run(steps)
    finally:
        events.set_events(tool, 0)
        events.free_tool_id(tool)
    return words, dict(calls)

APP = run_js('''({
  // 6 tensors that grow by a word per step in buffers of four sizes, as a KV cache in a runtime that pools nothing
  async run(steps) {
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    const capacity = (step) => 1024 * (1 + Math.floor(step / 16));
    const make = (step, name) => this.device.createBuffer({ size: capacity(step), usage, label: name });
    let past = Array.from({ length: 6 }, (_, i) => make(0, `past ${i}`));
    for (let step = 1; step < steps; step++) {
      const encoder = this.device.createCommandEncoder();
      const present = past.map((_, i) => make(step, `present ${i}`));
      present.forEach((buffer, i) => {
        encoder.copyBufferToBuffer(past[i], 0, buffer, 0, 4 * (step - 1));
      });
      this.device.queue.submit([encoder.finish()]);
      present.forEach((buffer, i) => {
        this.device.queue.writeBuffer(buffer, 4 * (step - 1), new Uint32Array([1000 * i + step]));
      });
      past.forEach((buffer) => buffer.destroy());
      past = present;
      await this.read(past[0]); // a token's end
    }
    const words = [];
    for (const buffer of past) words.push(await this.read(buffer));
    past.forEach((buffer) => buffer.destroy());
    return JSON.stringify(words);
  },
  async read(buffer) {
    const staging = this.device.createBuffer({
      size: buffer.size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST,
    });
    const encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 0, staging, 0, buffer.size);
    this.device.queue.submit([encoder.finish()]);
    await staging.mapAsync(GPUMapMode.READ);
    const words = [...new Uint32Array(staging.getMappedRange())];
    staging.destroy();
    return words;
  },
  async open() {
    this.device = await (await navigator.gpu.requestAdapter()).requestDevice();
    this.errors = [];
    this.device.addEventListener("uncapturederror", ({ error }) => this.errors.push(error.message));
  },
  methods() {
    const [device, queue] = [GPUDevice.prototype, GPUQueue.prototype];
    return [device.createBuffer, queue.submit, GPUCommandEncoder.prototype.copyBufferToBuffer];
  },
})''')

def refused(**choices):
    try:
        stepwell.attach(**choices).detach()
    except StepwellError as error:
        return [error.code, str(error)]
"""
STEPS = 64


def run(lab: Lab, body: str, **args: Any) -> Any:
    """``body`` is what `main` does once the application has its device."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return lab.run(f"{SOURCE}\nasync def main(args):\n    await APP.open()\n{lines}", **args)


def expected() -> list[list[int]]:
    written = STEPS - 1
    return [[1000 * i + step for step in range(1, STEPS)] + [0] * (1024 - written) for i in range(6)]


REUSE = """
before = list(APP.methods())
bare = await APP.run(args["steps"])
found = []
for name in args["policies"]:
    for policy in (name, OWN[name]):
        with stepwell.attach(policy=policy) as attachment:
            words, called = await run_counted(args["steps"])
            serving, stats = alive(), attachment.stats()
        found.append([name, policy is name, words == bare, called, serving, alive(), stats, attachment.stats()])
same = [mine == other for mine, other in zip(APP.methods(), before)]
return {"bare": bare, "found": found, "same": same, "errors": list(APP.errors)}
"""


def test_what_is_reused_by_name_and_by_ones_own_policy(lab: Lab) -> None:
    policies = ["adaptive", "exact", "lazy_release"]
    found = run(lab, REUSE, steps=STEPS, policies=policies)
    rows = json.loads(found["bare"])
    assert [row[: STEPS - 1] for row in rows] == [row[: STEPS - 1] for row in expected()]
    assert not any(any(row[STEPS - 1 :]) for row in rows)  # zero, as WebGPU promises
    assert found["errors"] == []
    assert found["same"] == [True, True, True]
    total = 6 * STEPS
    for name, by_name, same, called, serving, left, stats, last in found["found"]:
        (device,) = stats["devices"]
        assert same, name
        assert device["created"] + device["reused"] == total
        if by_name:  # JavaScript decides alone: Python hears of no buffer
            assert called == {}
            assert serving == 0
        else:
            assert called["Keeper.acquire"] == total
            assert called["Keeper.created"] == called["Keeper.room"] == device["created"]
            assert serving == 1
        assert left == 0  # no proxy holds a keeper any more
        assert last["devices"][0]["free_buffers"] == 0
        if name == "lazy_release":
            assert device["created"] == total
        else:
            assert device["created"] <= 6 * 2 * 4 + 12  # two of each tensor and size, and what waits for its proof
            assert device["runs"] >= STEPS - 1


LIVE = """
attachment = stepwell.attach(APP.device, policy=Simple, zero="never", budget=1 << 20)
run_js("(app) => { app.kept = app.device.createBuffer({ size: 64, usage: 140 }); }")(APP)
attachment.mark("a token")
attachment.detach()
attachment.detach()
run_js("(app) => app.device.queue.writeBuffer(app.kept, 0, new Uint32Array(16).fill(7))")(APP)
words = (await APP.read(APP.kept)).to_py()
left = alive()
APP.kept.destroy()
APP.kept.destroy()
return {"words": words, "left": left, "stats": attachment.stats(), "errors": list(APP.errors)}
"""


def test_what_lives_at_the_end_lives_on(lab: Lab) -> None:
    found = run(lab, LIVE)
    assert found["words"] == [7] * 16
    assert found["left"] == 0
    assert found["errors"] == []
    (device,) = found["stats"]["devices"]
    assert (device["live_buffers"], device["created"], device["budget_bytes"]) == (1, 1, 1 << 20)


RECORD = """
with stepwell.attach(record=True, runtime="an application") as watcher:
    await APP.run(args["steps"])
    watched = watcher.trace(why="a test")
    watcher.save(Path("/tmp/watched.trace.gz"), why="a test")
    saved = gzip.decompress(Path("/tmp/watched.trace.gz").read_bytes()).decode()
    summary = watcher.summary()
    events = watcher.events("lines").count("\\n")
    nothing = watcher.stats()["devices"]
with stepwell.attach(record=True, policy="exact", cap="40") as both:
    await APP.run(args["steps"])
    pooled = both.trace()
    (device,) = both.stats()["devices"]
with stepwell.attach() as unwatched:
    silent = [unwatched.trace(), unwatched.summary(), unwatched.events(), await unwatched.measure_costs()]
    try:
        unwatched.save(Path("/tmp/silent.trace"))
    except UsageError as error:
        refusal = str(error)
return {"watched": watched, "summary": summary, "events": events, "nothing": nothing, "pooled": pooled,
        "reused": device["reused"], "silent": silent, "left": alive(), "saved": saved, "refusal": refusal}
"""


def test_what_the_application_does_is_recorded(lab: Lab, tmp_path: Path) -> None:
    found = run(lab, RECORD, steps=20)
    for name in ("watched", "pooled"):
        path = tmp_path / f"{name}.trace"
        path.write_text(found[name], encoding="utf-8")
        creates = [request for op, _, request in read_trace(path) if op == ACQUIRE]
        assert sum(request.role is Role.ACTIVATION for request in creates) == 6 * 20
    watched, pooled = (read_metadata(tmp_path / f"{name}.trace") for name in ("watched", "pooled"))
    assert (watched["attach"], watched["runtime"], watched["why"]) == (True, "an application", "a test")
    assert "pool" not in watched
    assert pooled["pool"] == {"policy": "exact", "options": {"cap": 40}, "zero": "always"}
    assert found["nothing"] == []
    assert found["reused"] > 0
    assert found["events"] > len(creates)
    assert found["summary"]["totals"]["creates"] >= 6 * 20
    assert found["silent"] == [None] * 4
    assert found["saved"] == found["watched"]
    assert found["refusal"] == "save: nothing was recorded. Attach with record=True."
    assert found["left"] == 0


REFUSED = """
before = list(APP.methods())
cases = [refused(**choices) for choices in args["cases"]]
with stepwell.attach():
    cases.append(refused())
same = [mine == other for mine, other in zip(APP.methods(), before)]
return {"cases": cases, "left": alive(), "same": same, "after": refused(policy="exact", cap=3)}
"""


def test_what_is_refused_attaches_nothing(lab: Lab) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"policy": "pow2"}, "Choose one of adaptive, bucket, simple, exact, lazy_release, disabled."),
        ({"policy": "exact", "cap": -1}, "option cap: -1; it must be a whole number from 0 to 1,048,576."),
        ({"policy": "simple", "window": 3}, "no option 'window'. It has none."),
        ({"policy": "adaptive", "growth": 2.5}, "option growth: 2.5; it must be a number from 0 to 2."),
        ({"window": "eight"}, "option window: 'eight'; it must be a whole number from 1 to 256."),
        ({"budget": 0}, "it must be 1 B or more"),
        ({"zero": "sometimes"}, "it must be 'always' or 'never'"),
        ({"record": True, "budget": 1 << 20}, "name a policy beside record=True"),
        ({"record": True, "limit": 0}, "limit is a number of events"),
        ({"target": 5}, "target is a GPUDevice, or for all devices"),
    ]
    found = run(lab, REFUSED, cases=[choices for choices, _ in cases])
    for (code, message), (choices, text) in zip(found["cases"], [*cases, ({}, "attached already")], strict=True):
        assert code == "BadRequest", choices
        assert text in message, choices
    assert found["left"] == 0
    assert found["same"] == [True, True, True]
    assert found["after"] is None


UNDER_ORT = """
run = run_js('''async (begin, end) => {
  const { countBuffers } = await import(new URL("attach/count.js", location.href));
  const { Decoder, loadRuntime } = await import(new URL("attach/ort.js", location.href));
  const counter = countBuffers(); // below what is attached
  begin();
  const decoder = await Decoder.open(await loadRuntime(), { model: "kv64", start: 26, steps: 16 });
  const created = [];
  const digests = [];
  for (let step = 0; step < 16; step++) {
    const before = counter.now().created;
    const { digest, wrong } = await decoder.next();
    digests.push(wrong ? "wrong" : digest);
    created.push(counter.now().created - before);
  }
  await decoder.close();
  end();
  const { live } = counter.now();
  counter.restore();
  return JSON.stringify({ created, digests, live });
}''')
found = {}
for policy in args["policies"]:
    with ExitStack() as attached:
        choice = OWN[policy.removeprefix("own ")] if policy.startswith("own ") else policy
        begin = create_proxy(lambda: choice and attached.enter_context(stepwell.attach(policy=choice)) and None)
        end = create_proxy(attached.close)
        found[policy] = json.loads(await run(begin, end))
        begin.destroy()
        end.destroy()
stepwell.attach().detach()  # nothing is attached any more
return {"found": found, "left": alive()}
"""


def test_python_decides_under_onnxruntime_web(lab: Lab) -> None:
    """64 tensors of 64 KiB, from the seventh step on of 128: the runtime's own pool keeps 50 of a size."""
    found = run(lab, UNDER_ORT, policies=["", "adaptive", "own adaptive"])
    bare = found["found"].pop("")
    assert "wrong" not in bare["digests"]
    assert min(bare["created"][2:]) == 14
    assert bare["live"] == found["left"] == 0
    for attached in found["found"].values():
        assert attached["digests"] == bare["digests"]
        assert attached["created"][6:8] == [64, 64]
        assert max([*attached["created"][2:6], *attached["created"][8:]]) <= 2
        assert attached["live"] == 0


def test_what_a_reused_buffer_costs(browser: Browser, server_url: str) -> None:
    """Every arm of `python -m harness attach-cost` is measured, in every step."""
    times = attach_cost.measure(browser, server_url, rounds=1, steps=4)
    assert [row.arm for row in times] == list(attach_cost.ARMS)
    for row in times:
        print(f"{row.arm.name}: {row.pair_us:.2f} us per pair of createBuffer and destroy")
        assert (len(row.create_us), len(row.destroy_us), len(row.submit_us)) == (4, 4, 4)
        assert row.pair_us > 0
