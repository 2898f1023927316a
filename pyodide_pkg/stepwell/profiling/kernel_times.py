"""GPU time per kernel: decode steps with a compute pass per launch, each timed by the GPU's clock.

The measured steps come after the run and are not part of it: the step after the last token, repeated without being
committed, through a launcher of its own.  So the run's figures are those of a run without this.
"""

from contextlib import aclosing
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from stepwell.decode.generation import Generation
from stepwell.decode.session import DecodeSession
from stepwell.errors import BadRequest, UsageError
from stepwell.gpu.clock import now_ms
from stepwell.gpu.device import Device, DeviceProfile
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.memory.buffer import Buffer, Role
from stepwell.profiling.attribution import Attributed, attribute
from stepwell.profiling.plain_read import record_empty, time_plain_read
from stepwell.profiling.table import Clock, tabulate
from stepwell.step.recorder import Launch, Recorder, Step

WARM_UP = 2
"""Steps that are not counted: the first ones make bind groups, and the GPU's clock may rise."""
STEPS = 24
"""Steps that are counted, at most."""
LEAST_STEPS = 3
"""Steps that are counted, at least."""
ENOUGH_MS = 2500
"""Milliseconds after which no further step begins: CPU adapters take a second for a few."""
EMPTY_PASSES = 16
"""Passes after each step that do nothing: what a pass costs."""


def timing_options(options: LaunchOptions) -> LaunchOptions:
    """The options of the launcher that steps are measured with: ``options``, but a pass per launch, one submission."""
    return replace(options, shared_pass=False, replay=False, submit_every=0, submit_every_ms=0.0)


def check(device: Device, positions: int, context: int) -> None:
    """Check, before a run that may be long, that its kernels can be timed after it.

    Raises MissingCapability without timestamp-query, and BadRequest when ``positions`` of prompt and answer leave no
    room in ``context`` for the step that is measured.
    """
    device.set_profile(passes=True)
    device.set_profile()
    if positions > context:
        raise BadRequest(
            f"kernel_times measures a step after the last token: prompt and answer have {positions:,} positions, the "
            f"context {context:,}. Ask for fewer tokens or a larger context."
        )


@dataclass(slots=True)
class _Measured:
    """The measured steps: microseconds of each launch, step by step, and of the empty passes after them."""

    position: int = 0
    launches: list[Attributed] = field(default_factory=list)
    steps: list[tuple[float, ...]] = field(default_factory=list)
    empty_passes: list[float] = field(default_factory=list)

    def add(self, profile: DeviceProfile) -> None:
        count = len(self.launches)
        if len(profile.passes_us) != count + EMPTY_PASSES:
            raise UsageError(
                f"the device timed {len(profile.passes_us)} passes of {count} launches and {EMPTY_PASSES} empty ones: "
                "the launcher must give each launch a pass of its own (timing_options)."
            )
        self.steps.append(profile.passes_us[:count])
        self.empty_passes += profile.passes_us[count:]


async def time_kernels(
    session: DecodeSession, token: int, generation: Generation, launcher: Launcher
) -> dict[str, Any] | None:
    """The ``kernels`` of a record: the table for the step of ``token``, the last one of the session's ``generation``.

    ``launcher`` has ``timing_options``.  Returns None when the session was cancelled before a step was measured.
    """
    device = launcher.device
    device.set_profile(passes=True)
    try:
        measured = await _time_steps(session, token, generation, launcher)
        if not measured.steps:
            return None
        pass_us = median(measured.empty_passes)
        plain = await time_plain_read(launcher, pass_us)
    finally:
        device.set_profile()
        launcher.release_run()
        launcher.kernels.release_workspaces()
    clock = Clock.of([*measured.empty_passes, *(us for step in measured.steps for us in step)])
    return {
        "steps": len(measured.steps),
        "position": measured.position,
        "launches_per_token": len(measured.launches),
        "clock_us": clock.tick_us,
        "coarse_clock": clock.is_coarse,
        **tabulate(measured.launches, measured.steps, pass_us, plain),
    }


async def _time_steps(session: DecodeSession, token: int, generation: Generation, launcher: Launcher) -> _Measured:
    """Measure steps until there are STEPS of them, ENOUGH_MS have passed, or the session is cancelled."""
    device, pool = launcher.device, launcher.pool
    measured, done, start = _Measured(), 0, 0.0
    target = pool.acquire(4, Role.WEIGHTS, "empty passes")
    try:
        empty = _empty_passes(target)
        await launcher.prepare(empty)
        await device.take_profile()
        async with aclosing(session.rehearse(token, generation, launcher)) as steps:
            async for step in steps:
                await launcher.issue(empty)
                profile = await device.take_profile()
                if done == WARM_UP:
                    start = now_ms()
                    measured.position = step.position
                    measured.launches = _attributed(step, launcher, session)
                if done >= WARM_UP:
                    measured.add(profile)
                done += 1
                count = len(measured.steps)
                if count == STEPS or (count >= LEAST_STEPS and now_ms() - start > ENOUGH_MS) or session.cancelled:
                    return measured
    finally:
        pool.release(target)
        pool.flush()
    return measured


def _empty_passes(target: Buffer) -> Step:
    rec = Recorder()
    record_empty(rec, target, EMPTY_PASSES)
    return rec.finish()


def _attributed(step: Step, launcher: Launcher, session: DecodeSession) -> list[Attributed]:
    """The launches of ``step``, which is under way, in the order of their passes."""
    leases = {lease.id: lease for lease in launcher.pool.inventory.leases()}
    return [
        attribute(command, leases, rows=step.rows, length=step.length, position_bytes=session.position_bytes)
        for command in step.commands
        if isinstance(command, Launch)
    ]
