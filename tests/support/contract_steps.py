"""The second half of the contract (see contract.py): a step's scalars, plans that replay it, early reads, profiles."""

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence

from stepwell.errors import ShaderError, UsageError
from stepwell.gpu.device import Binding, BindingType, BufferUsage, Device, Layout
from stepwell.gpu.program import Op, Program, Scalar
from tests.support.contract import DATA, STAGING, UNIFORM, OpenDevice, add_pipeline, contents, raises, words

SHOW_WGSL = """
struct Step { position: u32, rows: u32, length: u32, draw: u32 }
DECLARATION step: Step;
@group(0) @binding(1) var<storage, read> x: array<u32>;
@group(0) @binding(2) var<storage, read_write> y: array<u32>;
@compute @workgroup_size(1)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
  if (any(id > vec3<u32>())) { return; }
  y[0] = x[0] + step.position; y[1] = step.rows; y[2] = step.length; y[3] = step.draw;
  y[4] = grid.x; y[5] = grid.y; y[6] = grid.z;
}
"""
READ_WRITE = (BindingType.READ_ONLY_STORAGE, BindingType.STORAGE)
LAYOUTS = {True: Layout(READ_WRITE, first=1, immediate_bytes=16), False: Layout((BindingType.UNIFORM, *READ_WRITE))}
SHOWN = 28
"""Bytes that the kernel writes to y."""
ALL = Scalar.POSITION | Scalar.ROWS | Scalar.LENGTH | Scalar.DRAW

SPIN_WGSL = """
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
@compute @workgroup_size(1)
fn main(@builtin(workgroup_id) id: vec3<u32>) {
  var h = y[id.x];
  for (var i = 0u; i < 20000u; i++) { h = h * 1664525u + 1013904223u; }
  y[id.x] = h;
}
"""


def _show(buffers: Sequence[memoryview], grid: tuple[int, int, int]) -> None:
    step, x, y = (buffer.cast("I") for buffer in buffers)
    if all(grid):
        y[0] = (x[0] + step[0]) & 0xFFFFFFFF
        y[1:4] = step[1:4]
        y[4:7] = memoryview(array("I", grid))


def _spin(buffers: Sequence[memoryview], grid: tuple[int, int, int]) -> None:
    y = buffers[0].cast("I")
    for i in range(grid[0]):
        h = y[i]
        for _ in range(200):
            h = h * 1664525 + 1013904223 & 0xFFFFFFFF
        y[i] = h


KERNELS: Mapping[str, Callable[[Sequence[memoryview], tuple[int, int, int]], None]] = {"show": _show, "spin": _spin}
"""What the pipelines of these checks compute, by label, for a device that cannot compile WGSL."""


class Rig:
    """One ``show`` pipeline, its buffers and its bind group; with immediates, or with the step block in a uniform."""

    def __init__(self, device: Device, immediates: bool, pipeline: int) -> None:
        self.device, self.immediates, self.pipeline = device, immediates, pipeline
        self.x, self.y = (device.create_buffer(64, DATA, label) for label in "xy")
        self.step = device.create_buffer(16, UNIFORM, "step")
        device.write_buffer(self.x, 0, words(1000))
        bound = [self.x, self.y] if immediates else [self.step, self.x, self.y]
        self.group = device.create_bind_group(pipeline, [Binding(buffer) for buffer in bound])

    def begin(self, program: Program) -> None:
        """The step block as this rig passes it, and a pass."""
        if not self.immediates:
            program.params(self.step, 0, ALL)
        program.begin_pass()
        if self.immediates:
            program.immediates()


async def show_pipeline(device: Device, immediates: bool) -> int:
    declaration = "var<immediate>" if immediates else "@group(0) @binding(0) var<uniform>"
    return await device.create_pipeline(SHOW_WGSL.replace("DECLARATION", declaration), LAYOUTS[immediates], "show")


async def on_each_rig(open_device: OpenDevice, check: Callable[[Rig], Awaitable[None]]) -> None:
    """Run a check in each way in which the device can pass a step's scalars, each on a device of its own."""
    for immediates in (False, True):
        device = await open_device()
        if not immediates or device.info.immediate_bytes:
            await check(Rig(device, immediates, await show_pipeline(device, immediates)))
        device.close()


def staging_of(device: Device, nbytes: int = SHOWN + 4) -> int:
    return device.create_buffer(nbytes, STAGING, "staging")


# ---- a step's scalars -----------------------------------------------------------------------------------------------


