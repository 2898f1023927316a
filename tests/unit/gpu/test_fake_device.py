"""FakeDevice: the contract every Device keeps, and what only the fake does (strict rules, fault injection, log)."""

import asyncio
import gc
import warnings
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from stepwell.errors import DeviceLost, MissingCapability, OutOfMemory, ShaderError, UsageError
from stepwell.gpu.device import Binding, BindingType, BufferUsage, Device, Layout
from stepwell.gpu.fake_device import FAKE_INFO, FakeDevice
from stepwell.gpu.fake_objects import FakeBuffer
from stepwell.gpu.program import Op, Program
from tests.support import contract, contract_steps
from tests.support.contract import DATA, STAGING, UNIFORM, words

STORAGE, READ, UNIFORM_BINDING = BindingType.STORAGE, BindingType.READ_ONLY_STORAGE, BindingType.UNIFORM
CHECKS = {**contract.CHECKS, **contract_steps.CHECKS}
EMPTY_WGSL = "@compute @workgroup_size(1) fn main() {}"


def layout(*bindings: BindingType) -> Layout:
    return Layout(bindings)


async def open_fake() -> Device:
    return FakeDevice(kernels={**contract.KERNELS, **contract_steps.KERNELS})


async def open_without_immediates() -> Device:
    info = replace(FAKE_INFO, immediate_bytes=0, features=frozenset())
    return FakeDevice(info, kernels={**contract.KERNELS, **contract_steps.KERNELS})


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("open_device", [open_fake, open_without_immediates])
def test_contract(open_device: contract.OpenDevice, name: str) -> None:
    asyncio.run(CHECKS[name](open_device))


def test_run_all_names_what_fails() -> None:
    """A device whose kernels do nothing must be found out, by exactly the checks that look at results of kernels."""

    async def without_kernels() -> Device:
        return FakeDevice()

    assert set(asyncio.run(contract.run_all(without_kernels, CHECKS))) == {
        "kernel",
        "bound_ranges",
        "scalars_reach_the_shader",
        "immediates_hold_for_one_pass",
        "dispatch_by_length",
        "replay_is_submit",
        "a_dead_object_ends_its_plans",
    }


def submit(device: FakeDevice, *program: int) -> None:
    device.submit(array("I", program))


def test_buffer_rules() -> None:
    device = FakeDevice()
    for size in (0, -4, 6):
        with pytest.raises(UsageError, match="above 0 and a multiple of 4"):
            device.create_buffer(size, DATA)
    with pytest.raises(UsageError, match=r"268,435,460 B.*268,435,456 B \(maxBufferSize\)"):
        device.create_buffer(268_435_460, DATA)
    for usage in (
        BufferUsage.MAP_READ | BufferUsage.STORAGE,
        BufferUsage.MAP_READ | BufferUsage.COPY_SRC,
        BufferUsage.MAP_WRITE | BufferUsage.COPY_DST,
        BufferUsage.MAP_WRITE | BufferUsage.MAP_READ,
    ):
        with pytest.raises(UsageError, match="combines with"):
            device.create_buffer(16, usage)
    device.create_buffer(16, BufferUsage.MAP_WRITE | BufferUsage.COPY_SRC)
    assert device.table_sizes()["buffers"] == 1


def test_untouched_gigabytes_cost_nothing() -> None:
    device = FakeDevice(limits={"maxBufferSize": 1 << 40})
    a, b = (device.create_buffer(1 << 39, DATA) for _ in range(2))
    submit(device, Op.COPY, a, 0, b, 0, 1 << 31, Op.CLEAR, b, 0, 1 << 31, Op.SUBMIT)
    device.write_buffer(a, 0, bytes(64))
    assert device.buffer_bytes == 1 << 40
    assert all(device.get(handle, FakeBuffer, "test").data is None for handle in (a, b))


@pytest.mark.parametrize(
    ("limit", "value", "entries", "message"),
    [
        ("maxStorageBufferBindingSize", 512, [(0, 0), (0, 16), (0, 512)], "1,024 B; the device allows 512 B"),
        ("maxUniformBufferBindingSize", 8, [(0, 512), (0, 16), (0, 512)], "16 B; the device allows 8 B"),
        ("minStorageBufferOffsetAlignment", 64, [(32, 64), (0, 16), (0, 64)], "multiple of 64"),
        ("minUniformBufferOffsetAlignment", 32, [(0, 64), (4, 8), (0, 64)], "multiple of 32"),
        ("maxBufferSize", 4096, [(0, 6), (0, 16), (0, 64)], "multiple of 4"),
        ("maxBufferSize", 4096, [(1024, 0), (0, 16), (0, 64)], "empty or ends outside"),
        ("maxBufferSize", 4096, [(768, 512), (0, 16), (0, 64)], "empty or ends outside"),
    ],
)
def test_binding_rules(limit: str, value: int, entries: list[tuple[int, int]], message: str) -> None:
    async def run() -> None:
        device = FakeDevice(limits={limit: value})
        pipeline = await device.create_pipeline(contract.ADD_WGSL, contract.ADD_LAYOUT)
        buffers = [
            device.create_buffer(1024, DATA),
            device.create_buffer(16, UNIFORM),
            device.create_buffer(1024, DATA),
        ]
        bindings = [Binding(buffer, *entry) for buffer, entry in zip(buffers, entries, strict=True)]
        with pytest.raises(UsageError, match=message):
            device.create_bind_group(pipeline, bindings)

    asyncio.run(run())


