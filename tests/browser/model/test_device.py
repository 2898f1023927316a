"""JsDevice in Chromium: the same contract as FakeDevice, and what only a real adapter can show."""

import pytest

from tests.browser.conftest import Lab
from tests.support.paths import SUPPORT

pytestmark = pytest.mark.browser
CONTRACT = ("contract.py", "contract_steps.py")


def test_contract(lab: Lab) -> None:
    source = """
import sys
from pathlib import Path

async def main(args):
    folder = Path("/tmp/contract/tests/support")
    folder.mkdir(parents=True)
    for name, text in args["files"].items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder.parents[1]))
    from stepwell import open_device
    from tests.support import contract
    from tests.support import contract_steps
    checks = {**contract.CHECKS, **contract_steps.CHECKS}
    return [sorted(checks), await contract.run_all(open_device, checks)]
"""
    files = {name: (SUPPORT / name).read_text(encoding="utf-8") for name in CONTRACT}
    checks, failed = lab.run(source, files=files)
    assert len(checks) >= 30
    assert failed == {}


def test_missing_capabilities_are_named(lab: Lab) -> None:
    source = """
from stepwell import open_device
from stepwell.errors import MissingCapability

async def attempt(**wanted):
    try:
        (await open_device(**wanted)).close()
    except MissingCapability as error:
        return [error.name, str(error.needed), str(error)]

async def main(args):
    return [
        await attempt(need={"maxBufferSize": 1 << 50}),
        await attempt(need={"minStorageBufferOffsetAlignment": 1}),
        await attempt(need_features=["shader-f64"]),
        await attempt(need={"maxBufferSize": 1 << 20}),
    ]
"""
    size, alignment, feature, fine = lab.run(source)
    assert size[0] == "maxBufferSize"
    assert "1,125,899,906,842,624 needed, the adapter has " in size[2]
    assert alignment[0] == "minStorageBufferOffsetAlignment"
    assert "shader-f64" in feature[2]
    assert fine is None


def test_shader_errors_have_lines(lab: Lab) -> None:
    source = """
from stepwell import open_device
from stepwell.errors import ShaderError
from stepwell.gpu.device import Layout

async def main(args):
    device = await open_device()
    code = "@compute @workgroup_size(1)\\nfn main() { let x: u32 = 1.5; }"
    try:
        await device.create_pipeline(code, Layout(), "broken")
    except ShaderError as error:
        return str(error)
    finally:
        device.close()
"""
    message = lab.run(source)
    assert message.startswith("broken: 2:")
    assert "let x: u32 = 1.5" in message


def test_a_lost_device_is_an_error_everywhere(lab: Lab) -> None:
    """What WebGPU does after a loss is to pretend that all is well, and very fast."""
    source = """
from array import array
from stepwell import BufferUsage, open_device
from stepwell.errors import DeviceLost
from stepwell.gpu.program import Op

async def main(args):
    device = await open_device()
    buffer = device.create_buffer(16, BufferUsage.MAP_READ | BufferUsage.COPY_DST)
    program = [Op.SCALARS, 1, 1, 2, 0, 0, Op.BEGIN_PASS, Op.END_PASS, Op.SUBMIT]
    plan = device.create_plan(array("I", program))
    device.executor.device.destroy()  # without a word to the device
    device.executor.fail("DeviceLost", "driver reset")  # what the browser reports when it was not destroy()
    outcome = []
    for call in (
        lambda: device.write_buffer(buffer, 0, bytes(16)),
        lambda: device.submit(array("I", [Op.SUBMIT])),
        lambda: device.create_plan(array("I", program)),
        lambda: device.replay(plan, 1, 1, 2, 0, 0),
    ):
        try:
            call()
        except DeviceLost as error:
            outcome.append(str(error))
    for awaitable in (device.read_buffer(buffer, 0, 16), device.take_profile(), device.wait()):
        try:
            await awaitable
        except DeviceLost as error:
            outcome.append(str(error))
    device.close()
    return outcome
"""
    assert lab.run(source) == ["driver reset"] * 7


