"""What happens in a pool, for those who watch: the interface, and a bounded log of the last events."""

import time
from collections import deque
from typing import NamedTuple, Protocol

from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.class_stats import Eviction


class Observer(Protocol):
    """Whoever is told of every event of a pool, after it happened.  A pool without observers pays nothing for them."""

    def created(self, buffer_id: int, size: int, role: Role, label: str) -> None:
        """Note a buffer of ``size`` bytes that was created, for a lease of ``role`` and ``label``."""

    def destroyed(self, buffer_id: int, size: int, cause: Eviction) -> None:
        """Note a buffer of ``size`` bytes that was destroyed."""

    def acquired(self, buffer: Buffer) -> None:
        """Note a lease that began."""

    def released(self, buffer: Buffer) -> None:
        """Note a lease that ended."""

    def flushed(self, serial: int) -> None:
        """Note that the flush of that number was carried out."""

    def run_began(self, run: int) -> None:
        """Note that the run of that number, from 1, began."""

    def failed(self, what: str, nbytes: int) -> None:
        """Note that memory ran out (``what`` is ``oom``) or the device was ``lost``, with ``nbytes`` reserved."""


class Event(NamedTuple):
    """One event: ``action`` is the observer's method; what does not apply is 0 or empty."""

    time_us: int
    run: int
    action: str
    buffer: int
    size: int
    requested: int
    role: str
    label: str
    detail: str


class EventLog(Observer):
    """The last ``limit`` events with their times (µs from an arbitrary start)."""

    def __init__(self, limit: int = 100_000) -> None:
        self.events: deque[Event] = deque(maxlen=limit)
        self._run = 0

    def created(self, buffer_id: int, size: int, role: Role, label: str) -> None:
        self._note("created", buffer_id, size, 0, role.value, label)

    def destroyed(self, buffer_id: int, size: int, cause: Eviction) -> None:
        self._note("destroyed", buffer_id, size, detail=cause.value)

    def acquired(self, buffer: Buffer) -> None:
        self._note("acquired", buffer.id, buffer.size, buffer.requested, buffer.role.value, buffer.label)

    def released(self, buffer: Buffer) -> None:
        self._note("released", buffer.id, buffer.size, buffer.requested, buffer.role.value, buffer.label)

    def flushed(self, serial: int) -> None:
        self._note("flushed", 0, 0, detail=str(serial))

    def run_began(self, run: int) -> None:
        self._run = run
        self._note("run_began", 0, 0, detail=str(run))

    def failed(self, what: str, nbytes: int) -> None:
        self._note("failed", 0, nbytes, detail=what)

    def _note(
        self, action: str, buffer: int, size: int, requested: int = 0, role: str = "", label: str = "", detail: str = ""
    ) -> None:
        now_us = time.perf_counter_ns() // 1000
        self.events.append(Event(now_us, self._run, action, buffer, size, requested, role, label, detail))
