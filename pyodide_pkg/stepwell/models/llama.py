"""The Llama architecture (Llama 2 and 3, SmolLM2, TinyLlama): its weights and one step as recorder calls.

Others that compute the same of tensors that are stored in another way derive from it (phi3.py).

Per layer nine launches: norm, qkv, rope + KV append, attention by chunks and its merge, output + residual, norm,
gate|up + SwiGLU, down + residual.  On GPUs a decode step has five (``kernels/fused.py``).
"""

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from stepwell.errors import BadFile, BadRequest
from stepwell.gpu.device import ByteSource, Progress
from stepwell.kernels.fused import FusedOps
from stepwell.kernels.kv import KVShape, LayerKV
from stepwell.kernels.ops import ROPE_BITS, Heads, Ops
from stepwell.kernels.sampling import Cuts, SampleOps
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import Switch
from stepwell.launch.recorder import Recorder
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.scope import Acquires
from stepwell.models.config import LlamaConfig, check_tensors, expected_tensors
from stepwell.weights.gguf import GgufFile
from stepwell.weights.loader import Weights, load_weights
from stepwell.weights.synthetic import Plan, make_weights, plan_weights


class Llama:
    """A loaded model: its config and its weights on the GPU.  ``steps`` records what it computes."""

    config_type: ClassVar[type[LlamaConfig]] = LlamaConfig

    def __init__(self, config: LlamaConfig, weights: Weights, launcher: Launcher, turns: Buffer) -> None:
        self.config = config
        self.weights = weights
        self.turns = turns
        self._pool = launcher.pool
        # sequences of more positions than that are rotated by other frequencies, all of them
        self.switch = config.original_context if len(config.rope_factors) > 1 else None

    @classmethod
    async def load(
        cls, file: GgufFile, source: ByteSource, launcher: Launcher, progress: Progress | None = None
    ) -> Self:
        """Check the file against the architecture, then stream its weights.  A failure leaves no buffer behind."""
        config = cls.config_type.from_gguf(file)
        check_tensors(file, config)
        table = rope_turns(config, [await read_factors(file, source, name) for name in config.rope_factors])
        turns = launcher.pool.acquire(len(table), Role.WEIGHTS, "rope turns")
        try:
            launcher.device.write_buffer(turns.id, 0, table)
            weights = await load_weights(
                file, source, launcher, matrices(config), vectors(config), progress, pairings(config)
            )
        except BaseException:
            launcher.pool.release(turns)
            launcher.pool.flush()
            raise
        return cls(config, weights, launcher, turns)

    def steps(self, launcher: Launcher) -> "Steps":
        """How its steps are recorded for ``launcher``: any one of the device and pool of the weights."""
        return Steps(self, launcher)

    def kv_shape(self, launcher: Launcher) -> KVShape:
        """What its KV cache is made of, for the kernels of ``launcher``."""
        config, tuning = self.config, launcher.tuning
        width_bytes = 4 * config.n_kv_heads * config.head_dim  # f32
        return KVShape(config.n_layers, width_bytes, tuning.slabs, (tuning.attention_chunk, tuning.decode_chunk))

    def close(self) -> None:
        """Give the weights back to the pool."""
        self._pool.release(self.turns)
        self.weights.release(self._pool)
        self._pool.flush()

    @classmethod
    async def synthetic(
        cls, config: LlamaConfig, kind: str, launcher: Launcher, progress: Progress | None = None
    ) -> Self:
        """A model of this shape with random weights in the layout of the tensor format ``kind``, made on the GPU."""
        table = rope_turns(config)
        turns = launcher.pool.acquire(len(table), Role.WEIGHTS, "rope turns")
        try:
            launcher.device.write_buffer(turns.id, 0, table)
            weights = await make_weights(plan_of(config, kind), launcher, progress)
        except BaseException:
            launcher.pool.release(turns)
            launcher.pool.flush()
            raise
        return cls(config, weights, launcher, turns)


