"""Traces: a program's requests to the pool as events in a compact file, to be replayed through any policy.

An event is a tuple ``(op, value, request)``:

    ACQUIRE  the lease's number, the request      leases are numbered 0, 1, 2, … in the order they begin
    RELEASE  the lease's number
    FLUSH    why: a ``Cause``                     everything recorded so far was submitted
    RUN      its position, S                      a run (one decode step or prefill) begins

The file is UTF-8 text, one event a line, and gzip when its name ends in ``.gz``:

    stepwell-trace 1 {"workload": "kv64"}         the version and the caller's metadata, a JSON object
    + 4196352 k 17                                acquire: bytes, role, site (if not 0); the lease is the next number
    - 191                                         release of lease 191
    f d                                           flush
    b 2050                                        a run begins
    . 4                                           the end: how many events there are
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from io import StringIO
from pathlib import Path
from typing import Final, TextIO, cast

from stepwell.errors import BadTrace
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.class_stats import Eviction
from stepwell.memory.policies.base import Request
from stepwell.memory.pool import BufferPool
from stepwell.options import OptionValue

VERSION = 1
"""The version of the format."""
MAGIC = "stepwell-trace"
"""The first word of a trace."""

# plain ints: a trace has millions of events, and an enum member costs a lookup each
ACQUIRE: Final = 0
RELEASE: Final = 1
FLUSH: Final = 2
RUN: Final = 3

NO_REQUEST = Request(0, Role.ACTIVATION)
"""The request of an event that has none."""

Event = tuple[int, int, Request]
"""An event: its op, its value, and the request of an ACQUIRE."""


class Cause(IntEnum):
    """Why recorded work was submitted."""

    DISPATCHES = 0  # the limit of pending dispatches was reached
    UPLOAD = 1
    DOWNLOAD = 2  # and waited for: nothing is in flight afterwards
    RUN_END = 3
    SUBMIT = 4  # the program said so


_CAUSE_LETTER = {
    Cause.DISPATCHES: "d",
    Cause.UPLOAD: "u",
    Cause.DOWNLOAD: "r",
    Cause.RUN_END: "e",
    Cause.SUBMIT: "s",
}
_ROLE_LETTER = {role: role.value[0] for role in Role} | {Role.WORKSPACE: "o"}
_CAUSE_OF = {letter: cause for cause, letter in _CAUSE_LETTER.items()}
_ROLE_OF = {letter: role for role, letter in _ROLE_LETTER.items()}


class TraceWriter:
    """Writes events to an open text file; ``close`` writes the end mark (and leaves the file open)."""

    def __init__(self, file: TextIO, metadata: Mapping[str, object] | None = None) -> None:
        self._file = file
        self._requests: dict[Request, str] = {}
        self._check = _Checker()
        self.count = 0
        file.write(f"{MAGIC} {VERSION} {json.dumps(dict(metadata or {}))}\n")

    def write(self, event: Event) -> None:
        """Append one event; BadTrace if it cannot follow the ones before it."""
        self.count += 1
        op, value, request = event
        self._check(event, self.count)
        if op == ACQUIRE:
            line = self._requests.get(request)
            if line is None:
                site = f" {request.site}" if request.site else ""
                line = f"+ {request.nbytes} {_ROLE_LETTER[request.role]}{site}\n"
                if len(self._requests) < 4096:  # what repeats is there from the first run on
                    self._requests[request] = line
        elif op == RELEASE:
            line = f"- {value}\n"
        elif op == FLUSH:
            line = f"f {_CAUSE_LETTER[Cause(value)]}\n"
        else:
            line = f"b {value}\n"
        self._file.write(line)

    def close(self) -> None:
        """Write the end mark."""
        self._file.write(f". {self.count}\n")


def write_trace(path: Path, events: Iterable[Event], metadata: Mapping[str, object] | None = None) -> int:
    """Write ``events`` as the trace file ``path``.  Returns the number of events; BadTrace if they are not in order."""
    with _open(path, "wt") as file:
        return _write(file, events, metadata)


def _write(file: TextIO, events: Iterable[Event], metadata: Mapping[str, object] | None) -> int:
    writer = TraceWriter(file, metadata)
    for event in events:
        writer.write(event)
    writer.close()
    return writer.count


def read_trace(path: Path) -> Iterator[Event]:
    """The events of the file ``path``, read one by one; BadTrace, with the line, where it is not well formed."""
    check = _Checker()
    requests: dict[str, Request] = {}
    lease = count = 0
    ended = False
    for number, line in _lines(path):
        op, _, rest = line.partition(" ")
        if number == 1:
            _parse_header(line)
            continue
        if ended:
            raise BadTrace(f"line {number}: {_short(line)} after the end mark. Write one trace per file.")
        if op == ".":
            if _int(rest, number) != count:
                raise BadTrace(f"line {number}: the end mark says {_short(rest)} events, {count:,} were read.")
            ended = True
            continue
        event: Event
        if op == "+":
            request = requests.get(rest)
            if request is None:
                request = requests[rest] = _parse_request(rest, number)
            event = (ACQUIRE, lease, request)
            lease += 1
        elif op == "-":
            event = (RELEASE, _int(rest, number), NO_REQUEST)
        elif op == "f" and rest in _CAUSE_OF:
            event = (FLUSH, _CAUSE_OF[rest], NO_REQUEST)
        elif op == "b":
            event = (RUN, _int(rest, number), NO_REQUEST)
        else:
            raise BadTrace(f"line {number}: {_short(line)} is no event. Expected one of: + - f b .")
        count += 1
        check(event, number)
        yield event
    if not ended:
        raise BadTrace(
            f"{path.name} ends after {count:,} events without its end mark: it was cut off. Record it again."
        )


def read_metadata(path: Path) -> dict[str, object]:
    """The metadata in the first line of the trace file ``path``; BadTrace if it is no trace."""
    for _, line in _lines(path):
        return _parse_header(line)
    raise BadTrace(f"{path.name} is empty.")


class _Checker:
    """BadTrace unless leases are numbered in order and each is released once."""

    def __init__(self) -> None:
        self._live: set[int] = set()
        self._next = 0

    def __call__(self, event: Event, number: int) -> None:
        """``number``: of the event or of its line, for the message."""
        op, value, request = event
        if op == RELEASE:
            if value not in self._live:
                state = "released already" if 0 <= value < self._next else "never acquired"
                raise BadTrace(f"at {number}: release of lease {value}, which was {state}.")
            self._live.remove(value)
        elif op == ACQUIRE:
            if value != self._next:
                raise BadTrace(f"at {number}: acquire of lease {value}; the next one is {self._next}.")
            if request.nbytes <= 0 or request.site < 0:
                raise BadTrace(f"at {number}: acquire of {request.nbytes} B for site {request.site}.")
            self._live.add(value)
            self._next += 1
        elif op not in (FLUSH, RUN) or value < 0:
            raise BadTrace(f"at {number}: op {op} with {value}.")


def check_events(events: Iterable[Event]) -> Iterator[Event]:
    """The same ``events``; BadTrace at the first that cannot follow the ones before it."""
    check = _Checker()
    for number, event in enumerate(events, 1):
        check(event, number)
        yield event


class TraceRecorder:
    """Watches a live pool (an ``Observer``) and keeps its events, from the buffers that are leased now on.

    A run's position is its number, from 1, and it begins with a flush, as the pool's does.  Buffers of every role are
    recorded: a trace is of the program, not of one policy.  Leases that die with their device end there.  The metadata
    has the pool's policy, if it was the same from beginning to end.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._chosen = pool.chosen
        self._numbers: dict[int, int] = {}  # buffer id → the number of its lease
        self._count = 0
        self._runs = 0
        self.events: list[Event] = []
        for buffer in pool.inventory.leases():
            self.acquired(buffer)
        pool.observe(self)

    def stop(self) -> None:
        """Stop watching; the events stay."""
        self._pool.unobserve(self)

    def save(self, path: Path, metadata: Mapping[str, object] | None = None) -> int:
        """Write the events so far to ``path``.  Returns how many there are."""
        return write_trace(path, self.events, self._about(metadata))

    def text(self, metadata: Mapping[str, object] | None = None) -> str:
        """The text of the file that ``save`` would write."""
        file = StringIO()
        _write(file, self.events, self._about(metadata))
        return file.getvalue()

    def _about(self, metadata: Mapping[str, object] | None) -> dict[str, object]:
        if self._chosen is None or self._chosen != self._pool.chosen:
            return dict(metadata or {})
        name, options = self._chosen
        return {"policy": name, "options": {key: _option_text(value) for key, value in options.items()}} | dict(
            metadata or {}
        )

    def acquired(self, buffer: Buffer) -> None:
        """Note that ``buffer`` was leased."""
        self._numbers[buffer.id] = self._count
        self.events.append((ACQUIRE, self._count, Request(buffer.requested, buffer.role, buffer.site)))
        self._count += 1

    def released(self, buffer: Buffer) -> None:
        """Note that the lease of ``buffer`` has ended."""
        self.events.append((RELEASE, self._numbers.pop(buffer.id), NO_REQUEST))

    def flushed(self, serial: int) -> None:
        """Note a flush."""
        self.events.append((FLUSH, Cause.SUBMIT, NO_REQUEST))

    def run_began(self, run: int) -> None:
        """Note that a run begins."""
        self._runs += 1
        self.events.append((RUN, self._runs, NO_REQUEST))

    def created(self, buffer_id: int, size: int, role: Role, label: str) -> None:
        """Note nothing: the policy decided it, not the program, and another one will decide for itself."""

    def destroyed(self, buffer_id: int, size: int, cause: Eviction) -> None:
        """Note nothing, as in ``created``."""

    def failed(self, what: str, nbytes: int) -> None:
        """Note the end of every lease if the device was lost."""
        if what == "lost":
            self.events += [(RELEASE, number, NO_REQUEST) for number in self._numbers.values()]
            self._numbers.clear()


