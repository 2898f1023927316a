"""The pool under a runtime, in Node on a small fake of WebGPU: memory, time, lost devices, what goes wrong."""

import json
import subprocess
from typing import Any

from tests.support.paths import ROOT, SUPPORT

JS = ROOT / "pyodide_pkg/stepwell/attach/js"
HEAD = f"""
const {{ attach }} = await import("{(JS / "attach.js").as_uri()}");
const {{ makeRealm, Clock, DATA, settle, leave }} = await import("{(SUPPORT / "fake_webgpu.js").as_uri()}");
const {{ EagerKeeper }} = await import("{(SUPPORT / "eager_keeper.js").as_uri()}");
const realm = makeRealm();
const timers = new Clock();
const begin = (options) => attach({{ target: realm, keeper: () => new EagerKeeper(), timers, ...options }});
const free = (attachment) => attachment.stats().devices.map(({{ free_buffers }}) => free_buffers);
const live = (attachment) => attachment.stats().devices.map(({{ live_buffers }}) => live_buffers);
const reported = [];
globalThis.reportError = (error) => reported.push(`${{error.name}}: ${{error.message}}`);
const print = (value) => console.log(JSON.stringify(value));
"""


def node(source: str, *flags: str) -> Any:
    """The JSON that a module prints."""
    command = ["node", *flags, "--input-type=module", "-"]
    done = subprocess.run(command, input=HEAD + source, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_memory_comes_back_when_nothing_is_submitted() -> None:
    source = """
const attachment = begin();
const device = new realm.GPUDevice();
await leave(device, 3);
const steps = [[free(attachment), timers.pending]];
for (const ms of [1000, 9000, 2000, 60000]) {
  timers.advance(ms);
  await settle();
  steps.push([free(attachment), timers.pending]);
}
await leave(device, 2);
steps.push([free(attachment), timers.pending]);
for (let i = 0; i < 30; i += 1) {
  timers.advance(900);
  device.queue.submit([]);
}
steps.push([free(attachment), timers.pending]);
device.createBuffer({ size: 4, usage: DATA });
attachment.detach();
print([steps, timers.pending, realm.alive]);
"""
    steps, pending, alive = node(source)
    assert steps[:5] == [[[3], 1], [[3], 1], [[3], 1], [[0], 0], [[0], 0]]
    assert steps[5:] == [[[2], 1], [[2], 1]]
    assert (pending, alive) == (0, 1)


def test_time_does_not_count_while_the_gpu_is_at_work() -> None:
    source = """
let finish = null;
const attachment = begin();
const device = new realm.GPUDevice();
await leave(device, 2);
realm.busy = new Promise((resolve) => { finish = resolve; });
device.queue.submit([]);
const runs = [];
for (const idle of [false, true]) {
  for (let i = 0; i < 8; i += 1) {
    timers.advance(1000);
    await settle();
  }
  runs.push(attachment.stats().devices[0].runs);
  realm.busy = null;
  finish();
  await settle();
}
print([runs, free(attachment)]);
"""
    runs, free = node(source)
    assert runs == [0, 8]
    assert free == [2]


def test_what_is_destroyed_while_nothing_is_submitted_comes_back_too() -> None:
    source = """
const attachment = begin();
const device = new realm.GPUDevice();
const buffers = [1, 2].map(() => device.createBuffer({ size: 64, usage: DATA }));
await settle();
timers.advance(100000);
for (const buffer of buffers) buffer.destroy();
const before = free(attachment);
timers.advance(12000);
print([before, free(attachment), realm.alive, timers.pending]);
"""
    assert node(source) == [[2], [0], 0, 0]


def test_a_program_ends_although_a_timer_runs() -> None:
    source = """
const attachment = attach({ target: realm, policy: "simple" });
await leave(new realm.GPUDevice(), 3);
print(free(attachment));
"""
    assert node(source) == [3]


def test_a_buffer_without_memory_is_never_handed_out_again() -> None:
    source = """
const attachment = begin();
const device = new realm.GPUDevice();
const seen = [];
device.addEventListener("uncapturederror", ({ error }) => seen.push(error.constructor.name));
device.createBuffer({ size: 16, usage: DATA });
device.inside.failing = 1;
const [bad, good] = [1, 2].map(() => device.createBuffer({ size: 256, usage: DATA }));
const early = [bad, good].map((buffer) => { buffer.destroy(); return free(attachment)[0]; });
await settle();
const kept = free(attachment);
const again = device.createBuffer({ size: 256, usage: DATA });
device.pushErrorScope("validation");
const encoder = device.createCommandEncoder();
encoder.clearBuffer(again);
device.queue.submit([encoder.finish()]);
const error = await device.popErrorScope();
print([seen, early, kept, error, attachment.stats().devices[0].native.reused]);
"""
    assert node(source) == [["GPUOutOfMemoryError"], [0, 0], [1], None, 1]


def test_no_memory_gives_back_what_is_free() -> None:
    """As an uncaptured error and as one that the application's scope caught, which it hears of as ever."""
    source = """
const attachment = begin();
const device = new realm.GPUDevice();
const steps = [];
await leave(device, 4);
steps.push(free(attachment));
device.inside.failing = 1;
device.createBuffer({ size: 1024, usage: DATA });
steps.push(free(attachment));
await leave(device, 4);
steps.push(free(attachment));
device.pushErrorScope("validation");
device.pushErrorScope("out-of-memory");
device.inside.failing = 1;
device.createBuffer({ size: 1024, usage: DATA });
const inner = await device.popErrorScope();
const outer = await device.popErrorScope();
steps.push(free(attachment), inner.constructor.name, outer);
print(steps);
"""
    assert node(source) == [[4], [0], [4], [0], "GPUOutOfMemoryError", None]


def test_a_budget_gives_up_free_buffers_for_new_ones() -> None:
    source = """
const attachment = begin({ keeper: undefined, policy: "simple", budget: 4096 });
const device = new realm.GPUDevice();
await leave(device, 4, 1024);
const peaks = [realm.bytes];
for (const size of [2048, 3072]) {
  device.queue.submit([]);
  await leave(device, 1, size);
  peaks.push(realm.bytes);
}
print(peaks);
"""
    assert max(node(source)) <= 4096


def test_a_lost_device_takes_its_pool_with_it() -> None:
    """Of two devices, one is destroyed and one is lost; a third lives on."""
    source = """
const attachment = begin();
const devices = [1, 2, 3].map(() => new realm.GPUDevice());
const held = [];
for (const device of devices) {
  await leave(device, 2);
  held.push(device.createBuffer({ size: 256, usage: DATA }));
}
devices[0].destroy();
const [first] = attachment.stats().devices;
devices[1].inside.lose({ reason: "unknown" });
await settle();
const states = attachment.stats().devices.map(({ state }) => state);
const after = devices[0].createBuffer({ size: 256, usage: DATA });
const books = [free(attachment), live(attachment)];
for (const buffer of held) buffer.destroy();
held[0].destroy();
after.destroy();
await settle();
const kinds = [after.constructor === realm.GPUBuffer, "inside" in after];
print([first.state, states, ...kinds, books, free(attachment), live(attachment)]);
attachment.detach();
"""
    first, states, is_buffer, is_native, books, free, live = node(source)
    assert (first, states) == ("lost", ["lost", "lost", "serving"])
    assert is_buffer and is_native  # the browser serves what comes after
    assert books == [[0, 0, 1], [0, 0, 1]]
    assert (free, live) == ([0, 0, 2], [0, 0, 0])


def test_a_buffer_of_a_lost_device_outlives_its_attachment() -> None:
    """WebGPU pretends that all is well on a lost device: no call with such a buffer throws, however late."""
    source = """
const attachment = begin();
const devices = [1, 2].map(() => new realm.GPUDevice());
const buffers = devices.map((device) => device.createBuffer({ size: 256, usage: DATA }));
devices[0].destroy();
attachment.detach();
devices[1].destroy();
await settle();
const seen = devices.map((device, index) => {
  const encoder = device.createCommandEncoder();
  encoder.clearBuffer(buffers[index]);
  device.queue.submit([encoder.finish()]);
  const served = Object.getPrototypeOf(device) !== realm.GPUDevice.prototype;
  buffers[index].destroy();
  return [served, Object.getPrototypeOf(device) === realm.GPUDevice.prototype];
});
print(seen);
"""
    assert node(source) == [[True, True], [True, True]]


def test_buffers_that_are_dropped_are_not_held() -> None:
    """Collected without destroy(): no longer in the books, and their native buffers are free to go."""
    source = """
const attachment = begin();
const device = new realm.GPUDevice();
(() => { for (let i = 0; i < 5; i += 1) device.createBuffer({ size: 256, usage: DATA }); })();
const before = live(attachment);
for (let i = 0; i < 50 && live(attachment)[0] > 0; i += 1) {
  await settle();
  gc();
  await new Promise((resolve) => { setTimeout(resolve, 5); });
}
print([before, live(attachment), free(attachment)]);
"""
    assert node(source, "--expose-gc") == [[5], [0], [0]]


def test_a_device_that_is_dropped_is_not_held() -> None:
    source = """
const attachment = begin();
const use = async () => {
  const device = new realm.GPUDevice();
  await leave(device, 2);
  device.createBuffer({ size: 16, usage: DATA });
  return new WeakRef(device);
};
const device = await use();
const before = attachment.stats().devices.length;
for (let i = 0; i < 50 && device.deref() !== undefined; i += 1) {
  await settle();
  gc();
  timers.advance(2000);
}
print([before, attachment.stats().devices.length, device.deref() === undefined]);
"""
    assert node(source, "--expose-gc") == [1, 0, True]


def test_a_keeper_that_fails_leaves_the_browser_to_serve() -> None:
    source = """
const outcomes = [];
for (const method of ["acquire", "room", "created", "release", "flush", "begin_run", "forget"]) {
  let calls = 0;
  class Failing extends EagerKeeper {}
  Failing.prototype[method] = function (...args) {
    calls += 1;
    if (calls > 2) throw new RangeError(method);
    return EagerKeeper.prototype[method].apply(this, args);
  };
  const attachment = begin({ keeper: () => new Failing() });
  const device = new realm.GPUDevice();
  const errors = [];
  device.addEventListener("uncapturederror", ({ error }) => errors.push(error.message));
  const held = [];
  for (let i = 0; i < 6; i += 1) {
    await leave(device, 1, 64 * (i + 1));
    attachment.mark("");
    const buffer = device.createBuffer({ size: 64, usage: DATA });
    device.queue.writeBuffer(buffer, 0, [i]);
    held.push(buffer);
    const tainted = device.createBuffer({ size: 4096, usage: DATA });
    await tainted.mapAsync(1);
    tainted.destroy();
  }
  const target = device.createBuffer({ size: 64, usage: 9 });
  const values = held.map((buffer) => {
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 0, target, 0, 64);
    device.queue.submit([encoder.finish()]);
    return target.inside.value;
  });
  for (const buffer of [...held, target]) buffer.destroy();
  outcomes.push([method, values, errors, attachment.stats().devices[0].state]);
  attachment.detach();
}
print([outcomes, realm.alive, [...new Set(reported)]]);
"""
    outcomes, alive, reported = node(source)
    for _, values, errors, state in outcomes:
        assert (values, errors, state) == (list(range(6)), [], "failed")
    assert alive == 0
    assert len(reported) == len(outcomes)


def test_an_observer_that_fails_is_none_of_the_applications_business() -> None:
    source = """
const { Shims } = await import("SHIMS");
const { Natives } = await import("NATIVES");
const seen = [];
const observers = [
  { before: { "GPUQueue.submit": () => { throw new Error("mine"); } } },
  { after: { "GPUDevice.createBuffer": (device, [descriptor], buffer) => seen.push([descriptor.size, buffer.size]) } },
];
const before = Object.getOwnPropertyDescriptors(realm.GPUDevice.prototype);
const shims = new Shims(new Natives(realm), {}, observers);
shims.install();
const device = new realm.GPUDevice();
device.createBuffer({ size: 12, usage: DATA });
device.queue.submit([]);
const { createBuffer } = realm.GPUDevice.prototype;
let twice = "";
try { new Shims(new Natives(realm), {}, observers).install(); } catch (error) { twice = error.name; }
shims.uninstall();
const after = Object.getOwnPropertyDescriptors(realm.GPUDevice.prototype);
print([seen, reported, realm.submits, createBuffer.name, createBuffer.length, twice,
  Object.keys(before).every((name) => before[name].value === after[name].value)]);
""".replace("SHIMS", (JS / "shims.js").as_uri()).replace("NATIVES", (JS / "natives.js").as_uri())
    assert node(source) == [[[12, 12]], ["Error: mine"], 1, "createBuffer", 1, "AttachError", True]


def test_whoever_wrapped_a_shim_keeps_it() -> None:
    source = """
const attachment = begin();
const below = realm.GPUDevice.prototype.createBuffer;
realm.GPUDevice.prototype.createBuffer = function (descriptor) { return below.call(this, descriptor); };
attachment.detach();
const device = new realm.GPUDevice();
const buffer = device.createBuffer({ size: 16, usage: DATA });
print(["inside" in buffer, realm.GPUDevice.prototype.destroy.name]);
"""
    assert node(source) == [True, "destroy"]


def test_use_in_a_pass_that_nobody_saw_begin() -> None:
    """Its commands cannot be followed: a buffer that it uses is destroyed for good, and the browser refuses them."""
    source = """
const device = new realm.GPUDevice();
const encoder = device.createCommandEncoder();
const pass = encoder.beginComputePass();
const attachment = begin();
const [left] = await leave(device);
const buffer = device.createBuffer({ size: 256, usage: DATA });
pass.setBindGroup(0, device.createBindGroup({ entries: [{ binding: 0, resource: { buffer } }] }));
buffer.destroy();
const next = device.createBuffer({ size: 256, usage: DATA });
device.pushErrorScope("validation");
device.queue.submit([encoder.finish()]);
print([(await device.popErrorScope())?.message ?? null, attachment.stats().devices[0].native.reused]);
"""
    assert node(source) == ["used in submit while destroyed", 1]


def test_runs_end_where_a_result_is_asked_for_or_the_caller_says() -> None:
    source = """
const attachment = begin();
const device = new realm.GPUDevice();
const runs = () => attachment.stats().devices[0].runs;
device.createBuffer({ size: 16, usage: DATA });
const staging = device.createBuffer({ size: 16, usage: 9 });
const step = async () => {
  const encoder = device.createCommandEncoder();
  encoder.beginComputePass().end();
  device.queue.submit([encoder.finish()]);
  await staging.mapAsync(1);
  staging.unmap();
};
const seen = [runs()];
for (let i = 0; i < 3; i += 1) { await step(); seen.push(runs()); }
await staging.mapAsync(1);
seen.push(runs());
attachment.mark("mine");
seen.push(runs());
await step();
seen.push(runs());
print(seen);
"""
    assert node(source) == [0, 1, 2, 3, 3, 4, 4]
