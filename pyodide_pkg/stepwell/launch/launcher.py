"""The launcher: a recorded step becomes one flat program and one call."""

from collections.abc import Callable

from stepwell.gpu.device import Device
from stepwell.gpu.program import Program
from stepwell.launch.bind_groups import DEFAULT_BIND_GROUPS, BindGroupCache
from stepwell.launch.counters import Counters
from stepwell.launch.kernel_cache import KernelCache
from stepwell.launch.recorder import Copy, Step
from stepwell.memory.buffer import Buffer
from stepwell.memory.pool import BufferPool


class Launcher:
    """Owns the compiled kernels and the bind groups of one device, and issues steps.

    All launches between two copies share one compute pass: WebGPU orders the dispatches of a pass by their usage
    scopes, so writes of one are seen by the next.
    """

    def __init__(self, device: Device, pool: BufferPool, bind_groups: int = DEFAULT_BIND_GROUPS) -> None:
        self.device = device
        self.pool = pool
        self.counters = Counters()
        self.kernels = KernelCache(device)
        self.bind_groups = BindGroupCache(device, self.counters, bind_groups)

    async def prepare(self, step: Step, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile the kernels that ``step`` needs and that are not there yet."""
        await self.kernels.ensure(step.variants, progress)

    def submit(self, step: Step) -> None:
        """Issue ``step``.  Afterwards nothing recorded is unsubmitted, so the pool may carry out what it put off."""
        self.device.submit(self.assemble(step).words)
        self.counters.submits += 1
        self.pool.flush()

    def touch_ahead(self) -> None:
        """Have the GPU clear the buffers that were made ahead while the host prepares the next step.

        Their first use, which is when the driver finds memory for them, then delays no step.
        """
        clears = self.pool.take_clears()
        if not clears:
            return
        program = Program()
        for buffer, nbytes in clears.items():
            program.clear(buffer, 0, nbytes)
        program.submit()
        self.device.submit(program.words)
        self.counters.submits += 1

    def assemble(self, step: Step) -> Program:
        if self.pool.debug:
            self.pool.check_live(step.buffers)
        counters, kernels, bind_groups = self.counters, self.kernels, self.bind_groups
        program = Program()
        for write in step.writes:
            program.write(*write)
            counters.uploads += 1
            counters.upload_bytes += 4 * len(write.words)
        for buffer, nbytes in self.pool.take_clears().items():
            program.clear(buffer, 0, nbytes)
        for command in step.commands:
            if isinstance(command, Copy):
                if program.in_pass:
                    program.end_pass()
                program.copy(*command)
                counters.copies += 1
                counters.copy_bytes += command.nbytes
                continue
            if not program.in_pass:
                program.begin_pass()
                counters.passes += 1
            pipeline = kernels[command.variant]
            program.dispatch(pipeline, bind_groups.get(pipeline, command.buffers), command.grid)
            counters.launches += 1
        if program.in_pass:
            program.end_pass()
        program.submit()
        return program

    async def read(self, staging: Buffer, nbytes: int) -> bytes:
        """The first ``nbytes`` of a staging buffer, once the work that fills it is done."""
        self.counters.readbacks += 1
        self.counters.readback_bytes += nbytes
        serial = self.pool.serial
        data = await self.device.read_buffer(staging.id, 0, nbytes)
        self.pool.note_complete(serial)
        return data

    async def wait(self) -> None:
        """Until all submitted work is done."""
        await self.pool.fence()

    def close(self) -> None:
        self.bind_groups.clear()
        self.kernels.clear()
