"""The record of a token: its times and its counts."""

from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from operator import add, attrgetter, sub
from typing import Any, TypeVar

from stepwell.launch.counters import COUNTERS, Counters
from stepwell.launch.launcher import Launcher
from stepwell.memory.ledger import Ledger

T = TypeVar("T")


@dataclass(slots=True)
class StepCounters(Counters):
    """GPU work and memory traffic of one token's step: the launcher's counts, then the pool's.

    ``refused`` is why the step was not a replay, None if it was one.  ``gpu_ms`` is the time of the compute passes by
    the GPU's clock, None unless it was asked for.  ``kv_class_bytes`` is the size class of one K or V tensor;
    ``reserved_bytes`` and ``in_use_bytes`` are levels at the step's end.
    """

    refused: str | None = None
    gpu_ms: float | None = None
    buffers_created: int = 0
    bytes_created: int = 0
    buffers_destroyed: int = 0
    bytes_destroyed: int = 0
    pool_hits: int = 0
    pool_misses: int = 0
    kv_class_bytes: int = 0
    reserved_bytes: int = 0
    in_use_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Milliseconds of one token: ``ms`` since the token before (the first: since the start), ``encode_ms`` recording
    and submitting its step, ``wait_ms`` waiting for its bytes."""

    ms: float
    encode_ms: float
    wait_ms: float


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token.  ``position`` is the number of positions in the KV cache when it was chosen.

    ``counters`` is None when nothing was measured.  ``digest`` is that of the logits, if it was asked for.
    """

    index: int
    position: int
    id: int
    timing: StepTiming
    counters: StepCounters | None
    ends: bool  # an end-of-generation token that ends the answer
    top_logits: tuple[tuple[int, float], ...] = ()
    digest: str = ""


_issued_by = attrgetter(*COUNTERS)
_moved_by = attrgetter("created", "bytes_created", "destroyed", "bytes_destroyed", "hits", "misses")
"""The ledger's counts, in the order of the fields of StepCounters from ``buffers_created`` on."""
_MOVED = 6
_WITHOUT_REPLAYED = COUNTERS.index("replayed")


class Cost(tuple[int, ...]):
    """Counts of the work issued and of the pool's, in the order of StepCounters' fields."""

    __slots__ = ()

    def plus(self, other: "Cost") -> "Cost":
        """The sums with ``other``."""
        return Cost(map(add, self, other))

    def since(self, before: "Cost") -> "Cost":
        """The differences from ``before``."""
        return Cost(map(sub, self, before))


NO_COST = Cost([0] * (len(COUNTERS) + _MOVED))
"""Counts of nothing."""


class Meter:
    """The counts of one session: differences of the cumulative counters, over the stretches in which it is at work.

    Sessions that share a launcher or a pool take turns, and the launcher and the pool count them all.  A coroutine
    works from one await to the next without another one in between, so the counts of such a stretch are its own.
    """

    def __init__(self, launcher: Launcher, ledger: Ledger) -> None:
        """Begin a stretch, until ``pause``."""
        self.on = True  # off, it costs nothing and says nothing
        self._counters = launcher.counters
        self._ledger = ledger
        self._spent = NO_COST  # since the last ``take``, up to ``_from``
        self._from: Cost | None = self._now()  # None: it is not at work

    def restart(self, on: bool) -> None:
        """Forget what was counted; nothing is at work.  Not ``on``: nothing is counted from now on."""
        self.on, self._spent, self._from = on, NO_COST, None

    def pause(self) -> None:
        """End the stretch: what follows is not this session's work."""
        self._note()
        self._from = None

    def resume(self) -> None:
        """Begin a stretch."""
        if self.on:
            self._from = self._now()

    def take(self) -> Cost:
        """The session's counts since the last ``take``."""
        self._note()
        taken, self._spent = self._spent, NO_COST
        return taken

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work``, with a stretch from each await to the next."""
        return await (_Metered(self, work) if self.on else work)

    def counters(self, cost: Cost, kv_class_bytes: int, refused: str | None, gpu_ms: float | None) -> StepCounters:
        """The counters of a step with the counts ``cost``."""
        replayed = int(refused is None)  # not the replay that a recording is tried with
        pool = (*cost[len(COUNTERS) :], kv_class_bytes, self._ledger.reserved_bytes, self._ledger.in_use_bytes)
        values: tuple[Any, ...] = (*cost[:_WITHOUT_REPLAYED], replayed, refused, gpu_ms, *pool)
        return StepCounters(*values)

    def _note(self) -> None:
        if self._from is not None:
            now = self._now()
            self._spent = self._spent.plus(now.since(self._from))
            self._from = now

    def _now(self) -> Cost:
        return Cost((*_issued_by(self._counters), *_moved_by(self._ledger)))


class _Metered(Generator[Any, Any, T]):
    """A coroutine whose work is metered until it waits; what it awaits, and the result, pass through."""

    def __init__(self, meter: Meter, work: Coroutine[Any, Any, T]) -> None:
        self._meter, self._work = meter, work

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def send(self, value: Any) -> Any:
        self._meter.resume()
        try:
            return self._work.send(value)
        finally:
            self._meter.pause()

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        self._meter.resume()
        try:
            return self._work.throw(kind if value is None else value)
        finally:
            self._meter.pause()
