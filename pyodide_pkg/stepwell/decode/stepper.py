"""Issues the steps of one sequence: live, recorded as a plan, or replayed."""

import struct
from collections.abc import Iterator, Sequence

from stepwell.decode.flight import LOGITS_AT, Flight, Issued, Readback, Ready, StepRequest
from stepwell.decode.kv_cache import KVCache
from stepwell.decode.timing import Meter
from stepwell.gpu.clock import now_ms
from stepwell.kernels.kv import LayerKV
from stepwell.kernels.sampling import SETTINGS_BYTES
from stepwell.launch.launcher import Launcher
from stepwell.launch.plan import Plan
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.scope import Acquires, KeptScope, Scope
from stepwell.models.llama import DecoderModel
from stepwell.step.recorder import Recorder, Step

# How often buffers must have come together before they get a plan.  While tensors outgrow their buffers one by one, as
# they do for some tokens around a size class, no set comes often: a plan would cost two steps and save hardly one.
SIGHTINGS = 2


class Stepper:
    """``depth`` steps may be in flight beside the one that is awaited; each has a staging buffer of its own."""

    def __init__(self, model: DecoderModel, launcher: Launcher, cache: KVCache, session: int, context: int) -> None:
        """``session`` is the pool's number of the sequence, ``context`` the most positions that it may have."""
        self._model, self._launcher, self._cache = model, launcher, cache
        self.steps = model.steps(launcher)
        self._pool = launcher.pool
        self._session, self._context = session, context
        self.meter = Meter(launcher, self._pool.ledger)
        # decode steps have their buffers for good where plans are to find them again
        self._steady = KeptScope(self._pool, launcher.kernels.workspace) if launcher.options.replay else None
        self._ids = self._pool.acquire(4 * launcher.tuning.prefill_rows, Role.ACTIVATION, "ids", host=True)
        self._settings: Buffer | None = None  # of sampling, once there was any
        self._ring: list[Buffer] = []
        self._turn = 0
        self._readback = Readback(on_gpu=True)
        self._nbytes = 0
        self._no_plans: Issued | None = None  # why steps are no longer recorded
        self.wants_record = False  # a plan is due, as soon as nothing is in flight

    def configure(self, readback: Readback, depth: int, settings: bytes = b"") -> None:
        """Choose what the next steps read back, and the ``settings`` they sample by.  No step may be in flight."""
        self._readback, self._nbytes = readback, readback.nbytes(self._model.config.vocab_size)
        if len(self._ring) != depth + 1 or self._ring[0].requested < self._nbytes:
            self._release_ring()
            for _ in range(depth + 1):
                self._ring.append(self._pool.acquire(self._nbytes, Role.STAGING, "readback"))
        if readback.cuts is not None:
            if self._settings is None:
                self._settings = self._pool.acquire(SETTINGS_BYTES, Role.ACTIVATION, "sampling settings", host=True)
            self._launcher.write(self._settings, settings)
        self.wants_record = False

    def dry_runs(self, rows: int, prompt_end: int, end: int) -> Iterator[Step]:
        """Yield steps of ``rows`` tokens as they would be recorded, for the names of their kernels; nothing is leased.

        The first belongs to a prompt that ends at ``prompt_end``, or is that of the token after it; the others are
        those that differ while the sequence grows up to ``end``.
        """
        for kv in self._cache.previews(prompt_end, end, _DryRun.buffer):
            dry = _DryRun(Recorder(0, rows, self._launcher.shapes))
            whole = self._context if rows == 1 else prompt_end
            yield self._record(dry.rec, dry, kv, whole, last=True, staging=dry.buffer)[0]

    async def issue(self, ask: StepRequest) -> Flight:
        """Issue a step: replay it, record it as a plan, or record it live.

        Raises what the pool and the device raise; the step is abandoned then, and all in flight.
        """
        async with self._pool.step(self._session) as start:
            scope = self._scope(ask.rows)
            step = None
            try:
                position = self._cache.end
                kv = self._cache.extend(ask.rows, ask.prompt_end)
                plan, issued = self._find_plan(ask)
                staging = self._next_staging() if ask.last else None
                if issued is Issued.RECORDED:
                    assert staging is not None
                    flight = await self._record_plan(ask, scope, kv, position, staging, start)
                    scope.end_step()
                    return flight
                if plan is not None:
                    assert staging is not None
                    self._write_ids(ask.ids)
                    self._launcher.replay(plan, position, ask.rows, staging, ask.draw)
                else:
                    step = await self._issue_live(ask, scope, kv, position, staging)
            except BaseException:
                scope.end_step()
                self.abandon()
                raise
            scope.end_step()
            read = self._launcher.read(staging, self._nbytes) if staging is not None else None
            return Flight(read, (start, now_ms()), issued, self.meter.take(), step)

    def abandon(self) -> None:
        """Undo all steps under way, and give their workspaces back."""
        self._cache.abandon()
        self._launcher.plans.forget(self._session)
        if self._steady is not None:
            self._steady.release()
        self._launcher.kernels.release_workspaces()

    def close(self) -> None:
        """Give every buffer back."""
        self._launcher.plans.forget(self._session)
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

    def _find_plan(self, ask: StepRequest) -> tuple[Plan | None, Issued]:
        """The plan to replay, or None and the way to issue the step instead."""
        plans = self._launcher.plans
        if not self._launcher.options.replay:
            return None, Issued.OFF
        if ask.rows != 1 or not ask.last:
            return None, Issued.PREFILL
        if ask.live:
            return None, Issued.LIVE
        plan, issued = None, self._no_plans
        if issued is None:
            plan, issued = self._plan_of(ask)
        if issued not in (Issued.REPLAYED, Issued.RECORDED):
            plans.refused[issued.value] += 1
        return plan, issued

    def _plan_of(self, ask: StepRequest) -> tuple[Plan | None, Issued]:
        """The plan of the step's buffers; None if there is none yet, or it ends before the step's position."""
        plans, key = self._launcher.plans, self._key()
        plan = plans.get(key)
        if plan is not None:
            if self._cache.end - 1 <= plan.last_position:
                return plan, Issued.REPLAYED
            return None, Issued.BEYOND_COPIES
        if not self._cache.stable and plans.sightings(key, self._session) < SIGHTINGS:
            return None, Issued.BUFFERS_CHANGED
        if ask.token is not None:
            return None, Issued.RECORDED
        self.wants_record = True
        return None, Issued.IN_FLIGHT

    def _scope(self, rows: int) -> Scope:
        if rows == 1 and self._steady is not None:
            return self._steady
        return Scope(self._pool, self._launcher.kernels.workspace)

    def _key(self) -> tuple[object, ...]:
        return (self._session, self._readback, self._cache.key)

    def _next_staging(self) -> Buffer:
        self._turn = (self._turn + 1) % len(self._ring)
        return self._ring[self._turn]

    def _write_ids(self, ids: Sequence[int] | None) -> None:
        if ids is not None:
            self._launcher.write(self._ids, struct.pack(f"<{len(ids)}I", *ids))

    async def _issue_live(
        self, ask: StepRequest, scope: Acquires, kv: Sequence[LayerKV], position: int, staging: Buffer | None
    ) -> Step:
        """Record the step, compile what it needs, and submit it."""
        rec = Recorder(position, ask.rows, self._launcher.shapes, ask.draw)
        if ask.ids is not None:
            rec.write(self._ids, 0, ask.ids)
        self._cache.record_copies(rec)
        end = self._context if ask.rows == 1 else max(ask.prompt_end, position + ask.rows)
        step, _ = self._record(rec, scope, kv, end, last=ask.last, staging=staging)
        await self._launcher.prepare(step)
        self._launcher.submit(step)
        return step

    def _record(
        self, rec: Recorder, scope: Acquires, kv: Sequence[LayerKV], end: int, *, last: bool, staging: Buffer | None
    ) -> tuple[Step, Buffer | None]:
        """Record the rest of the step; returns it, and its logits."""
        readback, steps = self._readback, self.steps
        logits = steps.record(rec, scope, self._ids, kv, end=end, want_logits=last)
        if logits is None:
            return rec.finish(), None
        vocab_bytes = 4 * self._model.config.vocab_size
        if readback.cuts is not None:
            assert self._settings is not None, "configure has written them"
            steps.sample(rec, scope, logits, self._settings, self._ids, readback.ban, readback.cuts)
        elif readback.on_gpu:
            steps.choose(rec, scope, logits, self._ids, readback.ban)
        if not readback.on_gpu:
            rec.copy_out(logits, 0, vocab_bytes)
        elif readback.digest:
            both = scope.acquire(LOGITS_AT + vocab_bytes, "token and logits")
            rec.copy(self._ids, 0, both, 0, 4)
            rec.copy(logits, 0, both, LOGITS_AT, vocab_bytes)
            rec.copy_out(both, 0, LOGITS_AT + vocab_bytes)
        else:
            rec.copy_out(self._ids, 0, 4)
        return rec.finish(staging), logits

    async def _record_plan(
        self, ask: StepRequest, scope: Scope, kv: Sequence[LayerKV], position: int, staging: Buffer, start: float
    ) -> Flight:
        """Issue the step live and keep it as a plan, replay that once, and compare: ids and logits bit by bit."""
        launcher, token = self._launcher, ask.token
        assert token is not None
        rec = Recorder(position, 1, launcher.shapes, ask.draw)
        self._cache.record_copies(rec)
        step, logits = self._record(rec, scope, kv, self._context, last=True, staging=staging)
        assert logits is not None
        await launcher.prepare(step)
        self._write_ids((token,))
        plan = launcher.record(step, self._key(), self._session, scope.held, self._context)
        span = (start, now_ms())
        self.wants_record = False
        if plan is None:
            self._no_plans = Issued.UNSOUND  # it would be again
        try:
            data = await launcher.read(staging, self._nbytes)
            if plan is not None and not await self._is_replayed_alike(
                plan, position, token, ask.draw, staging, logits, data
            ):
                self._no_plans = Issued.DIFFERS
                launcher.plans.refused[Issued.DIFFERS.value] += 1
                scope.end_step()
                self._write_ids((token,))  # what the replay wrote is written over
                await self._issue_live(ask._replace(ids=None), scope, kv, position, staging)
                data = await launcher.read(staging, self._nbytes)
        except BaseException:
            if plan is not None:
                launcher.plans.discard(plan)
            raise
        if plan is not None and self._no_plans:
            launcher.plans.discard(plan)
        return Flight(Ready(data), span, self._no_plans or Issued.RECORDED, self.meter.take())

    async def _is_replayed_alike(
        self, plan: Plan, position: int, token: int, draw: int, staging: Buffer, logits: Buffer, data: bytes
    ) -> bool:
        """Replay the step that was just done, and compare the bytes read back and the logits, bit by bit."""
        launcher, nbytes = self._launcher, 4 * self._model.config.vocab_size
        expected = await launcher.peek(logits, nbytes, in_step=True)
        self._write_ids((token,))
        launcher.replay(plan, position, 1, staging, draw)
        again = await launcher.read(staging, self._nbytes)
        return again == data and await launcher.peek(logits, nbytes, in_step=True) == expected


class _DryRun:
    """Stands in for a step's scope when only the launches of a recording are wanted: no buffer is acquired."""

    buffer = Buffer(0, 0, 0, Role.ACTIVATION)

    def __init__(self, rec: Recorder) -> None:
        self.rec = rec

    def acquire(self, nbytes: int, label: str) -> Buffer:
        return self.buffer

    def workspace(self, node: str, shape: tuple[int, ...], label: str, nbytes: int) -> Buffer:
        return self.buffer
