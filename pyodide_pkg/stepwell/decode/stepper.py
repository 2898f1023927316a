"""Issues the steps of one sequence: live, recorded as a plan, or replayed."""

import struct
from collections.abc import Iterator, Sequence

from stepwell.decode.flight import LOGITS_AT, Flight, Landed, Want
from stepwell.decode.kv_cache import KVCache
from stepwell.decode.timing import Meter
from stepwell.gpu.clock import now_ms
from stepwell.kernels.kv import LayerKV
from stepwell.kernels.sampling import SETTINGS_BYTES
from stepwell.launch.launcher import Launcher
from stepwell.launch.plan import Plan
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.scope import Acquires, Scope, Steady
from stepwell.models.llama import DecoderModel
from stepwell.step.recorder import Recorder, Step

# How often buffers must have come together before they get a plan.  While tensors outgrow their buffers one by one, as
# they do for some tokens around a size class, no set comes often: a plan would cost two steps and save hardly one.
SIGHTINGS = 2


class Stepper:
    """``depth`` steps may be in flight beside the one that is awaited; each has a staging buffer of its own."""

    def __init__(self, model: DecoderModel, launcher: Launcher, cache: KVCache, number: int, reach: int) -> None:
        """``number`` is the pool's of the session, ``reach`` the most positions it may have."""
        self._model, self._launcher, self._cache = model, launcher, cache
        self.steps = model.steps(launcher)
        self._pool = launcher.pool
        self._number, self._reach = number, reach
        self.meter = Meter(launcher, self._pool.ledger)
        # decode steps have their buffers for good where plans are to find them again
        self._steady = Steady(self._pool, launcher.kernels.workspace) if launcher.options.replay else None
        self._ids = self._pool.acquire(4 * launcher.tuning.prefill_rows, Role.ACTIVATION, "ids", host=True)
        self._settings: Buffer | None = None  # of sampling, once there was any
        self._ring: list[Buffer] = []
        self._turn = 0
        self._want = Want(on_gpu=True)
        self._nbytes = 0
        self._no_plans = ""  # why steps are no longer recorded
        self.wants_record = False  # a plan is due, as soon as nothing is in flight

    def configure(self, want: Want, depth: int, settings: bytes = b"") -> None:
        """What the next steps bring back; ``settings`` is what they sample by.  Nothing may be in flight."""
        self._want, self._nbytes = want, want.nbytes(self._model.config.vocab_size)
        if len(self._ring) != depth + 1 or self._ring[0].requested < self._nbytes:
            self._release_ring()
            for _ in range(depth + 1):
                self._ring.append(self._pool.acquire(self._nbytes, Role.STAGING, "readback"))
        if want.cuts is not None:
            if self._settings is None:
                self._settings = self._pool.acquire(SETTINGS_BYTES, Role.ACTIVATION, "sampling settings", host=True)
            self._launcher.write(self._settings, settings)
        self.wants_record = False

    def dry_runs(self, rows: int, reach: int, end: int) -> Iterator[Step]:
        """A step of that many rows as it would be recorded, for its kernels' names; no buffer is acquired.

        First one of a prompt up to ``reach``, or of the token behind it; then what else that may be while the sequence
        grows up to ``end``.
        """
        for kv in self._cache.previews(reach, end, _DryRun.buffer):
            dry = _DryRun(Recorder(0, rows, self._launcher.shapes))
            whole = self._reach if rows == 1 else reach
            yield self._record(dry.rec, dry, kv, whole, last=True, staging=dry.buffer)[0]

    async def issue(
        self, ids: Sequence[int] | None, rows: int, *, reach: int = 0, last: bool = True, live: bool = False,
        token: int | None = None, draw: int = 0,
    ) -> Flight:  # fmt: skip
        """Issue a step of ``rows`` tokens.  ``ids`` None: the id is on the GPU already.

        ``reach``: where the prompt ends that the step is part of.  ``live``: neither a plan nor for one.  ``token`` is
        the id of a decode step, given when nothing is in flight: then a plan may be recorded.  ``draw``: what the next
        id is sampled by.  Raises what the pool and the device raise; the step is abandoned then, and all in flight.
        """
        async with self._pool.step(self._number) as start:
            return await self._issue(ids, rows, reach, last, live, token, draw, start)

    async def _issue(
        self, ids: Sequence[int] | None, rows: int, reach: int, last: bool, live: bool, token: int | None, draw: int,
        start: float,
    ) -> Flight:  # fmt: skip
        step = None
        scope = self._scope(rows)
        try:
            position = self._cache.end
            kv = self._cache.extend(rows, reach)
            plan, refused = self._find_plan(rows, last, live, token is not None)
            staging = self._next_staging() if last else None
            if plan is not None and staging is not None:
                self._write_ids(ids)
                self._launcher.replay(plan, position, rows, staging, draw)
            elif refused == "recorded" and token is not None and staging is not None:
                flight = await self._record_plan(scope, kv, position, token, draw, staging, start)
                scope.end_step()
                return flight
            else:
                rec = Recorder(position, rows, self._launcher.shapes, draw)
                if ids is not None:
                    rec.write(self._ids, 0, ids)
                self._cache.carry(rec)
                reach = self._reach if rows == 1 else max(reach, position + rows)
                step, _ = self._record(rec, scope, kv, reach, last=last, staging=staging)
                await self._submit(step)
        except BaseException:
            scope.end_step()
            self.abandon()
            raise
        scope.end_step()
        read = self._launcher.read(staging, self._nbytes) if staging is not None else None
        return Flight(read, (start, now_ms()), refused, self.meter.take(), step)

    def abandon(self) -> None:
        """No step under way has happened; what they left in the workspaces, or failed to get for them, goes too."""
        self._cache.abandon()
        self._launcher.plans.forget(self._number)
        if self._steady is not None:
            self._steady.release()
        self._launcher.kernels.release_workspaces()

    def close(self) -> None:
        """Give every buffer back."""
        self._launcher.plans.forget(self._number)
        if self._steady is not None:
            self._steady.release()
        self._release_ring()
        if self._settings is not None:
            self._pool.release(self._settings)
        self._pool.release(self._ids)

    def _release_ring(self) -> None:
        while self._ring:
            self._pool.release(self._ring.pop())

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _find_plan(self, rows: int, last: bool, live: bool, alone: bool) -> tuple[Plan | None, str | None]:
        """The plan of the step under way; or None, and why not (``recorded``: it is to become one)."""
        if not self._launcher.options.replay:
            return None, "off"
        if rows != 1 or not last:
            return None, "prefill"
        if live:
            return None, "live"
        plans = self._launcher.plans
        if self._no_plans:
            plans.refused[self._no_plans] += 1
            return None, self._no_plans
        key = self._key()
        plan = plans.get(key)
        if plan is not None:
            if self._cache.end - 1 <= plan.last_position:
                return plan, None
            reason = "beyond its copies"
        elif not self._cache.stable and plans.sightings(key, self._number) < SIGHTINGS:
            reason = "buffers changed"
        elif alone:
            reason = "recorded"
        else:
            self.wants_record = True
            reason = "in flight"
        if reason != "recorded":
            plans.refused[reason] += 1
        return None, reason

    def _scope(self, rows: int) -> Scope:
        if rows == 1 and self._steady is not None:
            return self._steady
        return Scope(self._pool, self._launcher.kernels.workspace)

    def _key(self) -> tuple[object, ...]:
        return (self._number, self._want, self._cache.key)

    def _next_staging(self) -> Buffer:
        self._turn = (self._turn + 1) % len(self._ring)
        return self._ring[self._turn]

    def _write_ids(self, ids: Sequence[int] | None) -> None:
        if ids is not None:
            self._launcher.write(self._ids, struct.pack(f"<{len(ids)}I", *ids))

    async def _submit(self, step: Step) -> None:
        await self._launcher.prepare(step)
        self._launcher.submit(step)

    def _record(
        self, rec: Recorder, scope: Acquires, kv: Sequence[LayerKV], reach: int, *, last: bool,
        staging: Buffer | None,
    ) -> tuple[Step, Buffer | None]:  # fmt: skip
        """The step, and its logits."""
        want, steps = self._want, self.steps
        logits = steps.record(rec, scope, self._ids, kv, reach=reach, want_logits=last)
        if logits is None:
            return rec.finish(), None
        vocab_bytes = 4 * self._model.config.vocab_size
        if want.cuts is not None:
            assert self._settings is not None, "configure has written them"
            steps.sample(rec, scope, logits, self._settings, self._ids, want.ban, want.cuts)
        elif want.on_gpu:
            steps.choose(rec, scope, logits, self._ids, want.ban)
        if not want.on_gpu:
            rec.copy_out(logits, 0, vocab_bytes)
        elif want.digest:
            both = scope.acquire(LOGITS_AT + vocab_bytes, "token and logits")
            rec.copy(self._ids, 0, both, 0, 4)
            rec.copy(logits, 0, both, LOGITS_AT, vocab_bytes)
            rec.copy_out(both, 0, LOGITS_AT + vocab_bytes)
        else:
            rec.copy_out(self._ids, 0, 4)
        return rec.finish(staging), logits

    async def _record_plan(
        self,
        scope: Scope,
        kv: Sequence[LayerKV],
        position: int,
        token: int,
        draw: int,
        staging: Buffer,
        start: float,
    ) -> Flight:
        """Issue the step live and keep it as a plan, replay that once, and compare: ids and logits bit by bit."""
        launcher = self._launcher
        rec = Recorder(position, 1, launcher.shapes, draw)
        self._cache.carry(rec)
        step, logits = self._record(rec, scope, kv, self._reach, last=True, staging=staging)
        assert logits is not None
        await launcher.prepare(step)
        self._write_ids((token,))
        plan = launcher.record(step, self._key(), self._number, scope.held, self._reach)
        issued = now_ms()
        self.wants_record = False
        if plan is None:
            self._no_plans = "unsound"  # it would be again
        try:
            data = await launcher.read(staging, self._nbytes)
            if plan is not None and not await self._replays_alike(plan, position, token, draw, staging, logits, data):
                self._no_plans = "differs"
                launcher.plans.refused["differs"] += 1
                scope.end_step()
                data = await self._once_more(scope, kv, position, token, draw, staging)
        except BaseException:
            if plan is not None:
                launcher.plans.discard(plan)
            raise
        refused = self._no_plans or "recorded"
        if plan is not None and self._no_plans:
            launcher.plans.discard(plan)
        return Flight(Landed(data), (start, issued), refused, self.meter.take())

    async def _replays_alike(
        self, plan: Plan, position: int, token: int, draw: int, staging: Buffer, logits: Buffer, data: bytes
    ) -> bool:
        """Replay the step that was just done, and compare what comes back and the logits, bit by bit."""
        launcher, nbytes = self._launcher, 4 * self._model.config.vocab_size
        expected = await launcher.peek(logits, nbytes, in_step=True)
        self._write_ids((token,))
        launcher.replay(plan, position, 1, staging, draw)
        again = await launcher.read(staging, self._nbytes)
        return again == data and await launcher.peek(logits, nbytes, in_step=True) == expected

    async def _once_more(
        self, scope: Scope, kv: Sequence[LayerKV], position: int, token: int, draw: int, staging: Buffer
    ) -> bytes:
        """The step live, after a replay that went wrong: what that wrote is written over."""
        self._write_ids((token,))
        rec = Recorder(position, 1, self._launcher.shapes, draw)
        self._cache.carry(rec)
        step, _ = self._record(rec, scope, kv, self._reach, last=True, staging=staging)
        await self._submit(step)
        return await self._launcher.read(staging, self._nbytes)


class _DryRun:
    """Stands in for a step's scope when only what a recording launches is wanted: no buffer is acquired."""

    buffer = Buffer(0, 0, 0, Role.ACTIVATION)

    def __init__(self, rec: Recorder) -> None:
        self.rec = rec

    def acquire(self, nbytes: int, label: str) -> Buffer:
        return self.buffer

    def workspace(self, node: str, shape: tuple[int, ...], label: str, nbytes: int) -> Buffer:
        return self.buffer
