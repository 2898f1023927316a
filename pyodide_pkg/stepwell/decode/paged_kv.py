"""KV mode ``paged``: pages that are added as the sequence grows, and never copied.

A page is PAGE positions of K and V in every layer.  WGSL cannot choose a buffer by number and a kernel binds few, so
pages come from the pool in *slabs*: runs of them in one buffer per layer, larger as the sequence is longer.  Their
number grows with the logarithm of the length.  The pages of a prompt come in one slab: its end is known.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from struct import pack
from typing import NamedTuple

from stepwell.decode.kv_cache import Positions
from stepwell.kernels.kv import KVShape, KVSlabs, LayerKV, PageTable, table_words
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool
from stepwell.step.recorder import Recorder

PAGE = 16
"""Positions of a page."""
SPARE_PERCENT = 9
"""Percent of the needed positions that may be reserved beyond them, for sequences of SHORT positions and more."""
SHORT = 1000
"""Positions below which a sequence may reserve as much as one of this length."""


class Slab(NamedTuple):
    """A run of pages, in a buffer per layer."""

    number: int  # counted over all slabs of the cache's life
    first: int  # its first position
    positions: int
    buffers: list[Buffer]  # one per layer: the rows of K, then those of V

    @property
    def end(self) -> int:
        """The position after its last one."""
        return self.first + self.positions


class PagedKV(Positions):
    """K and V appended in place, in as many slabs as the sequence needs; steps under way keep their slabs."""

    stable = True  # between two slabs
    ahead = 1

    def __init__(self, pool: BufferPool, shape: KVShape, capacity: int) -> None:
        super().__init__(pool, shape, capacity)
        self._shape = shape
        self._slabs: list[Slab] = []
        self._count = 0  # slabs made in its life
        self._tables: list[Buffer] = []  # one per group of slabs that a launch binds together
        self._stale = False  # the tables do not say which slabs there are
        self._added: deque[int] = deque()  # slabs that each step under way has added
        self._last = 0  # the slab that the last step under way appends to
        self._views: tuple[tuple[int, ...], list[LayerKV]] = ((), [])  # what steps are given, while the key is this

    @property
    def class_bytes(self) -> int:
        """Reserved bytes of K, or of V, of one layer, in all slabs."""
        return sum(slab.buffers[0].size for slab in self._slabs) // 2

    @property
    def key(self) -> tuple[int, ...]:
        return (self._last, self._slabs[-1].number if self._slabs else 0)

    def fits(self, rows: int) -> int:
        """The rows up to the end of a slab: a step appends to one slab."""
        begin = self.end
        return next((min(rows, slab.end - begin) for slab in self._slabs if begin < slab.end), rows)

    def extend(self, rows: int, prompt_end: int = 0) -> Sequence[LayerKV]:
        self._check_room(rows)
        begin = self.end
        self._added.append(0)
        try:
            for positions in self._missing(self._room, begin + rows, prompt_end):
                self._add(positions)
                self._added[-1] += 1
            self._describe()
        except BaseException:
            self._take_back(self._added.pop())
            raise
        self._last = next(number for number, slab in enumerate(self._slabs) if begin < slab.end)
        self._rows.append(rows)
        if self._views[0] != self.key:  # once per slab, not per token
            table = PageTable(self._shape, self._spans(), tuple(self._tables))
            buffers = [[slab.buffers[layer] for slab in self._slabs] for layer in range(self._layers)]
            self._views = (self.key, [KVSlabs(table, slabs, self._last) for slabs in buffers])
        return self._views[1]

    def previews(self, prompt_end: int, end: int, buffer: Buffer) -> Iterator[Sequence[LayerKV]]:
        now, prompt_end, end = self._spans(), min(prompt_end, self._capacity), min(end, self._capacity)
        grown = self._grown(now, prompt_end)
        stages = [grown, now]
        while sum(grown[-1]) < end:
            grown = self._grown(grown, sum(grown[-1]) + 1)
            stages.append(grown)
        seen: set[int] = set()
        for spans in stages:
            table = PageTable(self._shape, spans, (buffer,) * -(-len(spans) // self._shape.slabs))
            if not seen.issuperset(table.bound):
                seen.update(table.bound)
                yield [KVSlabs(table, [buffer] * len(spans), len(spans) - 1)] * self._layers

    def record_copies(self, rec: Recorder) -> None:
        """Record nothing: the past stays in place."""

    def commit(self) -> None:
        self.length += self._rows.popleft()
        self._added.popleft()

    def abandon(self) -> None:
        """Undo all steps under way, and give their slabs back: there may be no memory for them."""
        self._rows.clear()
        while self._added:
            self._take_back(self._added.pop())

    def close(self) -> None:
        self._added.clear()
        self._take_back(len(self._slabs))

    # ---- inside -----------------------------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        return self._slabs[-1].end if self._slabs else 0

    def _spans(self) -> tuple[tuple[int, int], ...]:
        return tuple([(slab.first, slab.positions) for slab in self._slabs])

    def _grown(self, spans: tuple[tuple[int, int], ...], end: int) -> tuple[tuple[int, int], ...]:
        """The slabs after ``extend`` has made room up to ``end``, from those of ``spans``."""
        grown, room = list(spans), sum(spans[-1]) if spans else 0
        for positions in self._missing(room, end, end):
            grown.append((room, positions))
            room += positions
        return tuple(grown)

    def _missing(self, room: int, end: int, prompt_end: int) -> list[int]:
        """Positions of each slab to add to ``room`` positions for room up to ``end``.

        There are several where one would be larger than the device can bind.
        """
        if end <= room:
            return []
        needed = max(end, min(prompt_end, self._capacity))
        wanted = max(whole_pages(needed), reserved_positions(needed) // PAGE * PAGE)
        wanted = min(wanted, whole_pages(self._capacity)) - room
        largest = max(PAGE, self._pool.inventory.limits[Role.KV][0] // (2 * self._width_bytes) // PAGE * PAGE)
        return [largest] * ((wanted - 1) // largest) + [(wanted - 1) % largest + 1]

    def _add(self, positions: int) -> None:
        """Add a slab of ``positions`` in every layer, with a table if it opens a group; or raise, and add nothing."""
        held: list[Buffer] = []
        nbytes = 2 * positions * self._width_bytes
        try:
            for layer in range(self._layers):
                # every position that is read was written before, by this step's append at the latest
                buffer = self._pool.acquire(nbytes, Role.KV, f"kv.{layer}", layer, exact=True)
                held.append(buffer)
            if len(self._slabs) == len(self._tables) * self._shape.slabs:
                size = 16 * (self._shape.slabs + 1)
                table = self._pool.acquire(size, Role.UNIFORM, "page table", len(self._tables), host=True)
                self._tables.append(table)
        except BaseException:
            self._give_back(held)
            raise
        self._count += 1
        self._slabs.append(Slab(self._count, self._room, positions, held))
        self._stale = True

    def _take_back(self, count: int) -> None:
        """Give the last ``count`` slabs back."""
        for _ in range(count):
            self._give_back(self._slabs.pop().buffers)
            self._stale = True
        while len(self._tables) > -(-len(self._slabs) // self._shape.slabs):
            self._pool.release(self._tables.pop())

    def _describe(self) -> None:
        """Bring the tables up to date, in the queue's order: steps that were submitted see them as they were."""
        if not self._stale:
            return
        for group, table in enumerate(self._tables):
            words = table_words(self._shape, self._spans(), group)
            self._pool.device.write_buffer(table.id, 0, pack(f"<{len(words)}I", *words))
        self._stale = False

    def _give_back(self, buffers: list[Buffer]) -> None:
        while buffers:
            self._pool.release(buffers.pop())


def reserved_positions(needed: int) -> int:
    """Positions to reserve where ``needed`` are needed; short sequences double a few times."""
    suits_short = SHORT * (100 + SPARE_PERCENT) // 100
    return max(min(max(2 * needed, suits_short // 4), suits_short), needed * (100 + SPARE_PERCENT) // 100)


def whole_pages(positions: int) -> int:
    """``positions``, rounded up to whole pages."""
    return -(-positions // PAGE) * PAGE