class Steps:
    """Records the steps of a model: with which kernels is its launcher's choice."""

    def __init__(self, model: Llama, launcher: Launcher) -> None:
        """Raises BadRequest when ``fused`` is on and the model's heads or rows are none for it."""
        self.config = config = model.config
        self._weights, self._turns, self._switch = model.weights, model.turns, model.switch
        tuning = launcher.tuning
        self._ops, self._fused, self._sampling = Ops(tuning), FusedOps(tuning), SampleOps(tuning)
        window = config.sliding_window if config.sliding_window < config.context_length else 0
        rope = (config.rope_dim, window, config.rope_scale)
        self._heads = Heads(config.n_heads, config.n_kv_heads, config.head_dim, *rope)
        self._one_by_one = self._goes_one_by_one(launcher)
        self._qkv_width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim

    @property
    def kernels(self) -> dict[str, object]:
        """What ``auto`` came to: the family, whether decode steps are fused, the lanes of subgroups (0: not used), and
        whether fused products are in integers where their format and size allow it."""
        tuning, fused = self._ops.tuning, self._one_by_one
        lanes = max(4 * tuning.subgroups, tuning.subgroup * fused)
        return {"kernels": tuning.matmul, "fused": fused, "subgroups": lanes, "dot4": tuning.dot4 and fused}

    def _goes_one_by_one(self, launcher: Launcher) -> bool:
        """One row in few launches: where that is wanted, heads are whole octets, and a workgroup has room for a row."""
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

    def record(
        self,
        rec: Recorder,
        scope: Acquires,
        ids: Buffer,
        kv: Sequence[LayerKV],
        *,
        reach: int,
        want_logits: bool,
    ) -> Buffer | None:
        """Record the step of ``rec``: its rows' ids in, the last row's f32 logits[vocab] out.

        ``reach`` is where the sequence may come to: the workspaces that depend on its length are made for that, so that
        they stay the same from step to step.  For several rows it is where their prompt ends, and that is what the
        frequencies of rotation go by; one row is the last of its sequence.  Without ``want_logits`` the result is None.
        """
        if rec.rows == 1 and self._one_by_one:
            x = self._record_one(rec, scope, ids, kv, reach)
        else:
            x = self._record_rows(rec, scope, ids, kv, reach)
        return self._logits(rec, scope, x) if want_logits else None

    def _record_rows(self, rec: Recorder, scope: Acquires, ids: Buffer, kv: Sequence[LayerKV], reach: int) -> Buffer:
        """All layers for any number of rows; returns x[rows][hidden]."""
        c, ops, heads, w, rows = self.config, self._ops, self._heads, self._weights, rec.rows
        width = rec.shapes.width(rows)
        x = scope.acquire(4 * width * c.hidden_size, "x")
        y = scope.acquire(4 * width * c.hidden_size, "normed")
        qkv = scope.acquire(4 * width * self._qkv_width, "qkv")
        attended = scope.acquire(4 * width * c.n_heads * c.head_dim, "attended")
        hidden = scope.acquire(4 * width * c.ffn_size, "hidden")
        shape, partials, normals = self._attention_workspaces(rec, scope, kv[0], reach, ops.tuning.attention_chunk)

        def norm(weight: str) -> None:
            ops.rms_norm(rec, x, w.vector(weight), y, width=c.hidden_size, eps=c.rms_eps, rows=rows)

        def matmul(source: Buffer, layer: str, name: str, target: Buffer, mode: str = "plain") -> None:
            ops.matmul(rec, source, w.matrix(f"{layer}.{name}"), target, rows=rows, mode=mode, node=name)

        ops.embed(rec, ids, x, w.matrix("token_embd"), rows)
        for i, layer_kv in enumerate(kv):
            layer = f"blk.{i}"
            norm(f"{layer}.attn_norm")
            matmul(y, layer, "qkv", qkv)
            ops.rope_append(rec, self._turns, qkv, layer_kv, heads, rows, self._long_from(rows, reach))
            ops.attention(rec, qkv, layer_kv, partials, normals, attended, heads, rows=rows, shape=shape)
            matmul(attended, layer, "attn_output", x, "residual")
            norm(f"{layer}.ffn_norm")
            matmul(y, layer, "gate_up", hidden, "swiglu")
            matmul(hidden, layer, "ffn_down", x, "residual")
        return x

    def _record_one(self, rec: Recorder, scope: Acquires, ids: Buffer, kv: Sequence[LayerKV], reach: int) -> Buffer:
        """All layers for one row in as few launches as possible; returns x[hidden]."""
        c, fused, heads, w, eps = self.config, self._fused, self._heads, self._weights, self.config.rms_eps
        x = scope.acquire(4 * c.hidden_size, "x")
        q = scope.acquire(4 * c.n_heads * c.head_dim, "q")
        hidden = scope.acquire(4 * c.ffn_size, "hidden")
        turns = scope.acquire(4 * c.rope_dim, "turns")
        tiles, most = fused.tuning.decode_chunk, fused.shares(heads)
        shape, partials, normals = self._attention_workspaces(rec, scope, kv[0], reach, tiles, most)
        self._ops.embed(rec, ids, x, w.matrix("token_embd"), 1)
        fused.rope_turns(rec, self._turns, turns, heads, self._long_from(1, reach))
        for i, layer_kv in enumerate(kv):
            layer = f"blk.{i}"
            norm, qkv = w.vector(f"{layer}.attn_norm"), w.matrix(f"{layer}.qkv")
            fused.norm_qkv(rec, x, norm, eps, qkv, turns, q, layer_kv, heads)
            fused.attention(rec, q, layer_kv, partials, normals, heads, shape)
            fused.merged_product(rec, partials, normals, layer_kv, w.matrix(f"{layer}.attn_output"), x, heads)
            norm, gate_up = w.vector(f"{layer}.ffn_norm"), w.matrix(f"{layer}.gate_up")
            fused.norm_product(rec, x, norm, eps, gate_up, hidden, "swiglu", "gate_up")
            fused.product(rec, hidden, w.matrix(f"{layer}.ffn_down"), x, "residual", "ffn_down")
        return x

    def _logits(self, rec: Recorder, scope: Acquires, x: Buffer) -> Buffer:
        """Of the step's last row."""
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

    def _long_from(self, rows: int, reach: int) -> int:
        """From how many positions on a step takes the frequencies of long sequences; 0: it does not.

        A decode step is replayed at other positions, so its kernels compare; the steps of a prompt go by its end.
        """
        if self._switch is None:
            return 0
        if rows == 1:
            return self._switch + 1
        return 1 if reach > self._switch else 0

    def _attention_workspaces(
        self, rec: Recorder, scope: Acquires, kv: LayerKV, reach: int, chunk: int, most: int = 1 << 30
    ) -> tuple[tuple[int, int], Buffer, Buffer]:
        """Attention's shape class, and its workspaces."""
        shape = self._ops.attention_shape(rec, kv.chunks(reach, chunk), most)
        partial_bytes, normal_bytes = self._ops.partials_bytes(self._heads, shape)
        partials = scope.workspace("attention", shape, "attention partials", partial_bytes)
        return shape, partials, scope.workspace("attention", shape, "attention normals", normal_bytes)

    def choose(self, rec: Recorder, scope: Acquires, logits: Buffer, token: Buffer, ban: tuple[int, ...]) -> None:
        """Record greedy choice: token[0] = argmax of the logits outside ``ban``."""
        nbytes = self._ops.argmax_bytes()
        pairs = scope.workspace("argmax", (1,), "argmax pairs", nbytes) if nbytes else None
        self._ops.argmax(rec, logits, pairs, token, size=self.config.vocab_size, ban=ban)

    def sample(
        self, rec: Recorder, scope: Acquires, logits: Buffer, settings: Buffer, token: Buffer, ban: tuple[int, ...],
        cuts: Cuts,
    ) -> None:  # fmt: skip
        """Record a draw: token[0] = an id of those outside ``ban``, by ``settings`` (``kernels/sampling.py``)."""
        size = self.config.vocab_size
        work = scope.workspace("sample", (1,), "sampling", self._sampling.work_bytes())
        distances = scope.workspace("sample", (1,), "distances", 4 * size)
        self._sampling.sample(rec, logits, settings, work, distances, token, size=size, ban=ban, cuts=cuts)


