"""Which kernel variants an adapter gets.  One place decides; the model code only names operations."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

from stepwell.errors import BadRequest
from stepwell.gpu.device import DeviceInfo
from stepwell.kernels.kv import ceil_div
from stepwell.launch.options import Kernels, LaunchOptions, Switch


class ProductKey(NamedTuple):
    """A product of a decode step, as far as its speed goes: kernel, what is computed around W[n][k], how W is stored.

    ``subgroup``: lanes, as the kernel's constant says it; 0: it knows none.  ``arithmetic`` is the rule's: options say
    whether integers are to be used, a measurement does not.
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
        """Of the constants of ``matvec``, or of ``matmul_quad``, which has nothing before it."""
        around = (constants.get("before", ""), constants["after" if "after" in constants else "mode"])
        lanes = int(constants["subgroup"]) if "subgroup" in constants else 4 * bool(constants["subgroups"])
        shape = (constants["format"], constants["k"], constants["n"])
        return cls(kernel, *around, *shape, lanes, constants.get("arithmetic", "f32"))

    @property
    def outputs(self) -> int:
        return self.n // 2 if self.after == "swiglu" else self.n

    def __str__(self) -> str:
        around = f"{self.before} + {self.after}" if self.before else self.after
        return f"{self.kernel} {around} {self.format} {self.arithmetic} [{self.n:,} x {self.k:,}]"


@dataclass(frozen=True, slots=True)
class Spread:
    """How a workgroup of a product shares out its work; the fields are named as the kernels' constants.

    ``wide`` outputs side by side, ``per`` outputs per thread, ``splits`` sets of ``wide`` threads that share k.
    A thread of ``matvec`` reads ``ahead`` blocks of weights, one at least, before x is prepared, and then keeps so many
    under way; ``matmul_quad`` has none.
    """

    wide: int
    per: int
    splits: int
    ahead: int = 0
    arithmetic: Literal["f32", "dot4"] = "f32"

    def constants(self) -> tuple[tuple[str, int | str], ...]:
        return (
            ("wide", self.wide), ("per", self.per), ("splits", self.splits), ("ahead", self.ahead),
            ("arithmetic", self.arithmetic),
        )  # fmt: skip

    @property
    def outputs(self) -> int:
        """Of a workgroup."""
        return self.wide * self.per


class Tile(NamedTuple):
    """What a workgroup of a product of many rows computes: ``rows`` times ``columns`` (rows of W), of which a thread
    takes ``tall`` times ``across``.

    ``rows / tall`` and ``columns / across`` are multiples of eight, and the first is at least ``across``, so that there
    is a thread for every column.
    """

    rows: int
    columns: int
    tall: int
    across: int

    @property
    def threads(self) -> int:
        return self.rows // self.tall * (self.columns // self.across)

    def nbytes(self, f16: bool = False) -> int:
        """Of a workgroup's memory, for a block of 32 and the factor of its columns in f16."""
        return 64 * self.rows + 68 * self.columns if f16 else 128 * (self.rows + self.columns)


TILES = (Tile(128, 64, 8, 8), Tile(64, 64, 8, 4), Tile(64, 32, 4, 4), Tile(32, 32, 4, 4), Tile(16, 32, 2, 4))
"""From those that read workgroup memory the least, per product, to those of which a step has most threads."""

BESIDE_SLABS = 3  # storage buffers that attention binds: the queries, and what it leaves for its merge
MOST_SLABS = 12  # attention's loads are there once for each
DOT4 = "packed_4x8_integer_dot_product"  # WGSL's language extension
SHADER_F16 = "shader-f16"  # the device's feature


