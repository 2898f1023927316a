"""Tiny random Llama models as GGUF files, and the float64 forward pass that tests compare with.

The files are complete: weights in any supported format, and a GPT-2 style tokenizer with a ChatML template.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from stepwell.models.config import LlamaConfig, expected_tensors
from stepwell.weights.gguf import GgufFile
from tests.gguf_writer import ARRAY, STRING, Tensor, Typed, gguf_bytes
from tests.reference.kernels import k_quant_blocks

Array = npt.NDArray[np.float64]

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NORMAL, CONTROL = 1, 3
FIRST_MERGES = ["h e", "i n", "Ġ t", "Ġt he", "l l", "Ġ a", "e r", "o n", "r e", "Ġ s"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    n_layers: int = 2,
    hidden: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 96,
    vocab: int = 320,
    formats: str = "Q4_1",
    embed_format: str = "Q8_0",
    mixed: Mapping[str, str] | None = None,
    tied: bool = True,
    context: int = 256,
) -> dict[str, Array]:
    """Write a model to ``path``; the weights as a reader of the file sees them, by name, with shape (outputs, inputs).

    ``formats`` is that of the layers' matrices, ``embed_format`` that of the embedding and the output matrix; ``mixed``
    has exceptions, by the last part of the name (``attn_v``).  Rows (hidden, ffn, n_heads * head_dim) must be whole
    blocks of their format: multiples of 32, for K-quants of 256; any for F32, F16 and BF16.
    """
    config = LlamaConfig(
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocab,
        context_length=context,
        rope_theta=10_000.0,
        rope_dim=head_dim,
        rms_eps=1e-5,
        tied_embeddings=tied,
    )
    random = np.random.default_rng(seed)
    tensors, weights = [], {}
    for name, shape in expected_tensors(config).items():
        if len(shape) == 1:
            values, kind = random.uniform(0.5, 1.5, size=shape), "F32"
        else:
            # Scaled so that activations keep their size from layer to layer and logits spread over several units.
            spread = 1.0 if name == "token_embd.weight" else 1.5 / shape[0] ** 0.5
            values = random.normal(size=shape[::-1]) * spread
            kind = (mixed or {}).get(name.split(".")[-2], formats if name.startswith("blk.") else embed_format)
        quantised_type = gguf.GGMLQuantizationType[kind]
        if kind.endswith("_K"):  # which the package reads but does not write
            packed = k_quant_blocks(kind, shape[1], shape[0], spread, random)
        else:
            packed = gguf.quants.quantize(values.astype(np.float32), quantised_type)
        tensors.append(Tensor(name, shape, quantised_type.value, packed.tobytes()))
        weights[name] = gguf.quants.dequantize(packed, quantised_type).astype(np.float64)
    path.write_bytes(gguf_bytes(_metadata(config) | tokenizer_metadata(vocab), tensors))
    return weights


def _metadata(config: LlamaConfig) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.name": "Tiny random llama",
        "llama.block_count": config.n_layers,
        "llama.context_length": config.context_length,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.ffn_size,
        "llama.attention.head_count": config.n_heads,
        "llama.attention.head_count_kv": config.n_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.rope_dim,
        "llama.vocab_size": config.vocab_size,
    }


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte: itself if printable Latin-1, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tokenizer_metadata(vocab: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer of ``vocab`` tokens: 3 special ones, 256 bytes, and one token per merge."""
    alphabet = byte_alphabet()
    n_merges = vocab - len(SPECIAL_TOKENS) - len(alphabet)
    candidates = _merges()
    if not 0 <= n_merges <= len(candidates):
        raise ValueError(
            f"a vocabulary of {vocab}; {vocab - n_merges} to {vocab - n_merges + len(candidates)} are possible"
        )
    merges = candidates[:n_merges]
    tokens = SPECIAL_TOKENS + alphabet + [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * len(SPECIAL_TOKENS) + [NORMAL] * (vocab - len(SPECIAL_TOKENS)),
        "tokenizer.ggml.merges": Typed(ARRAY, merges, STRING),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _merges() -> list[str]:
    """Some merges of English, then all other pairs of letters: enough for vocabularies up to about 2,900."""
    letters = [chr(code) for code in (*range(0x61, 0x7B), *range(0x41, 0x5B))]
    return list(dict.fromkeys([*FIRST_MERGES, *(f"{a} {b}" for a, b in product(letters, letters))]))


class FileWeights(Mapping[str, npt.NDArray[np.float32]]):
    """The weights of a GGUF file, dequantised one at a time when asked for: a large model need not fit in memory."""

    def __init__(self, path: Path, file: GgufFile) -> None:
        self._file = file
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    def __getitem__(self, name: str) -> npt.NDArray[np.float32]:
        info = self._file.tensors[name]
        raw = self._data[info.offset : info.offset + info.nbytes].reshape(*info.shape[:0:-1], -1)
        kind = gguf.GGMLQuantizationType(info.format.ggml_type)
        plain = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}.get(kind)
        return gguf.quants.dequantize(raw if plain is None else raw.view(plain), kind).reshape(info.shape[::-1])

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.tensors)

    def __len__(self) -> int:
        return len(self._file.tensors)


def reference_llama(weights: Mapping[str, npt.NDArray[Any]], config: LlamaConfig, ids: list[int]) -> Array:
    """Logits [len(ids), vocab] of one causal forward pass from position 0, in float64."""

    def weight(name: str) -> Array:
        return np.asarray(weights[name], dtype=np.float64)

    def rms_norm(x: Array, name: str) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_eps) * weight(name)

    n_tokens = len(ids)
    embedding = weights["token_embd.weight"]
    x = np.asarray(embedding[ids], dtype=np.float64)
    for layer in range(config.n_layers):
        block = f"blk.{layer}"
        h = rms_norm(x, f"{block}.attn_norm.weight")
        q, k, v = (
            (h @ weight(f"{block}.attn_{part}.weight").T).reshape(n_tokens, -1, config.head_dim) for part in "qkv"
        )
        x = x + _attention(rope(q, config), rope(k, config), v) @ weight(f"{block}.attn_output.weight").T
        h = rms_norm(x, f"{block}.ffn_norm.weight")
        gate, up = (h @ weight(f"{block}.ffn_{part}.weight").T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(f"{block}.ffn_down.weight").T
    x = rms_norm(x, "output_norm.weight")
    return x @ np.asarray(embedding if config.tied_embeddings else weights["output.weight"], dtype=np.float64).T


def rope(x: Array, config: LlamaConfig) -> Array:
    """Turn the neighbouring pairs (2i, 2i+1) of each head of ``x`` [T, heads, head_dim] by position * theta^(-2i/d).

    GGUF's llama stores the Q and K rows in this interleaved order (converters permute them from the split-half order).
    """
    frequencies = config.rope_theta ** (-np.arange(0, config.rope_dim, 2) / config.rope_dim)
    angles = np.arange(len(x))[:, None, None] * frequencies
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return turned


def _attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention [T, heads * head_dim] of ``q`` [T, heads, d] over ``k`` and ``v`` [T, kv_heads, d]."""
    n_tokens, n_heads, head_dim = q.shape
    group = n_heads // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(head_dim)
    scores = np.where(np.tril(np.ones((n_tokens, n_tokens), dtype=bool)), scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", scores, v).reshape(n_tokens, n_heads * head_dim)
