"""What every ``Device`` does: the same checks run against FakeDevice on CPython and JsDevice in Chromium.

Each check is an async function that opens its own devices through ``open_device``.  Standard library only, so that the
source can be run inside Pyodide as it is: ``await run_all(open_device, CHECKS)`` returns what failed.  Where WebGPU
reports a broken rule late, a check asks for the error at the latest at the next ``await device.wait()``.
contract_steps.py is the second half: scalars, plans, early reads, profiles.
"""

import inspect
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence

from stepwell.errors import BadFile, DeviceError, ShaderError, StepwellError, UsageError
from stepwell.gpu.device import Binding, BindingType, BufferUsage, Chunk, Device, Layout
from stepwell.gpu.program import Op, Program

OpenDevice = Callable[[], Awaitable[Device]]

DATA = BufferUsage.STORAGE | BufferUsage.COPY_SRC | BufferUsage.COPY_DST
STAGING = BufferUsage.MAP_READ | BufferUsage.COPY_DST
UNIFORM = BufferUsage.UNIFORM | BufferUsage.COPY_DST

ADD_WGSL = """
@group(0) @binding(0) var<storage, read> x: array<u32>;
@group(0) @binding(1) var<uniform> increment: vec4<u32>;
@group(0) @binding(2) var<storage, read_write> y: array<u32>;
@compute @workgroup_size(4)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < arrayLength(&x)) { y[id.x] = x[id.x] + increment.x; }
}
"""
ADD_LAYOUT = Layout((BindingType.READ_ONLY_STORAGE, BindingType.UNIFORM, BindingType.STORAGE))


def _add(buffers: Sequence[memoryview], grid: tuple[int, int, int]) -> None:
    x, increment, y = (buffer.cast("I") for buffer in buffers)
    for i in range(min(4 * grid[0], len(x))):
        y[i] = (x[i] + increment[0]) & 0xFFFFFFFF


KERNELS: Mapping[str, Callable[[Sequence[memoryview], tuple[int, int, int]], None]] = {"add": _add}
"""What the pipelines of these checks compute, by label, for a device that cannot compile WGSL."""


class MemorySource:
    """A ByteSource over bytes."""

    def __init__(self, data: bytes, name: str = "memory") -> None:
        self.data, self.name, self.size = data, name, len(data)

    async def read(self, offset: int, nbytes: int) -> bytes:
        return self.data[offset : offset + nbytes]


# ---- tools ----------------------------------------------------------------------------------------------------------


def words(*values: int) -> bytes:
    return array("I", values).tobytes()


async def contents(device: Device, buffer: int, offset: int, nbytes: int) -> bytes:
    """Copy a range to a staging buffer and read it."""
    staging = device.create_buffer(nbytes, STAGING, "contents")
    program = Program()
    program.copy(buffer, offset, staging, 0, nbytes)
    program.submit()
    device.submit(program.words)
    data = await device.read_buffer(staging, 0, nbytes)
    device.destroy(staging)
    return data


async def raises(
    error: type[StepwellError], device: Device, call: Callable[[], object], *, late: bool = False
) -> StepwellError:
    """Assert that ``call`` raises ``error``: at once, or (``late``) at the next ``device.wait()`` at the latest."""
    try:
        result = call()
        if inspect.isawaitable(result):
            await result
        if late:
            await device.wait()
    except error as raised:
        assert str(raised), "the error has a message"
        return raised
    raise AssertionError(f"no {error.__name__} was raised")


async def add_pipeline(device: Device) -> int:
    return await device.create_pipeline(ADD_WGSL, ADD_LAYOUT, "add")


# ---- buffers and bytes ----------------------------------------------------------------------------------------------


async def check_new_buffer_is_zero(open_device: OpenDevice) -> None:
    device = await open_device()
    buffer = device.create_buffer(64, DATA, "zeros")
    assert await contents(device, buffer, 0, 64) == bytes(64)
    device.close()


