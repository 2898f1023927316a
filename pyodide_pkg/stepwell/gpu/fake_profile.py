"""The profiler of ``FakeDevice``: the spans and passes that a browser would report, in the time of this process."""

from time import perf_counter

from stepwell.gpu.device import DeviceProfile, Span


def now_ms() -> float:
    """Milliseconds since an arbitrary start."""
    return perf_counter() * 1e3


class FakeProfiler:
    """Collects spans and passes while ``spans`` or ``passes`` is on; a fake pass does its work in its submit.

    ``passes_us`` has the microseconds of the passes since the last ``take``.
    """

    def __init__(self) -> None:
        self.spans = self.passes = False
        self._spans: list[Span] = []
        self.passes_us: list[float] = []
        self._pass_began = 0.0

    def add_span(self, name: str, start_ms: float) -> float:
        """Add the span ``name``, which ends now; returns now."""
        end = now_ms()
        if self.spans:
            self._spans.append(Span(name, start_ms, end))
        return end

    def begin_pass(self) -> None:
        """Note that a pass begins."""
        self._pass_began = now_ms()

    def end_pass(self) -> None:
        """Note that the pass has ended."""
        self.passes_us.append((now_ms() - self._pass_began) * 1e3)

    def take(self) -> DeviceProfile:
        """The times since the last take."""
        taken = DeviceProfile(tuple(self._spans), tuple(self.passes_us), now_ms())
        self._spans.clear()
        self.passes_us.clear()
        return taken
