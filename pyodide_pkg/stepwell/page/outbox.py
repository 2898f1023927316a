"""The messages that go out to a page, as JSON text: see docs/protocol.md."""

import json
from collections.abc import Callable

from stepwell.gpu.clock import now_ms

_PROGRESS_MS = 50  # between two progress messages
_FRAME_MS = 16  # between two messages about the pool's classes


class Outbox:
    """Sends messages: ``send`` takes the JSON text of one.  ``phase`` is the last one that the page was told of."""

    def __init__(self, send: Callable[[str], object], phase: str) -> None:
        self._send = send
        self.phase = phase
        self._last_progress = 0.0
        self._last_pool = 0.0

    def emit(self, kind: str, **fields: object) -> None:
        """Send a message of type ``kind``."""
        self._send(json.dumps({"type": kind, **fields}, separators=(",", ":")))

    def enter(self, phase: str, text: str) -> None:
        """Begin ``phase``; ``text`` describes it to people."""
        self.phase = phase
        self._last_progress = 0.0
        self.emit("phase", phase=phase, text=text)

    def progress(self, unit: str) -> Callable[[int, int | None], None]:
        """A function that reports (done, total) of the present phase, not too often but always its end.

        ``total`` None: it is not known yet.
        """
        phase = self.phase

        def report(done: int, total: int | None) -> None:
            now = now_ms()
            if (total is not None and done >= total) or now - self._last_progress >= _PROGRESS_MS:
                self._last_progress = now
                self.emit("progress", phase=phase, done=done, total=total, unit=unit)

        return report

    @property
    def pool_is_due(self) -> bool:
        """Whether a frame has passed since the page was told of the pool."""
        return now_ms() - self._last_pool >= _FRAME_MS

    def pool(self, classes: object, text: str = "") -> None:
        """Tell the page of the pool's classes, no more than it shows; ``text``: the pool's own explanation."""
        self.emit("pool", classes=classes, text=text)
        self._last_pool = now_ms()