async def check_scalars_reach_the_shader(open_device: OpenDevice) -> None:
    async def check(rig: Rig) -> None:
        program = Program()
        program.scalars(7, 2, 9, 5)
        rig.begin(program)
        program.dispatch(rig.pipeline, rig.group, (3, 2, 1))
        program.end_pass()
        program.submit()
        rig.device.submit(program.words)
        assert await contents(rig.device, rig.y, 0, SHOWN) == words(1007, 2, 9, 5, 3, 2, 1)

    await on_each_rig(open_device, check)


async def check_immediates_hold_for_one_pass(open_device: OpenDevice) -> None:
    """Over a change of pipeline, also to one without immediates; not beyond the pass."""
    device = await open_device()
    if not device.info.immediate_bytes:
        await raises(ShaderError, device, lambda: show_pipeline(device, True))
        device.close()
        return
    first, second = [Rig(device, True, await show_pipeline(device, True)) for _ in range(2)]
    add = await add_pipeline(device)
    increment = device.create_buffer(16, UNIFORM, "increment")
    z = device.create_buffer(64, DATA, "z")
    add_group = device.create_bind_group(add, [Binding(first.x), Binding(increment), Binding(z)])
    program = Program()
    program.scalars(1, 2, 3, 0x80000004)
    program.begin_pass()
    program.immediates()
    program.dispatch(first.pipeline, first.group, (1, 1, 1))
    program.dispatch(add, add_group, (1, 1, 1))
    program.dispatch(second.pipeline, second.group, (1, 1, 1))
    program.end_pass()
    end_of_pass = len(program.words)
    program.submit()
    device.submit(program.words)
    for rig in (first, second):
        assert await contents(device, rig.y, 0, 16) == words(1001, 2, 3, 0x80000004)
    assert await contents(device, z, 0, 4) == words(1000)
    unset = Program()
    unset.words = program.words[:end_of_pass]
    unset.begin_pass()
    unset.dispatch(first.pipeline, first.group, (1, 1, 1))
    unset.end_pass()
    unset.submit()
    await raises(UsageError, device, lambda: device.submit(unset.words), late=True)
    device.close()


async def check_immediates_are_declared(open_device: OpenDevice) -> None:
    device = await open_device()
    code = SHOW_WGSL.replace("DECLARATION", "var<immediate>")
    for layout in (Layout(READ_WRITE, 1), Layout(READ_WRITE, 1, 1 << 20), Layout(READ_WRITE, 0, 16)):
        await raises(ShaderError, device, lambda layout=layout: device.create_pipeline(code, layout, "show"), late=True)
    device.close()


async def check_params_writes_what_the_mask_selects(open_device: OpenDevice) -> None:
    device = await open_device()
    buffer = device.create_buffer(48, DATA, "params")
    for mask in (Scalar(0), *Scalar, Scalar.ROWS | Scalar.LENGTH, ALL):
        device.write_buffer(buffer, 0, b"\xff" * 48)
        program = Program()
        program.scalars(11, 12, 13, 0xFFFFFFFF, 1 << 31)
        program.params(buffer, 16, mask)
        device.submit(program.words)
        expected = (word if mask >> bit & 1 else 0 for bit, word in enumerate((11, 12, 13, 0xFFFFFFFF)))
        assert await contents(device, buffer, 0, 48) == b"\xff" * 16 + words(*expected) + b"\xff" * 16, mask
    await raises(
        UsageError, device, lambda: device.submit(array("I", [Op.SCALARS, 1, 1, 1, 0, 0, Op.PARAMS, buffer, 0, 16]))
    )
    device.close()


async def check_dispatch_by_length(open_device: OpenDevice) -> None:
    """x is length / unit, rounded up, and at most the bound; for length 0 nothing runs."""

    async def check(rig: Rig) -> None:
        cases: list[tuple[int, int, int, tuple[int, ...]]] = [
            (9, 4, 3, ()), (8, 4, 2, ()), (1, 64, 1, ()), (5, 1, 5, ()), (0, 4, 0, ()),
            (9, 4, 2, (2,)), (9, 4, 3, (3,)), (9, 4, 3, (4,)), (70_000, 1, 5, (5,)), (0, 4, 0, (2,)),
        ]  # fmt: skip
        for length, unit, x, most in cases:
            rig.device.write_buffer(rig.y, 0, bytes(SHOWN))
            program = Program()
            program.scalars(0, 1, length)
            rig.begin(program)
            program.dispatch_by_length(rig.pipeline, rig.group, unit, 2, 3, *most)
            program.end_pass()
            program.submit()
            rig.device.submit(program.words)
            shown = words(1000, 1, length, 0, x, 2, 3) if x else bytes(SHOWN)
            assert await contents(rig.device, rig.y, 0, SHOWN) == shown, (length, unit, most)
        for unit, most in ((0, 1), (1, 0)):
            broken = Program()
            broken.scalars(0, 1, 1)
            broken.begin_pass()
            broken.dispatch_by_length(rig.pipeline, rig.group, unit, 1, 1, most)
            broken.end_pass()
            broken.submit()
            await raises(UsageError, rig.device, lambda words=broken.words: rig.device.submit(words))

    await on_each_rig(open_device, check)


