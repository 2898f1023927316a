"""A launcher on FakeDevice with kernels that mean something, to test the launch path without a model.

Every kernel folds all that it was given into each buffer that it may write: its own name, its grid, the step's scalars
that its WGSL reads, and the bytes of what it reads.  So a launch that is lost, done twice, out of order, or given the
wrong buffer or an old parameter changes the result.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.fake_objects import FakeBuffer, KernelFunction
from stepwell.gpu.program import Op, Scalar
from stepwell.kernels import fields_of, render
from stepwell.launch.bind_groups import BindGroupCache
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.launch.plan import Plans
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool
from stepwell.step.recorder import Launch, Recorder, Step, Variant

WORDS = 64  # of every buffer of a lab
QUEUE_OPS = frozenset(op.name.lower() for op in Op)


def pattern(mode: str, number: int = 0) -> Variant:
    """A launch of kv_pattern.wgsl; each number is another pipeline."""
    constants: dict[str, tuple[tuple[str, int], ...]] = {
        "seed": (("words", WORDS + number),),
        "mix": (("words", WORDS), ("x_words", WORDS), ("mul", 3 + number), ("add", 1)),
        "append": (("row_factor", 1 + number), ("words", 4)),
        "sum": (("row_factor", 1 + number), ("words", 4), ("stride", 3)),
    }
    return Variant("kv_pattern", (("mode", mode), *constants[mode], ("threads", 4), ("per", 4)))


SEED = pattern("seed")  # (y): reads the position
MIX = pattern("mix")  # (x, y): reads none of the step's scalars
APPEND = pattern("append")  # (tensor, slot), both written: the position
SUM = pattern("sum")  # (tensor, slot): the length
LAST = Variant("rms_norm", (("width", WORDS), ("eps", 1e-5), ("threads", 4), ("subgroups", False), ("last", True)))
# (x, weight, y): the rows
PICK = Variant("sample", (("stage", "pick"), ("size", 4), ("parts", 1), ("threads", 4), ("fallback", 0)))
# (work, distances, token), the second read: the draw
VARIANTS = (SEED, MIX, APPEND, SUM, LAST, PICK, *(pattern("seed", number) for number in range(1, 30)))
ONE = (1, 1, 1)


def meaning(variant: Variant) -> KernelFunction:
    """What a kernel does, as ``FakeDevice`` wants it."""
    fields = fields_of(render(variant.kernel, dict(variant.constants)))
    assert fields is not None
    mask = [int(bool(fields & bit)) for bit in Scalar]
    name = str(variant).encode()

    def run(views: Sequence[memoryview], grid: tuple[int, int, int]) -> None:
        block, *bound = views
        seen = [word * wanted for word, wanted in zip(block.cast("I"), mask, strict=True)]
        crc = zlib.crc32(repr((seen, grid)).encode(), zlib.crc32(name))
        for view in bound:
            if view.readonly:
                crc = zlib.crc32(view, crc)
        for view in bound:
            if not view.readonly:
                words = view.cast("I")
                words[1] = zlib.crc32(view, crc)
                words[0] += 1  # launches that wrote it

    return run


MEANINGS = {str(variant): meaning(variant) for variant in VARIANTS}


class Guarded(FakeDevice):
    """Nothing that a live plan refers to is ever destroyed here: it would be an error at the destroy."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.guarded: list[Plans] = []

    def destroy(self, handle: int) -> None:
        for plan in [plan for plans in self.guarded for plan in plans]:
            referred = {plan.handle, *plan.own_groups} | plan.buffers | plan.pipelines | plan.groups
            assert handle not in referred, f"{handle} is destroyed under the live plan {plan.key}"
        super().destroy(handle)


def device(**options: Any) -> Guarded:
    """One whose kernels mean something."""
    return Guarded(kernels=MEANINGS, log_limit=100_000, **options)


class Lab:
    """A device, a pool, a launcher, and what happened on the device."""

    def __init__(
        self,
        options: LaunchOptions | None = None,
        *,
        device_: FakeDevice | None = None,
        pool: BufferPool | None = None,
        bind_groups: BindGroupCache | None = None,
    ) -> None:
        self.device = device() if device_ is None else device_
        self.pool = BufferPool(self.device, "exact", debug=True) if pool is None else pool
        self.launcher = Launcher(self.device, self.pool, options or LaunchOptions(), bind_groups)
        if isinstance(self.device, Guarded):
            self.device.guarded.append(self.launcher.plans)
        self._read_to = 0

    async def compile(self, *variants: Variant) -> None:
        await self.launcher.kernels.ensure(variants or (SEED, MIX, APPEND, SUM, LAST, PICK))
        self.happened()

    def buffers(self, count: int) -> list[Buffer]:
        made = [self.pool.acquire(4 * WORDS, Role.ACTIVATION, f"b{i}", i, host=True) for i in range(count)]
        self.pool.flush()
        return made

    def staging(self) -> Buffer:
        return self.pool.acquire(4 * WORDS, Role.STAGING, "readback")

    def content(self, buffer: Buffer) -> bytes:
        return self.device.get(buffer.id, FakeBuffer, "test").get(0, buffer.size)

    def count(self, buffer: Buffer) -> int:
        """How many launches wrote it."""
        return int.from_bytes(self.content(buffer)[:4], "little")

    def happened(self, *names: str) -> list[str]:
        """Names of the device's log since the last look: the queue's operations, or the calls that are asked for."""
        new, self._read_to = self.device.log[self._read_to :], len(self.device.log)
        wanted = QUEUE_OPS | set(names)
        return [entry[0] for entry in new if entry[0] in wanted and entry[0] != "scalars"]

    def spent(self, before: Any = None) -> Any:
        """The launcher's counters, or what they grew by."""
        counters = self.launcher.counters
        return counters.copy() if before is None else counters.since(before)


def step_of(launches: Iterable[Launch], position: int = 0, rows: int = 1, staging: int = 0, draw: int = 0) -> Step:
    """A step of these commands."""
    return Step(position, rows, staging, tuple(launches), draw)


def seeds(targets: Sequence[Buffer], position: int = 0) -> Step:
    """One launch per buffer, all of one kernel."""
    rec = Recorder(position)
    for target in targets:
        rec.launch(SEED, (target,), ONE)
    return rec.finish()
