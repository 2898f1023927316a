"""An answer of the loaded model; on request, kernels are tuned before it and timed after it."""

from contextlib import aclosing
from typing import Any

from stepwell.decode.generation import Generation
from stepwell.decode.session import DecodeSession
from stepwell.launch.launcher import Launcher
from stepwell.page.engines import Engines
from stepwell.page.loaded_model import LoadedModel
from stepwell.page.outbox import Outbox
from stepwell.page.record import RunRecord
from stepwell.page.request import RunRequest
from stepwell.page.run import PageRun
from stepwell.text.detokenizer import StopMatcher


class AnswerRun(PageRun):
    """The answer of ``model`` to the prompt of the request."""

    def __init__(
        self, outbox: Outbox, engines: Engines, environment: dict[str, Any], request: RunRequest, model: LoadedModel
    ) -> None:
        super().__init__(outbox, engines, environment, request)
        self._model = model
        self._generation = Generation(
            max_tokens=request.tokens,
            sampling=request.sampling,
            eog_ids=frozenset(model.tokenizer.eog_ids),
            ban_eos=request.ban_eos,
            ignore_eos=request.ignore_eos,
            top_logits=request.top_logits,
            digest=request.digest,
            gpu_time=request.gpu_time,
        )

    async def _play(self) -> RunRecord:
        request, launcher, model = self._request, self._launcher, self._model
        stops = StopMatcher(request.stop)
        prompt_ids = model.prompt_ids(request)
        limit = model.model.config.context_length
        context = request.context or min(limit, len(prompt_ids) + request.tokens)
        timer = self._timer(len(prompt_ids) + request.tokens, context) if request.kernel_times else None
        self._start_afresh()
        goes_on = True
        if request.tune:
            goes_on = await self._tune(request.tune_ms)
            self._start_afresh()
        session = DecodeSession(
            model.model, launcher, kv=request.kv, kv_type=request.kv_type, context=context, spans=self._spans
        )
        record = RunRecord(
            scenario={"model": model.name, "sha256": model.sha256, **request.as_dict(), "context": context},
            environment=self._environment,
            prompt_ids=prompt_ids,
            before=launcher.report(),
        )
        with self._playing(session):
            self._outbox.enter("kernels", "Compiling kernels")
            await session.prepare(self._generation, len(prompt_ids), self._outbox.progress("kernels"))
            await launcher.device.take_profile()  # of what was issued until now
            if goes_on:
                await self._answer(session, record, stops)
            await self._sum_up(record, session.kernels)
            if timer is not None and not session.cancelled:
                await self._time_kernels(session, record, timer)
        return record

    async def _answer(self, session: DecodeSession, record: RunRecord, stops: StopMatcher) -> None:
        """Yield text as it grows; text that may be the beginning of a stop string is withheld."""
        # when end-of-generation tokens are fed back like any other, the text shows them
        detokenizer = self._model.detokenizer(skip_special=not self._request.ignore_eos)
        self._outbox.enter("prefill", f"Reading {len(record.prompt_ids):,} prompt tokens")
        reason = None
        answer = session.generate(record.prompt_ids, self._generation, self._outbox.progress("tokens"))
        async with aclosing(answer) as events:
            async for event in events:
                if event.index == 0:
                    self._outbox.enter("decode", "Answering")
                text = stops.push(detokenizer.push(event.id))
                self._token(record, event, text)
                if event.ends:
                    reason = "stop"
                if stops.matched is not None:
                    reason = "stop_string"
                    break
        if reason is None:
            reason = "cancelled" if session.cancelled else "length"
        tail = stops.push(detokenizer.finish()) + stops.finish()
        if tail:
            record.text += tail
            self._outbox.emit("token", text=tail, token=None, by_role=self._by_role())
        record.finish_reason = reason

    async def _tune(self, budget_ms: int) -> bool:
        """Tune the kernels of the model's decode steps, for the page to keep.  Returns False if cancelled."""
        from stepwell.tuning.autotune import Autotuner  # when it is wanted, not at the start of the page

        self._outbox.enter("tuning", "Tuning kernels for this adapter")
        self._at_work = tuner = Autotuner(self._model.model, self._launcher, budget_ms)
        try:
            outcome = await tuner.run(self._outbox.progress("products"))
        finally:
            self._at_work = None
            tuner.close()
        remembered = self._engines.remembered
        remembered.learn(outcome.measured)
        told = {**outcome.describe(), "choices": remembered.rows(outcome.measured)}
        self._outbox.emit("tuning", notices=outcome.refused, outcome=told, text=remembered.text())
        return not tuner.cancelled

    def _timer(self, positions: int, context: int) -> Launcher:
        """The launcher that times kernels after a run of ``positions``, checked to fit in ``context``."""
        from stepwell.profiling import kernel_times  # not at the start of the page

        kernel_times.check(self._launcher.device, positions, context)
        return self._engines.get(kernel_times.timing_options(self._request.launch_options))

    async def _time_kernels(self, session: DecodeSession, record: RunRecord, timer: Launcher) -> None:
        """Time the step after the last token, kernel by kernel."""
        from stepwell.profiling import kernel_times

        self._outbox.enter("decode", "Timing each kernel")
        record.kernels = await kernel_times.time_kernels(session, record.token_ids[-1], self._generation, timer)
        if record.kernels is None:
            record.finish_reason = "cancelled"  # not all that was asked for
