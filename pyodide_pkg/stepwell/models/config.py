"""The shape of a model, read from a GGUF file's metadata, and the tensors that follow from it.

``DecoderConfig`` is Llama's; architectures that differ in little have a config that derives from it (``phi3.py``).  Key
names and defaults follow the GGUF specification and llama.cpp's loader.  A key that would change the arithmetic in a
way that is not implemented is refused by name: a model never runs with a part of it left out.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from stepwell.errors import BadFile, ModelError, Unsupported

if TYPE_CHECKING:
    from stepwell.weights.gguf import GgufFile, Value

MAX_LAYERS = 512
"""llama.cpp's bound; it keeps a forged block count from growing the tensor table."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a model; sizes are in elements.

    ``n_heads`` query heads share ``n_kv_heads`` key/value heads; ``rope_dim`` is the part of a head that is rotated.
    ``tied_embeddings``: the token embedding is the output matrix too.

    ``rope_factors`` names the tensors that divide the frequencies of rotation: none; one; or two, for sequences up to
    ``original_context`` positions and for longer ones.  Rotated pairs are stretched by ``rope_scale``.  A position sees
    ``sliding_window`` positions, itself included; 0: itself and all before it.

    Raises BadFile for values that no model can have, Unsupported for values that these kernels cannot have.
    """

    architecture: ClassVar[str] = "llama"
    stacks: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv": ("attn_q", "attn_k", "attn_v"),
        "attn_output": ("attn_output",),
        "gate_up": ("ffn_gate", "ffn_up"),
        "ffn_down": ("ffn_down",),
    }
    """The matrices of a layer, and the tensors that make each, stacked row on row."""

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
    rope_factors: tuple[str, ...] = ()
    original_context: int = 0
    rope_scale: float = 1.0
    sliding_window: int = 0

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
        self._check_positions()

    def _check_positions(self) -> None:
        if self.rope_dim % 2 or not 0 < self.rope_dim <= self.head_dim:
            raise BadFile(
                f"rope_dim is {self.rope_dim:,}; an even number from 2 to head_dim ({self.head_dim}) is needed."
            )
        if not (math.isfinite(self.rope_scale) and self.rope_scale > 0):
            raise BadFile(f"rope_scale is {self.rope_scale}; a positive number is needed.")
        if self.sliding_window < 0:
            raise BadFile(f"sliding_window is {self.sliding_window:,}; at least 1, or 0 for none, is needed.")
        if len(self.rope_factors) > 1 and self.original_context < 1:
            raise BadFile(f"original_context is {self.original_context:,}; at least 1 is needed.")

    @classmethod
    def from_gguf(cls, file: "GgufFile") -> Self:
        """The config of ``file``.  Raises Unsupported or BadFile, with the file's and the key's name."""
        architecture = read_architecture(file)
        if architecture != cls.architecture:
            raise Unsupported(
                f"{file.name}: architecture {architecture!r}; this is the reader for {cls.architecture!r}."
            )
        keys = Keys(file, architecture)
        try:
            return cls._read(keys)
        except ModelError as error:
            text = str(error)
            raise type(error)(text if text.startswith(file.name) else f"{file.name}: {text}") from error

    @classmethod
    def _read(cls, keys: "Keys") -> Self:
        values = common_values(keys)
        if values["rope_dim"] != values["head_dim"]:
            raise Unsupported(
                f"{values['rope_dim']} of {values['head_dim']} dimensions per head are rotated; only whole heads are "
                f"supported."
            )
        factors = ("rope_freqs.weight",) if "rope_freqs.weight" in keys.file.tensors else ()  # Llama 3's scaling
        return cls(**values, rope_factors=factors)

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of the tensors of one layer, as in ``expected_tensors``."""
        hidden, ffn = self.hidden_size, self.ffn_size
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "attn_norm": (hidden,),
            "attn_q": (hidden, queries),
            "attn_k": (hidden, keys),
            "attn_v": (hidden, keys),
            "attn_output": (queries, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate": (hidden, ffn),
            "ffn_up": (hidden, ffn),
            "ffn_down": (ffn, hidden),
        }

    def pairing(self) -> tuple[int, ...]:
        """The pairing of the first tensor of qkv, for ``Ops.repack``; empty: pairs are neighbours in the file."""
        return ()


