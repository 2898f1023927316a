"""The operations of a decode step for GPUs: one row, in as few launches as possible.

A launch ends where every thread's result must be there before the next can begin.  That makes five per layer: norm +
q|k|v + rotation + KV append; attention in shares; the merge of the shares + output + residual; norm + gate|up + SwiGLU;
down + residual.  A launch that waits for the one before costs some microseconds whatever it does, so work is repeated
where that saves a launch: every workgroup of a product norms x, or merges the shares, itself.
"""

from collections.abc import Mapping
from typing import Literal

from stepwell.kernels.kv import Constants, LayerKV, ceil_div
from stepwell.kernels.ops import Heads, Matrix
from stepwell.kernels.tuning import ProductKey, Tiling, Tuning
from stepwell.memory.buffer import Buffer
from stepwell.step.recorder import Constant, Recorder, Variant

After = Literal["plain", "residual", "swiglu"]
"""What a product does with its result: store it, add it to y, or put gate and up together."""
QUANTISED_BYTES = 80
"""Workgroup memory per block of 32 values of x as integers (``wgsl/quantise.wgsl``)."""
_SHAPE = (1,)
_TEAM_BYTES = 48  # workgroup memory for eight values that a thread has merged
_MOST_TEAMS = 8
_REDUCTION_BYTES = 8192  # workgroup memory for sums and reductions


