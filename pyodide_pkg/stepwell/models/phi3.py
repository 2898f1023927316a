"""The Phi-3 architecture (Phi-3, Phi-3.5, Phi-4-mini): it computes what Llama does, from tensors stored in another way.

q, k and v are one tensor, gate and up another.  Heads are rotated by halves, in pairs (i, i + rope_dim / 2), and only
their first ``rope_dim`` values: the rows of q and k are laid out anew at load time, so that the kernels see pairs of
neighbours as in Llama.  Two sets of factors (LongRoPE) divide the frequencies of rotation, one for sequences up to the
original context and one for longer ones.  A position sees a window of positions, if the file has one.

Keys and tensors as llama.cpp's converter writes them; the arithmetic as in transformers' Phi3ForCausalLM.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from stepwell.models.config import DecoderConfig, Keys, common_values
from stepwell.models.llama import DecoderModel

SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
"""The tensors of LongRoPE's factors, for sequences up to the original context and for longer ones."""


@dataclass(frozen=True, slots=True)
class Phi3Config(DecoderConfig):
    """The shape of a Phi-3 model."""

    architecture: ClassVar[str] = "phi3"
    stacks: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv": ("attn_qkv",),
        "attn_output": ("attn_output",),
        "gate_up": ("ffn_up",),  # the rows of gate come first
        "ffn_down": ("ffn_down",),
    }

    @classmethod
    def _read(cls, keys: Keys) -> Self:
        values = common_values(keys, scalings=("longrope",))
        original = keys.integer("rope.scaling.original_context_length", values["context_length"])
        has_factors = SHORT in keys.file.tensors or LONG in keys.file.tensors
        scale = attention_factor(values["context_length"], original) if has_factors else 1.0
        return cls(
            **values,
            rope_factors=(SHORT, LONG) if has_factors else (),
            original_context=original,
            rope_scale=keys.real("rope.scaling.attn_factor", scale),
            sliding_window=keys.integer("attention.sliding_window", 0),
        )

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, ffn = self.hidden_size, self.ffn_size
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "attn_norm": (hidden,),
            "attn_qkv": (hidden, queries + 2 * keys),
            "attn_output": (queries, hidden),
            "ffn_norm": (hidden,),
            "ffn_up": (hidden, 2 * ffn),
            "ffn_down": (ffn, hidden),
        }

    def pairing(self) -> tuple[int, ...]:
        return ((self.n_heads + self.n_kv_heads) * self.head_dim, self.head_dim, self.rope_dim)


class Phi3(DecoderModel):
    """A loaded Phi-3 model."""

    config_type: ClassVar[type[DecoderConfig]] = Phi3Config


def attention_factor(context: int, original: int) -> float:
    """LongRoPE's stretch of q and k in a model whose context was extended from ``original`` to ``context`` positions.

    Files may state another one.
    """
    if context <= original or original < 2:
        return 1.0
    return math.sqrt(1 + math.log(context / original) / math.log(original))