async def check_write_read(open_device: OpenDevice) -> None:
    device = await open_device()
    buffer = device.create_buffer(32, DATA, "data")
    device.write_buffer(buffer, 0, bytes(range(32)))
    device.write_buffer(buffer, 8, bytearray(b"abcd"))
    device.write_buffer(buffer, 12, memoryview(b"efgh"))
    device.write_buffer(buffer, 16, array("I", [1, 2]))
    expected = bytes(range(8)) + b"abcdefgh" + words(1, 2) + bytes(range(24, 32))
    assert await contents(device, buffer, 0, 32) == expected
    assert await contents(device, buffer, 8, 8) == b"abcdefgh"
    device.close()


async def check_program_copies_and_clears(open_device: OpenDevice) -> None:
    """Several instructions in one program take effect in order, over several submits."""
    device = await open_device()
    a, b = (device.create_buffer(32, DATA, label) for label in "ab")
    device.write_buffer(a, 0, bytes(range(32)))
    program = Program()
    program.copy(a, 0, b, 16, 16)
    program.clear(a, 4, 8)
    program.copy(a, 0, b, 0, 16)
    program.submit()
    program.clear(b, 28, 4)
    program.submit()
    device.submit(program.words)
    first = bytes(range(4)) + bytes(8) + bytes(range(12, 16))
    assert await contents(device, b, 0, 32) == first + bytes(range(12)) + bytes(4)
    assert await contents(device, a, 0, 16) == first
    device.close()


async def check_write_runs_before_unsubmitted_work(open_device: OpenDevice) -> None:
    """WRITE is a queue operation: what was submitted before it sees the old bytes, what comes after it the new ones."""
    device = await open_device()
    source, before, after = (device.create_buffer(4, DATA, label) for label in ("source", "before", "after"))
    program = Program()
    program.write(source, 0, [1])
    program.copy(source, 0, before, 0, 4)
    program.submit()
    program.write(source, 0, [2])
    program.copy(source, 0, after, 0, 4)
    program.submit()
    device.submit(program.words)
    assert await contents(device, before, 0, 4) == words(1)
    assert await contents(device, after, 0, 4) == words(2)
    device.close()


async def check_empty_program(open_device: OpenDevice) -> None:
    device = await open_device()
    device.submit(array("I"))
    device.submit(array("I", [Op.SUBMIT]))
    await device.wait()
    device.close()


async def check_repeated_reads(open_device: OpenDevice) -> None:
    """A staging buffer can be filled again once its read has returned."""
    device = await open_device()
    staging = device.create_buffer(16, STAGING, "staging")
    for value in (7, 8, 9):
        program = Program()
        program.write(staging, 8, [value])
        device.submit(program.words)
        assert await device.read_buffer(staging, 8, 4) == words(value)
    assert await device.read_buffer(staging, 0, 16) == words(0, 0, 9, 0)
    device.close()


# ---- kernels --------------------------------------------------------------------------------------------------------


async def check_kernel(open_device: OpenDevice) -> None:
    """Two dependent dispatches in one pass, with a uniform, over whole buffers."""
    device = await open_device()
    pipeline = await add_pipeline(device)
    x, y, z = (device.create_buffer(20, DATA, label) for label in "xyz")
    increment = device.create_buffer(16, UNIFORM, "increment")
    device.write_buffer(x, 0, words(1, 2, 3, 4, 0xFFFFFFFF))
    first = device.create_bind_group(pipeline, [Binding(x), Binding(increment), Binding(y)])
    second = device.create_bind_group(pipeline, [Binding(y), Binding(increment), Binding(z)])
    program = Program()
    program.write(increment, 0, [10, 0, 0, 0])
    program.begin_pass()
    program.dispatch(pipeline, first, (2, 1, 1))
    program.dispatch(pipeline, second, (2, 1, 1))
    program.end_pass()
    program.submit()
    device.submit(program.words)
    assert await contents(device, y, 0, 20) == words(11, 12, 13, 14, 9)
    assert await contents(device, z, 0, 20) == words(21, 22, 23, 24, 19)
    device.close()


