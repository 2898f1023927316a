"""The K and V of one layer, as the kernels that append and read them bind them: whole tensors, or slabs of pages.

Attention works chunk by chunk: a workgroup has a chunk of the positions, and a merge puts the chunks' results together.
Models and operations pass a ``LayerKV`` on: they do not know where K and V are, nor in which type.  ``wgsl/kv.wgsl`` is
the other half of this module.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from stepwell.memory.buffer import Buffer
from stepwell.step.recorder import ByLength, Constant, Grid
from stepwell.step.shapes import power_of_two

Constants = tuple[tuple[str, Constant], ...]
"""The constants of a variant: (name, value) pairs."""
UNUSED = 0xFFFF_FFFF
"""An unused word of a table: beyond every position and chunk."""
KV_TYPES: Mapping[str, int] = {"f32": 4, "f16": 2}
"""The types that K and V can be stored in, and the bytes of a number.  Kernels compute in f32 either way.

f16 takes half of all KV bytes: two numbers in a u32, by pack2x16float, which every device has.  It has 11 bits of
precision, and a value beyond 65,504 does not fit: WGSL leaves open what is stored, usually infinity, and then the
logits are NaN.
"""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class KVShape(NamedTuple):
    """What a model's KV cache is made of.

    ``width_bytes``: bytes of one position of one K or V tensor.  ``slabs``: the most slabs that a launch which reads
    binds; together they are a *group*.  ``chunks``: positions per workgroup of attention, in steps of many rows and in
    steps of one.  ``half``: the numbers are f16, else f32.
    """

    layers: int
    width_bytes: int
    slabs: int = 1
    chunks: tuple[int, int] = (64, 64)
    half: bool = False

    def bound(self, slabs: int) -> int:
        """Slab bindings of the kernel that reads a group of ``slabs``.

        The kernel has its loads once per binding, and a thread looks for its slab among them.  Powers of two, so that
        a growing sequence needs few kernels.
        """
        return min(power_of_two(slabs), self.slabs)


class Read(NamedTuple):
    """A launch of attention: what its kernel is compiled with, what it binds, and its grid."""

    constants: Constants
    buffers: tuple[Buffer, ...]
    grid: Grid


class LayerKV(Protocol):
    """What the operations that append to the K and V of a layer, and read them, bind beside their own buffers."""

    def append_constants(self) -> Constants:
        """The constants of the kernel that appends the step's K and V."""

    def appended(self) -> tuple[Buffer, ...]:
        """The buffers that the kernel which appends binds."""

    def reads(self, chunk: int, y: int, z: int, shares: int = 0) -> Iterator[Read]:
        """The launches that read all positions by chunks of ``chunk``, with grids (x, y, z).

        x has a workgroup per chunk, or, with ``shares``, at most ``shares`` workgroups that share all chunks.
        """

    def merge_constants(self, chunk: int) -> Constants:
        """The constants of the kernel that puts the results of chunks of ``chunk`` positions together."""

    def counted(self) -> tuple[Buffer, ...]:
        """The buffers in which the merge finds the number of chunks; none where it follows from the length."""

    def chunks(self, length: int, chunk: int) -> int:
        """Chunks of ``chunk`` positions that a sequence of ``length`` has."""


@dataclass(frozen=True, slots=True)
class KVTensors:
    """K and V [position][kv_heads * head_dim], a buffer each, in f16 (``half``) or f32."""

    k: Buffer
    v: Buffer
    half: bool = False

    @property
    def buffers(self) -> tuple[Buffer, Buffer]:
        """K and V."""
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
    """Which positions are in which slab: the same in every layer.

    ``slabs`` are (first position, positions) in order.  ``groups`` are the tables on the GPU, one per group of slabs
    that a launch binds together (``table_words``).
    """

    shape: KVShape
    slabs: tuple[tuple[int, int], ...]
    groups: tuple[Buffer, ...]

    @property
    def bound(self) -> tuple[int, ...]:
        """Slab bindings of the kernel that reads a group, per group."""
        count, most = len(self.slabs), self.shape.slabs
        return tuple([self.shape.bound(min(most, count - first)) for first in range(0, count, most)])

    def chunks(self, chunk: int, slabs: slice = slice(None)) -> int:
        """Chunks of ``chunk`` positions in ``slabs``; no chunk is in two of them."""
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
        """Chunks of all slabs, however many of their positions are filled."""
        return self.table.chunks(chunk)

    def _constants(self, slabs: int, chunk: int) -> Constants:
        shape = self.table.shape
        column = "zw"[shape.chunks.index(chunk)]
        return (("slabs", slabs), ("half", shape.half), ("column", column), ("chunk", chunk))


def table_words(shape: KVShape, slabs: Sequence[tuple[int, int]], group: int) -> list[int]:
    """The 32-bit words of the table of group number ``group``, by which ``wgsl/kv.wgsl`` finds a position's slab.

    ``slabs`` are (first position, positions) of all groups.  The table has room for as many slabs as a group can have,
    so that it stays in one buffer while the group grows.
    """
    counts = [list(accumulate((ceil_div(n, chunk) for _, n in slabs), initial=0)) for chunk in shape.chunks]
    end = min((group + 1) * shape.slabs, len(slabs))
    words = [*(count[end] for count in counts), *(count[-1] for count in counts)]
    for slab in range(group * shape.slabs, (group + 1) * shape.slabs):
        words += [*slabs[slab], *(count[slab] for count in counts)] if slab < len(slabs) else [UNUSED] * 4
    return words
