"""A decode session: one sequence over a loaded model, token by token."""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from stepwell.decode.exclusion import Exclusion
from stepwell.decode.flight import Flight, Issued, StepRequest
from stepwell.decode.generation import Generation, Run
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.preparation import uses_ahead
from stepwell.decode.stepper import Stepper
from stepwell.decode.timing import TokenEvent
from stepwell.errors import BadRequest, BudgetExceeded, ContextFull, DeviceLost, OutOfMemory, PoolError, StepwellError
from stepwell.gpu.clock import now_ms
from stepwell.launch.launcher import Launcher
from stepwell.launch.spans import SpanLog
from stepwell.memory.recovery import retrying
from stepwell.models.llama import DecoderModel
from stepwell.step.recorder import Step

_FAILURES = (OutOfMemory, BudgetExceeded, DeviceLost)


class DecodeSession:
    """Owns a sequence's KV cache and small buffers; ``close`` gives everything back to the pool."""

    def __init__(
        self, model: DecoderModel, launcher: Launcher, *, kv: str, context: int, kv_type: str = "f32",
        spans: SpanLog | None = None,
    ) -> None:  # fmt: skip
        """``kv`` is a row of KV_MODES, ``kv_type`` of KV_TYPES, ``context`` the most positions this sequence may have.

        ``launcher`` is one on the model's device and pool.  ``spans`` takes the times of Python's work.
        """
        config = model.config
        if kv not in KV_MODES:
            raise BadRequest(f"no KV mode named {kv!r}; there are {', '.join(KV_MODES)}")
        if not 1 <= context <= config.context_length:
            raise BadRequest(f"a context of {context:,} positions; this model has 1 to {config.context_length:,}.")
        self._model = model
        self._launcher = launcher
        self._pool = pool = launcher.pool
        shape = model.kv_shape(launcher, kv_type)
        self.position_bytes = 2 * shape.width_bytes  # of K and V of one position in one layer
        self._context = context
        self._spans = spans
        self._cancelled = False
        self._closed = False
        self._history: list[int] = []
        self._flights: deque[Flight] = deque()  # issued decode steps whose results are to come, oldest first
        self._current: object = None  # the generation under way; an older one may still be closed by the event loop
        self._id = pool.new_session()
        self._exclusion = launcher.shared(Exclusion)
        make_cache, _ = KV_MODES[kv]
        self._cache = make_cache(pool, shape, context)
        try:
            self._stepper = Stepper(model, launcher, self._cache, self._id, context)
        except BaseException:
            self._cache.close()
            raise

    @property
    def length(self) -> int:
        """Positions in the KV cache."""
        return self._cache.length

    @property
    def end(self) -> int:
        """Positions with those of the steps under way."""
        return self._cache.end

    @property
    def in_flight(self) -> int:
        """Decode steps that were issued and whose results were not awaited yet."""
        return len(self._flights)

    @property
    def kernels(self) -> dict[str, object]:
        """The kernels that the launcher's options give this model (``Steps.kernels``)."""
        return self._stepper.steps.kernels

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
        self._stepper.configure(generation.readback, self._depth(generation), generation.settings)
        uses = uses_ahead(self._stepper, self._cache, prompt_rows, generation.max_tokens)
        await self._launcher.kernels.ensure(uses, progress)

    async def generate(
        self,
        prompt: Sequence[int],
        generation: Generation,
        progress: Callable[[int, int], None] | None = None,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Prefill ``prompt``, then yield tokens until the end, a limit or ``cancel``.

        The first event's time covers the prefill.  ``progress`` gets (prompt tokens done, in total).  A caller that
        stops early closes the iterator (contextlib.aclosing), or what is in flight ends with the next generation.
        """
        self._check(prompt)
        self._exclusion.enter(self._id, generation.gpu_time)
        self._current = current = object()
        await self._settle()
        self._cancelled = False
        meter = self._stepper.meter
        run = Run(generation, self._depth(generation), meter)
        self._stepper.configure(run.readback, run.depth, generation.settings)
        meter.restart(generation.measure)  # what came before belongs to no token
        try:
            event = await meter.during(self._prefill(list(prompt), run, progress))
            while event is not None:
                yield event
                if event.ends or event.index + 1 == generation.max_tokens:
                    return
                if self._current is not current:
                    raise BadRequest("a later generation of this session took the place of this one: ask for one only.")
                event = await meter.during(self._next(event, run))
        finally:
            if self._current is current:
                await self._settle()
                self._exclusion.leave(self._id)

    async def rehearse(self, token: int, generation: Generation, launcher: Launcher) -> AsyncGenerator[Step, None]:
        """Issue the step of ``token``, the last one of a generation that has ended, again and again; none is committed.

        Each is recorded live through ``launcher`` (of the same device and pool) and yielded while it is under way: when
        the iterator goes on, or is closed, the step has not happened.  Raises what a step raises, ContextFull too.
        """
        self._check([token])
        await self._settle()
        stepper = Stepper(self._model, launcher, self._cache, self._id, self._context)
        try:
            stepper.configure(generation.readback, 0, generation.settings)
            while True:
                flight = await retrying(self._pool, lambda: stepper.issue(StepRequest([token], live=True)))
                assert flight.step is not None and flight.read is not None
                try:
                    yield flight.step
                    await flight.read
                finally:
                    with suppress(StepwellError):  # raised above, or of a step that nobody waited for
                        await flight.read
                    self._cache.abandon()
        finally:
            stepper.close()

    def close(self) -> None:
        """Give every buffer back.  Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._exclusion.leave(self._id)
        self._flights.clear()
        self._stepper.close()
        self._cache.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _check(self, prompt: Sequence[int]) -> None:
        if self._closed:
            raise PoolError("the session is closed: open a new one.")
        if not prompt:
            raise BadRequest("the prompt has no tokens: write something.")
        if len(self._history) + len(prompt) > self._context:
            raise ContextFull(
                f"the prompt has {len(prompt):,} tokens, {len(self._history):,} are in the cache already; the context "
                f"holds {self._context:,}. Shorten it or ask for a larger context."
            )

    def _depth(self, generation: Generation) -> int:
        """Steps that run ahead of the awaited token: none where the host chooses the token.

        A growing cache needs one more set of tensors for each.
        """
        if not generation.readback.on_gpu or generation.gpu_time:
            return 0  # with gpu_time: the passes of a step in flight would count for another token
        depth = self._launcher.options.readback_depth
        if depth is None:
            return self._cache.ahead
        return depth

    async def _prefill(
        self, prompt: list[int], run: Run, progress: Callable[[int, int], None] | None, index: int = 0
    ) -> TokenEvent | None:
        """Read the prompt and choose token ``index``; None if cancelled in between."""
        if self._outgrows(len(self._history) + len(prompt)):
            self._cache.rewind()
        prompt = self._history[self.length :] + prompt
        end = self.length + len(prompt)
        most = self._stepper.steps.prefill_rows(end)
        data = b""
        done = 0
        while done < len(prompt):
            rows = prompt[done : done + self._cache.fits(most)]
            done += len(rows)
            data = await retrying(self._pool, lambda: self._alone(rows, run, end, index, last=done == len(prompt)))  # noqa: B023
            if (fresh := self.length - len(self._history)) > 0:  # not what is read once more
                self._history += rows[-fresh:]
            if progress is not None:
                progress(done, len(prompt))
            if self._cancelled and done < len(prompt):
                return None
        return await self._event(index, data, run, Issued.PREFILL)

    def _outgrows(self, end: int) -> bool:
        """Whether a sequence of ``end`` positions needs other frequencies of rotation than its cached keys have.

        Then all of it is read once more.
        """
        switch = self._model.switch_position
        return switch is not None and 0 < self.length <= switch < end

    async def _alone(self, ids: Sequence[int], run: Run, end: int, index: int, *, last: bool) -> bytes:
        """Run one step as a transaction, with nothing else in flight: it commits, or gives everything back.

        The ``last`` step of a prompt chooses token ``index``.
        """
        ask = StepRequest(ids, len(ids), prompt_end=end, last=last, live=True, draw=run.draws[index])
        flight = await self._stepper.issue(ask)
        try:
            data = await self._result(flight, run)
        except BaseException:
            self._stepper.abandon()
            raise
        self._commit()
        return data

    async def _next(self, before: TokenEvent, run: Run) -> TokenEvent | None:
        """The token after ``before``, while later ones are on their way; None if cancelled or the context is full."""
        if not self._flights and not self._cancelled and self._outgrows(min(self.length + 1, self._context)):
            return await self._prefill([before.id], run, None, before.index + 1)
        try:
            await self._issue_ahead(before, run)
            if self._cancelled or not self._flights:
                return None
            flight = self._flights[0]
            data = await self._result(flight, run)
            self._flights.popleft()
            self._commit()
            issued = flight.issued
        except _FAILURES as failure:
            data, issued = await self._once_more(before, failure, run), Issued.RETRIED
        self._history.append(before.id)
        return await self._event(before.index + 1, data, run, issued)

    async def _issue_ahead(self, before: TokenEvent, run: Run) -> None:
        flights, stepper = self._flights, self._stepper
        while not self._cancelled and before.index + 1 + len(flights) < run.generation.max_tokens:
            if self._cache.end >= self._context or self._cache.end == self._model.switch_position:
                return
            if flights and (len(flights) > run.depth or stepper.wants_record):
                return
            known = before.id if not flights else None
            ids = None if run.readback.on_gpu else [before.id]
            draw = run.draws[before.index + 1 + len(flights)]
            flights.append(await stepper.issue(StepRequest(ids, token=known, draw=draw)))

    def _commit(self) -> None:
        """Fill the positions of the oldest step under way: its result is there."""
        self._cache.commit()
        self._launcher.touch_ahead()  # the buffers that the cache has made ahead

    async def _once_more(self, before: TokenEvent, failure: StepwellError, run: Run) -> bytes:
        """Run the step of the token ``before`` alone, after ``failure`` of it or of a later one.

        The id comes from the host: nothing that the failed steps left on the GPU is trusted.
        """
        await self._settle()
        self._stepper.abandon()
        failures = [failure]

        async def attempt() -> bytes:
            if failures:
                raise failures.pop()
            return await self._alone([before.id], run, 0, before.index + 1, last=True)

        return await retrying(self._pool, attempt)

    async def _settle(self) -> None:
        """Abandon what is in flight, once the GPU is done with it."""
        flights = self._flights
        while flights:
            flight = flights[0]  # until it is over: another task that settles waits for it, too
            if flight.read is not None:
                with suppress(StepwellError):  # of a step that has not happened
                    await flight.read
            if flights and flights[0] is flight:
                flights.popleft()
        if not self._closed:
            self._cache.abandon()

    async def _result(self, flight: Flight, run: Run) -> bytes:
        """Await what a step brings back, and account for its time."""
        waiting = now_ms()
        if flight.read is not None:
            data = await flight.read
        else:
            data = b""
            await self._launcher.wait()  # one prefill step at a time: cancel stays quick
        done = now_ms()
        run.spend(flight, done - waiting)
        if self._spans is not None:
            name = "replay" if flight.issued.is_replay else "record and submit"
            self._spans.add("python", name, *flight.span_ms, refused=flight.issued.refused)
            self._spans.add("python", "wait", waiting, done)
        return data

    async def _event(self, index: int, data: bytes, run: Run, issued: Issued) -> TokenEvent:
        timed = run.generation.measure and run.generation.gpu_time
        gpu_ms = await self._gpu_ms() if timed else None
        return run.event(index, self.length, data, issued, self._cache.class_bytes, gpu_ms)

    async def _gpu_ms(self) -> float:
        profile = await self._launcher.device.take_profile()
        if self._spans is not None:
            self._spans.add_profile(profile)
        return sum(profile.passes_us) / 1000