async def check_bound_ranges(open_device: OpenDevice) -> None:
    """An offset and a size bind a part of a buffer; size 0 binds to the end."""
    device = await open_device()
    pipeline = await add_pipeline(device)
    x, y = (device.create_buffer(520, DATA, label) for label in "xy")
    increment = device.create_buffer(272, UNIFORM, "increment")
    device.write_buffer(x, 256, words(*range(66)))
    device.write_buffer(increment, 256, words(100, 0, 0, 0))
    entries = [Binding(x, 256, 8), Binding(increment, 256), Binding(y, 512, 8)]
    group = device.create_bind_group(pipeline, entries)
    program = Program()
    program.begin_pass()
    program.dispatch(pipeline, group, (1, 1, 1))
    program.end_pass()
    program.submit()
    device.submit(program.words)
    assert await contents(device, y, 504, 16) == words(0, 0, 100, 101)
    device.close()


async def check_shader_errors(open_device: OpenDevice) -> None:
    device = await open_device()
    before = dict(device.table_sizes())
    await raises(
        ShaderError, device, lambda: device.create_pipeline("var<private> x: u32;", Layout(), "no entry point")
    )
    wrong = Layout((BindingType.STORAGE, BindingType.UNIFORM, BindingType.STORAGE))
    too_few = Layout(ADD_LAYOUT.bindings[:2])
    await raises(ShaderError, device, lambda: device.create_pipeline(ADD_WGSL, wrong, "wrong type"))
    await raises(ShaderError, device, lambda: device.create_pipeline(ADD_WGSL, too_few, "too few"))
    assert device.table_sizes() == before
    await add_pipeline(device)  # the device is as good as before
    device.close()


async def check_bind_group_must_match(open_device: OpenDevice) -> None:
    device = await open_device()
    pipeline = await add_pipeline(device)
    x, y = (device.create_buffer(1024, DATA, label) for label in "xy")
    increment = device.create_buffer(16, UNIFORM, "increment")
    good = [Binding(x), Binding(increment), Binding(y)]
    await raises(UsageError, device, lambda: device.create_bind_group(pipeline, good[:2]))
    await raises(UsageError, device, lambda: device.create_bind_group(pipeline, [*good, Binding(x)]))
    for wrong in (
        [Binding(x), Binding(x), Binding(y)],  # no UNIFORM usage
        [Binding(x, 4), Binding(increment), Binding(y)],  # offset not aligned
        [Binding(x, 0, 2048), Binding(increment), Binding(y)],  # outside the buffer
        [Binding(x, 0, 6), Binding(increment), Binding(y)],  # not a multiple of 4
    ):
        await raises(UsageError, device, lambda wrong=wrong: device.create_bind_group(pipeline, wrong), late=True)
    device.create_bind_group(pipeline, good)
    await device.wait()
    device.close()


async def check_written_buffer_has_one_use(open_device: OpenDevice) -> None:
    """The usage-scope rule: no dispatch reads and writes one buffer through two bindings."""
    device = await open_device()
    pipeline = await add_pipeline(device)
    x = device.create_buffer(1024, DATA, "x")
    increment = device.create_buffer(16, UNIFORM, "increment")

    def dispatch() -> None:
        group = device.create_bind_group(pipeline, [Binding(x, 0, 256), Binding(increment), Binding(x, 256, 256)])
        program = Program()
        program.begin_pass()
        program.dispatch(pipeline, group, (1, 1, 1))
        program.end_pass()
        program.submit()
        device.submit(program.words)

    await raises(UsageError, device, dispatch, late=True)
    device.close()


# ---- handles --------------------------------------------------------------------------------------------------------


async def check_handles_are_never_reused(open_device: OpenDevice) -> None:
    device = await open_device()
    seen = set()
    for _ in range(20):
        handle = device.create_buffer(16, DATA, "short-lived")
        assert isinstance(handle, int)
        assert handle not in seen
        seen.add(handle)
        device.destroy(handle)
    pipeline = await add_pipeline(device)
    assert pipeline not in seen
    device.close()


