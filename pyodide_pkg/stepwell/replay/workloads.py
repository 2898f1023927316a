"""Synthetic workloads: the events of decode loops and of fixed shapes, without a model or a GPU.

``kv64``      Phi-4-mini: 32 layers, each with K and V of 2,048 B a position (f16), which grow by one position a token
``kv16``      Qwen3.5-4B: 32 layers; every fourth has such a K and V; the state of the others has a fixed size and never
              moves, so it is left out
``sawtooth``  six chats of 300 to 4,400 positions on the kv64 model, each begun by a prefill with its temporaries
``static``    an encoder with fixed shapes, the same in every run

A decode step, as onnxruntime-web runs it: uploading the inputs flushes; each layer acquires six intermediates and its
present K and V, gives the intermediates back and records 12 dispatches; 16 of them make a submit; the end of the run
and the download of the logits flush; only then are the past K and V disposed of.
Sources: microsoft/onnxruntime issue 32017 and its webgpu_context.cc; transformers.js past_key_values handling.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from stepwell.errors import BadRequest
from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Request
from stepwell.replay.kv_shapes import KV_WORKLOADS, PHI4_MINI, POSITION_BYTES, DecodeShape
from stepwell.replay.traces import ACQUIRE, FLUSH, NO_REQUEST, RELEASE, RUN, Cause, Event

DISPATCHES_PER_LAYER = 12
"""Dispatches that a layer records."""
DISPATCHES_PER_SUBMIT = 16
FIRST_POSITIONS, LAST_POSITIONS = 1024, 8192
"""The positions that kv64 and kv16 cover by default."""

SAWTOOTH_CHATS = ((300, 800), (900, 1400), (3900, 4400), (600, 1100), (2300, 2800), (400, 900))
"""The positions of each chat's prompt, and those at its end."""


class DecodeTrace:
    """The writer of the events of decode steps; it numbers leases and counts dispatches across them."""

    def __init__(self, shape: DecodeShape) -> None:
        self._shape = shape
        self._next = 0
        self._pending = 0
        self._past: list[int] = []
        self._intermediates: dict[int, list[list[Request]]] = {}

    def set_past(self, positions: int) -> Iterator[Event]:
        """The events for the K and V that a loop starts from: one full set, before the first run."""
        requests = self._kv_requests(positions)
        self._past = list(range(self._next, self._next + len(requests)))
        self._next += len(requests)
        yield from ((ACQUIRE, lease, request) for lease, request in zip(self._past, requests, strict=True))

    def run(self, positions: int, rows: int = 1) -> Iterator[Event]:
        """The events of one run that ends with ``positions`` filled, ``rows`` of them new."""
        shape = self._shape
        yield (RUN, positions, NO_REQUEST)
        if shape.upload:
            yield (FLUSH, Cause.UPLOAD, NO_REQUEST)
        kv = iter(self._kv_requests(positions))
        present: list[int] = []
        lease = self._next
        for layer, requests in enumerate(self._intermediate_requests(rows)):
            first = lease
            for request in requests:
                yield (ACQUIRE, lease, request)
                lease += 1
            if layer % shape.kv_every == shape.kv_every - 1:
                for _ in range(2):
                    yield (ACQUIRE, lease, next(kv))
                    present.append(lease)
                    lease += 1
            for number in range(first, first + len(requests)):
                yield (RELEASE, number, NO_REQUEST)
            self._pending += DISPATCHES_PER_LAYER
            while self._pending >= DISPATCHES_PER_SUBMIT:
                self._pending -= DISPATCHES_PER_SUBMIT
                yield (FLUSH, Cause.DISPATCHES, NO_REQUEST)
        self._next = lease
        yield (FLUSH, Cause.RUN_END, NO_REQUEST)
        yield (FLUSH, Cause.DOWNLOAD, NO_REQUEST)
        self._pending = 0
        yield from self.dispose()
        self._past = present

    def dispose(self) -> Iterator[Event]:
        """The events that give the past K and V back."""
        for lease in self._past:
            yield (RELEASE, lease, NO_REQUEST)
        self._past = []

    def _kv_requests(self, positions: int) -> list[Request]:
        nbytes = POSITION_BYTES * positions
        return [Request(nbytes, Role.KV, site) for site in range(self._shape.tensors)]

    def _intermediate_requests(self, rows: int) -> list[list[Request]]:
        """Six requests of each layer; a site is the ordinal of the acquire within the run."""
        found = self._intermediates.get(rows)
        if found is None:
            row = self._shape.hidden_bytes
            found = self._intermediates[rows] = [
                [Request(rows * row * (1 + index), Role.ACTIVATION, 6 * layer + index) for index in range(6)]
                for layer in range(self._shape.layers)
            ]
        return found


def growing(shape: DecodeShape, first: int, last: int) -> Iterator[Event]:
    """The events of decoding from ``first`` positions to ``last``, one token a run."""
    trace = DecodeTrace(shape)
    yield from trace.set_past(first)
    for positions in range(first + 1, last + 1):
        yield from trace.run(positions)