async def check_copy_past(open_device: OpenDevice) -> None:
    device = await open_device()
    source, target = (device.create_buffer(64, DATA, label) for label in ("source", "target"))
    device.write_buffer(source, 0, bytes(range(64)))
    for position, unit in ((0, 8), (3, 8), (8, 8), (5, 0), (1, 4)):
        device.write_buffer(target, 0, b"\xff" * 64)
        program = Program()
        program.scalars(position, 1, position + 1)
        program.copy_past(source, target, unit)
        program.submit()
        device.submit(program.words)
        copied = position * unit
        assert await contents(device, target, 0, 64) == bytes(range(copied)) + b"\xff" * (64 - copied)
    for position, unit in ((9, 8), (1, 6)):
        broken = array("I", [Op.SCALARS, position, 1, 1, 0, 0, Op.COPY_PAST, source, target, unit, Op.SUBMIT])
        await raises(UsageError, device, lambda broken=broken: device.submit(broken), late=True)
    device.close()


async def check_copy_out(open_device: OpenDevice) -> None:
    device = await open_device()
    source, staging = device.create_buffer(64, DATA, "source"), staging_of(device, 64)
    device.write_buffer(source, 0, bytes(range(64)))
    program = Program()
    program.scalars(0, 1, 1, 0, staging)
    program.copy_out(source, 8, 16)
    program.submit()
    device.submit(program.words)
    assert await device.read_buffer(staging, 0, 64) == bytes(range(8, 24)) + bytes(48)
    device.destroy(staging)
    await raises(UsageError, device, lambda: device.submit(program.words))
    nowhere = array("I", [Op.SCALARS, 0, 1, 1, 0, 0, Op.COPY_OUT, source, 8, 16, Op.SUBMIT])
    await raises(UsageError, device, lambda: device.submit(nowhere))
    device.close()


async def check_structure_of_a_step(open_device: OpenDevice) -> None:
    """SCALARS come first or not at all; the instructions that refer to them need them; passes as for the others."""
    device = await open_device()
    a, b = (device.create_buffer(64, DATA, label) for label in "ab")
    scalars = [Op.SCALARS, 1, 1, 2, 0, 0]
    for program in (
        [Op.CLEAR, a, 0, 4, *scalars, Op.SUBMIT],
        [*scalars, *scalars],
        scalars[:-1],
        [Op.PARAMS, a, 0, 7],
        [Op.COPY_PAST, a, b, 4, Op.SUBMIT],
        [Op.COPY_OUT, a, 0, 4, Op.SUBMIT],
        [Op.BEGIN_PASS, Op.IMMEDIATES, Op.END_PASS, Op.SUBMIT],
        [*scalars, Op.IMMEDIATES],
        [*scalars, Op.DISPATCH_BY_LENGTH, a, b, 1, 1, 1, 1],
        [*scalars, Op.BEGIN_PASS, Op.COPY_PAST, a, b, 4, Op.END_PASS, Op.SUBMIT],
        [*scalars, Op.BEGIN_PASS, Op.COPY_OUT, a, 0, 4, Op.END_PASS, Op.SUBMIT],
        [*scalars, Op.COPY_PAST, a, b, 4],
        [*scalars, Op.COPY_PAST, a, b],
    ):
        await raises(UsageError, device, lambda program=program: device.submit(array("I", program)))
        await raises(UsageError, device, lambda program=program: device.create_plan(array("I", program)))
    await device.wait()
    device.close()


# ---- plans ----------------------------------------------------------------------------------------------------------


def step_program(rig: Rig, old: int, new: int, scalars: tuple[int, int, int, int, int]) -> Program:
    """One of everything: old → new is what a growing KV cache does."""
    program = Program()
    program.scalars(*scalars)
    program.write(rig.x, 4, [5])
    program.copy_past(old, new, 4)
    rig.begin(program)
    program.dispatch_by_length(rig.pipeline, rig.group, 4, 1, 1)
    program.end_pass()
    program.copy(rig.y, 0, new, 32, 4)
    program.submit()
    program.clear(new, 36, 4)
    program.begin_pass()
    if rig.immediates:
        program.immediates()
    program.dispatch(rig.pipeline, rig.group, (1, 1, 1))
    program.end_pass()
    program.copy_out(rig.y, 0, SHOWN)
    program.submit()
    return program


