"""The common part of all runs that a page asks for: how they begin, what the page is told, how they end."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from stepwell.decode.timing import TokenEvent
from stepwell.launch.spans import SpanLog
from stepwell.memory.policies import make_policy
from stepwell.page.descriptions import describe_classes
from stepwell.page.engines import Engines
from stepwell.page.outbox import Outbox
from stepwell.page.record import RunRecord
from stepwell.page.request import RunRequest

if TYPE_CHECKING:
    from stepwell.replay.traces import TraceRecorder


class Cancellable(Protocol):
    """Work that can be cancelled."""

    def cancel(self) -> None:
        """End the work after its current step."""


class Player(Cancellable, Protocol):
    """A session, or a workload, that gives its tokens."""

    def close(self) -> None:
        """Give everything back."""


class PageRun(ABC):
    """One run of ``request``, by the launcher of its options; ``environment`` is that of its record."""

    def __init__(self, outbox: Outbox, engines: Engines, environment: dict[str, Any], request: RunRequest) -> None:
        self._outbox, self._engines, self._environment, self._request = outbox, engines, environment, request
        self._launcher = engines.get(request.launch_options)
        self._spans = SpanLog() if request.trace else None
        self._at_work: Cancellable | None = None
        self._recorder: TraceRecorder | None = None

    async def play(self) -> None:
        """Send tokens as they come, then the traces that were asked for, and the record."""
        try:
            record = await self._play()
        finally:
            self._stop_recording()
        if self._spans is not None:
            self._outbox.emit("trace", text=self._spans.as_chrome_trace())
        if self._recorder is not None:
            self._outbox.emit("pool_trace", text=self._recorder.text(self._about(record)))
        self._outbox.emit("done", record=record.as_dict())

    def cancel(self) -> None:
        """End the run after its current step."""
        if self._at_work is not None:
            self._at_work.cancel()

    @abstractmethod
    async def _play(self) -> RunRecord:
        """Play the run from its start to its record."""

    def _start_afresh(self) -> None:
        """Put the pool into the state of every run's start: the policy asked for, nothing free, new peaks."""
        pool, request = self._launcher.pool, self._request
        pool.set_policy(make_policy(request.policy, **request.policy_options))
        pool.flush()
        pool.trim()
        pool.set_budget(request.budget_bytes, request.hard_budget)
        pool.ledger.reset_peaks()
        self._stop_recording()
        if request.pool_trace:
            from stepwell.replay.traces import TraceRecorder  # when it is wanted, not at the start of the page

            self._recorder = TraceRecorder(pool)

    def _stop_recording(self) -> None:
        """Stop the recorder, if there is one; its events stay."""
        if self._recorder is not None:
            self._recorder.stop()

    def _about(self, record: RunRecord) -> dict[str, object]:
        """The metadata of the pool's trace: its policy, as what-if reads it, and its run."""
        request = self._request
        return {
            "policy": request.policy,
            "options": {name: str(value) for name, value in request.policy_options.items()},
            "model": record.scenario["model"],
            "kv": request.kv,
            "stepwell": self._environment.get("stepwell"),
        }

    @contextmanager
    def _playing(self, player: Player) -> Iterator[None]:
        """Let ``player`` be cancelled and profiled inside; it has given everything back afterwards."""
        launcher, request = self._launcher, self._request
        self._at_work = player
        try:
            launcher.device.set_profile(spans=request.trace, passes=request.gpu_time)
            yield
        finally:
            self._at_work = None
            launcher.device.set_profile()
            player.close()
            launcher.release_run()
            launcher.pool.flush()

    def _token(self, record: RunRecord, event: TokenEvent, text: str) -> None:
        entry = record.add(event, text)
        self._outbox.emit("token", text=text, token=entry, by_role=self._by_role())
        if self._outbox.pool_is_due:
            self._outbox.pool(describe_classes(self._launcher.pool))

    async def _sum_up(self, record: RunRecord, kernels: dict[str, object] | None = None) -> None:
        """Take the figures of pool and launcher while the run holds its buffers, and the last of the profile."""
        from stepwell.memory.explain import explain  # at the end of a run, not at the start of the page

        self._stop_recording()
        launcher = self._launcher
        text = explain(launcher.pool)
        record.memory(launcher.pool.report(), text)
        record.launched({**launcher.report(), "kernels": kernels})
        self._outbox.pool(describe_classes(launcher.pool), text)
        if self._spans is not None:
            self._spans.add_profile(await launcher.device.take_profile())

    def _by_role(self) -> dict[str, int]:
        return self._launcher.pool.ledger.reserved_by_role()
