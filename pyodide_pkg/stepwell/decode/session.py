"""A decode session: one sequence over a loaded model, token by token."""

import struct
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from stepwell.decode.kv_cache import KV_MODES
from stepwell.decode.sampling import Sampler, Sampling, top_logits
from stepwell.decode.timing import Meter, StepCounters, StepTiming, now_ms
from stepwell.errors import BadRequest, ContextFull, PoolError
from stepwell.launch.launcher import Launcher
from stepwell.launch.recorder import Recorder, Step
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.scope import Scope
from stepwell.models.llama import Llama

PREFILL_ROWS = 64  # tokens per prefill step
STEP_BYTES = 16  # of kernels/wgsl/step.wgsl


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate.  ``eog_ids`` end the answer unless they are banned or ignored (fed back like any token)."""

    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    eog_ids: frozenset[int] = frozenset()
    ban_eos: bool = False
    ignore_eos: bool = False
    top_logits: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequest(f"{self.max_tokens} tokens asked for; ask for at least 1.")
        if self.ban_eos and self.ignore_eos:
            raise BadRequest("ban_eos and ignore_eos exclude each other: choose one.")
        if not 0 <= self.top_logits <= 1000:
            raise BadRequest(f"top_logits is {self.top_logits}; it must be 0 to 1,000.")


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token.  ``position`` is the number of positions in the KV cache when it was chosen."""

    index: int
    position: int
    id: int
    timing: StepTiming
    counters: StepCounters
    ends: bool  # an end-of-generation token that ends the answer
    top_logits: tuple[tuple[int, float], ...] = ()


