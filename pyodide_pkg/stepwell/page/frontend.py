"""``Frontend``: what a page talks to.  JSON text in, JSON text out; no other object crosses the border.

The messages are those of docs/protocol.md.  Errors of stepwell become ``error`` messages;
any other exception is a bug and propagates to the caller.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from stepwell.decode.kv_modes import KV_MODES
from stepwell.errors import BadRequest, StepwellError
from stepwell.gpu import open_device
from stepwell.gpu.device import ByteSource, Device
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.memory.pool import BufferPool
from stepwell.models.synthetic import Synthetic
from stepwell.page.answer import AnswerRun
from stepwell.page.descriptions import (
    describe_ablation,
    describe_environment,
    describe_launch_options,
    describe_policies,
    describe_synthetic,
    describe_workloads,
)
from stepwell.page.engines import Engines
from stepwell.page.loaded_model import LoadedModel, load_model, make_model
from stepwell.page.outbox import Outbox
from stepwell.page.request import RunRequest
from stepwell.page.run import Cancellable, PageRun
from stepwell.page.workload import WorkloadRun
from stepwell.text.backends import js_backend


class Playable(Cancellable, Protocol):
    """A run that the page can start and cancel."""

    async def play(self) -> None:
        """Play it to its end."""


class Frontend:
    """One device, at most one loaded model, one run at a time.

    ``emit`` takes the JSON text of a message; ``host`` is JSON of facts that only the page knows (browser, timer, …);
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
        self._running: Playable | None = None

    @asynccontextmanager
    async def _reporting(self) -> AsyncIterator[None]:
        try:
            yield
        except StepwellError as error:
            self._outbox.emit("error", code=error.code, message=str(error), phase=self._outbox.phase)

    # ---- messages in ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the GPU device and tell the page what it is."""
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
        """Load a model from any byte ``source``."""
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
            await self._run(lambda: self._make_run(RunRequest.from_json(request)))

    async def what_if(self, question: str, file: Any) -> None:
        """Answer a ``what_if`` message; ``file`` is the JS File of the trace."""
        async with self._reporting():
            from stepwell.gpu.js_device import open_file

            await self._what_if(question, open_file(file))

    async def what_if_source(self, question: str, source: ByteSource) -> None:
        """Answer a ``what_if`` message on the trace in any byte ``source``."""
        async with self._reporting():
            await self._what_if(question, source)

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
            self._model.model.close()
            self._model = None
            self._opened().release()

    def _make_room(self) -> Launcher:
        """Give the present model up; returns the launcher that the next one is loaded with."""
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

    async def _what_if(self, question: str, source: ByteSource) -> None:
        from stepwell.page.what_if import Question, WhatIfRun  # when it is wanted, not at the start of the page

        await self._run(lambda: WhatIfRun(self._outbox, Question.from_json(question), source))

    async def _run(self, make: Callable[[], Playable]) -> None:
        if self._running is not None:
            raise BadRequest("a run is under way: stop it before the next.")
        self._running = run = make()
        try:
            await run.play()
        finally:
            self._running = None
        self._outbox.enter("ready", "Ready")

    def _make_run(self, request: RunRequest) -> PageRun:
        engines, environment = self._opened(), self._environment()
        if request.workload is not None:
            return WorkloadRun(self._outbox, engines, environment, request)
        if self._model is None:
            raise BadRequest("no model is loaded: load one first.")
        return AnswerRun(self._outbox, engines, environment, request, self._model)

    def _environment(self) -> dict[str, object]:
        return describe_environment(self._opened().device.info, self._host)
