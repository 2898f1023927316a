"""The messages that go out to a page, as JSON text: see docs/protocol.md."""

import json
from collections.abc import Callable

from stepwell.gpu.clock import now_ms

_PROGRESS_MS = 50  # between two progress messages
_FRAME_MS = 16  # between two messages about the pool's classes


class Outbox:
    """``send`` takes the JSON text of a message.  ``phase`` is what the page was last told that is being done."""

    def __init__(self, send: Callable[[str], object], phase: str) -> None:
        self._send = send
        self.phase = phase
        self._last_progress = 0.0
        self._last_pool = 0.0

    def emit(self, kind: str, **fields: object) -> None:
        self._send(json.dumps({"type": kind, **fields}, separators=(",", ":")))

    def enter(self, phase: str, text: str) -> None:
        """Begin a phase; ``text`` is for people."""
        self.phase = phase
        self._last_progress = 0.0
        self.emit("phase", phase=phase, text=text)

    def progress(self, unit: str) -> Callable[[int, int | None], None]:
        """Reports (done, total) of the present phase, not too often, and always its end; None: it is not known yet."""
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
        """Tell the page the pool's classes, as little of them as it shows; ``text``: what the pool says of itself."""
        self.emit("pool", classes=classes, text=text)
        self._last_pool = now_ms()
