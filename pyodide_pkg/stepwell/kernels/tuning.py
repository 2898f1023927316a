"""What is chosen for an adapter: kernels, workgroup sizes, tiles.  ``launch/selection.py`` chooses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

from stepwell.errors import BadRequest
from stepwell.kernels.kv import ceil_div


class ProductKey(NamedTuple):
    """A product of a decode step with W[n][k], as far as its speed goes.

    ``before`` and ``after``: what the kernel computes around the product.  ``format``: the layout of W.  ``subgroup``:
    lanes, as the kernel's constant says it; 0: it knows none.  ``arithmetic`` is the rule's: options say whether to use
    integers, a measurement does not.
    """

    kernel: str
    before: str
    after: str
    format: str
    k: int
    n: int
    subgroup: int
    arithmetic: str = "f32"

    @classmethod
    def of(cls, kernel: str, constants: Mapping[str, Any]) -> Self:
        """The key of the variant with ``constants`` of ``kernel``: ``matvec`` or ``matmul_quad``."""
        around = (constants.get("before", ""), constants["after" if "after" in constants else "mode"])
        lanes = int(constants["subgroup"]) if "subgroup" in constants else 4 * bool(constants["subgroups"])
        shape = (constants["format"], constants["k"], constants["n"])
        return cls(kernel, *around, *shape, lanes, constants.get("arithmetic", "f32"))

    @property
    def outputs(self) -> int:
        """Outputs of the product: SwiGLU makes one of two rows of W."""
        return self.n // 2 if self.after == "swiglu" else self.n

    def __str__(self) -> str:
        around = f"{self.before} + {self.after}" if self.before else self.after
        return f"{self.kernel} {around} {self.format} {self.arithmetic} [{self.n:,} x {self.k:,}]"


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product of one row is cut into workgroups and threads; the fields are the kernels' constants.

    A workgroup has ``wide`` outputs side by side, ``per`` outputs per thread, and ``splits`` sets of ``wide`` threads
    that share k.  A thread of ``matvec`` reads ``ahead`` blocks of weights, one at least, before x is prepared, and
    then keeps ``ahead`` blocks under way; ``matmul_quad`` reads none ahead (0).
    """

    wide: int
    per: int
    splits: int
    ahead: int = 0
    arithmetic: Literal["f32", "dot4"] = "f32"

    def constants(self) -> tuple[tuple[str, int | str], ...]:
        """The constants of ``matvec``."""
        return (
            ("wide", self.wide), ("per", self.per), ("splits", self.splits), ("ahead", self.ahead),
            ("arithmetic", self.arithmetic),
        )  # fmt: skip

    @property
    def outputs(self) -> int:
        """Outputs of a workgroup."""
        return self.wide * self.per


class Tile(NamedTuple):
    """What a workgroup of a product of many rows computes: ``rows`` rows of x times ``columns`` rows of W.

    A thread takes ``tall`` times ``across`` of them.  ``rows / tall`` and ``columns / across`` are multiples of eight,
    and the first is at least ``across``, so that there is a thread for every column.
    """

    rows: int
    columns: int
    tall: int
    across: int

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.rows // self.tall * (self.columns // self.across)

    def nbytes(self, f16: bool = False) -> int:
        """Bytes of a workgroup's memory for a block of 32 along k, and with ``f16`` for a factor per column."""
        return 64 * self.rows + 68 * self.columns if f16 else 128 * (self.rows + self.columns)


TILES = (Tile(128, 64, 8, 8), Tile(64, 64, 8, 4), Tile(64, 32, 4, 4), Tile(32, 32, 4, 4), Tile(16, 32, 2, 4))
"""Ordered from the least workgroup-memory traffic to the most threads per step."""