def sawtooth(shape: DecodeShape, first: int, last: int) -> Iterator[Event]:
    """The events of chats one after the other; those within ``first`` to ``last`` positions, and cut there."""
    trace = DecodeTrace(shape)
    for prompt, end in SAWTOOTH_CHATS:
        start, stop = max(prompt, first), min(end, last)
        if start >= stop:
            continue
        yield from trace.run(start, rows=start)
        for positions in range(start + 1, stop + 1):
            yield from trace.run(positions)
        yield from trace.dispose()


STATIC_RUNS = 8
"""Runs of ``static`` by default."""
_STATIC_LAYERS = 24
_STATIC_ROWS = 1500  # an audio encoder's frames


def static(first: int, last: int) -> Iterator[Event]:
    """The events of runs ``first`` to ``last`` of an encoder with fixed shapes; its outputs are disposed of after it.

    A layer has a normalised copy, Q, K, V, scores, their product, the MLP's inner activation and the residual, which
    lives until the next layer has added to it.  The head keeps one output per four layers until after the run.
    """
    hidden, inner, heads = 1280 * 4, 5120 * 4, 20
    layer_bytes = [
        _STATIC_ROWS * hidden,
        *[_STATIC_ROWS * hidden] * 3,
        heads * _STATIC_ROWS * 257 * 4,
        _STATIC_ROWS * hidden,
        _STATIC_ROWS * inner,
    ]
    lease = pending = 0
    kept: list[int] = []
    for run in range(first, last + 1):
        yield (RUN, run, NO_REQUEST)
        yield (FLUSH, Cause.UPLOAD, NO_REQUEST)
        site = 0
        residual = -1
        for layer in range(_STATIC_LAYERS):
            start = lease
            for nbytes in layer_bytes:
                yield (ACQUIRE, lease, Request(nbytes, Role.ACTIVATION, site))
                lease, site = lease + 1, site + 1
            yield (ACQUIRE, lease, Request(_STATIC_ROWS * hidden, Role.ACTIVATION, site))
            if residual >= 0:
                yield (RELEASE, residual, NO_REQUEST)
            residual, lease, site = lease, lease + 1, site + 1
            if layer % 4 == 3:
                yield (ACQUIRE, lease, Request(_STATIC_ROWS * 384 * 4 * (1 + layer // 4), Role.ACTIVATION, site))
                kept.append(lease)
                lease, site = lease + 1, site + 1
            for number in range(start, start + len(layer_bytes)):
                yield (RELEASE, number, NO_REQUEST)
            pending += DISPATCHES_PER_LAYER
            while pending >= DISPATCHES_PER_SUBMIT:
                pending -= DISPATCHES_PER_SUBMIT
                yield (FLUSH, Cause.DISPATCHES, NO_REQUEST)
        yield (RELEASE, residual, NO_REQUEST)
        yield (FLUSH, Cause.RUN_END, NO_REQUEST)
        yield (FLUSH, Cause.DOWNLOAD, NO_REQUEST)
        pending = 0
        for number in kept:
            yield (RELEASE, number, NO_REQUEST)
        kept.clear()


@dataclass(frozen=True, slots=True)
class Workload:
    """A row of the table: ``events(first, last)``, and the S (positions, or runs) covered by default."""

    summary: str
    events: Callable[[int, int], Iterator[Event]]
    first: int
    last: int


WORKLOADS: Mapping[str, Workload] = {
    **{
        name: Workload(
            f"{shape.model}: {shape.tensors} KV tensors that grow by {POSITION_BYTES:,} B a token",
            partial(growing, shape),
            FIRST_POSITIONS,
            LAST_POSITIONS,
        )
        for name, shape in KV_WORKLOADS.items()
    },
    "sawtooth": Workload(
        "six chats of 300 to 4,400 positions, with prefill temporaries",
        partial(sawtooth, PHI4_MINI),
        1,
        max(end for _, end in SAWTOOTH_CHATS),
    ),
    "static": Workload("an encoder whose shapes are the same in every run", static, 1, STATIC_RUNS),
}
"""The workloads, by name."""


def workload_events(name: str, first: int | None = None, last: int | None = None) -> Iterator[Event]:
    """The events of the workload ``name`` from S = ``first`` to S = ``last``.

    Raises BadRequest for an unknown name or an empty range.
    """
    workload = WORKLOADS.get(name)
    if workload is None:
        raise BadRequest(f"workload {name!r}: there is none of that name. Choose one of {', '.join(WORKLOADS)}.")
    low = workload.first if first is None else first
    high = workload.last if last is None else last
    if not 1 <= low <= high:
        raise BadRequest(f"workload {name}: S from {low:,} to {high:,}; need 1 <= from <= to.")
    return workload.events(low, high)
