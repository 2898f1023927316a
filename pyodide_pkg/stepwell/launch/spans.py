"""Spans of a run for Chrome's trace viewer (ui.perfetto.dev): the work of Python, JS and the GPU over time."""

import json
from collections.abc import Iterable
from typing import NamedTuple

from stepwell.gpu.clock import now_ms
from stepwell.gpu.device import DeviceProfile

_TRACKS = {"python": 1, "js": 2, "gpu": 3}


class Entry(NamedTuple):
    """A span on a track, in milliseconds of ``clock.now_ms``."""

    track: str
    name: str
    start_ms: float
    end_ms: float
    args: dict[str, object]


class SpanLog:
    """Collects spans."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, track: str, name: str, start_ms: float, end_ms: float, **args: object) -> None:
        """Add the span ``name`` to ``track``, with ``args`` to show beside it."""
        self.entries.append(Entry(track, name, start_ms, end_ms, args))

    def add_profile(self, profile: DeviceProfile) -> None:
        """Add the device's spans; its clock is set by the moment at which ``profile`` was taken.

        Compute passes have durations only: they are laid end to end before that moment, on a track of their own.
        """
        offset = now_ms() - profile.now_ms
        for span in profile.spans:
            self.add("js", span.name, span.start_ms + offset, span.end_ms + offset)
        end = now_ms()
        begin = end - sum(profile.passes_us) / 1000
        for number, duration_us in enumerate(profile.passes_us):
            self.add("gpu", "compute pass", begin, begin + duration_us / 1000, number=number, placed="end to end")
            begin += duration_us / 1000

    def as_chrome_trace(self) -> str:
        """JSON text in Chrome's trace event format: complete events, microseconds from the first one."""
        origin = min((entry.start_ms for entry in self.entries), default=0.0)
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": track}}
            for track, number in _TRACKS.items()
        ]
        events += _complete(self.entries, origin)
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _complete(entries: Iterable[Entry], origin: float) -> list[dict[str, object]]:
    return [
        {
            "ph": "X",
            "name": name,
            "cat": track,
            "pid": 1,
            "tid": _TRACKS[track],
            "ts": round(1000 * (start - origin), 1),
            "dur": round(1000 * (end - start), 1),
            "args": args,
        }
        for track, name, start, end, args in entries
    ]