class FusedOps:
    """Records launches of the kernels ``matvec``, ``attention_decode`` and ``rope_turns``."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning

    def fits(self, longest: int) -> bool:
        """Whether a workgroup can hold a vector of ``longest`` f32 values."""
        return self.needs(longest) <= self.tuning.workgroup_bytes

    def needs(self, longest: int) -> int:
        """Bytes of a workgroup's memory for a vector of ``longest`` f32 values."""
        return 4 * longest + _REDUCTION_BYTES + team_bytes(self.tuning, longest)

    def shares(self, heads: Heads) -> int:
        """The most partial results of attention: with few heads of K and V it takes more to keep the GPU busy."""
        most = self.tuning.attention_shares
        return 2 * most if heads.kv_heads <= 4 else most

    def rope_turns(self, rec: Recorder, digits: Buffer, rotations: Buffer, heads: Heads, long_from: int = 0) -> None:
        """rotations[pair] = the rotation at the step's position, from the tables ``digits``.

        ``long_from`` as in ``Ops.rope_append``.
        """
        threads = self.tuning.elementwise_threads
        constants = (*heads.rope_constants(long_from), ("threads", threads))
        grid = (ceil_div(heads.rope_dim // 2, threads), 1, 1)
        rec.launch(Variant("rope_turns", constants), (digits, rotations), grid, "rope_turns", _SHAPE)

    def norm_qkv(
        self, rec: Recorder, x: Buffer, weight: Buffer, eps: float, matrix: Matrix, rotations: Buffer, q: Buffer,
        kv: LayerKV, heads: Heads,
    ) -> None:  # fmt: skip
        """q = the rotated queries of RMSNorm(x); append k and v to the layer's cache at the step's position."""
        constants: Constants = (
            ("before", "norm"), ("eps", eps), ("after", "rope"), *heads.constants(), ("rope_dim", heads.rope_dim),
            *kv.append_constants(),
        )  # fmt: skip
        self._launch(rec, matrix, "qkv", constants, (x, q), (weight, rotations, *kv.appended()))

    def norm_product(
        self, rec: Recorder, x: Buffer, weight: Buffer, eps: float, matrix: Matrix, y: Buffer, after: After, node: str
    ) -> None:
        """y = RMSNorm(x) W^T, or with ``after`` "swiglu" SwiGLU of its halves."""
        constants: Constants = (("before", "norm"), ("eps", eps), ("after", after))
        self._launch(rec, matrix, node, constants, (x, y), (weight,))

    def product(self, rec: Recorder, x: Buffer, matrix: Matrix, y: Buffer, after: After, node: str) -> None:
        """y = x W^T, or with ``after`` "residual" y += x W^T."""
        self._launch(rec, matrix, node, (("before", "plain"), ("after", after)), (x, y), ())

    def attention(
        self, rec: Recorder, q: Buffer, kv: LayerKV, partials: Buffer, normals: Buffer, heads: Heads,
        shape: tuple[int, int],
    ) -> None:  # fmt: skip
        """partials, normals = the shares of causal attention of the step's row, ``shape`` being their class."""
        tuning, d4 = self.tuning, heads.head_dim // 4
        chunk, threads = tuning.decode_chunk, max(tuning.attention_threads, d4)
        lanes = 1
        while 2 * lanes <= min(tuning.attention_lanes, tuning.subgroup) and d4 % (2 * lanes) == 0:
            lanes *= 2
        group = heads.heads // heads.kv_heads
        together = group * (16 * (threads // d4) * d4 + 8 * chunk) <= tuning.workgroup_bytes
        constants: Constants = (
            *heads.constants(), ("window", heads.window), ("most", self.shares(heads)), ("threads", threads),
            ("subgroup", tuning.subgroup), ("lanes", lanes), ("together", together),
        )  # fmt: skip
        for read in kv.reads(chunk, heads.kv_heads, 1, self.shares(heads)):
            variant = Variant("attention_decode", (*constants, *read.constants))
            rec.launch(variant, (q, partials, normals, *read.buffers), read.grid, "attention", shape)

    def merged_product(
        self, rec: Recorder, partials: Buffer, normals: Buffer, kv: LayerKV, matrix: Matrix, y: Buffer, heads: Heads
    ) -> None:
        """y += (the shares of attention put together) W^T."""
        constants: Constants = (
            ("before", "merge"), ("after", "residual"), ("heads", heads.heads), ("head_dim", heads.head_dim),
            *kv.merge_constants(self.tuning.decode_chunk), ("most", self.shares(heads)),
            ("teams", teams_of(self.tuning, matrix.k)),
        )  # fmt: skip
        self._launch(rec, matrix, "attn_output", constants, (partials, y), (normals, *kv.counted()))

    def _launch(
        self, rec: Recorder, matrix: Matrix, node: str, constants: Constants,
        first: tuple[Buffer, ...], last: tuple[Buffer, ...],
    ) -> None:  # fmt: skip
        around = dict(constants)
        outputs = matrix.outputs(str(around["after"]))
        tiling = self._tiling(matrix, around, outputs)
        shape: Constants = (
            ("format", matrix.format), ("k", matrix.k), ("n", matrix.n), *tiling.constants(),
            ("subgroup", self.tuning.subgroup),
        )  # fmt: skip
        grid = (ceil_div(outputs, tiling.wide * tiling.per), 1, 1)
        rec.launch(Variant("matvec", (*shape, *constants)), (*first, *matrix.buffers, *last), grid, node, _SHAPE)

    def _tiling(self, matrix: Matrix, around: Mapping[str, Constant], outputs: int) -> Tiling:
        """The measured tiling of the product, else the rule's."""
        tuning, default = self.tuning, default_tiling(self.tuning, outputs, matrix, str(around["before"]))
        if not tuning.tilings:
            return default
        shape = {"format": matrix.format, "k": matrix.k, "n": matrix.n, "subgroup": tuning.subgroup}
        key = ProductKey.of("matvec", {**around, **shape, "arithmetic": default.arithmetic})
        return tuning.tilings.get(key, default)


def teams_of(tuning: Tuning, width: int) -> int:
    """Threads that merge the shares of eight values of a row of ``width``: as many as workgroup memory has room for."""
    room = tuning.workgroup_bytes - 4 * width - _REDUCTION_BYTES
    return 1 + min(_MOST_TEAMS - 1, max(0, room) // _TEAM_BYTES // (width // 8))


def team_bytes(tuning: Tuning, width: int) -> int:
    """Bytes of a workgroup's memory for what the threads of ``teams_of`` have merged."""
    return (teams_of(tuning, width) - 1) * (width // 8) * _TEAM_BYTES


def default_tiling(tuning: Tuning, outputs: int, matrix: Matrix, before: str = "plain") -> Tiling:
    """The rule's tiling of a product of one row with ``matrix``.

    A wide workgroup reads x once for many outputs, but many workgroups keep the GPU busy: it is as wide as leaves
    enough of them.  ``before`` is what the workgroup computes first: "plain", "norm" or "merge".
    """
    wide = tuning.decode_wide
    while 2 * wide <= tuning.decode_widest and outputs >= 3 * wide * tuning.workgroups:
        wide *= 2
    per = 1
    while 2 * per <= tuning.most_per_thread and outputs >= 4 * per * wide * tuning.workgroups:
        per *= 2
    threads = tuning.decode_threads if per == 1 else tuning.decode_threads // 2  # its outputs keep a thread busy
    unit = max(1, tuning.subgroup // wide)  # whole subgroups
    blocks = ceil_div(matrix.k // 32, unit) * unit
    splits = max(unit, min(blocks, threads // wide))
    if before == "merge":  # threads without a block of weights put shares together
        helpers = min(teams_of(tuning, matrix.k) * (matrix.k // 8), tuning.decode_threads)
        splits = max(splits, helpers // wide // unit * unit)
    per = min(per, splits)  # a workgroup has a thread for each of its outputs
    rows = per * matrix.n // outputs  # of W that a thread reads at a time
    fits = matrix.k // 32 * QUANTISED_BYTES + _REDUCTION_BYTES <= tuning.workgroup_bytes
    integers = tuning.dot4 and tuning.subgroup >= 4 and matrix.layout.quantised and fits
    # a norm reads x and its weight at the same time: less fits beside that
    ahead = tuning.decode_ahead // (rows * (2 if before == "norm" else 1))
    return Tiling(wide, per, splits, max(1, ahead), "dot4" if integers else "f32")
