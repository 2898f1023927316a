"""Stores what ``transformers`` computes of the tiny models, so that tests need neither it nor PyTorch.

    python -m venv ../scratch && ../scratch/bin/pip install torch==2.13.0 transformers==5.24.0 gguf jinja2
    PYTHONPATH=.:pyodide_pkg ../scratch/bin/python -m tests.support.make_transformers_reference

For each model of ``tiny_architectures.py``: its prompt, 64 greedy ids of ``generate`` and the best logits of some
steps, in float32 on the CPU, of the weights as a reader of the GGUF file dequantises them.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from stepwell.gpu.source import FileSource
from stepwell.models.config import DecoderConfig
from stepwell.models.phi3 import Phi3Config
from stepwell.weights.gguf import read_gguf
from tests.support.tiny_architectures import DATA, STEPS, TINY_MODELS, TinyModel, reference_file
from tests.support.tiny_llama import Array

BEST = 8
KEPT_STEPS = (0, 1, 2, 3, 15, 22, 23, 24, 31, 47, 63)  # 22 to 24: around the switch of the model that has one
SMALLEST_LEAD = 0.01  # of a chosen logit over the next: a tenth would do for f32 sums in another order


def halves(weight: Array, config: DecoderConfig) -> Array:
    """Rows of q or k as transformers has them: pairs of neighbours become (i, i + head_dim / 2)."""
    heads = weight.reshape(-1, config.head_dim // 2, 2, weight.shape[1])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def state_of(weights: dict[str, Array], config: DecoderConfig) -> dict[str, torch.Tensor]:
    """The weights by the names of transformers."""
    phi3 = isinstance(config, Phi3Config)
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    state["lm_head.weight"] = weights["token_embd.weight" if config.tied_embeddings else "output.weight"]
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    names["ffn_down"] = "mlp.down_proj"
    if phi3:
        names |= {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    else:
        names |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
        names |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    for layer in range(config.n_layers):
        for ours, theirs in names.items():
            weight = weights[f"blk.{layer}.{ours}.weight"]
            if ours in ("attn_q", "attn_k"):
                weight = halves(weight, config)
            state[f"model.layers.{layer}.{theirs}.weight"] = weight
    return {name: torch.tensor(np.ascontiguousarray(value), dtype=torch.float32) for name, value in state.items()}


def model_of(tiny: TinyModel, config: DecoderConfig, weights: dict[str, Array]) -> Any:
    """The model of transformers."""
    shape: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if isinstance(config, Phi3Config):
        rope["partial_rotary_factor"] = config.rope_dim / config.head_dim
        if config.rope_factors:
            short, long = (tiny.options[name] for name in ("short", "long"))
            rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
            rope["original_max_position_embeddings"] = config.original_context
        shape |= {"original_max_position_embeddings": config.original_context, "rope_parameters": rope}
        shape["sliding_window"] = config.sliding_window or None
        model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**shape))
    else:
        if tiny.scaling is not None:
            scaling = tiny.scaling
            rope |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low}
            rope |= {"high_freq_factor": scaling.high, "original_max_position_embeddings": scaling.original_context}
        shape |= {"head_dim": config.head_dim, "rope_parameters": rope}
        model = transformers.LlamaForCausalLM(transformers.DecoderConfig(**shape))
    model.load_state_dict(state_of(weights, config), strict=True)
    return model.eval()


async def reference_of(tiny: TinyModel, path: Path) -> dict[str, Any]:
    weights = tiny.make(path)
    file = await read_gguf(FileSource(path))
    config = (Phi3Config if file.metadata["general.architecture"] == "phi3" else DecoderConfig).from_gguf(file)
    model = model_of(tiny, config, weights)
    prompt = tiny.prompt_ids()
    with torch.no_grad():
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    ids = made.sequences[0, len(prompt) :].tolist()
    best = [torch.topk(logits[0], BEST) for logits in made.logits]
    lead = min(float(step.values[0] - step.values[1]) for step in best)
    if lead < SMALLEST_LEAD:
        raise SystemExit(f"a choice with a lead of {lead:.1e} only: take another seed")
    return {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "prompt_ids": prompt,
        "ids": ids,
        "distinct": len(set(ids)),
        "smallest_lead": round(lead, 4),
        "top_logits": {str(step): pairs(best[step]) for step in KEPT_STEPS},
    }


def pairs(best: Any) -> list[list[float]]:
    return [[index, round(logit, 5)] for index, logit in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


async def main() -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, tiny in TINY_MODELS.items():
            reference = await reference_of(tiny, Path(folder) / "tiny.gguf")
            print(name, reference["distinct"], reference["smallest_lead"])
            reference_file(name).write_text(json.dumps(reference) + "\n")


if __name__ == "__main__":
    import asyncio

    asyncio.run(main())
