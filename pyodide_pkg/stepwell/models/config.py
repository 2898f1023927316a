"""The shape of a Llama model, read from a GGUF file's metadata, and the tensors that follow from it.

Key names and defaults follow the GGUF specification and llama.cpp's loader for the ``llama`` architecture.  What would
change the arithmetic and is not implemented is refused by name: a model never runs with a part of it left out.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from stepwell.errors import BadFile, ModelError, Unsupported

if TYPE_CHECKING:
    from stepwell.weights.gguf import GgufFile, Value

MAX_LAYERS = 512  # llama.cpp's bound; keeps a forged block count from growing the tensor table


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes in elements.  ``n_heads`` query heads share ``n_kv_heads`` key/value heads; ``rope_dim`` is the part of a
    head that is rotated.  ``tied_embeddings``: the token embedding is the output matrix too.

    Raises BadFile for values that no model can have, Unsupported for those that ours cannot.
    """

    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rope_dim: int
    rms_eps: float
    tied_embeddings: bool

    def __post_init__(self) -> None:
        for name in ("hidden_size", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise BadFile(f"{name} is {getattr(self, name):,}; at least 1 is needed.")
        if self.context_length < 1:
            raise BadFile(f"context_length is {self.context_length:,}; at least 1 is needed.")
        if self.n_layers > MAX_LAYERS:
            raise BadFile(f"n_layers is {self.n_layers:,}; at most {MAX_LAYERS} are possible.")
        if self.n_heads % self.n_kv_heads:
            raise BadFile(f"{self.n_heads} query heads cannot share {self.n_kv_heads} key/value heads evenly.")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise BadFile(f"rope_theta is {self.rope_theta}; a positive number is needed.")
        if not 0 <= self.rms_eps < 1:
            raise BadFile(f"rms_eps is {self.rms_eps}; a number from 0 to below 1 is needed.")
        if self.head_dim % 2:
            raise BadFile(f"head_dim is {self.head_dim}; rotary embedding turns pairs, so it must be even.")
        if self.head_dim % 4:
            raise Unsupported(f"head_dim is {self.head_dim}; the kernels read four values at a time: a multiple of 4.")
        if self.rope_dim != self.head_dim:
            raise Unsupported(
                f"{self.rope_dim} of {self.head_dim} dimensions per head are rotated; only whole heads are supported."
            )

    @classmethod
    def from_gguf(cls, file: "GgufFile") -> Self:
        """Raises Unsupported or BadFile, with the file's and the key's name."""
        architecture = read_architecture(file)
        if architecture != "llama":
            raise Unsupported(f"{file.name}: architecture {architecture!r}; this is the reader for 'llama'.")
        keys = _Keys(file, "llama")
        _refuse_variations(keys)
        hidden_size, n_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
        head_dim = keys.integer("attention.key_length", hidden_size // max(n_heads, 1))
        value_dim = keys.integer("attention.value_length", hidden_size // max(n_heads, 1))
        if value_dim != head_dim:
            raise keys.unsupported("attention.value_length", value_dim, f"values as long as keys ({head_dim})")
        try:
            return cls(
                hidden_size=hidden_size,
                n_layers=keys.integer("block_count"),
                n_heads=n_heads,
                n_kv_heads=keys.integer("attention.head_count_kv", n_heads),
                head_dim=head_dim,
                ffn_size=keys.integer("feed_forward_length"),
                vocab_size=_vocab_size(file, keys),
                context_length=keys.integer("context_length"),
                rope_theta=keys.real("rope.freq_base", 10_000.0),
                rope_dim=keys.integer("rope.dimension_count", head_dim),
                rms_eps=keys.real("attention.layer_norm_rms_epsilon"),
                tied_embeddings="output.weight" not in file.tensors,
            )
        except ModelError as error:
            text = str(error)
            raise type(error)(text if text.startswith(file.name) else f"{file.name}: {text}") from error


def read_architecture(file: "GgufFile") -> str:
    """``general.architecture``: which architecture's keys and tensors the file has."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise BadFile(
            f"{file.name}: the key 'general.architecture' is {'missing' if name is None else 'not a string'}."
        )
    return name


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape in GGUF order: a matrix is (inputs, outputs), its rows of ``inputs`` weights are contiguous."""
    hidden, ffn = config.hidden_size, config.ffn_size
    queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    table: dict[str, tuple[int, ...]] = {"token_embd.weight": (hidden, config.vocab_size)}
    for layer in range(config.n_layers):
        block = f"blk.{layer}"
        table |= {
            f"{block}.attn_norm.weight": (hidden,),
            f"{block}.attn_q.weight": (hidden, queries),
            f"{block}.attn_k.weight": (hidden, keys),
            f"{block}.attn_v.weight": (hidden, keys),
            f"{block}.attn_output.weight": (queries, hidden),
            f"{block}.ffn_norm.weight": (hidden,),
            f"{block}.ffn_gate.weight": (hidden, ffn),
            f"{block}.ffn_up.weight": (hidden, ffn),
            f"{block}.ffn_down.weight": (ffn, hidden),
        }
    table["output_norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        table["output.weight"] = (hidden, config.vocab_size)
    return table


def check_tensors(file: "GgufFile", config: LlamaConfig) -> None:
    """Every tensor of the architecture is there with its shape, norms are F32, and nothing else is there.

    Raises Unsupported for tensors that our forward pass has no use for (biases, RoPE factors, experts), because leaving
    them out would give wrong answers; BadFile for missing tensors and wrong shapes.
    """
    expected = expected_tensors(config)
    if extra := [name for name in file.tensors if name not in expected]:
        raise Unsupported(
            f"{file.name}: {len(extra):,} tensors have no place in a plain Llama model of {config.n_layers} layers, "
            f"the only kind supported: {', '.join(extra[:3])}{', …' if len(extra) > 3 else ''}."
        )
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            raise BadFile(f"{file.name}: tensor {name!r} with shape {list(shape)} is missing.")
        if info.shape != shape:
            raise BadFile(f"{file.name}: tensor {name!r} has shape {list(info.shape)}; {list(shape)} is expected.")
        if len(shape) == 1 and info.format.name != "F32":
            raise Unsupported(f"{file.name}: tensor {name!r} has type {info.format.name}; norms are supported in F32.")


class _Keys:
    """Typed access to the keys under one prefix.  Without a default, a missing key is a BadFile."""

    def __init__(self, file: "GgufFile", prefix: str) -> None:
        self.file, self.prefix = file, prefix

    def find(self, key: str) -> "Value | None":
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; a list (one per layer) counts as its element when all of them are equal."""
        value = self.find(key)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise self.unsupported(key, "different from layer to layer", "one value for all layers")
            value = value[0]
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self.bad(key, value, "an integer")

    def real(self, key: str, default: float | None = None) -> float:
        value = self.find(key)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self.bad(key, value, "a number")

    def bad(self, key: str, value: object, wanted: str) -> BadFile:
        found = "missing" if value is None else f"{value!r}"
        return BadFile(f"{self.file.name}: the key '{self.prefix}.{key}' is {found}; {wanted} is needed.")

    def unsupported(self, key: str, value: object, supported: str) -> Unsupported:
        return Unsupported(f"{self.file.name}: '{self.prefix}.{key}' is {value}; supported: {supported}.")


def _vocab_size(file: "GgufFile", keys: _Keys) -> int:
    """The tokenizer's length, as llama.cpp sizes the embedding; the key counts only in a file without a tokenizer."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else keys.integer("vocab_size")


def _refuse_variations(keys: _Keys) -> None:
    """Members of the llama family whose arithmetic differs from ours."""
    if experts := keys.integer("expert_count", 0):
        raise keys.unsupported("expert_count", experts, "dense models (0)")
    if keys.find("attention.causal") is False:
        raise keys.unsupported("attention.causal", False, "causal attention (True)")
    scaling = keys.find("rope.scaling.type")
    factor_key = "rope.scale_linear" if keys.find("rope.scaling.factor") is None else "rope.scaling.factor"
    factor = keys.real(factor_key, 1.0)
    if scaling not in (None, "none", "linear"):
        raise keys.unsupported("rope.scaling.type", f"{scaling!r} (factor {factor:g})", "none")
    if scaling != "none" and factor not in (0.0, 1.0):  # 0 stands for 1 in old files
        raise keys.unsupported(factor_key, f"{factor:g}", "no scaling (1)")