def test_too_many_storage_buffers() -> None:
    async def run() -> None:
        device = FakeDevice()
        await device.create_pipeline(EMPTY_WGSL, layout(*[READ] * 7, STORAGE, UNIFORM_BINDING))
        with pytest.raises(ShaderError, match=r"9 buffers.*8 \(maxStorageBuffersPerShaderStage\)"):
            await device.create_pipeline(EMPTY_WGSL, layout(*[READ] * 8, STORAGE))
        with pytest.raises(ShaderError, match="maxUniformBuffersPerShaderStage"):
            await device.create_pipeline(EMPTY_WGSL, layout(*[UNIFORM_BINDING] * 13))

    asyncio.run(run())


def test_shader_checks() -> None:
    async def run() -> None:
        device = FakeDevice()
        for code in ("fn main() {}", "@compute @workgroup_size(1) fn other() {}", "// @compute fn main() {}"):
            with pytest.raises(ShaderError, match="entry point"):
                await device.create_pipeline(code, Layout())
        with pytest.raises(ShaderError, match="feature shader-f16"):
            await device.create_pipeline("enable f16;" + EMPTY_WGSL, Layout())
        with pytest.raises(ShaderError, match=r"@group\(1\)"):
            await device.create_pipeline("@group(1) @binding(0) var<storage> x: u32;" + EMPTY_WGSL, layout(READ))
        reversed_attributes = "@binding(0) @group(0) var<storage, read_write> x: u32;" + EMPTY_WGSL
        await device.create_pipeline(reversed_attributes, layout(STORAGE))
        with pytest.raises(ShaderError, match="storage in WGSL and uniform"):
            await device.create_pipeline(reversed_attributes, layout(UNIFORM_BINDING))
        capable = FakeDevice(replace(FAKE_INFO, features=frozenset({"shader-f16", "subgroups"})))
        await capable.create_pipeline("enable f16, subgroups;" + EMPTY_WGSL, Layout())

    asyncio.run(run())


def test_aliasing_and_usage_scope() -> None:
    async def run() -> None:
        device = FakeDevice()
        pipeline = await device.create_pipeline(EMPTY_WGSL, layout(STORAGE, STORAGE, READ))
        x, y = (device.create_buffer(1024, DATA) for _ in range(2))

        def dispatch(*entries: Binding) -> None:
            group = device.create_bind_group(pipeline, entries)
            submit(device, Op.BEGIN_PASS, Op.DISPATCH, pipeline, group, 1, 1, 1, Op.END_PASS, Op.SUBMIT)

        dispatch(Binding(x, 0, 256), Binding(x, 256, 256), Binding(y))
        with pytest.raises(UsageError, match="overlapping"):
            dispatch(Binding(x, 0, 512), Binding(x, 256, 256), Binding(y))
        with pytest.raises(UsageError, match="writable at binding 1 and read-only-storage at binding 2"):
            dispatch(Binding(x), Binding(y, 0, 256), Binding(y, 256, 256))

    asyncio.run(run())


def test_layouts_must_match_at_dispatch() -> None:
    async def run() -> None:
        device = FakeDevice()
        first = await device.create_pipeline(EMPTY_WGSL, layout(STORAGE))
        same = await device.create_pipeline(EMPTY_WGSL, layout(STORAGE))
        other = await device.create_pipeline(EMPTY_WGSL, layout(READ))
        group = device.create_bind_group(first, [Binding(device.create_buffer(16, DATA))])
        submit(device, Op.BEGIN_PASS, Op.DISPATCH, same, group, 1, 1, 1, Op.END_PASS, Op.SUBMIT)
        with pytest.raises(UsageError, match="layout"):
            submit(device, Op.BEGIN_PASS, Op.DISPATCH, other, group, 1, 1, 1, Op.END_PASS, Op.SUBMIT)

    asyncio.run(run())