def plan_of(config: LlamaConfig, kind: str) -> Plan:
    """What random weights of this shape are made of."""
    return plan_weights(kind, expected_tensors(config), matrices(config), vectors(config))


def matrices(config: LlamaConfig) -> Mapping[str, tuple[str, ...]]:
    """The matrices of the step and the tensors that are stacked, row on row, to make each."""
    table: dict[str, tuple[str, ...]] = {"token_embd": ("token_embd.weight",)}
    for i in range(config.n_layers):
        for name, parts in config.stacks.items():
            table[f"blk.{i}.{name}"] = tuple(f"blk.{i}.{part}.weight" for part in parts)
    # a tied model has one matrix under two names
    table["output"] = ("token_embd.weight",) if config.tied_embeddings else ("output.weight",)
    return table


def vectors(config: LlamaConfig) -> Mapping[str, str]:
    """The f32 vectors of the step and their tensors."""
    names = [f"blk.{i}.{name}" for i in range(config.n_layers) for name in ("attn_norm", "ffn_norm")]
    return {name: f"{name}.weight" for name in (*names, "output_norm")}


def pairings(config: LlamaConfig) -> Mapping[str, tuple[int, ...]]:
    """The tensors whose rows are laid out for rotation when they are repacked, and how (``Ops.repack``)."""
    pairing = config.pairing()
    return {f"blk.{i}.{config.stacks['qkv'][0]}.weight": pairing for i in range(config.n_layers)} if pairing else {}


async def read_factors(file: GgufFile, source: ByteSource, name: str) -> list[float]:
    """The values of a small f32 tensor that divides frequencies.  BadFile for what cannot."""
    tensor = file.tensors[name]
    values = struct.unpack(f"<{tensor.shape[0]}f", await source.read(tensor.offset, tensor.nbytes))
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            raise BadFile(f"{file.name}: {name}[{index}] is {value}; a positive number is needed.")
    return list(values)


def rope_turns(config: LlamaConfig, factors: Sequence[Sequence[float]] = ()) -> bytes:
    """cos and sin of 2^bit * theta^(-2i/rope_dim), f32 [ROPE_BITS][rope_dim / 2][2]: see ``wgsl/rope_append.wgsl``.

    A table for each of ``factors``, which divide the frequencies; without any it is one.
    """
    half = config.rope_dim // 2
    turns = array("f")
    for divisors in factors or [[1.0] * half]:
        for bit in range(ROPE_BITS):
            for i in range(half):
                angle = 2**bit * config.rope_theta ** (-i / half) / divisors[i]
                turns.extend((math.cos(angle), math.sin(angle)))
    return turns.tobytes()