def _option_text(value: OptionValue) -> str:
    """``value`` as a form or a command line has it, and ``what_if`` reads it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{size}:{count}" for size, count in value.items())
    return str(value)


def _parse_header(line: str) -> dict[str, object]:
    magic, _, rest = line.partition(" ")
    version, _, text = rest.partition(" ")
    if magic != MAGIC:
        raise BadTrace(f"the file begins with {_short(line)}, a trace with '{MAGIC} {VERSION}'. Is it a trace?")
    if version != str(VERSION):
        raise BadTrace(f"the trace has version {_short(version)}; this stepwell reads version {VERSION}.")
    try:
        metadata = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadTrace(f"the trace's metadata is not JSON: {error}.") from error
    if not isinstance(metadata, dict):
        raise BadTrace(f"the trace's metadata is {_short(text)}; it must be a JSON object.")
    return metadata


def _parse_request(text: str, number: int) -> Request:
    fields = text.split(" ")
    if len(fields) not in (2, 3) or fields[1] not in _ROLE_OF:
        letters = " ".join(f"{letter}={role.value}" for letter, role in _ROLE_OF.items())
        raise BadTrace(f"line {number}: an acquire of {_short(text)}. Expected bytes, role ({letters}) and site.")
    site = _int(fields[2], number) if len(fields) == 3 else 0
    return Request(_int(fields[0], number), _ROLE_OF[fields[1]], site)


def _int(text: str, number: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadTrace(f"line {number}: {_short(text)} where a number of 0 or more is expected.")
    return int(text)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends; BadTrace when the bytes are no text or a broken archive."""
    number = 0
    try:
        with _open(path, "rt") as file:
            for number, line in enumerate(file, 1):
                yield number, line.rstrip("\n")
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadTrace(f"{path.name}, after line {number}: {error}. The file is damaged or cut off.") from error
    if not number:
        raise BadTrace(f"{path.name} is empty.")


def _open(path: Path, mode: str) -> TextIO:
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, mode, compresslevel=6, encoding="utf-8", newline="\n"))
    return cast(TextIO, path.open(mode, encoding="utf-8", newline="\n"))
