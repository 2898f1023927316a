"""The Llama architecture (Llama 2 and 3, SmolLM2, TinyLlama): its weights and one step as recorder calls.

Per layer nine launches: norm, qkv, rope + KV append, attention by chunks and its merge, output + residual, norm,
gate|up + SwiGLU, down + residual.
"""

import math
import struct
from collections.abc import Mapping, Sequence

from stepwell.gpu.device import ByteSource, Progress
from stepwell.kernels.ops import ROPE_BITS, Heads, Ops
from stepwell.kernels.tuning import tuning_for
from stepwell.launch.launcher import Launcher
from stepwell.launch.recorder import Recorder
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.scope import Acquires
from stepwell.models.config import LlamaConfig, check_tensors
from stepwell.weights.gguf import GgufFile
from stepwell.weights.loader import Weights, load_weights


class Llama:
    """A loaded model: its config, its weights on the GPU, and how to record a step."""

    def __init__(self, config: LlamaConfig, weights: Weights, launcher: Launcher, turns: Buffer) -> None:
        self.config = config
        self._weights = weights
        self._launcher = launcher
        self._turns = turns
        self._ops = Ops(tuning_for(launcher.device.info))
        self._heads = Heads(config.n_heads, config.n_kv_heads, config.head_dim, config.rope_dim)
        self.kv_width_bytes = 4 * config.n_kv_heads * config.head_dim  # one position of one K or V tensor, f32

    @classmethod
    async def load(
        cls, file: GgufFile, source: ByteSource, launcher: Launcher, progress: Progress | None = None
    ) -> "Llama":
        """Check the file against the architecture, then stream its weights.  A failure leaves no buffer behind."""
        config = LlamaConfig.from_gguf(file)
        check_tensors(file, config)
        table = rope_turns(config)
        turns = launcher.pool.acquire(len(table), Role.WEIGHTS, "rope turns")
        try:
            launcher.device.write_buffer(turns.id, 0, table)
            weights = await load_weights(file, source, launcher, matrices(config), vectors(config), progress)
        except BaseException:
            launcher.pool.release(turns)
            launcher.pool.flush()
            raise
        return cls(config, weights, launcher, turns)

    def record(
        self,
        rec: Recorder,
        scope: Acquires,
        ids: Buffer,
        kv: Sequence[tuple[Buffer, Buffer]],
        *,
        reach: int,
        want_logits: bool,
    ) -> Buffer | None:
        """Record the step of ``rec``: its rows' ids in, the last row's f32 logits[vocab] out.

        ``reach`` is where the sequence may come to: the workspaces that depend on its length are made for that, so that
        they stay the same from step to step.  Without ``want_logits`` the result is None.
        """
        c, ops, heads, w, rows = self.config, self._ops, self._heads, self._weights, rec.rows
        width = rec.shapes.width(rows)
        qkv_width = (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
        x = scope.acquire(4 * width * c.hidden_size, "x")
        y = scope.acquire(4 * width * c.hidden_size, "normed")
        qkv = scope.acquire(4 * width * qkv_width, "qkv")
        attended = scope.acquire(4 * width * c.n_heads * c.head_dim, "attended")
        hidden = scope.acquire(4 * width * c.ffn_size, "hidden")
        shape = ops.attention_shape(rec, reach)
        partial_bytes, normal_bytes = ops.partials_bytes(heads, shape)
        partials = scope.workspace("attention", shape, "attention partials", partial_bytes)
        normals = scope.workspace("attention", shape, "attention normals", normal_bytes)

        def norm(source: Buffer, weight: str, *, last: bool = False) -> None:
            ops.rms_norm(rec, source, w.vector(weight), y, width=c.hidden_size, eps=c.rms_eps, rows=rows, last=last)

        def matmul(source: Buffer, layer: str, name: str, target: Buffer, mode: str = "plain") -> None:
            ops.matmul(rec, source, w.matrix(f"{layer}.{name}"), target, rows=rows, mode=mode, node=name)

        ops.embed(rec, ids, x, w.matrix("token_embd"), rows)
        for i, (k, v) in enumerate(kv):
            layer = f"blk.{i}"
            norm(x, f"{layer}.attn_norm")
            matmul(y, layer, "qkv", qkv)
            ops.rope_append(rec, self._turns, qkv, k, v, heads, rows)
            ops.attention(rec, qkv, k, v, partials, normals, attended, heads, rows=rows, shape=shape)
            matmul(attended, layer, "attn_output", x, "residual")
            norm(x, f"{layer}.ffn_norm")
            matmul(y, layer, "gate_up", hidden, "swiglu")
            matmul(hidden, layer, "ffn_down", x, "residual")
        if not want_logits:
            return None
        logits = scope.acquire(4 * c.vocab_size, "logits")
        norm(x, "output_norm", last=True)
        ops.matmul(rec, y, w.matrix("output"), logits, rows=1, node="output")
        return logits

    def choose(self, rec: Recorder, logits: Buffer, token: Buffer, ban: tuple[int, ...]) -> None:
        """Record greedy choice: token[0] = argmax of the logits outside ``ban``."""
        self._ops.argmax(rec, logits, token, size=self.config.vocab_size, ban=ban)

    def close(self) -> None:
        """Give the weights back to the pool."""
        self._launcher.pool.release(self._turns)
        self._weights.release(self._launcher.pool)
        self._launcher.pool.flush()


def matrices(config: LlamaConfig) -> Mapping[str, tuple[str, ...]]:
    """The matrices of the step and the tensors that are stacked, row on row, to make each."""
    table: dict[str, tuple[str, ...]] = {"token_embd": ("token_embd.weight",)}
    for i in range(config.n_layers):
        layer = f"blk.{i}"
        table[f"{layer}.qkv"] = (f"{layer}.attn_q.weight", f"{layer}.attn_k.weight", f"{layer}.attn_v.weight")
        table[f"{layer}.attn_output"] = (f"{layer}.attn_output.weight",)
        table[f"{layer}.gate_up"] = (f"{layer}.ffn_gate.weight", f"{layer}.ffn_up.weight")
        table[f"{layer}.ffn_down"] = (f"{layer}.ffn_down.weight",)
    # a tied model has one matrix under two names
    table["output"] = ("token_embd.weight",) if config.tied_embeddings else ("output.weight",)
    return table


def vectors(config: LlamaConfig) -> Mapping[str, str]:
    """The f32 vectors of the step and their tensors."""
    names = [f"blk.{i}.{name}" for i in range(config.n_layers) for name in ("attn_norm", "ffn_norm")]
    return {name: f"{name}.weight" for name in (*names, "output_norm")}


def rope_turns(config: LlamaConfig) -> bytes:
    """cos and sin of 2^bit * theta^(-2i/rope_dim), f32 [ROPE_BITS][rope_dim / 2][2]: see ``wgsl/rope_append.wgsl``."""
    half = config.rope_dim // 2
    angles = [2**bit * config.rope_theta ** (-i / half) for bit in range(ROPE_BITS) for i in range(half)]
    return b"".join(struct.pack("<2f", math.cos(angle), math.sin(angle)) for angle in angles)
