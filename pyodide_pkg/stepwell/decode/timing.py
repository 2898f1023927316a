"""One record per token: what it took and what it cost."""

from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from operator import add, attrgetter, sub
from typing import Any, TypeVar

from stepwell.launch.counters import COUNTERS
from stepwell.launch.launcher import Launcher
from stepwell.memory.ledger import Ledger

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepCounters:
    """GPU work and memory traffic of one token's step; ``reserved_bytes`` and ``in_use_bytes`` are levels at its end.

    ``refused`` is why the step was not a replay, None if it was one.  ``gpu_ms`` is the time of the compute passes by
    the GPU's clock, None unless that was asked for.
    """

    launches: int
    passes: int
    encoders: int
    submits: int
    syncs: int
    copies: int
    bind_groups_created: int
    bind_groups_reused: int
    bind_groups_evicted: int
    uploads: int
    uploads_skipped: int
    upload_bytes: int
    immediates: int
    immediates_bytes: int
    readbacks: int
    readback_bytes: int
    replayed: int
    refused: str | None
    gpu_ms: float | None
    buffers_created: int
    bytes_created: int
    buffers_destroyed: int
    bytes_destroyed: int
    pool_hits: int
    pool_misses: int
    kv_class_bytes: int
    reserved_bytes: int
    in_use_bytes: int


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

    ``counters`` is None when nothing was to be measured.  ``digest``: of the logits, if asked for.
    """

    index: int
    position: int
    id: int
    timing: StepTiming
    counters: StepCounters | None
    ends: bool  # an end-of-generation token that ends the answer
    top_logits: tuple[tuple[int, float], ...] = ()
    digest: str = ""


_POOL = {
    "buffers_created": "created",
    "bytes_created": "bytes_created",
    "buffers_destroyed": "destroyed",
    "bytes_destroyed": "bytes_destroyed",
    "pool_hits": "hits",
    "pool_misses": "misses",
}
_NAMES = (*COUNTERS, *_POOL)
_issued_of = attrgetter(*COUNTERS)
_moved_of = attrgetter(*_POOL.values())


class Cost(tuple[int, ...]):
    """What was issued, and what the pool did: counts in the order of _NAMES."""

    __slots__ = ()

    def plus(self, other: "Cost") -> "Cost":
        return Cost(map(add, self, other))

    def since(self, before: "Cost") -> "Cost":
        return Cost(map(sub, self, before))


NOTHING = Cost([0] * len(_NAMES))


class Meter:
    """What one session costs: differences of the cumulative counters, over the stretches in which it is at work.

    Sessions that share a launcher or a pool take turns, and the launcher and the pool count them all.  A coroutine
    works from one await to the next without another one in between, so what is counted in such a stretch is its own.
    """

    def __init__(self, launcher: Launcher, ledger: Ledger) -> None:
        """A stretch begins, until ``pause``."""
        self.on = True  # off, it costs nothing and says nothing
        self._counters = launcher.counters
        self._ledger = ledger
        self._spent = NOTHING  # since the last ``take``, up to ``_from``
        self._from: Cost | None = self._now()  # None: it is not at work

    def pause(self) -> None:
        """What follows is not this session's work."""
        self._note()
        self._from = None

    def resume(self) -> None:
        """A stretch begins."""
        if self.on:
            self._from = self._now()

    def take(self) -> Cost:
        """What the session has cost since the last ``take``."""
        self._note()
        taken, self._spent = self._spent, NOTHING
        return taken

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work``: from await to await a stretch of its own."""
        return await (_Metered(self, work) if self.on else work)

    def counters(
        self, cost: Cost, kv_class_bytes: int, refused: str | None, gpu_ms: float | None = None
    ) -> StepCounters:
        """The record of a step that cost so much."""
        return StepCounters(
            # ``replayed`` is not the replay that a recording is tried with
            **dict(zip(_NAMES, cost, strict=True)) | {"replayed": int(refused is None)},
            refused=refused,
            gpu_ms=gpu_ms,
            kv_class_bytes=kv_class_bytes,
            reserved_bytes=self._ledger.reserved_bytes,
            in_use_bytes=self._ledger.in_use_bytes,
        )

    def _note(self) -> None:
        if self._from is not None:
            now = self._now()
            self._spent = self._spent.plus(now.since(self._from))
            self._from = now

    def _now(self) -> Cost:
        return Cost((*_issued_of(self._counters), *_moved_of(self._ledger)))


class _Metered(Generator[Any, Any, T]):
    """A coroutine that is at work until it waits for something.  What it waits for, and how that ends, goes through."""

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
