"""One record per token: what it took and what it cost."""

import time
from dataclasses import dataclass

from stepwell.launch.launcher import Launcher
from stepwell.memory.ledger import Ledger


def now_ms() -> float:
    return 1000 * time.perf_counter()


@dataclass(frozen=True, slots=True)
class StepCounters:
    """GPU work and memory traffic of one step; ``reserved_bytes`` and ``in_use_bytes`` are levels at its end."""

    launches: int
    passes: int
    submits: int
    copies: int
    bind_groups_created: int
    bind_groups_reused: int
    uploads: int
    upload_bytes: int
    readbacks: int
    readback_bytes: int
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
    """Milliseconds of one token: ``encode_ms`` recording and submitting, ``wait_ms`` until its bytes were back."""

    ms: float
    encode_ms: float
    wait_ms: float


_LAUNCHER = (
    "launches", "passes", "submits", "copies", "bind_groups_created", "bind_groups_reused", "uploads", "upload_bytes",
    "readbacks", "readback_bytes",
)  # fmt: skip
_POOL = {
    "buffers_created": "created",
    "bytes_created": "bytes_created",
    "buffers_destroyed": "destroyed",
    "bytes_destroyed": "bytes_destroyed",
    "pool_hits": "hits",
    "pool_misses": "misses",
}


class Meter:
    """Takes the differences of the cumulative counters from step to step."""

    def __init__(self, launcher: Launcher, ledger: Ledger) -> None:
        self._counters = launcher.counters
        self._ledger = ledger
        self._before = self._read()

    def _read(self) -> dict[str, int]:
        counts = {name: getattr(self._counters, name) for name in _LAUNCHER}
        return counts | {name: getattr(self._ledger, attribute) for name, attribute in _POOL.items()}

    def start(self) -> None:
        self._before = self._read()

    def step(self, kv_class_bytes: int) -> StepCounters:
        """What happened since ``start``."""
        before = self._before
        return StepCounters(
            **{name: value - before[name] for name, value in self._read().items()},
            kv_class_bytes=kv_class_bytes,
            reserved_bytes=self._ledger.reserved_bytes,
            in_use_bytes=self._ledger.in_use_bytes,
        )