def test_reads_that_fail_unseen(lab: Lab) -> None:
    """A read that nobody awaits is no unhandled rejection, no warning of Python's, and takes no error with it."""
    source = """
import asyncio, gc, warnings
from pyodide.code import run_js
from stepwell import BufferUsage, open_device
from stepwell.errors import UsageError

async def main(args):
    unhandled = run_js("globalThis.unhandled = []; unhandled")
    listen = run_js("() => addEventListener('unhandledrejection', (event) => unhandled.push(String(event.reason)))")
    listen()
    device = await open_device()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one, two = (device.create_buffer(16, BufferUsage.MAP_READ | BufferUsage.COPY_DST) for _ in range(2))
        device.read_buffer(one, 0, 16)
        device.destroy(one)
        device.read_buffer(one, 0, 16)
        device.write_buffer(two, 12, bytes(8))  # outside: reported late
        first, second = device.read_buffer(two, 0, 8), device.read_buffer(two, 8, 8)
        outcomes = []
        await asyncio.sleep(0.05)
        for awaitable in (second, device.wait(), device.wait()):
            try:
                await awaitable
                outcomes.append("fine")
            except UsageError as error:
                outcomes.append("raised")
        gc.collect()
        await asyncio.sleep(0.05)
    device.close()
    return [outcomes, list(unhandled), [str(warning.message) for warning in caught]]
"""
    assert lab.run(source) == [["raised", "fine", "fine"], [], []]


def test_calls_and_time_of_a_step(lab: Lab) -> None:
    """Issuing a decode step's worth of dispatches: replay is one call of plain numbers, and its spans lie within it.

    How long both take is printed; it is the machine's.
    """
    source = """
from time import perf_counter
from pyodide.code import run_js
from stepwell import BufferUsage, open_device
from stepwell.gpu import js_device
from stepwell.gpu.device import Binding, BindingType, Layout
from stepwell.gpu.program import Program

spying = run_js('''(module) => {
  const spied = (executor) => {
    const { replay } = executor;
    executor.replay = (...args) => {
      globalThis.replayed?.push(args.map((argument) => typeof argument));
      return replay.apply(executor, args);
    };
    return executor;
  };
  const openAdapter = async () => {
    const { facts, openDevice } = await module.openAdapter();
    return { facts, openDevice: async (request) => spied(await openDevice(request)) };
  };
  return { ...module, openAdapter };
}''')

CODE = '''
struct Step { position: u32, rows: u32, length: u32, reserved: u32 }
var<immediate> step: Step;
@group(0) @binding(1) var<storage, read_write> y: array<u32>;
@compute @workgroup_size(1) fn main() { y[0] = step.position + KIND; }
'''

async def main(args):
    real, spied = js_device.script, spying(js_device.script())
    js_device.script = lambda: spied
    device = await open_device()
    js_device.script = real
    data = BufferUsage.STORAGE | BufferUsage.COPY_SRC
    layout = Layout((BindingType.STORAGE,), 1, 16)
    pipelines = [await device.create_pipeline(CODE.replace("KIND", f"{kind}u"), layout) for kind in range(10)]
    buffers = [device.create_buffer(64, data) for _ in range(300)]
    groups = [device.create_bind_group(pipelines[i % 10], [Binding(buffer)]) for i, buffer in enumerate(buffers)]
    staging = device.create_buffer(16, BufferUsage.MAP_READ | BufferUsage.COPY_DST)
    program = Program()
    program.scalars(1, 1, 2, 0, staging)
    program.begin_pass()
    program.immediates()
    for i, group in enumerate(groups):
        program.dispatch(pipelines[i % 10], group, (1, 1, 1))
    program.end_pass()
    program.copy_out(buffers[299], 0, 4)
    program.submit()
    plan = device.create_plan(program.words)
    times = {"submit": [], "replay": [], "encode": [], "queue": []}
    kinds = set()
    run_js("globalThis.replayed = []")
    device.replay(plan, 1, 1, 2, 0, staging)
    calls = run_js("globalThis.replayed").to_py()
    run_js("globalThis.replayed = null")
    values = []
    for name in ["submit", "replay"] * args["rounds"]:
        device.set_profile(spans=name == "replay")
        start = perf_counter()
        if name == "submit":
            device.submit(program.words)
        else:
            device.replay(plan, 1, 1, 2, 0, staging)
        times[name].append(1e3 * (perf_counter() - start))
        values.append(int.from_bytes(await device.read_buffer(staging, 0, 4), "little"))
    for name, start, end in (await device.take_profile()).spans:
        kinds.add(name)
        times["encode" if name == "encode" else "queue"].append(end - start)
    device.close()
    median = lambda values: sorted(values)[len(values) // 2]
    spans = zip(times["replay"], times["encode"], times["queue"])
    within = [replay - encode - queue for replay, encode, queue in spans]
    shown = {name: [median(found), min(found)] for name, found in times.items()}
    return [calls, sorted(set(values)), sorted(kinds), len(within), min(within), shown]
"""
    calls, values, kinds, rounds, least_rest, times = lab.run(source, rounds=40)
    print({name: [round(value, 3) for value in pair] for name, pair in times.items()})
    assert calls == [["number"] * 6]
    assert values == [10]
    assert (kinds, rounds) == (["encode", "submit"], 40)
    assert least_rest > -0.1, "a clock's steps, in ms"


