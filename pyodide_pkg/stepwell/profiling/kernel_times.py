"""GPU time per kernel: decode steps with a compute pass per launch, each timed by the GPU's clock.

The steps that are measured come after the run and are not part of it: the step after the last token, repeated without
being committed, through a launcher of its own.  So the run's figures are those of a run without this.
"""

from contextlib import aclosing
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from stepwell.decode.generation import Generation
from stepwell.decode.session import DecodeSession
from stepwell.errors import BadRequest, UsageError
from stepwell.gpu.clock import now_ms
from stepwell.gpu.device import Device, Profile
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.memory.buffer import Buffer, Role
from stepwell.profiling.attribution import Attributed, attribute
from stepwell.profiling.plain_read import record_nothing, time_plain_read
from stepwell.profiling.table import Clock, tabulate
from stepwell.step.recorder import Launch, Recorder, Step

WARM_UP = 2  # steps that are not counted: the first ones make bind groups, and the GPU's clock may rise
STEPS = 24  # that are counted at most
LEAST_STEPS = 3
ENOUGH_MS = 2500  # after so long no further step begins: CPU adapters take a second for a few
NOTHINGS = 16  # empty passes behind each step


def timing_options(options: LaunchOptions) -> LaunchOptions:
    """Those of the launcher that steps are measured with: ``options``, but for a pass per launch, in one submission."""
    return replace(options, shared_pass=False, replay=False, submit_every=0, submit_every_ms=0.0)


def check(device: Device, positions: int, context: int) -> None:
    """Before the run, which may be long: MissingCapability without timestamp-query; BadRequest when a run of so many
    positions, prompt and answer, leaves no room for the step that is measured.
    """
    device.set_profile(passes=True)
    device.set_profile()
    if positions > context:
        raise BadRequest(
            f"kernel_times measures a step behind the last token: prompt and answer have {positions:,} positions, the "
            f"context {context:,}. Ask for fewer tokens or a larger context."
        )


@dataclass(slots=True)
class _Measured:
    """What the steps gave: microseconds of each launch, step by step, and of the empty passes behind them."""

    position: int = 0
    launches: list[Attributed] = field(default_factory=list)
    steps: list[tuple[float, ...]] = field(default_factory=list)
    nothings: list[float] = field(default_factory=list)

    def add(self, profile: Profile) -> None:
        count = len(self.launches)
        if len(profile.passes_us) != count + NOTHINGS:
            raise UsageError(
                f"the device timed {len(profile.passes_us)} passes of {count} launches and {NOTHINGS} empty ones: the "
                "launcher must give each launch a pass of its own (timing_options)."
            )
        self.steps.append(profile.passes_us[:count])
        self.nothings += profile.passes_us[count:]


async def time_kernels(
    session: DecodeSession, token: int, generation: Generation, launcher: Launcher
) -> dict[str, Any] | None:
    """``kernels`` of a record: the table for the step of ``token``, the last one of the session's generation.

    The launcher has ``timing_options``.  None when the session was cancelled before a step was measured.
    """
    device = launcher.device
    device.set_profile(passes=True)
    try:
        measured = await _time_steps(session, token, generation, launcher)
        if not measured.steps:
            return None
        pass_us = median(measured.nothings)
        plain = await time_plain_read(launcher, pass_us)
    finally:
        device.set_profile()
        launcher.release_run()
        launcher.kernels.release_workspaces()
    clock = Clock.of([*measured.nothings, *(us for step in measured.steps for us in step)])
    return {
        "steps": len(measured.steps),
        "position": measured.position,
        "launches_per_token": len(measured.launches),
        "clock_us": clock.tick_us,
        "coarse_clock": clock.is_coarse,
        **tabulate(measured.launches, measured.steps, pass_us, plain),
    }


async def _time_steps(session: DecodeSession, token: int, generation: Generation, launcher: Launcher) -> _Measured:
    """Until there are enough of them, or that took long enough, or the session is cancelled."""
    device, pool = launcher.device, launcher.pool
    measured, done, start = _Measured(), 0, 0.0
    target = pool.acquire(4, Role.WEIGHTS, "empty passes")
    try:
        nothing = _nothing(target)
        await launcher.prepare(nothing)
        await device.take_profile()
        async with aclosing(session.rehearse(token, generation, launcher)) as steps:
            async for step in steps:
                await launcher.issue(nothing)
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


def _nothing(target: Buffer) -> Step:
    rec = Recorder()
    record_nothing(rec, target, NOTHINGS)
    return rec.finish()


def _attributed(step: Step, launcher: Launcher, session: DecodeSession) -> list[Attributed]:
    """The launches of a step that is under way, in the order of their passes."""
    leases = {lease.id: lease for lease in launcher.pool.leases()}
    return [
        attribute(command, leases, rows=step.rows, length=step.length, position_bytes=session.position_bytes)
        for command in step.commands
        if isinstance(command, Launch)
    ]
