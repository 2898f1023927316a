"""A decoder model with its weights on the GPU, and the tensors of the Llama architecture (Llama 2 and 3, SmolLM2, …).

Architectures that compute the same from tensors stored in another way derive from it (``phi3.py``).  ``steps.py``
records the steps of all of them.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

from stepwell.errors import BadRequest
from stepwell.gpu.device import ByteSource, Progress
from stepwell.kernels.kv import KV_TYPES, KVShape
from stepwell.launch.launcher import Launcher
from stepwell.memory.buffer import Buffer, Role
from stepwell.models.config import DecoderConfig, check_tensors, expected_tensors
from stepwell.models.rope import read_factors, rotation_tables
from stepwell.models.steps import Steps
from stepwell.weights.gguf import GgufFile
from stepwell.weights.loader import Weights, load_weights
from stepwell.weights.synthetic import WeightPlan, make_weights, plan_weights


class DecoderModel:
    """A loaded model: its ``config``, and on the GPU its ``weights`` and its tables of ``rotations``.

    ``switch_position``: longer sequences are rotated by other frequencies, all of them; None: there is one set.
    """

    config_type: ClassVar[type[DecoderConfig]] = DecoderConfig

    def __init__(self, config: DecoderConfig, weights: Weights, launcher: Launcher, rotations: Buffer) -> None:
        self.config = config
        self.weights = weights
        self.rotations = rotations
        self._pool = launcher.pool
        self.switch_position = config.original_context if len(config.rope_factors) > 1 else None

    @classmethod
    async def load(
        cls, file: GgufFile, source: ByteSource, launcher: Launcher, progress: Progress | None = None
    ) -> Self:
        """Check ``file`` against the architecture, then stream its weights from ``source``.

        ``progress`` gets (bytes done, bytes in total).  Raises as ``from_gguf``, ``check_tensors`` and ``load_weights``
        do; then every buffer is given back.
        """
        config = cls.config_type.from_gguf(file)
        check_tensors(file, config)
        table = rotation_tables(config, [await read_factors(file, source, name) for name in config.rope_factors])
        rotations = launcher.pool.acquire(len(table), Role.WEIGHTS, "rope turns")
        try:
            launcher.device.write_buffer(rotations.id, 0, table)
            weights = await load_weights(
                file, source, launcher, matrices(config), vectors(config), progress, pairings(config)
            )
        except BaseException:
            launcher.pool.release(rotations)
            launcher.pool.flush()
            raise
        return cls(config, weights, launcher, rotations)

    def steps(self, launcher: Launcher) -> Steps:
        """The recorder of its steps with the kernels of ``launcher``, which has the device and pool of the weights."""
        return Steps(self.config, self.weights, self.rotations, self.switch_position, launcher)

    def kv_shape(self, launcher: Launcher, kv_type: str = "f32") -> KVShape:
        """What its KV cache is made of, for the kernels of ``launcher``.  BadRequest for a type not in KV_TYPES."""
        if kv_type not in KV_TYPES:
            raise BadRequest(f"no type {kv_type!r} of K and V; there are {', '.join(KV_TYPES)}.")
        config, tuning = self.config, launcher.tuning
        width_bytes = KV_TYPES[kv_type] * config.n_kv_heads * config.head_dim
        chunks = tuning.attention_chunk, tuning.decode_chunk
        return KVShape(config.n_layers, width_bytes, tuning.slabs, chunks, kv_type == "f16")

    def close(self) -> None:
        """Give the weights back to the pool."""
        self._pool.release(self.rotations)
        self.weights.release(self._pool)
        self._pool.flush()

    @classmethod
    async def synthetic(
        cls, config: DecoderConfig, kind: str, launcher: Launcher, progress: Progress | None = None
    ) -> Self:
        """A model of the shape ``config`` with random weights, made on the GPU in the layout of tensor format ``kind``.

        ``progress`` gets (bytes done, bytes in total).
        """
        table = rotation_tables(config)
        rotations = launcher.pool.acquire(len(table), Role.WEIGHTS, "rope turns")
        try:
            launcher.device.write_buffer(rotations.id, 0, table)
            weights = await make_weights(weight_plan(config, kind), launcher, progress)
        except BaseException:
            launcher.pool.release(rotations)
            launcher.pool.flush()
            raise
        return cls(config, weights, launcher, rotations)


def weight_plan(config: DecoderConfig, kind: str) -> WeightPlan:
    """The random weights of the shape ``config`` in the layout of tensor format ``kind``."""
    return plan_weights(kind, expected_tensors(config), matrices(config), vectors(config))


def matrices(config: DecoderConfig) -> Mapping[str, tuple[str, ...]]:
    """The matrices of the step and the tensors that are stacked, row on row, to make each."""
    table: dict[str, tuple[str, ...]] = {"token_embd": ("token_embd.weight",)}
    for i in range(config.n_layers):
        for name, parts in config.stacks.items():
            table[f"blk.{i}.{name}"] = tuple(f"blk.{i}.{part}.weight" for part in parts)
    # a tied model has one matrix under two names
    table["output"] = ("token_embd.weight",) if config.tied_embeddings else ("output.weight",)
    return table


def vectors(config: DecoderConfig) -> Mapping[str, str]:
    """The f32 vectors of the step and the tensor of each."""
    names = [f"blk.{i}.{name}" for i in range(config.n_layers) for name in ("attn_norm", "ffn_norm")]
    return {name: f"{name}.weight" for name in (*names, "output_norm")}


def pairings(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """The tensors whose rows are laid out for rotation when they are repacked, and how (``Ops.repack``)."""
    pairing = config.pairing()
    return {f"blk.{i}.{config.stacks['qkv'][0]}.weight": pairing for i in range(config.n_layers)} if pairing else {}