def test_upload_from_url_file_and_opfs(lab: Lab, server_url: str) -> None:
    """The same bytes arrive by every way, in pieces and with gaps, and a short file is an error."""
    source = """
from array import array
from stepwell import BufferUsage, open_device
from stepwell.errors import BadFile
from stepwell.gpu.device import Chunk
from stepwell.gpu.js_device import open_file, open_opfs, open_url
from pyodide.ffi import to_js
from pyodide.code import run_js

async def main(args):
    device = await open_device()
    usage = BufferUsage.STORAGE | BufferUsage.COPY_SRC | BufferUsage.COPY_DST
    staging = device.create_buffer(64, BufferUsage.MAP_READ | BufferUsage.COPY_DST)
    target = device.create_buffer(64, usage)
    url = await open_url(args["url"], "manifest")
    data = await url.read(0, url.size)
    make_file = run_js("(bytes, name) => new File([bytes], name)")
    local = open_file(make_file(to_js(data), "manifest.json"))
    write = run_js('''async (bytes) => {
        const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("t", { create: true });
        const handle = await folder.getFileHandle("m.json", { create: true });
        const out = await handle.createWritable(); await out.write(bytes); await out.close(); }''')
    await write(to_js(data))
    opfs = await open_opfs("t/m.json")
    results = []
    for file in (url, local, opfs):
        seen = []
        chunks = [Chunk(8, 10, target, 0), Chunk(100, 20, target, 16)]
        await device.upload(file, chunks, lambda done, total: seen.append((done, total)))
        device.submit(array("I", [4, target, 0, staging, 0, 64, 7]))
        got = await device.read_buffer(staging, 0, 64)
        arrived = [got[:10] == data[8:18], got[10:12] == bytes(2), got[16:36] == data[100:120], got[36:] == bytes(28)]
        results.append([file.size == len(data), *arrived, seen[-1], await file.read(4, 6) == data[4:10]])
    errors = []
    for chunk in (Chunk(url.size - 8 & ~3, 40, target, 0),):
        for file in (local, opfs):
            try:
                await device.upload(file, [chunk])
            except BadFile as error:
                errors.append(str(error))
    for attempt in (open_url(args["url"] + ".none", "nothing"), open_opfs("no/such/file")):
        try:
            await attempt
        except BadFile as error:
            errors.append(str(error))
    device.close()
    return [results, errors]
"""
    results, errors = lab.run(source, url=f"{server_url.rstrip('/')}/manifest.json")
    assert results == [[True, True, True, True, True, [30, 30], True]] * 3
    assert [("ends at byte" in error) for error in errors[:2]] == [True, True]
    assert "404" in errors[2]
    assert "private file system" in errors[3]