async def check_dead_handles(open_device: OpenDevice) -> None:
    """A destroyed, unknown or wrong-kind handle is a UsageError at the call that uses it."""
    device = await open_device()
    pipeline = await add_pipeline(device)
    live = device.create_buffer(16, DATA, "live")
    increment = device.create_buffer(16, UNIFORM, "increment")
    dead = device.create_buffer(16, DATA, "dead")
    device.destroy(dead)
    for handle in (dead, 1 << 30, pipeline):
        await raises(UsageError, device, lambda handle=handle: device.write_buffer(handle, 0, bytes(4)))
        for program in (
            [Op.COPY, handle, 0, live, 0, 4, Op.SUBMIT],
            [Op.COPY, live, 0, handle, 0, 4, Op.SUBMIT],
            [Op.CLEAR, handle, 0, 4, Op.SUBMIT],
            [Op.WRITE, handle, 0, 1, 5],
        ):
            await raises(UsageError, device, lambda program=program: device.submit(array("I", program)))
        entries = [Binding(live), Binding(increment), Binding(handle)]
        await raises(UsageError, device, lambda entries=entries: device.create_bind_group(pipeline, entries))
        await raises(UsageError, device, lambda handle=handle: device.read_buffer(handle, 0, 4))
    await raises(UsageError, device, lambda: device.destroy(dead))
    await raises(UsageError, device, lambda: device.create_bind_group(live, []))
    device.close()


async def check_destroyed_pipeline_and_group(open_device: OpenDevice) -> None:
    device = await open_device()
    pipeline = await add_pipeline(device)
    x, y = (device.create_buffer(16, DATA, label) for label in "xy")
    increment = device.create_buffer(16, UNIFORM, "increment")
    group = device.create_bind_group(pipeline, [Binding(x), Binding(increment), Binding(y)])
    program = Program()
    program.begin_pass()
    program.dispatch(pipeline, group, (1, 1, 1))
    program.end_pass()
    program.submit()
    device.submit(program.words)
    device.destroy(group)
    await raises(UsageError, device, lambda: device.submit(program.words))
    device.destroy(pipeline)
    await raises(UsageError, device, lambda: device.submit(program.words))
    device.close()


async def check_submit_with_destroyed_buffer(open_device: OpenDevice) -> None:
    """A bind group outlives its buffers; a dispatch that uses it then does not."""
    device = await open_device()
    pipeline = await add_pipeline(device)
    x, y = (device.create_buffer(16, DATA, label) for label in "xy")
    increment = device.create_buffer(16, UNIFORM, "increment")
    group = device.create_bind_group(pipeline, [Binding(x), Binding(increment), Binding(y)])
    device.destroy(x)
    program = Program()
    program.begin_pass()
    program.dispatch(pipeline, group, (1, 1, 1))
    program.end_pass()
    program.submit()
    await raises(UsageError, device, lambda: device.submit(program.words), late=True)
    device.close()


async def check_tables_return_to_start(open_device: OpenDevice) -> None:
    device = await open_device()
    start = dict(device.table_sizes())
    assert set(start) == {"buffers", "pipelines", "bind_groups", "plans"}
    pipeline = await add_pipeline(device)
    x, y = (device.create_buffer(16, DATA, label) for label in "xy")
    increment = device.create_buffer(16, UNIFORM, "increment")
    group = device.create_bind_group(pipeline, [Binding(x), Binding(increment), Binding(y)])
    grown = device.table_sizes()
    assert [grown[kind] - start[kind] for kind in ("buffers", "pipelines", "bind_groups")] == [3, 1, 1]
    for handle in (group, pipeline, x, y, increment):
        device.destroy(handle)
    assert device.table_sizes() == start
    device.close()


# ---- rules that WebGPU may report late ------------------------------------------------------------------------------