@dataclass(frozen=True, slots=True)
class Tuning:
    """Kernels, workgroup sizes and tiles.  Sizes are threads, outputs, rows or positions, as named.

    ``subgroups``: kernels may use the operations of subgroups of exactly four lanes.
    """

    matmul: Literal["quad", "split"]
    subgroups: bool
    tile: int  # rows of a prefill step that share one unpacked weight
    norm_threads: int
    attention_chunk: int  # positions per workgroup; for attention_split also its threads
    argmax_threads: int
    elementwise_threads: int
    outputs_per_thread: int = 12  # quad, one row
    outputs_per_thread_of_tile: int = 8  # quad, `tile` rows
    split_outputs: int = 8  # split: outputs per workgroup
    split_threads: int = 128  # split: threads per workgroup, at most
    prefill_rows: int = 64  # of a step of a prompt, at most: a multiple of 64
    tiled_rows: int = 0  # split: from so many rows on, products are matmul_tile's; 0: never
    tiles: tuple[Tile, ...] = TILES  # for it to choose from
    tile_threads: int = 24_576  # of its tiles, that keep the GPU busy
    f16: bool = False  # it computes in f16
    f16_run: int = 16  # terms of a pair of sums in f16: 16, or 32, which is faster and less exact
    argmax_parts: int = 1  # workgroups that share the logits
    sample_parts: int = 4  # the same, of sampling; at most its threads
    sample_threads: int = 16  # a power of two up to 1,024
    fused: bool = False  # decode steps by kernels/fused.py
    subgroup: int = 0  # its kernels' subgroup size; 0: they know none
    decode_chunk: int = 64  # positions of a tile of its attention
    attention_shares: int = 32  # workgroups that share the tiles of a head, at most
    attention_threads: int = 256  # per workgroup of its attention
    attention_lanes: int = 8  # threads that share a position's score, at most
    decode_threads: int = 512  # of its products, at most
    decode_wide: int = 8  # outputs side by side in a workgroup of its products, at least
    decode_widest: int = 32  # and at most
    most_per_thread: int = 4  # outputs of its products
    decode_ahead: int = 4  # blocks that a thread of its products has under way
    dot4: bool = False  # its products in integers
    workgroups: int = 128  # that keep the GPU busy
    workgroup_bytes: int = 16384  # of a workgroup's memory
    slabs: int = 1  # of paged K and V that a launch of attention binds, at most
    spreads: Mapping[ProductKey, Spread] = field(default_factory=dict, hash=False)  # measured ones, before the rule's

    def __post_init__(self) -> None:
        if self.subgroups and self.norm_threads != 4:
            raise BadRequest(f"norm_threads is {self.norm_threads}; with subgroups of four it must be 4.")
        parts, threads = self.sample_parts, self.sample_threads
        if not 1 <= parts <= threads <= 1024 or threads & (threads - 1):
            raise BadRequest(
                f"sampling in {parts} parts by {threads} threads; a power of two up to 1,024, and no more parts."
            )

    def tile_for(self, rows: int, columns: int, f16: bool = False) -> tuple[Tile, int]:
        """The tile of a product of so many rows with so many rows of W, and how many blocks are in memory at once.

        The first of ``tiles`` that fits and that leaves enough threads to fill the GPU; else the last that fits.
        None but the last is taller than the step.
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


def tuning_for(
    info: DeviceInfo,
    options: LaunchOptions | None = None,
    spreads: Mapping[ProductKey, Spread] | None = None,
) -> Tuning:
    """The kernels of an adapter, as far as ``options`` leave the choice to it; ``spreads`` were measured on it.

    CPU adapters get few, fat threads and no barriers; GPUs get many threads, and decode steps of few launches.  On a
    CPU adapter a load costs as much as ten arithmetic operations, whatever its address, and a barrier costs more still;
    a pipeline of 12 outputs per thread is where compile time starts to outgrow the gain.  Raises BadRequest for
    what is to be on and cannot be, with the reason.
    """
    options = options or LaunchOptions()
    split = not info.is_software if options.kernels is Kernels.AUTO else options.kernels is Kernels.SPLIT
    fused = _is_on(options.fused, info)
    lanes = info.subgroup_size if info.subgroup_size == info.subgroup_max_size else 0
    if options.subgroups is Switch.OFF:
        lanes = 0
    quads = not split and lanes == 4
    subgroup = lanes if fused and 4 <= lanes <= 64 else 0
    if options.subgroups is Switch.ON and not (quads or subgroup):
        raise BadRequest(f"subgroups is on, but {_why_no_subgroups(info, split, fused)}")
    packed = DOT4 in info.language and subgroup > 0
    if options.dot4 is Switch.ON and not packed:
        raise BadRequest(f"dot4 is on, but {_why_no_dot4(info, fused)}")
    halves = SHADER_F16 in info.features and split
    if options.f16 is Switch.ON and not halves:
        raise BadRequest(f"f16 is on, but {_why_no_f16(info)}")
    return replace(
        _for_decode(_split() if split else _quad(quads), info),
        fused=fused,
        subgroup=subgroup,
        dot4=packed and _is_on(options.dot4, info),
        f16=halves and _is_on(options.f16, info),
        spreads=spreads if options.tuned and spreads is not None else {},
        workgroup_bytes=info.limits.get("maxComputeWorkgroupStorageSize", 16384),
    )


def _is_on(switch: Switch, info: DeviceInfo) -> bool:
    """``auto`` of what is for GPUs."""
    return not info.is_software if switch is Switch.AUTO else switch is Switch.ON


def _quad(quads: bool) -> Tuning:
    return Tuning(
        matmul="quad",
        subgroups=quads,
        tile=4,
        norm_threads=4,
        attention_chunk=128 if quads else 32,
        argmax_threads=16,
        elementwise_threads=4,
    )


def _split() -> Tuning:
    return Tuning(
        matmul="split",
        subgroups=False,
        tile=4,
        norm_threads=64,
        attention_chunk=64,
        argmax_threads=256,
        elementwise_threads=64,
        prefill_rows=256,
        tiled_rows=16,
        argmax_parts=64,
        sample_parts=64,
        sample_threads=256,
    )


def _for_decode(tuning: Tuning, info: DeviceInfo) -> Tuning:
    """The workgroups of fused decode steps: a CPU adapter can stand small ones only."""
    if info.is_software:
        return replace(
            tuning,
            decode_wide=4,
            decode_widest=8,
            decode_threads=8,
            decode_chunk=32,
            attention_threads=32,
            workgroups=32,
        )
    slabs = min(MOST_SLABS, info.limits.get("maxStorageBuffersPerShaderStage", 8) - BESIDE_SLABS)
    return replace(
        tuning,
        decode_threads=min(512, info.limits.get("maxComputeInvocationsPerWorkgroup", 256)),
        slabs=slabs if tuning.matmul == "split" else 1,  # quad kernels are long: launches are cheaper
    )


def _why_no_subgroups(info: DeviceInfo, split: bool, fused: bool) -> str:
    least, most = info.subgroup_size, info.subgroup_max_size
    if not least:
        return "this device has none: leave it at auto or off."
    if least != most:
        return (
            f"those of this adapter have {least} to {most} lanes, and kernels are made for one size: use auto or off."
        )
    if fused:
        return f"those of this adapter have {least} lanes; kernels of decode steps know 4 to 64: use auto or off."
    family = "split kernels know none" if split else f"quad kernels know those of 4 lanes, this adapter's have {least}"
    return f"{family}: set fused to on, whose decode steps use them, or leave subgroups at auto."


def _why_no_dot4(info: DeviceInfo, fused: bool) -> str:
    if DOT4 not in info.language:
        return f"this browser's WGSL does not have {DOT4}: leave it at auto or off."
    if not fused:
        return "only fused decode steps know it: set fused to on, or leave dot4 at auto."
    return "its kernels need subgroups of one size, 4 to 64 lanes: leave dot4 at auto or off."


def _why_no_f16(info: DeviceInfo) -> str:
    if SHADER_F16 not in info.features:
        return f"this device does not have {SHADER_F16}: leave it at auto or off."
    return "quad kernels know none: set kernels to split, or leave f16 at auto."