async def check_replay_is_submit(open_device: OpenDevice) -> None:
    """Bit for bit, whatever the scalars; those that the plan was made with do not matter."""

    async def check(rig: Rig) -> None:
        device = rig.device
        old, new = (device.create_buffer(64, DATA, label) for label in ("old", "new"))
        stagings = [staging_of(device) for _ in range(2)]
        device.write_buffer(old, 0, bytes(range(64)))
        plan = device.create_plan(step_program(rig, old, new, (0, 0, 0, 0, 0)).words)
        seen = set()
        for i, (position, rows) in enumerate(((0, 5), (5, 1), (6, 1), (0, 1), (7, 2))):
            staging, draw = stagings[i % 2], i * 0x33333333
            outcomes = []
            for replayed in (False, True):
                for buffer in (new, rig.y):
                    device.write_buffer(buffer, 0, b"\xee" * 64)
                if replayed:
                    device.replay(plan, position, rows, position + rows, draw, staging)
                else:
                    scalars = (position, rows, position + rows, draw, staging)
                    device.submit(step_program(rig, old, new, scalars).words)
                read = await device.read_buffer(staging, 0, SHOWN)
                outcomes.append((read, await contents(device, new, 0, 64), await contents(device, rig.y, 0, 64)))
            assert outcomes[0] == outcomes[1], (position, rows)
            assert outcomes[0][0] == words(1000 + position, rows, position + rows, draw, 1, 1, 1)
            seen.add(outcomes[0])
        assert len(seen) == 5

    await on_each_rig(open_device, check)


async def check_a_dead_object_ends_its_plans(open_device: OpenDevice) -> None:
    for name in ("pipeline", "group", "x", "y", "old", "unbound", "staging"):

        async def check(rig: Rig, name: str = name) -> None:
            await _destroy_and_replay(rig, name)

        await on_each_rig(open_device, check)


async def _destroy_and_replay(rig: Rig, name: str) -> None:
    device = rig.device
    plans = device.table_sizes()["plans"]
    old, new, unbound = (device.create_buffer(64, DATA, label) for label in ("old", "new", "unbound"))
    staging, other = staging_of(device), staging_of(device)
    program = step_program(rig, old, new, (1, 1, 2, 0, staging))
    plan = device.create_plan(program.words)
    device.replay(plan, 1, 1, 2, 0, staging)
    await device.wait()
    made = {"old": old, "unbound": unbound, "staging": staging}
    victim = made.get(name) or getattr(rig, name)
    device.destroy(victim)
    if name in made and name != "old":
        device.replay(plan, 1, 1, 2, 0, other)
        assert await device.read_buffer(other, 0, 4) == words(1001)
    else:
        error = await raises(UsageError, device, lambda: device.replay(plan, 1, 1, 2, 0, other))
        assert str(victim) in str(error)
        await raises(UsageError, device, lambda: device.create_plan(program.words))
    if name == "staging":
        await raises(UsageError, device, lambda: device.replay(plan, 1, 1, 2, 0, staging))
    assert device.table_sizes()["plans"] == plans + 1
    device.destroy(plan)
    assert device.table_sizes()["plans"] == plans
    await raises(UsageError, device, lambda: device.replay(plan, 1, 1, 2, 0, other))
    await raises(UsageError, device, lambda: device.destroy(plan))
    await device.wait()


async def check_plans_are_independent(open_device: OpenDevice) -> None:
    """Two plans over the same objects, as a pair of ping-pong directions has them: forgetting one leaves the other."""

    async def check(rig: Rig) -> None:
        device = rig.device
        a, b = (device.create_buffer(64, DATA, label) for label in "ab")
        staging = staging_of(device)
        forth, back = (device.create_plan(step_program(rig, *pair, (0, 1, 1, 0, 0)).words) for pair in ((a, b), (b, a)))
        device.write_buffer(a, 0, words(1, 2, 3))
        device.replay(forth, 2, 1, 3, 0, staging)
        device.write_buffer(a, 0, bytes(12))
        device.replay(back, 1, 1, 2, 0, staging)
        assert await contents(device, a, 0, 12) == words(1, 0, 0)
        device.destroy(forth)
        device.replay(back, 2, 1, 3, 0, staging)
        assert await contents(device, a, 0, 12) == words(1, 2, 0)
        device.destroy(b)
        await raises(UsageError, device, lambda: device.replay(back, 2, 1, 3, 0, staging))
        device.destroy(back)

    await on_each_rig(open_device, check)


async def check_handles_of_two_devices_differ(open_device: OpenDevice) -> None:
    first, second = await open_device(), await open_device()
    handles = [device.create_buffer(16, DATA, "x") for _ in range(5) for device in (first, second)]
    handles += [await add_pipeline(device) for device in (first, second)]
    assert len(set(handles)) == len(handles)
    await raises(UsageError, second, lambda: second.write_buffer(handles[0], 0, bytes(4)))
    first.close()
    second.close()


# ---- reads ----------------------------------------------------------------------------------------------------------


async def check_reads_start_with_the_call(open_device: OpenDevice) -> None:
    """Several in flight, awaited in any order; each sees the work submitted before it, not what came after."""
    device = await open_device()
    source = device.create_buffer(16, DATA, "source")
    stagings = [staging_of(device, 16) for _ in range(3)]
    reads = []
    for value, staging in enumerate(stagings):
        program = Program()
        program.scalars(0, 1, 1, 0, staging)
        program.write(source, 0, [value, 0x80000001])
        program.copy_out(source, 0, 8)
        program.submit()
        device.submit(program.words)
        reads.append(device.read_buffer(staging, 0, 8 if value else 4))
    await device.wait()
    assert await reads[2] == words(2, 0x80000001)
    assert await reads[0] == words(0)
    assert await reads[1] == words(1, 0x80000001)
    device.close()


async def check_four_bytes(open_device: OpenDevice) -> None:
    device = await open_device()
    staging = staging_of(device, 4)
    for data in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\x01\x02\x03\x04", bytes(4)):
        device.write_buffer(staging, 0, data)
        assert await device.read_buffer(staging, 0, 4) == data
    device.close()


async def check_a_read_that_nobody_awaits(open_device: OpenDevice) -> None:
    """It may fail: the device is as good as before, and what else went wrong is not lost with it."""
    device = await open_device()
    one, two = staging_of(device, 16), staging_of(device, 16)
    device.write_buffer(two, 0, words(4))
    device.read_buffer(one, 0, 16)
    device.destroy(one)
    device.read_buffer(one, 0, 16)
    await device.wait()
    assert await device.read_buffer(two, 0, 4) == words(4)
    device.read_buffer(two, 0, 16)
    await device.wait()
    device.write_buffer(two, 0, words(5))
    assert await device.read_buffer(two, 0, 4) == words(5)

    def break_a_rule() -> None:
        device.create_buffer(16, DATA | BufferUsage.MAP_READ, "broken")
        device.read_buffer(two, 0, 16)

    await raises(UsageError, device, break_a_rule, late=True)
    await device.wait()
    device.close()


# ---- profiles -------------------------------------------------------------------------------------------------------


async def check_profile(open_device: OpenDevice) -> None:
    device = await open_device()
    timestamps = "timestamp-query" in device.info.features
    pipeline = await device.create_pipeline(SPIN_WGSL, Layout((BindingType.STORAGE,)), "spin")
    group = device.create_bind_group(pipeline, [Binding(device.create_buffer(4096, DATA, "y"))])
    program = Program()
    program.scalars(0, 1, 1)
    for _ in range(2):
        for x in (1024, 64):
            program.begin_pass()
            program.dispatch(pipeline, group, (x, 1, 1))
            program.end_pass()
        program.submit()
    plan = device.create_plan(program.words)

    async def measured(spans: bool, passes: bool) -> tuple[list[str], int]:
        device.set_profile(spans, passes)
        device.submit(program.words)
        device.replay(plan, 0, 1, 1, 0, 0)
        profile = await device.take_profile()
        times = [time for span in profile.spans for time in (span.start_ms, span.end_ms)]
        assert times == sorted(times)
        assert all(time <= profile.now_ms for time in times)
        assert all(time >= 0 for time in profile.passes_us)
        if profile.passes_us:
            assert min(profile.passes_us[::2]) > 0, "1,024 workgroups take time"
        return [span.name for span in profile.spans], len(profile.passes_us)

    assert await measured(False, False) == ([], 0)
    assert await measured(True, False) == (["encode", "submit"] * 4, 0)
    if timestamps:
        assert await measured(False, True) == ([], 8)
        assert await measured(True, True) == (["encode", "submit"] * 4, 8)
        # more passes than one set of queries holds
        device.set_profile(passes=True)
        many = array("I", [*([Op.BEGIN_PASS, Op.END_PASS] * 2500), Op.SUBMIT])
        device.submit(many)
        assert len((await device.take_profile()).passes_us) == 2500
    assert await measured(False, False) == ([], 0)
    device.close()


CHECKS: Mapping[str, Callable[[OpenDevice], Awaitable[None]]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}