async def check_late_rules(open_device: OpenDevice) -> None:
    device = await open_device()
    limits = device.info.limits
    data = device.create_buffer(64, DATA, "data")
    other = device.create_buffer(64, DATA, "other")
    staging = device.create_buffer(64, STAGING, "staging")
    source_only = device.create_buffer(64, BufferUsage.STORAGE | BufferUsage.COPY_SRC, "source only")
    broken: Mapping[str, Callable[[], object]] = {
        "no usage": lambda: device.create_buffer(64, BufferUsage(0), "no usage"),
        "MAP_READ with STORAGE": lambda: device.create_buffer(64, DATA | BufferUsage.MAP_READ, "mappable storage"),
        "larger than maxBufferSize": lambda: device.create_buffer(limits["maxBufferSize"] + 4, DATA, "too large"),
        "write outside": lambda: device.write_buffer(data, 60, bytes(8)),
        "write without COPY_DST": lambda: device.write_buffer(source_only, 0, bytes(4)),
        "copy from staging": lambda: _submit(device, Op.COPY, staging, 0, data, 0, 4),
        "copy without COPY_DST": lambda: _submit(device, Op.COPY, data, 0, source_only, 0, 4),
        "copy inside one buffer, overlapping": lambda: _submit(device, Op.COPY, data, 0, data, 8, 16),
        "copy outside": lambda: _submit(device, Op.COPY, data, 48, other, 0, 32),
        "unaligned copy": lambda: _submit(device, Op.COPY, data, 2, other, 0, 4),
        "clear outside": lambda: _submit(device, Op.CLEAR, data, 32, 64),
        "unaligned clear": lambda: _submit(device, Op.CLEAR, data, 0, 6),
        "read without MAP_READ": lambda: device.read_buffer(data, 0, 4),
        "read outside": lambda: device.read_buffer(staging, 32, 64),
    }
    for name, call in broken.items():
        try:
            await raises(UsageError, device, call, late=True)
        except AssertionError as failure:
            raise AssertionError(f"{name}: {failure}") from None
    device.write_buffer(data, 0, words(5))  # the device is as good as before
    assert await contents(device, data, 0, 4) == words(5)
    device.close()


async def check_program_structure(open_device: OpenDevice) -> None:
    """A malformed program is a UsageError of ``submit`` itself."""
    device = await open_device()
    data, other = (device.create_buffer(64, DATA, label) for label in ("data", "other"))
    for program in (
        [99],
        [0],
        [Op.END_PASS],
        [Op.BEGIN_PASS, Op.BEGIN_PASS, Op.END_PASS, Op.END_PASS, Op.SUBMIT],
        [Op.BEGIN_PASS, Op.COPY, data, 0, other, 0, 4, Op.END_PASS, Op.SUBMIT],
        [Op.BEGIN_PASS, Op.CLEAR, data, 0, 4, Op.END_PASS, Op.SUBMIT],
        [Op.BEGIN_PASS, Op.SUBMIT],
        [Op.BEGIN_PASS],
        [Op.BEGIN_PASS, Op.END_PASS],
        [Op.DISPATCH, data, data, 1, 1, 1, Op.SUBMIT],
        [Op.CLEAR, data, 0, 4],
        [Op.CLEAR, data, 0],  # cut off
        [Op.WRITE, data, 0, 2, 7],
    ):
        await raises(UsageError, device, lambda program=program: device.submit(array("I", program)))
    device.write_buffer(data, 0, words(6))
    assert await contents(device, data, 0, 4) == words(6)
    device.close()


async def check_grid_limit(open_device: OpenDevice) -> None:
    device = await open_device()
    pipeline = await add_pipeline(device)
    x, y = (device.create_buffer(16, DATA, label) for label in "xy")
    increment = device.create_buffer(16, UNIFORM, "increment")
    group = device.create_bind_group(pipeline, [Binding(x), Binding(increment), Binding(y)])
    too_many = device.info.limits["maxComputeWorkgroupsPerDimension"] + 1
    program = Program()
    program.begin_pass()
    program.dispatch(pipeline, group, (1, too_many, 1))
    program.end_pass()
    program.submit()
    await raises(UsageError, device, lambda: device.submit(program.words), late=True)
    device.close()


def _submit(device: Device, *instruction: int) -> None:
    device.submit(array("I", [*instruction, Op.SUBMIT]))


# ---- upload ---------------------------------------------------------------------------------------------------------


