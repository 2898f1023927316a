"""The cost of a recorded trace under every policy.  The trace is a file that the page was given.

The replay stops for a moment every few thousand events, so that the page hears how far it is and a cancel gets through.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from stepwell.errors import BadTrace
from stepwell.gpu.device import ByteSource
from stepwell.options import Option, OptionKind, check_options
from stepwell.page.outbox import Outbox
from stepwell.replay.simulator import served
from stepwell.replay.traces import Event, read_metadata, read_trace
from stepwell.replay.what_if import Setting, Trial, WhatIf, compare, recorded_costs, recorded_setting, settings, survey
from stepwell.replay.what_if_outcome import Outcome

MOST_EVENTS = 10_000_000  # kept in memory, about 60 bytes each: a replay reads them once per setting
_SLICE = 20_000
_BLOCK = 1 << 24
_GZIP = b"\x1f\x8b"


OPTIONS = (
    Option("baseline", OptionKind.TEXT, None, "the policy that the others are compared with"),
    Option("budget_mib", OptionKind.FLOAT, None, "MiB that every setting may reserve", 1, 1 << 40),
    Option("create_us", OptionKind.FLOAT, None, "microseconds that creating a buffer takes", 0),
    Option("create_us_per_mib", OptionKind.FLOAT, None, "further microseconds for each MiB of it", 0),
)
"""The options of a question about a trace."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a trace, by OPTIONS; None: as the trace says, or as ``what_if`` assumes."""

    baseline: str | None = None
    budget_mib: float | None = None
    create_us: float | None = None
    create_us_per_mib: float | None = None

    @classmethod
    def from_json(cls, text: str) -> "Question":
        """The question in the JSON ``text``.  Raises BadRequest for unknown fields and values of the wrong type."""
        given = {name: value for name, value in json.loads(text).items() if value is not None}
        return cls(**check_options(OPTIONS, given, "what-if"))

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None: none."""
        return None if self.budget_mib is None else int(self.budget_mib * (1 << 20))


class WhatIfRun:
    """The replay of one trace, which ends with a ``verdict`` message."""

    def __init__(self, outbox: Outbox, question: Question, source: ByteSource) -> None:
        self._outbox, self._question, self._source = outbox, question, source
        self._cancelled = False

    async def play(self) -> None:
        """Replay the trace and send the verdict.  Raises BadTrace for no trace, or one with nothing to compare."""
        with TemporaryDirectory() as folder:
            answer = await self._answer(await self._copy(Path(folder)))
        self._outbox.emit("verdict", answer=None if answer is None else {"trace": self._source.name, **answer})

    def cancel(self) -> None:
        """End the replay soon; there is no answer then."""
        self._cancelled = True

    async def _copy(self, folder: Path) -> Path:
        """The file where Python can read it, under its own name; its first bytes say whether it is compressed."""
        self._outbox.enter("what-if", f"Reading {self._source.name}")
        name = re.sub(r"[^\w.-]", "_", self._source.name.removesuffix(".gz"))[-100:]
        is_gzip = await self._source.read(0, len(_GZIP)) == _GZIP
        path = folder / f"{name or 'trace'}{'.gz' if is_gzip else ''}"
        with path.open("wb") as file:
            for offset in range(0, self._source.size, _BLOCK):
                file.write(await self._source.read(offset, min(_BLOCK, self._source.size - offset)))
        return path

    async def _answer(self, path: Path) -> WhatIf | None:
        """The answer; None when the replay was cancelled."""
        question = self._question
        metadata = read_metadata(path)
        costs = recorded_costs(metadata, question.create_us, question.create_us_per_mib)
        baseline, baseline_from = recorded_setting(metadata, question.baseline)
        events = await self._read(path)
        if events is None:
            return None
        found = survey(events, metadata)
        asked = [(baseline, None), *((setting, question.budget_bytes) for setting in settings(found.attached))]
        outcomes: list[Outcome] = []
        for setting, budget in asked:
            trial = Trial(setting, costs, found.unit, budget)
            self._outbox.enter("what-if", self._doing(setting, len(outcomes) + 1, len(asked)))
            if not await self._feed(trial, events, len(outcomes), len(asked)):
                return None
            outcomes.append(trial.outcome())
        return compare(found, outcomes[1:], outcomes[0], baseline_from, costs, question.budget_bytes)

    async def _read(self, path: Path) -> list[Event] | None:
        """All events of the file; None when it was cancelled."""
        report = self._outbox.progress("events")
        stream = served(read_trace(path))
        events: list[Event] = []
        while part := list(islice(stream, _SLICE)):
            events += part
            if len(events) > MOST_EVENTS:
                raise BadTrace(
                    f"{path.name} has more than {MOST_EVENTS:,} events, too many for a page: "
                    "replay it with `python -m stepwell.replay what-if`, which needs no memory for them."
                )
            report(len(events), None)
            await asyncio.sleep(0)
            if self._cancelled:
                return None
        return events

    async def _feed(self, trial: Trial, events: Sequence[Event], done: int, count: int) -> bool:
        """Whether the replay went through to its end; ``done`` of ``count`` settings were replayed before it."""
        report = self._outbox.progress("events")
        for start in range(0, len(events), _SLICE):
            trial.feed(events[start : start + _SLICE])
            report(done * len(events) + min(start + _SLICE, len(events)), count * len(events))
            await asyncio.sleep(0)
            if self._cancelled:
                return False
        return True

    def _doing(self, setting: Setting, number: int, count: int) -> str:
        return f"Replaying {self._source.name} under {setting.label} ({number} of {count})"
