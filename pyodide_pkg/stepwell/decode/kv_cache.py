"""The KV cache modes: who holds K and V, and what a step does to make room.

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

AHEAD_STEPS = 4  # how long before a tensor outgrows its buffer the next one is made
DONATE_POSITIONS = 64  # more than it needs, at least, a donated tensor has room for
DONATE_STEPS = 16  # how long before they are full tensors begin to move
AHEAD_BYTES = 1 << 20  # smaller tensors cross together and are cheap to make: nothing is gained ahead of that


class KVCache(Protocol):
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
        """How many of ``rows`` more positions one step can have."""

    def extend(self, rows: int, prompt_end: int = 0) -> Sequence[LayerKV]:
        """Room for ``rows`` more positions, and each layer's K and V.  Raises ContextFull.

        ``prompt_end`` is where the prompt ends that the step is part of: room that will be needed anyhow.
        """

    def previews(self, prompt_end: int, end: int, buffer: Buffer) -> Iterator[Sequence[LayerKV]]:
        """What ``extend`` would give, but with ``buffer`` in every place, and nothing is acquired.

        First in the steps of a prompt up to ``prompt_end``; then as far as others need other kernels, up to ``end``.
        """

    def record_copies(self, rec: Recorder) -> None:
        """Record what brings the past into the tensors of the last ``extend``."""

    def commit(self) -> None:
        """The oldest step under way has its result."""

    def abandon(self) -> None:
        """No step under way has happened."""

    def rewind(self) -> None:
        """The next step is at position 0.  Nothing is under way."""

    def close(self) -> None: ...


class Positions:
    """What all modes share: the geometry, and how far the sequence has come."""

    def __init__(self, pool: BufferPool, shape: KVShape, capacity: int) -> None:
        self._pool = pool
        self._layers, self._width_bytes, self._half = shape.layers, shape.width_bytes, shape.half
        self._capacity = capacity
        self._rows: deque[int] = deque()  # of the steps under way
        self.length = 0

    @property
    def end(self) -> int:
        return self.length + sum(self._rows)

    def rewind(self) -> None:
        self.length = 0

    def _check_room(self, rows: int) -> None:
        if self.end + rows > self._capacity:
            raise ContextFull(
                f"{self.end:,} positions are filled and {rows:,} more are wanted; the context holds "
                f"{self._capacity:,}. Ask for fewer tokens or a larger context."
            )


class Tensors(Positions):
    """The modes with a tensor per K and V: acquiring a full set or nothing, and carrying the past over."""

    stable = False
    ahead = 0

    def fits(self, rows: int) -> int:
        return rows

    def previews(self, prompt_end: int, end: int, buffer: Buffer) -> Iterator[Sequence[LayerKV]]:
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
        """K and V of every layer, out of all tensors in order."""
        return [KVTensors(k, v, self._half) for k, v in zip(tensors[::2], tensors[1::2], strict=True)]

    def _record_copies(self, rec: Recorder, past: list[KVTensors], present: list[KVTensors]) -> None:
        """Copy the filled positions into the larger tensors."""
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

    What runtimes do whose graphs return ``present`` outputs, and the pattern that the pool exists for.
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
    """Appended in place; a tensor that is about to be full moves to one that is half as large again.

    What runtimes do that may write a graph's ``past`` input: as many buffers as tensors, not twice as many, and a copy
    of the past once in a while.  Tensors move before they must, a few in each step, so that never many exist twice.
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
        """How many fit the buffer that a tensor is in."""
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
        """The last step under way has not happened."""
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
        """The past is where it is."""

    def commit(self) -> None:
        self.length += self._rows.popleft()

    def abandon(self) -> None:
        self._rows.clear()

    def close(self) -> None:
        self._release(self._tensors)
        self._tensors = []