def test_truncated_programs() -> None:
    device = FakeDevice()
    a, b = (device.create_buffer(16, DATA) for _ in range(2))
    for program in ([Op.COPY, a, 0, b, 0], [Op.CLEAR, a], [Op.WRITE, a, 0], [Op.WRITE, a, 0, 3, 1, 2], [Op.WRITE]):
        with pytest.raises(UsageError, match=r"needs .* words"):
            submit(device, *program)
    with pytest.raises(UsageError, match="32-bit"):
        device.submit(array("Q", [Op.SUBMIT]))


def test_write_may_not_overtake_recorded_work() -> None:
    device = FakeDevice()
    a, b = (device.create_buffer(16, DATA) for _ in range(2))
    copy = (Op.COPY, a, 0, b, 0, 4)
    for buffer in (a, b):
        with pytest.raises(UsageError, match="would run before"):
            submit(device, *copy, Op.WRITE, buffer, 0, 1, 7, Op.SUBMIT)
        submit(device, *copy, Op.SUBMIT, Op.WRITE, buffer, 0, 1, 7)


def test_only_the_range_in_use_is_out_of_reach() -> None:
    async def run() -> None:
        device = FakeDevice()
        pipeline = await device.create_pipeline(EMPTY_WGSL, layout(UNIFORM_BINDING))
        arena, target = device.create_buffer(512, UNIFORM | BufferUsage.COPY_SRC), device.create_buffer(512, DATA)
        group = device.create_bind_group(pipeline, [Binding(arena, 256, 16)])
        dispatch = (Op.BEGIN_PASS, Op.DISPATCH, pipeline, group, 1, 1, 1)
        for offset, fine in ((240, True), (252, False), (256, False), (268, False), (272, True)):
            for write in ((Op.WRITE, arena, offset, 4, 1, 2, 3, 4), (Op.PARAMS, arena, offset, 7)):
                program = (Op.SCALARS, 1, 1, 2, 0, 0, *dispatch, *write, Op.END_PASS, Op.SUBMIT)
                if fine:
                    submit(device, *program)
                else:
                    with pytest.raises(UsageError, match="would run before"):
                        submit(device, *program)
        copied = (Op.COPY, arena, 0, target, 64, 8)
        submit(device, *copied, Op.WRITE, target, 72, 1, 1, Op.WRITE, arena, 8, 1, 1, Op.SUBMIT)
        with pytest.raises(UsageError, match="would run before"):
            submit(device, *copied, Op.WRITE, target, 68, 1, 1, Op.SUBMIT)

    asyncio.run(run())


def test_a_rehearsed_plan_has_no_effect() -> None:
    device = FakeDevice()
    a, b = (device.create_buffer(16, DATA) for _ in range(2))
    device.write_buffer(a, 0, words(1, 2, 3, 4))
    logged = len(device.log)
    program = array("I", [Op.SCALARS, 2, 1, 3, 0, 0, Op.WRITE, a, 0, 1, 9, Op.COPY_PAST, a, b, 4, Op.SUBMIT])
    device.set_profile(spans=True)
    plan = device.create_plan(program)
    assert device.log[logged:] == [("create_plan", str(plan))]
    assert device.get(a, FakeBuffer, "test").get(0, 16) == words(1, 2, 3, 4)
    assert device.get(b, FakeBuffer, "test").data is None
    assert asyncio.run(device.take_profile()).spans == ()
    program[10] = 7  # the plan has words of its own
    device.replay(plan, 1, 1, 2, 8, 0)
    assert device.get(b, FakeBuffer, "test").get(0, 16) == words(9, 0, 0, 0)
    assert device.log[-5:-3] == [("replay", str(plan), *"11280"), ("scalars", *"11280")]


def test_a_read_that_nobody_awaits_leaves_the_late_error_to_the_next() -> None:
    async def run() -> None:
        device = FakeDevice()
        staging = device.create_buffer(16, STAGING)
        device.fail_next_create = OutOfMemory
        device.create_buffer(16, DATA)
        unread, read = (device.read_buffer(staging, 0, 16) for _ in range(2))
        with pytest.raises(OutOfMemory):
            await read
        del unread
        await device.wait()

    with warnings.catch_warnings(record=True) as caught:
        asyncio.run(run())
        gc.collect()
    assert caught == []


def test_timed_passes_need_a_feature() -> None:
    device = FakeDevice(replace(FAKE_INFO, features=frozenset()))
    device.set_profile(spans=True)
    with pytest.raises(MissingCapability, match="timestamp-query"):
        device.set_profile(passes=True)


def test_mapped_buffers_are_out_of_reach() -> None:
    async def run() -> None:
        device = FakeDevice()
        data, staging = device.create_buffer(16, DATA), device.create_buffer(16, STAGING)
        device.write_buffer(staging, 0, words(3))
        reading = device.read_buffer(staging, 0, 4)
        with pytest.raises(UsageError, match="mapped"):
            submit(device, Op.COPY, data, 0, staging, 0, 4, Op.SUBMIT)
        with pytest.raises(UsageError, match="mapped"):
            device.write_buffer(staging, 0, words(4))
        assert await reading == words(3)
        submit(device, Op.COPY, data, 0, staging, 0, 4, Op.SUBMIT)
        with pytest.raises(UsageError, match="multiple of 8"):
            await device.read_buffer(staging, 4, 4)

        reading = device.read_buffer(staging, 0, 4)
        device.destroy(staging)
        with pytest.raises(UsageError, match="destroyed while the read was pending"):
            await reading

    asyncio.run(run())


def test_foreign_handles() -> None:
    ours, theirs = FakeDevice(), FakeDevice()
    handle = theirs.create_buffer(16, DATA)
    ours.create_buffer(16, DATA)
    with pytest.raises(UsageError, match="another device"):
        ours.write_buffer(handle, 0, words(1))
    with pytest.raises(UsageError, match="another device"):
        ours.destroy(handle)


def test_kernels_cannot_write_read_only_bindings() -> None:
    def write_input(buffers: list[memoryview], grid: tuple[int, int, int]) -> None:
        buffers[0][0] = 1

    async def run() -> None:
        device = FakeDevice(kernels={"bad": write_input})
        pipeline = await device.create_pipeline(EMPTY_WGSL, layout(READ), "bad")
        group = device.create_bind_group(pipeline, [Binding(device.create_buffer(16, DATA))])
        with pytest.raises(TypeError, match="read-only"):
            submit(device, Op.BEGIN_PASS, Op.DISPATCH, pipeline, group, 1, 1, 1, Op.END_PASS, Op.SUBMIT)

    asyncio.run(run())


def test_out_of_memory_is_reported_late() -> None:
    async def run() -> None:
        device = FakeDevice()
        device.fail_next_create = OutOfMemory
        failed = device.create_buffer(4096, DATA, "kv")
        good = device.create_buffer(4096, DATA)
        with pytest.raises(OutOfMemory, match=r"4,096 B \(kv\)"):
            await device.wait()
        await device.wait()  # reported once
        device.destroy(failed)
        device.destroy(good)
        assert device.table_sizes()["buffers"] == 0

    asyncio.run(run())


@pytest.mark.parametrize("how", ["lose", "fail_next_create"])
def test_device_lost(how: str) -> None:
    async def run() -> None:
        device = FakeDevice()
        buffer, staging = device.create_buffer(16, DATA), device.create_buffer(16, STAGING)
        pipeline = await device.create_pipeline(EMPTY_WGSL, layout(READ))
        plan = device.create_plan(array("I", [Op.SCALARS, 1, 1, 2, 0, 0]))
        reading = device.read_buffer(staging, 0, 16)
        if how == "lose":
            device.lose("driver reset")
        else:
            device.fail_next_create = DeviceLost
            device.create_buffer(16, DATA)
        calls: list[Callable[[], object]] = [
            lambda: device.create_buffer(16, DATA),
            lambda: device.create_bind_group(pipeline, [Binding(buffer)]),
            lambda: device.write_buffer(buffer, 0, words(1)),
            lambda: device.destroy(buffer),
            lambda: submit(device, Op.SUBMIT),
            lambda: device.create_plan(array("I", [Op.SCALARS, 1, 1, 2, 0, 0])),
            lambda: device.replay(plan, 1, 1, 2, 0, 0),
        ]
        for call in calls:
            with pytest.raises(DeviceLost):
                call()
        awaited: list[Awaitable[object]] = [
            reading,
            device.wait(),
            device.create_pipeline(EMPTY_WGSL, Layout()),
            device.read_buffer(staging, 0, 4),
            device.upload(contract.MemorySource(b""), []),
            device.take_profile(),
        ]
        for awaitable in awaited:
            with pytest.raises(DeviceLost):
                await awaitable
        assert set(device.table_sizes().values()) == {0}
        device.close()

    asyncio.run(run())


def test_log_is_bounded_and_can_be_off() -> None:
    device = FakeDevice()
    buffer = device.create_buffer(16, DATA, "x")
    submit(device, Op.CLEAR, buffer, 0, 16, Op.SUBMIT)
    assert device.log == [
        ("create_buffer", str(buffer), "16", str(int(DATA)), "x"),
        ("clear", str(buffer), "0", "16"),
        ("submit",),
    ]
    bounded, silent = FakeDevice(log_limit=10), FakeDevice(log_limit=0)
    for device in (bounded, silent):
        buffer = device.create_buffer(16, DATA)
        program = Program()
        for i in range(100):
            program.write(buffer, 0, [i])
        device.submit(program.words)
    assert 10 <= len(bounded.log) <= 20
    assert bounded.log[-1] == ("write", str(bounded.log[-1][1]), "0", "1")
    assert silent.log == []
