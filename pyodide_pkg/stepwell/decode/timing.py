"""One record per token: what it took and what it cost."""

from dataclasses import dataclass

from stepwell.launch.counters import Counters
from stepwell.launch.launcher import Launcher
from stepwell.memory.ledger import Ledger


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


@dataclass(frozen=True, slots=True)
class Cost:
    """What was issued, and what the pool did."""

    issued: Counters
    moved: tuple[int, ...]  # in the order of _POOL

    def __add__(self, other: "Cost") -> "Cost":
        if other is NOTHING:
            return self
        issued = self.issued.copy()
        issued.add(other.issued)
        return Cost(issued, tuple(a + b for a, b in zip(self.moved, other.moved, strict=True)))


NOTHING = Cost(Counters(), (0,) * len(_POOL))


class Meter:
    """Takes the differences of the cumulative counters."""

    def __init__(self, launcher: Launcher, ledger: Ledger) -> None:
        self.on = True  # off, it costs nothing and says nothing
        self._counters = launcher.counters
        self._ledger = ledger
        self._issued, self._moved = launcher.counters.copy(), self._now()

    def take(self) -> Cost:
        """What happened since the last ``take``."""
        if not self.on:
            return NOTHING
        before, self._issued = self._issued, self._counters.copy()
        moved, self._moved = self._moved, self._now()
        return Cost(self._issued.since(before), tuple(a - b for a, b in zip(self._moved, moved, strict=True)))

    def _now(self) -> tuple[int, ...]:
        return tuple(getattr(self._ledger, name) for name in _POOL.values())

    def counters(
        self, cost: Cost, kv_class_bytes: int, refused: str | None, gpu_ms: float | None = None
    ) -> StepCounters:
        """The record of a step that cost so much."""
        return StepCounters(
            # ``replayed`` is not the replay that a recording is tried with
            **cost.issued.as_dict() | {"replayed": int(refused is None)},
            **dict(zip(_POOL, cost.moved, strict=True)),
            refused=refused,
            gpu_ms=gpu_ms,
            kv_class_bytes=kv_class_bytes,
            reserved_bytes=self._ledger.reserved_bytes,
            in_use_bytes=self._ledger.in_use_bytes,
        )
