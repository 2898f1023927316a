"""The KV cache modes: they hold K and V, and make room for a step.

K and V of a layer are f32 or f16 [position][kv_heads * head_dim] (position-major, so that growing is one plain copy).
A step is a transaction: ``extend`` before recording, then ``commit`` once its result is back.  Several steps can be
under way; they commit in order, or are all abandoned.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from stepwell.errors import ContextFull
from stepwell.kernels.kv import KVShape, KVTensors, LayerKV
from stepwell.memory.buffer import Buffer, Role, Zero
from stepwell.memory.pool import BufferPool
from stepwell.step.recorder import Recorder

AHEAD_STEPS = 4
"""Steps before a tensor outgrows its buffer in which the next buffer is made."""
DONATE_POSITIONS = 64
"""The least spare positions of a donated tensor that has moved."""
DONATE_STEPS = 16
"""Steps before donated tensors are full in which they begin to move."""
AHEAD_BYTES = 1 << 20
"""Bytes from which on a tensor is made ahead: smaller ones outgrow their buffers together and are cheap to make."""


class KVCache(Protocol):
    """The K and V of one sequence, and the room for its steps."""

    length: int  # positions that are filled and committed
    stable: bool  # buffers of a ``key`` that is new come again: a plan for them is worth while at once
    ahead: int  # steps that may run ahead of the awaited one without another set of tensors for each

    @property
    def end(self) -> int:
        """Positions with those of the steps under way: where the next step begins."""

    @property
    def class_bytes(self) -> int:
        """Reserved bytes of one K or V tensor: the size class that the staircase is about."""

    @property
    def key(self) -> tuple[int, ...]:
        """The handles that the last step under way uses and another one may not."""

    def fits(self, rows: int) -> int:
        """The part of ``rows`` more positions that one step can have."""

    def extend(self, rows: int, prompt_end: int = 0) -> Sequence[LayerKV]:
        """Make room for ``rows`` more positions; returns each layer's K and V.  Raises ContextFull.

        ``prompt_end`` is the end of the prompt that the step is part of: room that will be needed anyhow.
        """

    def previews(self, prompt_end: int, end: int, buffer: Buffer) -> Iterator[Sequence[LayerKV]]:
        """Yield what ``extend`` would return, with ``buffer`` in every place: nothing is acquired.

        First comes that of the steps of a prompt up to ``prompt_end``, then those up to ``end`` that need other
        kernels.
        """

    def record_copies(self, rec: Recorder) -> None:
        """Record the copies of the past into the tensors of the last ``extend``."""

    def commit(self) -> None:
        """Commit the oldest step under way: its result is there."""

    def abandon(self) -> None:
        """Undo all steps under way."""

    def rewind(self) -> None:
        """Begin again at position 0.  No step may be under way."""

    def close(self) -> None:
        """Give every buffer back."""


class Positions:
    """The common part of all modes: the geometry, and the length of the sequence."""

    def __init__(self, pool: BufferPool, shape: KVShape, capacity: int) -> None:
        self._pool = pool
        self._layers, self._width_bytes, self._half = shape.layers, shape.width_bytes, shape.half
        self._capacity = capacity
        self._rows: deque[int] = deque()  # of the steps under way
        self.length = 0

    @property
    def end(self) -> int:
        """As in ``KVCache``."""
        return self.length + sum(self._rows)

    def rewind(self) -> None:
        """As in ``KVCache``."""
        self.length = 0

    def _check_room(self, rows: int) -> None:
        if self.end + rows > self._capacity:
            raise ContextFull(
                f"{self.end:,} positions are filled and {rows:,} more are wanted; the context holds "
                f"{self._capacity:,}. Ask for fewer tokens or a larger context."
            )


class Tensors(Positions):
    """The modes with a tensor per K and V: they acquire a full set or nothing, and copy the past."""

    stable = False
    ahead = 0

    def fits(self, rows: int) -> int:
        """All of ``rows``."""
        return rows

    def previews(self, prompt_end: int, end: int, buffer: Buffer) -> Iterator[Sequence[LayerKV]]:
        """Yield the same tensors at all lengths."""
        yield [KVTensors(buffer, buffer, self._half)] * self._layers

    def _acquire(self, positions: int, first_site: int = 0) -> list[KVTensors]:
        held: list[Buffer] = []
        try:
            for i in range(2 * self._layers):
                label = f"{'kv'[i % 2]}.{i // 2}"
                # every position that is read was written before: by the copy of the past, or by this step's append
                nbytes = positions * self._width_bytes
                held.append(self._pool.acquire(nbytes, Role.KV, label, first_site + i, zero=Zero.NEVER))
        except BaseException:
            for buffer in reversed(held):
                self._pool.release(buffer)
            raise
        return self._pairs(held)

    def _pairs(self, tensors: Sequence[Buffer]) -> list[KVTensors]:
        """The K and V of every layer, from all ``tensors`` in order."""
        return [KVTensors(k, v, self._half) for k, v in zip(tensors[::2], tensors[1::2], strict=True)]

    def _record_copies(self, rec: Recorder, past: list[KVTensors], present: list[KVTensors]) -> None:
        """Record the copies of the filled positions from ``past`` to ``present``."""
        for old, new in zip(past, present, strict=False):  # there is no past in the first step
            for source, target in zip(old.buffers, new.buffers, strict=True):
                rec.copy_past(source, target, self._width_bytes)

    def _release(self, pairs: list[KVTensors]) -> None:
        # in reverse: with LIFO free lists each site gets its own buffer back
        for pair in reversed(pairs):
            self._pool.release(pair.v)
            self._pool.release(pair.k)


class GrowKV(Tensors):
    """A new, larger present tensor per K and V at every step; the past is copied into it, then released.

    Runtimes whose graphs return ``present`` outputs do it: the pattern that the pool exists for.
    """

    def __init__(self, pool: BufferPool, shape: KVShape, capacity: int) -> None:
        super().__init__(pool, shape, capacity)
        self._sets: deque[list[KVTensors]] = deque([[]])  # that of the committed positions, then one per step under way
        self._past: deque[list[KVTensors]] = deque()  # of steps before, while others are under way

    @property
    def class_bytes(self) -> int:
        return self._sets[0][0].k.size if self._sets[0] else 0

    @property
    def key(self) -> tuple[int, ...]:
        last_two = self._sets[-2], self._sets[-1]
        return tuple([buffer.id for pairs in last_two for pair in pairs for buffer in pair.buffers])

    def extend(self, rows: int, prompt_end: int = 0) -> list[KVTensors]:
        self._check_room(rows)
        if self._past:
            # one for one, the oldest: so the sets take turns whether or not others are in flight when a step begins,
            # and a plan that was recorded with none in flight fits
            self._release(self._past.popleft())
        self._sets.append(self._acquire(self.end + rows))
        self._rows.append(rows)
        return self._sets[-1]

    def record_copies(self, rec: Recorder) -> None:
        self._record_copies(rec, self._sets[-2], self._sets[-1])

    def commit(self) -> None:
        self.length += self._rows.popleft()
        past = self._sets.popleft()
        if self._rows or self._past:
            self._past.append(past)
        else:
            self._release(past)
        nbytes = min(self.end + AHEAD_STEPS, self._capacity) * self._width_bytes
        if nbytes >= AHEAD_BYTES:
            self._pool.prepare_growth(nbytes, range(2 * self._layers), AHEAD_STEPS, at_most=1)

    def abandon(self) -> None:
        while self._rows:
            self._rows.pop()
            self._release(self._sets.pop())
        while self._past:
            self._release(self._past.popleft())

    def close(self) -> None:
        self.abandon()
        self._release(self._sets[0])
        self._sets[0] = []


class DonateKV(Tensors):
    """K and V appended in place; a tensor that is about to be full moves to one that is half as large again.

    Runtimes that may write a graph's ``past`` input do it: as many buffers as tensors, not twice as many, and a copy of
    the past once in a while.  Tensors move before they must, a few in each step, so that never many exist twice.
    """

    ahead = 1

    def __init__(self, pool: BufferPool, shape: KVShape, capacity: int) -> None:
        super().__init__(pool, shape, capacity)
        self._tensors: list[Buffer] = []
        self._moved: deque[list[tuple[int, Buffer]]] = deque()  # per step under way: (tensor, the buffer it was in)

    @property
    def class_bytes(self) -> int:
        return self._tensors[0].size if self._tensors else 0

    @property
    def key(self) -> tuple[int, ...]:
        moved = [past.id for _, past in self._moved[-1]] if self._moved else []
        return (*[tensor.id for tensor in self._tensors], *moved)

    def extend(self, rows: int, prompt_end: int = 0) -> list[KVTensors]:
        self._check_room(rows)
        needed = self.end + rows
        if not self._tensors:
            positions = self._room_for(needed)
            self._tensors = [tensor for pair in self._acquire(positions) for tensor in pair.buffers]
            self._moved.append([])
        else:
            self._moved.append([])
            try:
                for tensor in self._due(needed):
                    self._move(tensor, self._room_for(needed))
            except BaseException:
                self._move_back()
                raise
        self._rows.append(rows)
        return self._pairs(self._tensors)

    def record_copies(self, rec: Recorder) -> None:
        for tensor, past in self._moved[-1]:
            rec.copy_past(past, self._tensors[tensor], self._width_bytes)

    def commit(self) -> None:
        self.length += self._rows.popleft()
        for _, past in self._moved.popleft():
            self._pool.release(past)

    def abandon(self) -> None:
        while self._rows:
            self._rows.pop()
            self._move_back()

    def close(self) -> None:
        self.abandon()
        while self._tensors:
            self._pool.release(self._tensors.pop())

    def _room_for(self, needed: int) -> int:
        return min(self._capacity, needed + max(needed // 2, DONATE_POSITIONS))

    def _positions(self, tensor: int) -> int:
        """Positions that fit the buffer of ``tensor``."""
        return min(self._tensors[tensor].size // self._width_bytes, self._capacity)

    def _due(self, needed: int) -> list[int]:
        """The tensors to move in this step: those that are too small, and some of those that soon will be."""
        soon = min(needed + DONATE_STEPS, self._capacity)
        small = [tensor for tensor in range(len(self._tensors)) if self._positions(tensor) < soon]
        small.sort(key=self._positions)  # those that must come first
        must = sum(self._positions(tensor) < needed for tensor in small)
        return small[: max(must, -(-2 * len(self._tensors) // DONATE_STEPS))]

    def _move(self, tensor: int, positions: int) -> None:
        past = self._tensors[tensor]
        label = f"{'kv'[tensor % 2]}.{tensor // 2}"
        self._tensors[tensor] = self._pool.acquire(positions * self._width_bytes, Role.KV, label, tensor)
        self._moved[-1].append((tensor, past))

    def _move_back(self) -> None:
        """Undo the moves of the last step under way."""
        for tensor, past in reversed(self._moved.pop()):
            self._pool.release(self._tensors[tensor])
            self._tensors[tensor] = past


class StaticKV(Tensors):
    """K and V allocated once for the whole context and appended in place."""

    stable = True
    ahead = 1
    key = ()

    def __init__(self, pool: BufferPool, shape: KVShape, capacity: int) -> None:
        super().__init__(pool, shape, capacity)
        self._tensors = self._acquire(capacity)

    @property
    def class_bytes(self) -> int:
        return self._tensors[0].k.size

    def extend(self, rows: int, prompt_end: int = 0) -> list[KVTensors]:
        self._check_room(rows)
        self._rows.append(rows)
        return self._tensors

    def record_copies(self, rec: Recorder) -> None:
        """Record nothing: the past stays in place."""

    def commit(self) -> None:
        self.length += self._rows.popleft()

    def abandon(self) -> None:
        self._rows.clear()

    def close(self) -> None:
        self._release(self._tensors)
        self._tensors = []