async def check_upload(open_device: OpenDevice) -> None:
    """Chunks land at their offsets, a tail that is no multiple of 4 is padded with zeros, progress counts the bytes."""
    device = await open_device()
    data = bytes(i * 7 % 251 for i in range(1000))
    a, b = (device.create_buffer(512, DATA, label) for label in "ab")
    device.write_buffer(b, 0, b"\xff" * 512)
    chunks = [Chunk(4, 400, a, 0), Chunk(404, 6, b, 8), Chunk(800, 200, b, 64)]
    seen: list[tuple[int, int]] = []
    await device.upload(MemorySource(data), chunks, lambda done, total: seen.append((done, total)))
    assert await contents(device, a, 0, 400) == data[4:404]
    assert await contents(device, b, 0, 20) == b"\xff" * 8 + data[404:410] + bytes(2) + b"\xff" * 4
    assert await contents(device, b, 64, 200) == data[800:]
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {606}
    assert seen[-1] == (606, 606)
    device.close()


async def check_upload_errors(open_device: OpenDevice) -> None:
    device = await open_device()
    buffer = device.create_buffer(64, DATA, "target")
    await raises(BadFile, device, lambda: device.upload(MemorySource(bytes(32)), [Chunk(16, 32, buffer)]))
    await raises(UsageError, device, lambda: device.upload(MemorySource(bytes(99)), [Chunk(0, 80, buffer)]), late=True)
    await device.upload(MemorySource(b"abcd"), [Chunk(0, 4, buffer)])
    assert await contents(device, buffer, 0, 4) == b"abcd"
    device.close()


# ---- the device -----------------------------------------------------------------------------------------------------


async def check_info(open_device: OpenDevice) -> None:
    device = await open_device()
    info = device.info
    at_least = {
        "maxBufferSize": 268_435_456,
        "maxStorageBufferBindingSize": 134_217_728,
        "maxUniformBufferBindingSize": 65_536,
        "maxStorageBuffersPerShaderStage": 8,
        "maxComputeWorkgroupsPerDimension": 65_535,
        "maxComputeInvocationsPerWorkgroup": 256,
        "maxComputeWorkgroupStorageSize": 16_384,
    }
    for name, least in at_least.items():
        assert info.limits[name] >= least, name
    for name in ("minStorageBufferOffsetAlignment", "minUniformBufferOffsetAlignment"):
        assert 32 <= info.limits[name] <= 256, name
    assert ("subgroups" in info.features) == (info.subgroup_size > 0)
    assert info.subgroup_size <= info.subgroup_max_size
    assert isinstance(info.is_software, bool)
    device.close()


async def check_close(open_device: OpenDevice) -> None:
    """Closing frees everything and may be done twice; afterwards nothing works, and says so."""
    device = await open_device()
    buffer = device.create_buffer(16, DATA, "data")
    await add_pipeline(device)
    device.close()
    device.close()
    assert set(device.table_sizes().values()) == {0}
    await raises(DeviceError, device, lambda: device.write_buffer(buffer, 0, bytes(4)))
    await raises(DeviceError, device, lambda: device.submit(array("I", [Op.SUBMIT])))
    await raises(DeviceError, device, lambda: device.create_buffer(16, DATA, "too late"), late=True)
    await raises(DeviceError, device, device.wait)


async def check_two_devices(open_device: OpenDevice) -> None:
    """Devices do not see each other, and closing one leaves the other as it is."""
    first, second = await open_device(), await open_device()
    a, b = first.create_buffer(4, DATA, "a"), second.create_buffer(4, DATA, "b")
    first.write_buffer(a, 0, words(1))
    second.write_buffer(b, 0, words(2))
    assert await contents(first, a, 0, 4) == words(1)
    first.close()
    assert await contents(second, b, 0, 4) == words(2)
    second.close()


CHECKS: Mapping[str, Callable[[OpenDevice], Awaitable[None]]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}


async def run_all(
    open_device: OpenDevice, checks: Mapping[str, Callable[[OpenDevice], Awaitable[None]]]
) -> dict[str, str]:
    """Run every check; the failed ones by name, with what went wrong."""
    failed = {}
    for name, check in checks.items():
        try:
            await check(open_device)
        except (AssertionError, StepwellError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed
