"""The K and V of one layer, as the kernels that append and read them bind them: whole tensors, or slabs of pages.

Attention works chunk by chunk: so many positions to a workgroup, whose results are put together afterwards.  What a
model records does not say where K and V are, nor in which type; ``wgsl/kv.wgsl`` is the other half of this module.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from stepwell.memory.buffer import Buffer
from stepwell.step.recorder import ByLength, Constant, Grid
from stepwell.step.shapes import power_of_two

Constants = tuple[tuple[str, Constant], ...]
UNUSED = 0xFFFF_FFFF  # in a table: beyond every position and chunk
KV_TYPES: Mapping[str, int] = {"f32": 4, "f16": 2}
"""In which K and V can be stored: bytes of a number.  Kernels compute in f32 either way.

f16 has 11 bits of precision; a value beyond 65,504 does not fit: WGSL leaves open what is stored, usually infinity.
"""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class KVShape(NamedTuple):
    """What a model's KV cache is made of.

    ``width_bytes`` are of one position of one K or V tensor.  A launch that reads binds ``slabs`` slabs at most, which
    are a *group*; ``chunks`` are the positions of a workgroup of attention, for the steps of many rows and for those of
    one.  ``half``: the numbers are f16, else f32.
    """

    layers: int
    width_bytes: int
    slabs: int = 1
    chunks: tuple[int, int] = (64, 64)
    half: bool = False

    def bound(self, slabs: int) -> int:
        """How many places for slabs the kernel has that reads a group of so many.

        Its loads are there once for each place, and a thread looks for its slab among them.  Powers of two, so that a
        sequence which grows needs few kernels.
        """
        return min(power_of_two(slabs), self.slabs)


class Read(NamedTuple):
    """A launch of attention: what its kernel is compiled with, what it binds, and its grid."""

    constants: Constants
    buffers: tuple[Buffer, ...]
    grid: Grid


class LayerKV(Protocol):
    """What the operations that append to the K and V of a layer, and read them, bind beside their own buffers."""

    def append_constants(self) -> Constants: ...

    def appended(self) -> tuple[Buffer, ...]: ...

    def reads(self, chunk: int, y: int, z: int, shares: int = 0) -> Iterator[Read]:
        """The launches that it takes to read all positions by chunks of so many: a workgroup to a chunk in x, or so
        many that share all chunks.
        """

    def merge_constants(self, chunk: int) -> Constants:
        """Of what puts the chunks together."""

    def counted(self) -> tuple[Buffer, ...]:
        """Where that finds the number of chunks."""

    def chunks(self, length: int, chunk: int) -> int:
        """How many chunks of that size ``length`` positions have."""


@dataclass(frozen=True, slots=True)
class KVTensors:
    """K and V [position][kv_heads * head_dim], a buffer each, of f16 (``half``) or f32."""

    k: Buffer
    v: Buffer
    half: bool = False

    @property
    def buffers(self) -> tuple[Buffer, Buffer]:
        return self.k, self.v

    def append_constants(self) -> Constants:
        return (("slabs", 0), ("half", self.half))

    def appended(self) -> tuple[Buffer, ...]:
        return self.buffers

    def reads(self, chunk: int, y: int, z: int, shares: int = 0) -> Iterator[Read]:
        grid = ByLength(chunk, y, z, shares) if shares else ByLength(chunk, y, z)
        yield Read(self.merge_constants(chunk), self.buffers, grid)

    def merge_constants(self, chunk: int) -> Constants:
        return (("slabs", 0), ("half", self.half), ("chunk", chunk))

    def counted(self) -> tuple[Buffer, ...]:
        return ()

    def chunks(self, length: int, chunk: int) -> int:
        return ceil_div(length, chunk)


@dataclass(frozen=True, slots=True)
class PageTable:
    """Which positions are in which slab, the same in every layer.

    ``slabs`` are (first position, positions) in order; ``groups`` the tables of those that a launch binds together, on
    the GPU: see ``table_words``.
    """

    shape: KVShape
    slabs: tuple[tuple[int, int], ...]
    groups: tuple[Buffer, ...]

    @property
    def bound(self) -> tuple[int, ...]:
        """Per group, how many places for slabs the kernel has that reads it."""
        count, most = len(self.slabs), self.shape.slabs
        return tuple([self.shape.bound(min(most, count - first)) for first in range(0, count, most)])

    def chunks(self, chunk: int, slabs: slice = slice(None)) -> int:
        """How many of that size; a chunk is in one slab."""
        return sum(ceil_div(positions, chunk) for _, positions in self.slabs[slabs])


@dataclass(frozen=True, slots=True)
class KVSlabs:
    """One layer's slabs in order, each with the K and V of a run of positions; the step appends to ``last``."""

    table: PageTable
    slabs: Sequence[Buffer]
    last: int

    def append_constants(self) -> Constants:
        return (("slabs", self.table.shape.slabs), ("half", self.table.shape.half))

    def appended(self) -> tuple[Buffer, ...]:
        return self.table.groups[self.last // self.table.shape.slabs], self.slabs[self.last]

    def reads(self, chunk: int, y: int, z: int, shares: int = 0) -> Iterator[Read]:
        most = self.table.shape.slabs
        for number, (table, bound) in enumerate(zip(self.table.groups, self.table.bound, strict=True)):
            group = slice(number * most, (number + 1) * most)
            slabs = tuple(self.slabs[group])
            rest = slabs[-1:] * (bound - len(slabs))
            workgroups = min(self.table.chunks(chunk), shares) if shares else self.table.chunks(chunk, group)
            yield Read(self._constants(bound, chunk), (table, *slabs, *rest), (workgroups, y, z))

    def merge_constants(self, chunk: int) -> Constants:
        return self._constants(self.table.shape.slabs, chunk)

    def counted(self) -> tuple[Buffer, ...]:
        return self.table.groups[-1:]

    def chunks(self, length: int, chunk: int) -> int:
        """Of all slabs, however many of their positions are filled."""
        return self.table.chunks(chunk)

    def _constants(self, slabs: int, chunk: int) -> Constants:
        shape = self.table.shape
        column = "zw"[shape.chunks.index(chunk)]
        return (("slabs", slabs), ("half", shape.half), ("column", column), ("chunk", chunk))


def table_words(shape: KVShape, slabs: Sequence[tuple[int, int]], group: int) -> list[int]:
    """The 32-bit words of a group's table: how ``wgsl/kv.wgsl`` finds a chunk's slab, and a position's.

    It has room for all slabs that the group may come to have, so that it stays the same buffer while it grows.
    """
    counts = [list(accumulate((ceil_div(n, chunk) for _, n in slabs), initial=0)) for chunk in shape.chunks]
    end = min((group + 1) * shape.slabs, len(slabs))
    words = [*(count[end] for count in counts), *(count[-1] for count in counts)]
    for slab in range(group * shape.slabs, (group + 1) * shape.slabs):
        words += [*slabs[slab], *(count[slab] for count in counts)] if slab < len(slabs) else [UNUSED] * 4
    return words
