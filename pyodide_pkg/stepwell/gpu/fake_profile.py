"""Measuring, for ``FakeDevice``: the spans and passes that a browser would report, in the time of this process."""

from time import perf_counter

from stepwell.gpu.device import DeviceProfile, Span


def now_ms() -> float:
    return perf_counter() * 1e3


class FakeProfiler:
    """Collects while ``spans`` or ``passes`` is on.  The work of a fake pass is done in its submit."""

    def __init__(self) -> None:
        self.spans = self.passes = False
        self._spans: list[Span] = []
        self._passes_us: list[float] = []
        self._pass_began = 0.0

    def add_span(self, name: str, start_ms: float) -> float:
        """A span that ends now; returns now."""
        end = now_ms()
        if self.spans:
            self._spans.append(Span(name, start_ms, end))
        return end

    def begin_pass(self) -> None:
        self._pass_began = now_ms()

    def end_pass(self) -> None:
        self._passes_us.append((now_ms() - self._pass_began) * 1e3)

    def take(self) -> DeviceProfile:
        taken = DeviceProfile(tuple(self._spans), tuple(self._passes_us), now_ms())
        self._spans.clear()
        self._passes_us.clear()
        return taken