BESIDE_SLABS = 3
"""Storage buffers that attention binds beside slabs: the queries, and the two that it leaves for its merge."""
MOST_SLABS = 12
"""The most slabs that a launch of attention binds: its kernel has its loads once for each."""
DOT4 = "packed_4x8_integer_dot_product"
"""WGSL's language extension for products of integers."""
SHADER_F16 = "shader-f16"
"""The device's feature for arithmetic in f16."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Kernels, workgroup sizes and tiles of an adapter.  Sizes are threads, outputs, rows or positions, as named.

    ``subgroups``: kernels may use the operations of subgroups of exactly four lanes.  Raises BadRequest for sizes that
    the kernels cannot have.
    """

    matmul: Literal["quad", "split"]
    subgroups: bool
    tile: int  # rows of a prefill step that share one unpacked weight
    norm_threads: int
    attention_chunk: int  # positions per workgroup; for attention_split also its threads
    argmax_threads: int
    elementwise_threads: int
    outputs_per_thread: int = 12  # quad, products of one row
    outputs_per_thread_of_tile: int = 8  # quad, products of `tile` rows
    split_outputs: int = 8  # split: outputs per workgroup
    split_threads: int = 128  # split: threads per workgroup, at most
    prefill_rows: int = 64  # rows of a step of a prompt, at most: a multiple of 64
    tiled_rows: int = 0  # split: products of this many rows and more are matmul_tile's; 0: never
    tiles: tuple[Tile, ...] = TILES  # matmul_tile: the tiles to choose from
    tile_threads: int = 24_576  # matmul_tile: threads that keep the GPU busy
    f16: bool = False  # matmul_tile computes in f16
    f16_run: int = 16  # terms of a pair of sums in f16: 16, or 32, which is faster and less exact
    argmax_parts: int = 1  # workgroups that share the logits
    sample_parts: int = 4  # the same for sampling; at most its threads
    sample_threads: int = 16  # a power of two up to 1,024
    fused: bool = False  # decode steps are recorded by kernels/fused.py
    subgroup: int = 0  # fused: the kernels' subgroup size; 0: they know none
    decode_chunk: int = 64  # fused: positions of a tile of attention
    attention_shares: int = 32  # fused: workgroups that share the tiles of a head, at most
    attention_threads: int = 256  # fused: threads per workgroup of attention
    attention_lanes: int = 8  # fused: threads that share a position's score, at most
    decode_threads: int = 512  # fused: threads per workgroup of products, at most
    decode_wide: int = 8  # fused: outputs side by side in a workgroup of products, at least
    decode_widest: int = 32  # fused: and at most
    most_per_thread: int = 4  # fused: outputs per thread of products, at most
    decode_ahead: int = 4  # fused: blocks of weights that a thread of products has under way
    dot4: bool = False  # fused: products in integers
    workgroups: int = 128  # fused: workgroups that keep the GPU busy
    workgroup_bytes: int = 16384  # memory of a workgroup
    slabs: int = 1  # slabs of paged K and V that a launch of attention binds, at most
    tilings: Mapping[ProductKey, Tiling] = field(default_factory=dict, hash=False)  # measured; these go before the rule

    def __post_init__(self) -> None:
        if self.subgroups and self.norm_threads != 4:
            raise BadRequest(f"norm_threads is {self.norm_threads}; with subgroups of four it must be 4.")
        parts, threads = self.sample_parts, self.sample_threads
        if not 1 <= parts <= threads <= 1024 or threads & (threads - 1):
            raise BadRequest(
                f"sampling in {parts} parts by {threads} threads; a power of two up to 1,024, and no more parts."
            )

    def tile_for(self, rows: int, columns: int, f16: bool = False) -> tuple[Tile, int]:
        """The tile of a product of ``rows`` rows with ``columns`` rows of W, and its stages: blocks in memory at once.

        The tile is the first of ``tiles`` that fits and leaves enough threads to fill the GPU, else the last that fits.
        None but the last of all is taller than the step.
        """
        fitting = [tile for tile in self.tiles if tile.rows <= rows and tile.nbytes(f16) <= self.workgroup_bytes]
        tile = next(
            (
                tile
                for tile in fitting
                if ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns) * tile.threads >= self.tile_threads
            ),
            fitting[-1] if fitting else self.tiles[-1],
        )
        return tile, 2 if 2 * tile.nbytes(f16) <= self.workgroup_bytes else 1
