"""One step of a decoder model, as recorder calls.

Per layer nine launches: norm, qkv, rope + KV append, attention by chunks and its merge, output + residual, norm,
gate|up + SwiGLU, down + residual.  On GPUs a decode step has five (``kernels/fused.py``).
"""

from collections.abc import Sequence

from stepwell.errors import BadRequest
from stepwell.kernels.fused import FusedOps
from stepwell.kernels.kv import LayerKV, ceil_div
from stepwell.kernels.ops import Heads, Ops
from stepwell.kernels.sampling import Cuts, SampleOps
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import Switch
from stepwell.memory.buffer import Buffer
from stepwell.memory.scope import Acquires
from stepwell.models.config import DecoderConfig
from stepwell.step.recorder import Recorder
from stepwell.step.shapes import power_of_two
from stepwell.weights.loader import Weights

FEWEST_ROWS = 64
"""Rows of a prefill step for which a matrix is worth reading."""
PARTIALS_BYTES = 128 << 20
"""Bytes that a binding holds on every device."""


class Steps:
    """Records the steps of a model, with the kernels that its launcher chooses."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, rotations: Buffer, switch_position: int | None,
        launcher: Launcher,
    ) -> None:  # fmt: skip
        """``rotations`` and ``switch_position`` are those of ``DecoderModel``.

        Raises BadRequest when the option ``fused`` is on and its kernels cannot take the model's heads or rows.
        """
        self.config, self._weights, self._rotations, self._switch_position = config, weights, rotations, switch_position
        tuning = launcher.tuning
        self._ops, self._fused, self._sampling = Ops(tuning), FusedOps(tuning), SampleOps(tuning)
        window = config.sliding_window if config.sliding_window < config.context_length else 0
        rope = (config.rope_dim, window, config.rope_scale)
        self._heads = Heads(config.n_heads, config.n_kv_heads, config.head_dim, *rope)
        self._one_by_one = self._goes_one_by_one(launcher)
        self._qkv_width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim

    @property
    def kernels(self) -> dict[str, object]:
        """The kernels chosen, as plain data.

        ``kernels``: the family.  ``fused``: whether decode steps are.  ``subgroups``: their lanes, 0 for none.
        ``dot4`` and ``f16``: whether fused products are in integers, and products of prompts in f16, where the format
        and size of a matrix allow it.
        """
        tuning, fused = self._ops.tuning, self._one_by_one
        lanes = max(4 * tuning.subgroups, tuning.subgroup * fused)
        return {
            "kernels": tuning.matmul,
            "fused": fused,
            "subgroups": lanes,
            "dot4": tuning.dot4 and fused,
            "f16": tuning.f16,
        }

    def _goes_one_by_one(self, launcher: Launcher) -> bool:
        """Whether a step of one row has few launches: they are wanted, and its heads and rows fit the kernels."""
        tuning, longest = launcher.tuning, max(self.config.hidden_size, self.config.n_heads * self.config.head_dim)
        octets = self.config.head_dim % 8 == 0
        if not tuning.fused or (octets and self._fused.fits(longest)):
            return tuning.fused
        if launcher.options.fused is Switch.ON:
            if not octets:
                raise BadRequest(
                    f"fused is on, but heads have {self.config.head_dim} values, and its kernels take eight at a time. "
                    "Leave fused at auto or off."
                )
            raise BadRequest(
                f"fused is on, but a row of {longest:,} values takes {self._fused.needs(longest):,} B of a workgroup's "
                f"memory, and this device gives it {tuning.workgroup_bytes:,} B. Leave fused at auto or off."
            )
        return False

    def prefill_rows(self, end: int) -> int:
        """Tokens per step of a prompt that ends at ``end`` positions.

        The launcher's ``prefill_rows``, or fewer where attention's partial results would exceed PARTIALS_BYTES.
        """
        tuning, heads = self._ops.tuning, self._heads
        rows, chunks = tuning.prefill_rows, power_of_two(ceil_div(end, tuning.attention_chunk))
        while rows > FEWEST_ROWS and 4 * rows * chunks * heads.heads * heads.head_dim > PARTIALS_BYTES:
            rows //= 2
        return rows

    def record(
        self,
        rec: Recorder,
        scope: Acquires,
        ids: Buffer,
        kv: Sequence[LayerKV],
        *,
        end: int,
        want_logits: bool,
    ) -> Buffer | None:
        """Record the step of ``rec``: ``ids``[rows] in, the f32 logits[vocab] of the last row out.

        ``kv`` has the K and V of each layer.  ``end`` is the length that the sequence may come to: workspaces are
        made for it, so that they stay the same from step to step.  A step of several rows is part of a prompt,
        ``end`` is the prompt's end, and the frequencies of rotation go by it; one row is the last of its sequence.
        Returns None without ``want_logits``.
        """
        if rec.rows == 1 and self._one_by_one:
            x = self._record_one(rec, scope, ids, kv, end)
        else:
            x = self._record_rows(rec, scope, ids, kv, end)
        return self._logits(rec, scope, x) if want_logits else None

    def _record_rows(self, rec: Recorder, scope: Acquires, ids: Buffer, kv: Sequence[LayerKV], end: int) -> Buffer:
        """Record all layers for any number of rows; returns x[rows][hidden]."""
        c, ops, heads, w, rows = self.config, self._ops, self._heads, self._weights, rec.rows
        width = rec.shapes.width(rows)
        x = scope.acquire(4 * width * c.hidden_size, "x")
        y = scope.acquire(4 * width * c.hidden_size, "normed")
        qkv = scope.acquire(4 * width * self._qkv_width, "qkv")
        attended = scope.acquire(4 * width * c.n_heads * c.head_dim, "attended")
        hidden = scope.acquire(4 * width * c.ffn_size, "hidden")
        shape, partials, normals = self._attention_workspaces(rec, scope, kv[0], end, ops.tuning.attention_chunk)
        names = ("qkv", "attn_output", "gate_up", "ffn_down")
        matrices = (w.matrix(f"blk.{i}.{name}") for i in range(len(kv)) for name in names)
        nbytes = ops.halves_bytes(rec, rows, matrices)
        halves = scope.acquire(nbytes, "halves") if nbytes else None

        def norm(weight: str) -> None:
            ops.rms_norm(rec, x, w.vector(weight), y, width=c.hidden_size, eps=c.rms_eps, rows=rows)

        def matmul(source: Buffer, layer: str, name: str, target: Buffer, mode: str = "plain") -> None:
            matrix = w.matrix(f"{layer}.{name}")
            ops.matmul(rec, source, matrix, target, rows=rows, mode=mode, node=name, halves=halves)

        ops.embed(rec, ids, x, w.matrix("token_embd"), rows)
        for i, layer_kv in enumerate(kv):
            layer = f"blk.{i}"
            norm(f"{layer}.attn_norm")
            matmul(y, layer, "qkv", qkv)
            ops.rope_append(rec, self._rotations, qkv, layer_kv, heads, rows, self._long_from(rows, end))
            ops.attention(rec, qkv, layer_kv, partials, normals, attended, heads, rows=rows, shape=shape)
            matmul(attended, layer, "attn_output", x, "residual")
            norm(f"{layer}.ffn_norm")
            matmul(y, layer, "gate_up", hidden, "swiglu")
            matmul(hidden, layer, "ffn_down", x, "residual")
        return x

    def _record_one(self, rec: Recorder, scope: Acquires, ids: Buffer, kv: Sequence[LayerKV], end: int) -> Buffer:
        """Record all layers for one row in as few launches as possible; returns x[hidden]."""
        c, fused, heads, w, eps = self.config, self._fused, self._heads, self._weights, self.config.rms_eps
        x = scope.acquire(4 * c.hidden_size, "x")
        q = scope.acquire(4 * c.n_heads * c.head_dim, "q")
        hidden = scope.acquire(4 * c.ffn_size, "hidden")
        rotations = scope.acquire(4 * c.rope_dim, "turns")
        tiles, most = fused.tuning.decode_chunk, fused.shares(heads)
        shape, partials, normals = self._attention_workspaces(rec, scope, kv[0], end, tiles, most)
        self._ops.embed(rec, ids, x, w.matrix("token_embd"), 1)
        fused.rope_turns(rec, self._rotations, rotations, heads, self._long_from(1, end))
        for i, layer_kv in enumerate(kv):
            layer = f"blk.{i}"
            norm, qkv = w.vector(f"{layer}.attn_norm"), w.matrix(f"{layer}.qkv")
            fused.norm_qkv(rec, x, norm, eps, qkv, rotations, q, layer_kv, heads)
            fused.attention(rec, q, layer_kv, partials, normals, heads, shape)
            fused.merged_product(rec, partials, normals, layer_kv, w.matrix(f"{layer}.attn_output"), x, heads)
            norm, gate_up = w.vector(f"{layer}.ffn_norm"), w.matrix(f"{layer}.gate_up")
            fused.norm_product(rec, x, norm, eps, gate_up, hidden, "swiglu", "gate_up")
            fused.product(rec, hidden, w.matrix(f"{layer}.ffn_down"), x, "residual", "ffn_down")
        return x

    def _logits(self, rec: Recorder, scope: Acquires, x: Buffer) -> Buffer:
        """Record the logits of the step's last row."""
        c, w = self.config, self._weights
        logits = scope.acquire(4 * c.vocab_size, "logits")
        norm, output = w.vector("output_norm"), w.matrix("output")
        if rec.rows == 1 and self._one_by_one:
            self._fused.norm_product(rec, x, norm, c.rms_eps, output, logits, "plain", "output")
            return logits
        y = scope.acquire(4 * c.hidden_size, "last normed")
        self._ops.rms_norm(rec, x, norm, y, width=c.hidden_size, eps=c.rms_eps, rows=rec.rows, last=True)
        self._ops.matmul(rec, y, output, logits, rows=1, node="output")
        return logits

    def _long_from(self, rows: int, end: int) -> int:
        """The length from which on a step takes the frequencies of long sequences; 0: it never does.

        A decode step is replayed at other positions, so its kernels compare; the steps of a prompt go by its end.
        """
        if self._switch_position is None:
            return 0
        if rows == 1:
            return self._switch_position + 1
        return 1 if end > self._switch_position else 0

    def _attention_workspaces(
        self, rec: Recorder, scope: Acquires, kv: LayerKV, end: int, chunk: int, most: int = 1 << 30
    ) -> tuple[tuple[int, int], Buffer, Buffer]:
        """Attention's shape class, and its workspaces."""
        shape = self._ops.attention_shape(rec, kv.chunks(end, chunk), most)
        partial_bytes, normal_bytes = self._ops.partials_bytes(self._heads, shape)
        partials = scope.workspace("attention", shape, "attention partials", partial_bytes)
        return shape, partials, scope.workspace("attention", shape, "attention normals", normal_bytes)

    def choose(self, rec: Recorder, scope: Acquires, logits: Buffer, token: Buffer, ban: tuple[int, ...]) -> None:
        """Record greedy choice: token[0] = the id of the largest logit outside ``ban``."""
        nbytes = self._ops.argmax_bytes()
        pairs = scope.workspace("argmax", (1,), "argmax pairs", nbytes) if nbytes else None
        self._ops.argmax(rec, logits, pairs, token, size=self.config.vocab_size, ban=ban)

    def sample(
        self, rec: Recorder, scope: Acquires, logits: Buffer, settings: Buffer, token: Buffer, ban: tuple[int, ...],
        cuts: Cuts,
    ) -> None:  # fmt: skip
        """Record a draw: token[0] = an id outside ``ban``, by ``settings`` and ``cuts`` (``kernels/sampling.py``)."""
        size = self.config.vocab_size
        work = scope.workspace("sample", (1,), "sampling", self._sampling.work_bytes())
        distances = scope.workspace("sample", (1,), "distances", 4 * size)
        self._sampling.sample(rec, logits, settings, work, distances, token, size=size, ban=ban, cuts=cuts)
