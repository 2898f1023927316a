"""The operations of a transformer step as recorder calls: each picks its kernel variant and its grid.

Shapes: ``rows`` are the tokens of this step; activations are f32, row-major.  Position, rows and length reach every
kernel with its launch (``wgsl/step.wgsl``).  ``node`` names the operation of the model's graph: launches of one node
share a bounded set of variants.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from stepwell.errors import BadRequest
from stepwell.kernels.kv import LayerKV, ceil_div
from stepwell.kernels.layouts import LAYOUTS, MatrixLayout
from stepwell.kernels.tuning import ProductKey, Tuning
from stepwell.memory.buffer import Buffer
from stepwell.step.recorder import Recorder, Variant

REPACK_THREADS = 64
"""Threads per workgroup: enough that 4 million rows, far more than a vocabulary has, stay below 65,535 workgroups."""
HALVE_THREADS = 128
"""Threads per workgroup."""
ROPE_BITS = 20
"""Binary digits of a position: rotations are there for positions below 2^20."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix [n][k] on the GPU, in the layout named ``format`` (layouts.py); floats have no ``scales``."""

    format: str
    n: int
    k: int
    words: Buffer
    scales: Buffer | None

    def __post_init__(self) -> None:
        if self.k % 32:
            raise BadRequest(f"a matrix has rows of {self.k} weights; multiples of 32 are supported.")
        if self.format not in LAYOUTS:
            raise BadRequest(f"no matrix layout {self.format!r}; there are {', '.join(LAYOUTS)}.")

    @property
    def layout(self) -> MatrixLayout:
        """The layout named ``format``."""
        return LAYOUTS[self.format]

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that a kernel binds: words, and scales if there are any."""
        return (self.words,) if self.scales is None else (self.words, self.scales)

    def outputs(self, mode: str) -> int:
        """Outputs of a product with the matrix; ``mode`` "swiglu" makes one of a gate row and an up row."""
        return self.n // 2 if mode == "swiglu" else self.n


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention geometry of one layer.

    The first ``rope_dim`` values of a head of q and k are rotated and stretched by ``rope_scale``.  A position sees
    ``window`` positions, itself included; 0: itself and all before it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    window: int = 0
    rope_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise BadRequest(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly.")
        if self.head_dim % 4:
            raise BadRequest(f"head_dim is {self.head_dim}; a multiple of 4 is needed.")

    def constants(self) -> tuple[tuple[str, int], ...]:
        """The constants of kernels that know heads."""
        return (("heads", self.heads), ("kv_heads", self.kv_heads), ("head_dim", self.head_dim))

    def rope_constants(self, long_from: int) -> tuple[tuple[str, int | float], ...]:
        """The constants of kernels that rotate; ``long_from`` as in ``Ops.rope_append``."""
        return (
            ("rope_dim", self.rope_dim), ("rope_scale", self.rope_scale), ("long_from", long_from), ("bits", ROPE_BITS),
        )  # fmt: skip


class Ops:
    """Records the operations of a step with the kernels that ``tuning`` chooses."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning

    def repack(
        self, rec: Recorder, raw: Buffer, source: str, matrix: Matrix, rows: int, first_row: int,
        pairing: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Fill ``rows`` rows of ``matrix``, from ``first_row`` on, with GGUF blocks of format ``source`` in ``raw``.

        ``pairing`` (count, head_dim, rope_dim): the first ``count`` rows belong to heads that are rotated by halves, in
        pairs (i, i + rope_dim / 2); they are laid out for pairs of neighbours.  Empty: no rows are.
        """
        threads = REPACK_THREADS
        constants = (
            ("source", source),
            ("format", matrix.format),
            ("rows", rows),
            ("columns", matrix.k),
            ("first_row", first_row),
            ("all_rows", matrix.n),
            ("pairing", pairing),
            ("threads", threads),
        )
        rec.launch(Variant("repack", constants), (raw, *matrix.buffers), (ceil_div(rows, threads), matrix.k // 32, 1))

    def noise(self, rec: Recorder, matrix: Matrix, deviation: float) -> None:
        """Fill ``matrix`` with weights of mean 0 and this standard ``deviation``; the step's position is the seed."""
        threads = REPACK_THREADS
        constants = (
            ("format", matrix.format),
            ("n", matrix.n),
            ("k", matrix.k),
            ("deviation", deviation),
            ("threads", threads),
        )
        rec.launch(Variant("noise", constants), matrix.buffers, (ceil_div(matrix.n, threads), matrix.k // 32, 1))

    def embed(self, rec: Recorder, ids: Buffer, x: Buffer, table: Matrix, rows: int) -> None:
        """x[rows][k] = the rows of ``table`` that ``ids`` name."""
        blocks = table.k // 32
        constants = (("format", table.format), ("width", table.k), ("vocab", table.n), ("threads", 32))
        grid = (ceil_div(blocks, 32), rows, 1)
        rec.launch(Variant("embed", constants), (ids, x, *table.buffers), grid, "embed")

    def rms_norm(
        self,
        rec: Recorder,
        x: Buffer,
        weight: Buffer,
        y: Buffer,
        *,
        width: int,
        eps: float,
        rows: int,
        last: bool = False,
    ) -> None:
        """y[rows][width] = RMSNorm(x); with ``last`` only the step's last row, into row 0 of ``y``."""
        tuning = self.tuning
        constants = (
            ("width", width),
            ("eps", eps),
            ("threads", tuning.norm_threads),
            ("subgroups", tuning.subgroups),
            ("last", last),
        )
        node, rows = ("last_norm", 1) if last else ("norm", rows)
        rec.launch(Variant("rms_norm", constants), (x, weight, y), (rows, 1, 1), node, (rec.shapes.width(rows),))

    def halves_bytes(self, rec: Recorder, rows: int, matrices: Iterable[Matrix]) -> int:
        """Bytes of the workspace of products of ``rows`` rows with ``matrices``; 0: they need none."""
        if not (self.tuning.f16 and self._tiled(rows)):
            return 0  # without a look at the matrices: most steps end here
        longest = max((matrix.k for matrix in matrices if matrix.layout.quantised), default=0)
        return rec.shapes.width(rows) * (2 * longest + 16) if longest else 0

    def _tiled(self, rows: int) -> bool:
        """Whether products of ``rows`` rows are matmul_tile's."""
        return 0 < self.tuning.tiled_rows <= rows

    def halve(self, rec: Recorder, x: Buffer, halves: Buffer, k: int, rows: int) -> None:
        """halves = the rows of x[rows][k] as f16, and the power of two that each was divided by."""
        constants = (("k", k), ("threads", HALVE_THREADS))
        rec.launch(Variant("halve", constants), (x, halves), (rows, 1, 1), "halve", (rec.shapes.width(rows),))

    def matmul(
        self, rec: Recorder, x: Buffer, matrix: Matrix, y: Buffer, *, rows: int, mode: str = "plain", node: str = "",
        halves: Buffer | None = None,
    ) -> None:  # fmt: skip
        """y[rows][n] = x[rows][k] W^T.

        ``mode`` "residual" adds to y, "swiglu" gives y[rows][n/2] = silu(gate) * up.

        ``halves`` is a workspace of ``halves_bytes``.
        """
        tuning = self.tuning
        tile = 1 if rows == 1 else tuning.tile
        outputs = matrix.outputs(mode)
        shape = (rec.shapes.width(rows),)
        constants = (("format", matrix.format), ("k", matrix.k), ("n", matrix.n), ("mode", mode), ("tile", tile))
        if self._tiled(rows):
            in_f16 = tuning.f16 and matrix.layout.quantised
            self._matmul_tile(rec, x, matrix, y, rows, mode, node, halves if in_f16 else None)
            return
        if tuning.matmul == "quad":
            per = tuning.outputs_per_thread if tile == 1 else tuning.outputs_per_thread_of_tile
            if mode == "swiglu":
                per = max(1, per * 2 // 3) if tile == 1 else max(1, per // 2)  # each output takes two rows of W
            if tile == 1 and tuning.tilings:
                key = ProductKey.of("matmul_quad", {**dict(constants), "subgroups": tuning.subgroups})
                per = tuning.tilings[key].per if key in tuning.tilings else per
            variant = Variant("matmul_quad", (*constants, ("per", per), ("subgroups", tuning.subgroups)))
            wide = 4 * per
        else:
            wide = tuning.split_outputs
            blocks = matrix.k // 32
            splits = ceil_div(blocks, ceil_div(blocks, tuning.split_threads // wide))  # as even as it gets
            variant = Variant("matmul_split", (*constants, ("wide", wide), ("splits", splits)))
        rec.launch(variant, (x, y, *matrix.buffers), (ceil_div(outputs, wide), ceil_div(rows, tile), 1), node, shape)

    def _matmul_tile(
        self, rec: Recorder, x: Buffer, matrix: Matrix, y: Buffer, rows: int, mode: str, node: str,
        halves: Buffer | None,
    ) -> None:  # fmt: skip
        """Record a product of many rows, in f16 if there are ``halves``."""
        tuning, width, outputs = self.tuning, rec.shapes.width(rows), matrix.outputs(mode)
        f16 = halves is not None
        tile, stages = tuning.tile_for(width, matrix.n, f16)
        constants = (
            ("format", matrix.format), ("k", matrix.k), ("n", matrix.n), ("mode", mode), *tile._asdict().items(),
            ("stages", stages), ("arithmetic", "f16" if f16 else "f32"),
        )  # fmt: skip
        if halves is not None:
            constants = (*constants, ("run", tuning.f16_run))
            self.halve(rec, x, halves, matrix.k, rows)
            x = halves
        wide = tile.columns * outputs // matrix.n
        grid = (ceil_div(outputs, wide), ceil_div(rows, tile.rows), 1)
        buffers = (x, y, *matrix.buffers)
        rec.launch(Variant("matmul_tile", constants), buffers, grid, node, (width,))

    def rope_append(
        self, rec: Recorder, rotations: Buffer, qkv: Buffer, kv: LayerKV, heads: Heads, rows: int, long_from: int = 0
    ) -> None:
        """Rotate q in ``qkv``; rotate k, and append k and v to the layer's cache.

        A step whose end is at ``long_from`` positions or more takes the second table of ``rotations``; 0: there is one.
        """
        threads = self.tuning.elementwise_threads
        pairs = (heads.heads + 2 * heads.kv_heads) * heads.head_dim // 2
        rope = heads.rope_constants(long_from)
        constants = (*heads.constants(), *rope, *kv.append_constants(), ("threads", threads))
        grid = (ceil_div(pairs, threads), rows, 1)
        rec.launch(Variant("rope_append", constants), (rotations, qkv, *kv.appended()), grid, "rope_append")

    def attention_shape(self, rec: Recorder, chunks: int, most: int = 1 << 30) -> tuple[int, int]:
        """The shape class of attention over ``chunks`` chunks: the step's width, and partial results up to ``most``."""
        return rec.shapes.width(rec.rows), min(rec.shapes.chunks(chunks), most)

    def partials_bytes(self, heads: Heads, shape: tuple[int, int]) -> tuple[int, int]:
        """Bytes of the workspaces of attention of class ``shape``: partial values, and their (maximum, sum) pairs."""
        parts = shape[0] * shape[1] * heads.heads
        return 4 * parts * heads.head_dim, 8 * parts

    def attention(
        self, rec: Recorder, qkv: Buffer, kv: LayerKV, partials: Buffer, normals: Buffer, out: Buffer, heads: Heads, *,
        rows: int, shape: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """out[rows][heads * head_dim]: causal grouped-query attention over the positions up to the step's end.

        ``shape`` is the class that the workspaces ``partials`` and ``normals`` were made for.
        """
        tuning = self.tuning
        chunk = tuning.attention_chunk
        quads = tuning.subgroups and heads.head_dim % 16 == 0  # the quad kernel shares heads out in 16s
        kernel, constants = "attention_quad" if quads else "attention_split", heads.constants()
        for read in kv.reads(chunk, heads.kv_heads, rows):
            variant = Variant(kernel, (*constants, ("window", heads.window), *read.constants))
            rec.launch(variant, (qkv, partials, normals, *read.buffers), read.grid, "attention", shape)
        threads = tuning.elementwise_threads
        merge = Variant("attention_merge", (*constants, *kv.merge_constants(chunk), ("threads", threads)))
        grid = (ceil_div(heads.heads * heads.head_dim // 4, threads), rows, 1)
        rec.launch(merge, (partials, normals, out, *kv.counted()), grid, "attention", shape)

    def argmax_bytes(self) -> int:
        """Bytes of argmax's workspace; 0: it needs none."""
        return 8 * self.tuning.argmax_parts if self.tuning.argmax_parts > 1 else 0

    def argmax(
        self, rec: Recorder, logits: Buffer, pairs: Buffer | None, token: Buffer, *, size: int, ban: tuple[int, ...]
    ) -> None:
        """token[0] = the id of the largest of ``size`` logits outside ``ban``; ``pairs`` is the workspace."""
        parts = self.tuning.argmax_parts
        constants = (("size", size), ("parts", parts), ("threads", self.tuning.argmax_threads))

        def launch(stage: str, ban: tuple[int, ...], buffers: tuple[Buffer, Buffer], workgroups: int) -> None:
            variant = Variant("argmax", (("stage", stage), ("ban", ban), *constants))
            rec.launch(variant, buffers, (workgroups, 1, 1), "argmax", (1,))

        if pairs is None:
            launch("all", ban, (logits, token), 1)
        else:
            launch("part", ban, (logits, pairs), parts)
            launch("pairs", (), (pairs, token), 1)
