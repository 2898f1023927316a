"""The KV cache modes: who holds K and V, and what a step does to make room.

K and V of a layer are f32 [position][kv_heads * head_dim] (position-major, so that growing is one plain copy).
A step is a transaction: ``extend`` before recording, then ``commit`` once its result is back.  Several steps can be
under way; they commit in order, or are all abandoned.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from stepwell.errors import ContextFull
from stepwell.launch.recorder import Recorder
from stepwell.memory.buffer import Buffer, Role, Zero
from stepwell.memory.pool import BufferPool

Pair = tuple[Buffer, Buffer]
AHEAD_STEPS = 4  # how long before a tensor outgrows its buffer the next one is made
AHEAD_BYTES = 1 << 20  # smaller tensors cross together and are cheap to make: nothing is gained ahead of that


class KVCache(Protocol):
    length: int  # positions that are filled and committed
    stable: bool  # every step uses the same tensors

    @property
    def end(self) -> int:
        """Positions with those of the steps under way: where the next step begins."""

    @property
    def class_bytes(self) -> int:
        """Reserved bytes of one K or V tensor: the size class that the staircase is about."""

    @property
    def key(self) -> tuple[int, ...]:
        """The handles that the last step under way uses and another one may not."""

    def extend(self, rows: int) -> list[Pair]:
        """Room for ``rows`` more positions: (K, V) per layer.  Raises ContextFull."""

    def carry(self, rec: Recorder) -> None:
        """Record what brings the past into the tensors of the last ``extend``."""

    def commit(self) -> None:
        """The oldest step under way has its result."""

    def abandon(self) -> None:
        """No step under way has happened."""

    def rewind(self) -> None:
        """The next step is at position 0.  Nothing is under way."""

    def close(self) -> None: ...


class Tensors:
    """What the modes share: the geometry, acquiring a full set of K and V or nothing, and carrying the past over."""

    stable = False

    def __init__(self, pool: BufferPool, layers: int, width_bytes: int, capacity: int) -> None:
        self._pool = pool
        self._layers = layers
        self._width_bytes = width_bytes
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

    def _acquire(self, positions: int, first_site: int = 0) -> list[Pair]:
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
        return list(zip(held[::2], held[1::2], strict=True))

    def _carry(self, rec: Recorder, past: list[Pair], present: list[Pair]) -> None:
        """Copy the filled positions into the larger tensors."""
        for pairs in zip(past, present, strict=False):  # there is no past in the first step
            for source, target in zip(*pairs, strict=True):
                rec.copy_past(source, target, self._width_bytes)

    def _release(self, pairs: list[Pair]) -> None:
        # in reverse: with LIFO free lists each site gets its own buffer back
        for k, v in reversed(pairs):
            self._pool.release(v)
            self._pool.release(k)


class GrowKV(Tensors):
    """A new, larger present tensor per K and V at every step; the past is copied into it, then released.

    What runtimes do whose graphs return ``present`` outputs, and the pattern that the pool exists for.
    """

    def __init__(self, pool: BufferPool, layers: int, width_bytes: int, capacity: int) -> None:
        super().__init__(pool, layers, width_bytes, capacity)
        self._sets: deque[list[Pair]] = deque([[]])  # that of the committed positions, then one per step under way
        self._past: deque[list[Pair]] = deque()  # of steps before, while others are under way

    @property
    def class_bytes(self) -> int:
        return self._sets[0][0][0].size if self._sets[0] else 0

    @property
    def key(self) -> tuple[int, ...]:
        return tuple([buffer.id for pairs in (self._sets[-2], self._sets[-1]) for pair in pairs for buffer in pair])

    def extend(self, rows: int) -> list[Pair]:
        self._check_room(rows)
        if self._past:
            # one for one, the oldest: so the sets take turns whether or not others are in flight when a step begins,
            # and a plan that was recorded with none in flight fits
            self._release(self._past.popleft())
        self._sets.append(self._acquire(self.end + rows))
        self._rows.append(rows)
        return self._sets[-1]

    def carry(self, rec: Recorder) -> None:
        self._carry(rec, self._sets[-2], self._sets[-1])

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


class StaticKV(Tensors):
    """K and V allocated once for the whole context and appended in place."""

    stable = True
    key = ()

    def __init__(self, pool: BufferPool, layers: int, width_bytes: int, capacity: int) -> None:
        super().__init__(pool, layers, width_bytes, capacity)
        self._tensors = self._acquire(capacity)

    @property
    def class_bytes(self) -> int:
        return self._tensors[0][0].size

    def extend(self, rows: int) -> list[Pair]:
        self._check_room(rows)
        self._rows.append(rows)
        return self._tensors

    def carry(self, rec: Recorder) -> None:
        """The past is where it is."""

    def commit(self) -> None:
        self.length += self._rows.popleft()

    def abandon(self) -> None:
        self._rows.clear()

    def close(self) -> None:
        self._release(self._tensors)
        self._tensors = []


KV_MODES: dict[str, tuple[Callable[[BufferPool, int, int, int], KVCache], str]] = {
    "grow": (GrowKV, "a new, larger tensor per K and V at every token, the past copied in: what the pool exists for"),
    "static": (StaticKV, "allocated once for the whole context, appended in place"),
}