class DecodeSession:
    """Owns a sequence's KV cache and small buffers; ``close`` gives everything back to the pool."""

    def __init__(self, model: Llama, launcher: Launcher, *, kv: str, context: int) -> None:
        """``kv`` is a row of KV_MODES, ``context`` the most positions this sequence may have."""
        config = model.config
        if kv not in KV_MODES:
            raise BadRequest(f"no KV mode named {kv!r}; there are {', '.join(KV_MODES)}")
        if not 1 <= context <= config.context_length:
            raise BadRequest(f"a context of {context:,} positions; this model has 1 to {config.context_length:,}.")
        self._model = model
        self._launcher = launcher
        self._pool = pool = launcher.pool
        self._number = pool.new_session()
        self._context = context
        self._meter = Meter(launcher, pool.ledger)
        self._cancelled = False
        self._closed = False
        self._history: list[int] = []
        make_cache, _ = KV_MODES[kv]
        self._cache = make_cache(pool, config.n_layers, model.kv_width_bytes, context)
        self._step = pool.acquire(STEP_BYTES, Role.UNIFORM, "step")
        self._ids = pool.acquire(4 * PREFILL_ROWS, Role.ACTIVATION, "ids", host=True)
        self._staging = pool.acquire(4 * config.vocab_size, Role.STAGING, "readback")

    @property
    def length(self) -> int:
        """Positions in the KV cache."""
        return self._cache.length

    @property
    def history(self) -> tuple[int, ...]:
        """The ids of the filled positions, in order.

        They outlive the device: after a loss, load the model again and prefill a new session with them and the last
        token to go on where this one was.
        """
        return tuple(self._history)

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` ended the last generation."""
        return self._cancelled

    def cancel(self) -> None:
        """Stop the generation under way after its current step."""
        self._cancelled = True

    async def prepare(
        self, generation: Generation, prompt_rows: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compile the kernels that prefill and decode will need, so that no token's time includes it."""
        greedy = self._on_gpu(generation)
        shapes = {min(prompt_rows, PREFILL_ROWS), prompt_rows % PREFILL_ROWS or PREFILL_ROWS, 1}
        dry = _DryRun()
        pairs = [(dry.buffer, dry.buffer)] * self._model.config.n_layers
        for rows in shapes:
            logits = self._model.record(
                dry.rec, dry, dry.buffer, dry.buffer, pairs, rows=rows, length=rows, reach=rows, want_logits=True
            )
            if greedy and logits is not None:
                self._model.choose(dry.rec, logits, dry.buffer, self._ban(generation))
        await self._launcher.kernels.ensure(dry.rec.finish().variants, progress)

    async def generate(
        self,
        prompt: Sequence[int],
        generation: Generation,
        progress: Callable[[int, int], None] | None = None,
    ) -> AsyncIterator[TokenEvent]:
        """Prefill ``prompt``, then yield tokens until the end, a limit or ``cancel``.

        The first event's time covers the prefill.  ``progress`` gets (prompt tokens done, in total).
        """
        if self._closed:
            raise PoolError("the session is closed: open a new one.")
        if not prompt:
            raise BadRequest("the prompt has no tokens: write something.")
        if self.length + len(prompt) > self._context:
            raise ContextFull(
                f"the prompt has {len(prompt):,} tokens, {self.length:,} are in the cache already; the context holds "
                f"{self._context:,}. Shorten it or ask for a larger context."
            )
        self._cancelled = False
        sampler = Sampler(generation.sampling)
        pending = list(prompt)
        for index in range(generation.max_tokens):
            if self._cancelled or self.length + len(pending) > self._context:
                return
            event = await self._token(index, pending, generation, sampler, progress)
            if event is None:
                return
            yield event
            if event.ends:
                return
            pending = [event.id]

    async def _token(
        self,
        index: int,
        pending: list[int],
        generation: Generation,
        sampler: Sampler,
        progress: Callable[[int, int], None] | None,
    ) -> TokenEvent | None:
        """Run ``pending`` through the model in steps and choose the next token; None if cancelled in between."""
        self._meter.start()
        start = now_ms()
        encode_ms = wait_ms = 0.0
        data = b""
        on_gpu = self._on_gpu(generation)
        for first in range(0, len(pending), PREFILL_ROWS):
            rows = pending[first : first + PREFILL_ROWS]
            last = first + len(rows) == len(pending)
            upload = not (on_gpu and index)
            encoded, waited, data = await self._run(rows, generation, upload=upload, on_gpu=on_gpu, last=last)
            encode_ms += encoded
            wait_ms += waited
            if not index and progress is not None:
                progress(first + len(rows), len(pending))
            if self._cancelled and not last:
                return None
        best: list[tuple[int, float]] = []
        if on_gpu:
            (token,) = struct.unpack("<I", data)
        else:
            logits = array("f", data)
            best = top_logits(logits, generation.top_logits)
            token = sampler.choose(logits, self._ban(generation))
        timing = StepTiming(now_ms() - start, encode_ms, wait_ms)
        counters = self._meter.step(self._cache.class_bytes)
        ends = token in generation.eog_ids and not generation.ignore_eos
        return TokenEvent(index, self.length, token, timing, counters, ends, tuple(best))

    @staticmethod
    def _on_gpu(generation: Generation) -> bool:
        """A greedy choice stays on the GPU: the next step's id is already where the embedding reads it."""
        return generation.sampling.greedy and not generation.top_logits

    @staticmethod
    def _ban(generation: Generation) -> tuple[int, ...]:
        return tuple(sorted(generation.eog_ids)) if generation.ban_eos else ()

    async def _run(
        self, ids: Sequence[int], generation: Generation, *, upload: bool, on_gpu: bool, last: bool
    ) -> tuple[float, float, bytes]:
        """One step: (encode ms, wait ms, bytes read back).  Not ``upload``: the id is on the GPU already.

        When memory runs out the step is run once more, with its ids from the host: what the failed one left on the
        GPU is not trusted.
        """
        attempts = 0

        async def attempt() -> tuple[float, float, bytes]:
            nonlocal attempts
            attempts += 1
            uploaded = ids if upload or attempts > 1 else None
            return await self._attempt(uploaded, len(ids), generation, on_gpu=on_gpu, last=last)

        result = await self._pool.retrying(attempt)
        self._history += ids
        return result

    async def _attempt(
        self, ids: Sequence[int] | None, rows: int, generation: Generation, *, on_gpu: bool, last: bool
    ) -> tuple[float, float, bytes]:
        """A step as a transaction: it commits, or raises and has given everything back."""
        start = now_ms()
        self._pool.begin_run(self._number)
        scope = Scope(self._pool)
        try:
            step, nbytes = self._record(scope, ids, rows, generation, on_gpu=on_gpu, last=last)
            if self._launcher.kernels.missing(step.variants):
                await self._launcher.prepare(step)
            self._launcher.submit(step)
            submitted = now_ms()
            if last:
                data = await self._launcher.read(self._staging, nbytes)
            else:
                data = b""
                await self._launcher.wait()  # one prefill step at a time: cancel stays quick
        except BaseException:
            scope.release()
            self._cache.abandon()
            raise
        scope.release()
        self._cache.commit()
        self._launcher.touch_ahead()
        return submitted - start, now_ms() - submitted, data

    def _record(
        self, scope: Scope, ids: Sequence[int] | None, rows: int, generation: Generation, *, on_gpu: bool, last: bool
    ) -> tuple[Step, int]:
        rec = Recorder()
        position = self.length
        rec.write(self._step, 0, (position, rows, position + rows, 0))
        if ids is not None:
            rec.write(self._ids, 0, ids)
        kv = self._cache.extend(rec, rows)
        logits = self._model.record(
            rec, scope, self._step, self._ids, kv,
            rows=rows, length=position + rows, reach=self._context, want_logits=last,
        )  # fmt: skip
        nbytes = 0
        if logits is not None:
            source, nbytes = (self._ids, 4) if on_gpu else (logits, 4 * self._model.config.vocab_size)
            if on_gpu:
                self._model.choose(rec, logits, self._ids, self._ban(generation))
            rec.copy(source, 0, self._staging, 0, nbytes)
        return rec.finish(), nbytes

    def close(self) -> None:
        """Give every buffer back.  Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._cache.close()
        for buffer in (self._staging, self._ids, self._step):
            self._pool.release(buffer)


class _DryRun:
    """Stands in for a step's scope when only the variants of a recording are wanted: no buffer is acquired."""

    def __init__(self) -> None:
        self.rec = Recorder()
        self.buffer = Buffer(0, 0, 0, Role.ACTIVATION)

    def acquire(self, nbytes: int, label: str) -> Buffer:
        return self.buffer
