"""``Frontend``: what a page talks to.  JSON text in, JSON text out; no other object crosses the border.

The messages are those of docs/architecture.md ("The page's messages").  Errors of stepwell become ``error`` messages;
any other exception is a bug and propagates to the caller.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

from stepwell.clock import now_ms
from stepwell.decode.generation import Generation
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.kv_pattern import FIRST_POSITIONS, KVPattern
from stepwell.decode.session import DecodeSession
from stepwell.decode.timing import TokenEvent
from stepwell.engines import Engines
from stepwell.errors import BadRequest, StepwellError
from stepwell.gpu import open_device
from stepwell.gpu.device import ByteSource, Device
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.launch.spans import SpanLog
from stepwell.listings import (
    describe_ablation,
    describe_classes,
    describe_environment,
    describe_launch_options,
    describe_policies,
    describe_synthetic,
    describe_workloads,
)
from stepwell.loaded_model import LoadedModel, TextOfIds, load_model, make_model
from stepwell.memory.policies import make_policy
from stepwell.memory.pool import BufferPool
from stepwell.models.synthetic import Synthetic
from stepwell.outbox import Outbox
from stepwell.record import RunRecord
from stepwell.request import Request
from stepwell.text.backends import js_backend
from stepwell.text.detokenizer import StopMatcher

_FRAME_MS = 16  # between two messages about the pool's classes


def _start_afresh(pool: BufferPool, request: Request) -> None:
    """Every run starts from the same state: the policy asked for, nothing free, peaks measured from here."""
    pool.set_policy(make_policy(request.policy, **request.policy_options))
    pool.flush()
    pool.trim()
    pool.set_budget(request.budget_bytes, request.hard_budget)
    pool.ledger.reset_peaks()


async def _profiled(event: TokenEvent, launcher: Launcher, request: Request, spans: SpanLog | None) -> TokenEvent:
    """A workload's token with its GPU time and its spans, as a session gives them."""
    if spans is not None:
        start, timing = now_ms() - event.timing.ms, event.timing
        spans.add("python", "record and submit", start, start + timing.encode_ms)
        spans.add("python", "wait", start + timing.encode_ms, start + timing.encode_ms + timing.wait_ms)
    if not request.gpu_time or event.counters is None:
        return event
    profile = await launcher.device.take_profile()
    if spans is not None:
        spans.add_profile(profile)
    return replace(event, counters=replace(event.counters, gpu_ms=sum(profile.passes_us) / 1000))


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Frontend:
    """One device, at most one loaded model, one run at a time.

    ``emit`` takes the JSON text of a message; ``host`` is JSON of what only the page knows (browser, timer, …);
    ``make_tokenizer`` is that of web/tokenizer.js.
    """

    def __init__(
        self,
        emit: Callable[[str], object],
        host: str,
        make_tokenizer: Callable[[str], Callable[[str], Any]],
        opener: Callable[[], Awaitable[Device]] = open_device,
    ) -> None:
        self._outbox = Outbox(emit, "device")
        self._host: dict[str, Any] = json.loads(host)
        self._make_encoder = js_backend(make_tokenizer)
        self._opener = opener
        self._engines: Engines | None = None
        self._model: LoadedModel | None = None
        self._running: Cancellable | None = None
        self._last_pool = 0.0

    @asynccontextmanager
    async def _reporting(self) -> AsyncIterator[None]:
        try:
            yield
        except StepwellError as error:
            self._outbox.emit("error", code=error.code, message=str(error), phase=self._outbox.phase)

    # ---- messages in ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the GPU device and say what there is."""
        async with self._reporting():
            self._outbox.enter("device", "Opening the GPU device")
            device = await self._opener()
            self._engines = Engines(device, BufferPool(device))
            self._outbox.emit(
                "environment",
                environment=self._environment(),
                policies=describe_policies(),
                kv_modes=[{"name": name, "summary": summary} for name, (_, summary) in KV_MODES.items()],
                workloads=describe_workloads(),
                synthetic=describe_synthetic(),
                launch_options=describe_launch_options(),
                ablation=describe_ablation(),
                boot_ms=self._host.get("boot_ms"),
                limits=dict(device.info.limits),
            )
            if remembered := self._host.get("tuning"):
                notices = self._engines.remembered.read(remembered)
                self._outbox.emit("tuning", notices=notices, outcome=None, text=None)
            self._outbox.enter("ready", "Ready")

    async def load_url(self, model: str) -> None:
        """Load the model of a ``load`` message of kind ``url``."""
        async with self._reporting():
            from stepwell.gpu.js_device import open_url

            described = json.loads(model)
            self._outbox.enter("weights", f"Opening {described['name']}")
            await self._load(described, await open_url(described["url"], described["name"]))

    async def load_file(self, model: str, file: Any) -> None:
        """Load the model of a ``load`` message of kind ``file``; ``file`` is the JS File."""
        async with self._reporting():
            from stepwell.gpu.js_device import open_file

            await self._load(json.loads(model), open_file(file))

    async def load_source(self, model: str, source: ByteSource) -> None:
        """The same from any byte source."""
        async with self._reporting():
            await self._load(json.loads(model), source)

    async def load_synthetic(self, model: str) -> None:
        """Make the model of a ``load`` message of kind ``synthetic``; one that cannot be leaves the present one."""
        async with self._reporting():
            device = self._opened().device
            self._check_idle()
            self._outbox.enter("weights", "Making random weights")
            found = Synthetic.named(json.loads(model)["name"])
            found.check(device.info.limits)
            self._loaded(await make_model(found, self._make_room(), self._outbox))

    async def run(self, request: str) -> None:
        """Answer a ``run`` message: tokens as they come, then the record."""
        async with self._reporting():
            await self._run(Request.from_json(request))

    def cancel(self) -> None:
        """End the run under way after its current step; without one, nothing happens."""
        if self._running is not None:
            self._running.cancel()

    def close(self) -> None:
        """Give back the model, the pool and the device."""
        if self._engines is not None:
            self._unload()
            self._engines.close()
            self._engines = None

    # ---- the work ------------------------------------------------------------------------------------------------

    def _opened(self) -> Engines:
        if self._engines is None:
            raise BadRequest("there is no GPU device: see the error of the start.")
        return self._engines

    def _unload(self) -> None:
        if self._model is not None:
            self._model.llama.close()
            self._model = None

    def _make_room(self) -> Launcher:
        """Give up the present model; what the next one is loaded with."""
        self._unload()
        return self._opened().get(LaunchOptions())

    def _check_idle(self) -> None:
        if self._running is not None:
            raise BadRequest("a run is under way: stop it before loading another model.")

    async def _load(self, described: Mapping[str, Any], source: ByteSource) -> None:
        self._opened()
        self._check_idle()
        self._outbox.enter("weights", f"Reading {described['name']}")
        self._loaded(await load_model(described, source, self._make_room(), self._make_encoder, self._outbox))

    def _loaded(self, model: LoadedModel) -> None:
        self._model = model
        self._outbox.emit("model", model=model.describe())
        self._outbox.enter("ready", "Ready")

    async def _run(self, request: Request) -> None:
        if self._running is not None:
            raise BadRequest("a run is under way: stop it before the next.")
        launcher = self._opened().get(request.launch_options)
        play = self._decode if request.workload is None else self._grow
        spans = SpanLog() if request.trace else None
        record = await play(launcher, request, spans)
        if spans is not None:
            self._outbox.emit("trace", text=spans.as_chrome_trace())
        self._outbox.emit("done", record=record.as_dict())
        self._outbox.enter("ready", "Ready")

    async def _decode(self, launcher: Launcher, request: Request, spans: SpanLog | None) -> RunRecord:
        """Answer the prompt with the loaded model."""
        model = self._model
        if model is None:
            raise BadRequest("no model is loaded: load one first.")
        generation = Generation(
            max_tokens=request.tokens,
            sampling=request.sampling,
            eog_ids=frozenset(model.tokenizer.eog_ids),
            ban_eos=request.ban_eos,
            ignore_eos=request.ignore_eos,
            top_logits=request.top_logits,
            digest=request.digest,
            gpu_time=request.gpu_time,
        )
        stops = StopMatcher(request.stop)
        prompt_ids = model.prompt_ids(request)
        limit = model.llama.config.context_length
        context = request.context or min(limit, len(prompt_ids) + request.tokens)
        timer = None
        if request.kernel_times:
            from stepwell.profiling import kernel_times  # not at the start of the page

            kernel_times.check(launcher.device, len(prompt_ids) + request.tokens, context)
            timer = self._opened().get(kernel_times.timing_options(request.launch_options))
        _start_afresh(launcher.pool, request)
        goes_on = True
        if request.tune:
            goes_on = await self._tune(launcher, model, request.tune_ms)
            _start_afresh(launcher.pool, request)
        session = DecodeSession(model.llama, launcher, kv=request.kv, context=context, spans=spans)
        record = RunRecord(
            scenario={"model": model.name, "sha256": model.sha256, **request.as_dict(), "context": context},
            environment=self._environment(),
            prompt_ids=prompt_ids,
            before=launcher.report(),
        )
        with self._playing(launcher, session, request):
            self._outbox.enter("kernels", "Compiling kernels")
            await session.prepare(generation, len(prompt_ids), self._outbox.progress("kernels"))
            await launcher.device.take_profile()  # of what was issued until now
            # when end-of-generation tokens are fed back like any other, the text shows them
            detokenizer = model.detokenizer(skip_special=not generation.ignore_eos)
            if goes_on:
                await self._answer(session, record, generation, stops, detokenizer)
            await self._sum_up(launcher, record, spans, session.kernels)
            if timer is not None and not session.cancelled:
                self._outbox.enter("decode", "Timing each kernel")
                token = record.token_ids[-1]
                record.kernels = await kernel_times.time_kernels(session, token, generation, timer)
                if record.kernels is None:
                    record.finish_reason = "cancelled"  # not all that was asked for
        return record

    async def _tune(self, launcher: Launcher, model: LoadedModel, budget_ms: int) -> bool:
        """Tune the kernels of the model's decode steps; the page keeps what is found.  Whether the run goes on."""
        from stepwell.decode.autotune import Autotuner  # when it is wanted, not at the start of the page

        self._outbox.enter("tuning", "Tuning kernels for this adapter")
        self._running = tuner = Autotuner(model.llama, launcher, budget_ms)
        try:
            outcome = await tuner.run(self._outbox.progress("products"))
        finally:
            self._running = None
            tuner.close()
        remembered = self._opened().remembered
        remembered.learn(outcome.measured)
        told = {**outcome.describe(), "choices": remembered.rows(outcome.measured)}
        self._outbox.emit("tuning", notices=outcome.refused, outcome=told, text=remembered.text())
        return not tuner.cancelled

    async def _grow(self, launcher: Launcher, request: Request, spans: SpanLog | None) -> RunRecord:
        """Run a workload: no model, no prompt."""
        name = request.workload or ""
        start = FIRST_POSITIONS if request.start is None else request.start
        _start_afresh(launcher.pool, request)
        pattern = KVPattern(name, launcher, kv=request.kv, start=start, tokens=request.tokens)
        asked = {**request.as_dict(), "start": start, "context": pattern.capacity}
        record = RunRecord(
            scenario={"model": name, "sha256": None, **asked},
            environment=self._environment(),
            prompt_ids=[],
            before=launcher.report(),
        )
        with self._playing(launcher, pattern, request):
            self._outbox.enter("kernels", "Compiling kernels")
            await pattern.prepare(self._outbox.progress("kernels"))
            await launcher.device.take_profile()
            self._outbox.enter("prefill", f"Filling {start:,} positions")
            async for event in pattern.run():
                if event.index == 0:
                    self._outbox.enter("decode", "Growing")
                self._token(record, await _profiled(event, launcher, request, spans), "")
            record.finish_reason = "cancelled" if pattern.cancelled else "length"
            await self._sum_up(launcher, record, spans)
        return record

    @contextmanager
    def _playing(self, launcher: Launcher, run: DecodeSession | KVPattern, request: Request) -> Iterator[None]:
        """``run`` can be cancelled and is profiled as asked inside; it has given everything back afterwards."""
        self._running = run
        try:
            launcher.device.set_profile(spans=request.trace, passes=request.gpu_time)
            yield
        finally:
            self._running = None
            launcher.device.set_profile()
            run.close()
            launcher.release_run()
            launcher.pool.flush()

    async def _answer(
        self,
        session: DecodeSession,
        record: RunRecord,
        generation: Generation,
        stops: StopMatcher,
        detokenizer: TextOfIds,
    ) -> None:
        self._outbox.enter("prefill", f"Reading {len(record.prompt_ids):,} prompt tokens")
        reason = None
        async with aclosing(session.generate(record.prompt_ids, generation, self._outbox.progress("tokens"))) as events:
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

    def _token(self, record: RunRecord, event: TokenEvent, text: str) -> None:
        entry = record.add(event, text)
        self._outbox.emit("token", text=text, token=entry, by_role=self._by_role())
        if now_ms() - self._last_pool >= _FRAME_MS:
            self._pool()

    async def _sum_up(
        self,
        launcher: Launcher,
        record: RunRecord,
        spans: SpanLog | None,
        kernels: dict[str, object] | None = None,
    ) -> None:
        """The figures of the pool and the launcher, while the run still holds its buffers; what is left to profile."""
        from stepwell.memory.explain import explain  # at the end of a run, not at the start of the page

        text = explain(launcher.pool)
        record.memory(launcher.pool.report(), text)
        record.launched({**launcher.report(), "kernels": kernels})
        self._pool(text)
        if spans is not None:
            spans.add_profile(await launcher.device.take_profile())

    def _pool(self, text: str = "") -> None:
        """Tell the page the pool's classes, as little of them as it shows; ``text``: what the pool says of itself."""
        self._outbox.emit("pool", classes=describe_classes(self._opened().pool), text=text)
        self._last_pool = now_ms()

    def _by_role(self) -> dict[str, int]:
        return self._opened().pool.ledger.reserved_by_role()

    def _environment(self) -> dict[str, object]:
        return describe_environment(self._opened().device.info, self._host)