def read_architecture(file: "GgufFile") -> str:
    """The architecture whose keys and tensors ``file`` has (``general.architecture``).  Raises BadFile without one."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise BadFile(
            f"{file.name}: the key 'general.architecture' is {'missing' if name is None else 'not a string'}."
        )
    return name


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of the tensors of ``config`` in GGUF order: a matrix is (inputs, outputs), rows contiguous."""
    table: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.hidden_size, config.vocab_size)}
    layer = config.layer_tensors()
    for i in range(config.n_layers):
        table |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    table["output_norm.weight"] = (config.hidden_size,)
    if not config.tied_embeddings:
        table["output.weight"] = (config.hidden_size, config.vocab_size)
    return table | {name: (config.rope_dim // 2,) for name in config.rope_factors}


def check_tensors(file: "GgufFile", config: DecoderConfig) -> None:
    """Check that ``file`` has every tensor of ``config`` with its shape, vectors in F32, and nothing else.

    Raises Unsupported for tensors that the forward pass has no use for (biases, experts), because leaving them out
    would give wrong answers; BadFile for missing tensors and wrong shapes.
    """
    expected = expected_tensors(config)
    if extra := [name for name in file.tensors if name not in expected]:
        raise Unsupported(
            f"{file.name}: {len(extra):,} tensors have no place in a plain {config.architecture} model of "
            f"{config.n_layers} layers, the only kind supported: "
            f"{', '.join(extra[:3])}{', …' if len(extra) > 3 else ''}."
        )
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            raise BadFile(f"{file.name}: tensor {name!r} with shape {list(shape)} is missing.")
        if info.shape != shape:
            raise BadFile(f"{file.name}: tensor {name!r} has shape {list(info.shape)}; {list(shape)} is expected.")
        if len(shape) == 1 and info.format.name != "F32":
            raise Unsupported(f"{file.name}: tensor {name!r} has type {info.format.name}; vectors must be F32.")


class Keys:
    """Typed access to the keys of ``file`` under ``prefix``.  Without a default, a missing key is a BadFile."""

    def __init__(self, file: "GgufFile", prefix: str) -> None:
        self.file, self.prefix = file, prefix

    def find(self, key: str) -> "Value | None":
        """The value of ``key``; None without one."""
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer under ``key``; a list (one per layer) counts as its element when all of them are equal."""
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
        """The number under ``key``."""
        value = self.find(key)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self.bad(key, value, "a number")

    def bad(self, key: str, value: object, wanted: str) -> BadFile:
        """The error for ``value`` under ``key``, where ``wanted`` belongs."""
        found = "missing" if value is None else f"{value!r}"
        return BadFile(f"{self.file.name}: the key '{self.prefix}.{key}' is {found}; {wanted} is needed.")

    def unsupported(self, key: str, value: object, supported: str) -> Unsupported:
        """The error for ``value`` under ``key``, where only ``supported`` is implemented."""
        return Unsupported(f"{self.file.name}: '{self.prefix}.{key}' is {value}; supported: {supported}.")


def common_values(keys: Keys, scalings: tuple[str, ...] = ()) -> dict[str, Any]:
    """The config's fields that all architectures have; ``scalings``: types of RoPE scaling that the caller reads."""
    _refuse_variations(keys, scalings)
    hidden_size, n_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden_size // max(n_heads, 1))
    value_dim = keys.integer("attention.value_length", hidden_size // max(n_heads, 1))
    if value_dim != head_dim:
        raise keys.unsupported("attention.value_length", value_dim, f"values as long as keys ({head_dim})")
    return {
        "hidden_size": hidden_size,
        "n_layers": keys.integer("block_count"),
        "n_heads": n_heads,
        "n_kv_heads": keys.integer("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "ffn_size": keys.integer("feed_forward_length"),
        "vocab_size": _vocab_size(keys),
        "context_length": keys.integer("context_length"),
        "rope_theta": keys.real("rope.freq_base", 10_000.0),
        "rope_dim": keys.integer("rope.dimension_count", head_dim),
        "rms_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "tied_embeddings": "output.weight" not in keys.file.tensors,
    }


def _vocab_size(keys: Keys) -> int:
    """The tokenizer's length, as llama.cpp sizes the embedding; the key counts only in a file without a tokenizer."""
    tokens = keys.file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else keys.integer("vocab_size")


def _refuse_variations(keys: Keys, scalings: tuple[str, ...]) -> None:
    """Raise Unsupported for members of the family whose arithmetic differs."""
    if experts := keys.integer("expert_count", 0):
        raise keys.unsupported("expert_count", experts, "dense models (0)")
    if keys.find("attention.causal") is False:
        raise keys.unsupported("attention.causal", False, "causal attention (True)")
    scaling = keys.find("rope.scaling.type")
    factor_key = "rope.scale_linear" if keys.find("rope.scaling.factor") is None else "rope.scaling.factor"
    factor = keys.real(factor_key, 1.0)
    if scaling not in (None, "none", "linear", *scalings):
        supported = ", ".join(("none", *scalings))
        raise keys.unsupported("rope.scaling.type", f"{scaling!r} (factor {factor:g})", supported)
    if scaling not in ("none", *scalings) and factor not in (0.0, 1.0):  # 0 stands for 1 in old files
        raise keys.unsupported(factor_key, f"{factor:g}", "no scaling (1)")
