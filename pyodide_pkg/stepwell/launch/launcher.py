"""The launcher: it turns a recorded step into flat programs, and a step that comes again into a plan."""

from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Generator, Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar

from stepwell.errors import BadRequest, DeviceLost, StepwellError, UsageError
from stepwell.gpu.device import Device
from stepwell.gpu.program import STEP_BYTES, Program
from stepwell.kernels.products import choices_in_use
from stepwell.kernels.tuning import ProductKey, Tiling
from stepwell.launch.assembly import Assembly
from stepwell.launch.bind_groups import BindGroupCache
from stepwell.launch.context import LaunchContext
from stepwell.launch.counters import Counters
from stepwell.launch.kernel_cache import KernelCache
from stepwell.launch.options import LaunchOptions, Params
from stepwell.launch.parameters import CallSites, Parameters, Shadow, UniformPool
from stepwell.launch.plan import DEFAULT_PLANS, Plan, Plans
from stepwell.launch.selection import tuning_for
from stepwell.launch.verify import verify
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool
from stepwell.memory.recovery import fence
from stepwell.step.recorder import Recorder, Step
from stepwell.step.shapes import Shapes

T = TypeVar("T")


class Launcher:
    """Owns the compiled kernels, bind groups, parameter slots and plans of one device, and issues steps.

    Several launchers can work on one device and pool, and share a bind-group cache.  All launches between two copies
    can share one compute pass: WebGPU orders the dispatches of a pass by their usage scopes, so what one writes the
    next one sees.
    """

    def __init__(
        self,
        device: Device,
        pool: BufferPool,
        options: LaunchOptions | None = None,
        bind_groups: BindGroupCache | None = None,
        tilings: Mapping[ProductKey, Tiling] | None = None,
    ) -> None:
        """Raises BadRequest for immediates or subgroups on a device that has none."""
        self.device = device
        self.pool = pool
        self.options = options = options or LaunchOptions()
        self.params = _resolved(options.params, device)
        self.tuning = tuning_for(device.info, options, tilings)  # which kernels the steps that it is for are to launch
        self.shapes = Shapes(options.width_ladder)
        self.counters = Counters()
        self.parameters = _parameters(self.params, pool)
        self.shadow = Shadow()
        self.kernels = KernelCache(
            device,
            pool,
            immediates=self.params is Params.IMMEDIATES,
            variants_per_node=options.variants_bound,
        )
        # an empty cache is false
        self.bind_groups = BindGroupCache(options.bind_groups) if bind_groups is None else bind_groups
        self.context = LaunchContext(
            device, pool, options, self.kernels, self.bind_groups, self.parameters, self.shadow
        )
        self.plans = Plans(pool, max(DEFAULT_PLANS, (options.readback_depth or 0) + 4))
        self.kernels.on_evict.append(self.plans.drop_variant)
        if self.parameters is not None:
            self.kernels.on_evict.append(self.parameters.forget)
        self.bind_groups.on_evict.append(self.plans.drop_group)
        self._generation = pool.inventory.generation
        self._shared: dict[Callable[[], Any], Any] = {}

    def shared(self, make: Callable[[], T]) -> T:
        """The one object of ``make`` that all users of this launcher share; it is made at the first call."""
        if make not in self._shared:
            self._shared[make] = make()
        found: T = self._shared[make]
        return found

    async def prepare(self, step: Step, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile the kernels that ``step`` needs and that are not there yet."""
        await self.kernels.ensure(step.uses, progress)

    async def issue(self, step: Step) -> None:
        """Compile what ``step`` lacks and submit it, in a step of the pool: for commands that are no decode step.

        Its buffers must stay leased until then; a decode step acquires, records and submits in one ``pool.step``.
        """
        await self.prepare(step)
        async with self.pool.step():
            self.submit(step)

    def submit(self, step: Step) -> None:
        """Submit ``step``.  Afterwards nothing recorded is unsubmitted, so the pool may carry out what it put off.

        UsageError while a step of another task is under way on the pool: it might use what that one has yet to submit.
        """
        assembly = Assembly(self.context, step, whole=False)
        try:
            self._submit(assembly, step)
        finally:
            self._destroy_groups(assembly)

    def record(self, step: Step, key: Hashable, owner: int, pinned: Sequence[Buffer], end: int) -> Plan | None:
        """Submit ``step`` and keep it as a plan for positions below ``end``; ``pinned`` stays leased as long.

        None, with the reason counted, when the trace breaks a rule that a plan must keep: the step was submitted all
        the same.  UsageError when it could not be submitted.
        """
        assembly = Assembly(self.context, step, whole=True)
        try:
            program = self._submit(assembly, step)
        except BaseException:
            self._destroy_groups(assembly)
            raise
        try:
            last_position = verify(step, self.context, end)
            self._check_groups(assembly)
            handle = self.device.create_plan(program.words)
        except UsageError as error:
            self.plans.refused[f"unsound: {error}"] += 1
            self._destroy_groups(assembly)
            return None
        counts = replace(assembly.counters, replayed=1, bind_groups_created=0, bind_groups_evicted=0)
        counts.bind_groups_reused = counts.launches
        once = assembly.written_once
        counts.uploads -= len(once)
        counts.uploads_skipped += len(once)
        counts.upload_bytes -= STEP_BYTES * len(once)
        plan = Plan(
            handle, key, owner, self.device, frozenset(step.buffers - {step.staging} | assembly.slot_buffers),
            frozenset(assembly.pipelines), frozenset(assembly.groups), tuple(pinned), assembly.own_groups,
            frozenset(assembly.written.keys() - once), counts, last_position,
        )  # fmt: skip
        for buffer in pinned:
            self.pool.pin(buffer)
        self.plans.add(plan)
        return plan

    def replay(self, plan: Plan, position: int, rows: int, staging: Buffer, draw: int = 0) -> None:
        """Submit the step of ``plan``, with other scalars."""
        if self.pool.busy:
            self._check_turn()
        if self.pool.debug:
            self.pool.inventory.check_live(plan.buffers)
        self.touch_ahead()
        self.shadow.doubt(plan.slots)
        self.device.replay(plan.handle, position, rows, position + rows, draw, staging.id)
        self.counters.add(plan.counts)
        self.plans.replayed += 1
        self.pool.flush()

    def touch_ahead(self) -> None:
        """Have the GPU clear now what is to be zero before the next step.

        A program of its own: a step that throws cannot lose it, and a plan does not repeat it.  For buffers made ahead,
        called early, it also is their first use, when the driver finds memory for them: that then delays no step.
        """
        clears = self.pool.inventory.take_clears()
        if not clears:
            return
        program = Program()
        for buffer, nbytes in clears.items():
            program.clear(buffer, 0, nbytes)
        program.submit()
        self.device.submit(program.words)
        self.counters.submits += 1
        self.counters.encoders += 1

    def read(self, staging: Buffer, nbytes: int) -> Awaitable[bytes]:
        """The first ``nbytes`` of a staging buffer, once the work submitted until now is done.

        The read starts with the call and can be awaited later.
        """
        self.counters.readbacks += 1
        self.counters.readback_bytes += nbytes
        return _Reading(self, self.device.read_buffer(staging.id, 0, nbytes))

    async def peek(self, buffer: Buffer, nbytes: int, in_step: bool = False) -> bytes:
        """The first ``nbytes`` of a buffer that is not mappable: a look from outside, in a step of the pool of its own.

        ``in_step``: in the caller's, after what it has submitted.
        """
        staging = self.pool.acquire(nbytes, Role.STAGING, "peek")
        try:
            async with nullcontext() if in_step else self.pool.step():
                rec = Recorder()
                rec.copy_out(buffer, 0, nbytes)
                self.submit(rec.finish(staging))
                reading = self.read(staging, nbytes)
            return await reading
        finally:
            self.pool.release(staging)

    def write(self, buffer: Buffer, data: bytes) -> None:
        """Write tensor data from the host, in the queue's order.  Nothing recorded may be unsubmitted."""
        self.device.write_buffer(buffer.id, 0, data)
        self.counters.uploads += 1
        self.counters.upload_bytes += len(data)

    async def wait(self) -> None:
        """Wait until all submitted work is done."""
        self.counters.syncs += 1
        await fence(self.pool)

    def report(self) -> dict[str, Any]:
        """What the caches of the launch path did since the launcher was made, as plain data."""
        counters, plans = self.counters, self.plans
        bound = counters.bind_groups_created + counters.bind_groups_reused
        return {
            "options": self.options.as_dict(),
            "params": self.params.value,
            "identity_rate": counters.bind_groups_reused / bound if bound else None,
            "plans": {
                "recorded": plans.recorded,
                "replayed": plans.replayed,
                "invalidated": plans.invalidated,
                "refused": dict(plans.refused),
            },
            "bind_groups": {"size": len(self.bind_groups), "evicted": counters.bind_groups_evicted},
            "variants": self.kernels.report(),
            "tuned": choices_in_use(self.kernels.variants, self.tuning.tilings),
            "workspace_bytes": self.kernels.workspace_bytes,
        }

    def release_run(self) -> None:
        """Forget what was made for the buffers of a run that is over: the next run has others.

        A step of another task may be using it: while one is under way this does nothing.
        """
        if self.pool.busy:
            return
        self.plans.clear()
        self.bind_groups.clear(self.context)

    def close(self) -> None:
        """Give everything back.  A bind-group cache that is shared loses the groups of this launcher only."""
        self.plans.close()
        self.bind_groups.clear(self.context)
        self.bind_groups.on_evict.remove(self.plans.drop_group)
        if self.parameters is not None:
            self.parameters.clear()
        self.shadow.clear()
        self.kernels.clear()

    def _submit(self, assembly: Assembly, step: Step) -> Program:
        """Submit the programs of a step; returns the last one."""
        self._check_turn()
        if self.pool.debug:
            self.pool.inventory.check_live(step.buffers)
        if self._generation != self.pool.inventory.generation:
            self._generation = self.pool.inventory.generation
            self.shadow.clear()
        self.touch_ahead()
        program = Program()
        try:
            for program in assembly.programs():
                self.device.submit(program.words)
        except BaseException:
            self.shadow.doubt(assembly.written)
            raise
        finally:
            self.counters.add(assembly.counters)
            self.bind_groups.sweep()
        self.shadow.issued(assembly.written)
        if self.options.bind_group_cache:
            self.bind_groups.expect(assembly.counters.launches)
        self.pool.flush()
        return program

    def _check_turn(self) -> None:
        if self.pool.busy:
            raise UsageError("a step of another task is under way: submit yours within `async with pool.step()`.")

    def _check_groups(self, assembly: Assembly) -> None:
        """Raise UsageError if the cache cannot hold the step's bind groups: then some are gone already."""
        needed, bound = len(assembly.groups), self.bind_groups.bound
        if self.options.bind_group_cache and needed > bound:
            raise UsageError(f"the step has {needed:,} bind groups, the cache holds {bound:,}. Set bind_groups higher.")

    def _destroy_groups(self, assembly: Assembly) -> None:
        """The bind groups of the step that no cache holds."""
        try:
            for group in assembly.own_groups:
                self.device.destroy(group)
        except DeviceLost:
            return  # they died with it


class _Reading:
    """A read that was started.  Nothing happens if it is never awaited; it can be awaited again.

    A task that is cancelled waits for its end all the same: the buffer is out of the queue's reach until then.
    """

    def __init__(self, launcher: Launcher, reading: Awaitable[bytes]) -> None:
        self._launcher, self._reading = launcher, reading
        self._serial = launcher.pool.inventory.serial

    def __await__(self) -> Generator[Any, None, bytes]:
        self._launcher.counters.syncs += 1
        try:
            data = yield from self._reading.__await__()
        except CancelledError:
            with suppress(StepwellError):
                yield from self._reading.__await__()
            raise
        self._launcher.pool.inventory.note_complete(self._serial)
        return data


def _parameters(params: Params, pool: BufferPool) -> Parameters | None:
    if params is Params.UNIFORM_POOL:
        return UniformPool(pool)
    return CallSites(pool) if params is Params.CALL_SITE else None


def _resolved(params: Params, device: Device) -> Params:
    has_immediates = device.info.immediate_bytes >= STEP_BYTES
    if params is Params.IMMEDIATES and not has_immediates:
        raise BadRequest(
            f"params is immediates, but this browser has none ({device.info.immediate_bytes} B of {STEP_BYTES} B): use "
            "call_site or auto, or Chrome 149 or newer."
        )
    if params is Params.AUTO:
        return Params.IMMEDIATES if has_immediates else Params.CALL_SITE
    return params
