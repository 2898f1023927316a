"""JsDevice in Chromium: the same contract as FakeDevice, and what only a real adapter can show."""

from pathlib import Path

import pytest

from tests.browser.conftest import Lab

pytestmark = pytest.mark.browser
CONTRACT = Path(__file__).parents[1] / "contract.py"


def test_contract(lab: Lab) -> None:
    source = CONTRACT.read_text(encoding="utf-8") + (
        "\nasync def main(args):"
        "\n    from stepwell import open_device"
        "\n    return [sorted(CHECKS), await run_all(open_device)]"
    )
    checks, failed = lab.run(source)
    assert len(checks) >= 20
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
    try:
        await device.create_pipeline("@compute @workgroup_size(1)\\nfn main() { let x: u32 = 1.5; }", Layout(), "broken")
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
    device._js.device.destroy()      # behind the device's back
    device._js.fail("DeviceLost", "driver reset")  # what the browser reports when it was not destroy()
    outcome = []
    for call in (
        lambda: device.write_buffer(buffer, 0, bytes(16)),
        lambda: device.submit(array("I", [Op.SUBMIT])),
    ):
        try:
            call()
        except DeviceLost as error:
            outcome.append(str(error))
    for awaitable in (device.read_buffer(buffer, 0, 16), device.wait()):
        try:
            await awaitable
        except DeviceLost as error:
            outcome.append(str(error))
    device.close()
    return outcome
"""
    assert lab.run(source) == ["driver reset"] * 4


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
