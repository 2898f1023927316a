"""Tiny random Llama and Phi-3 models as GGUF files, and the float64 forward pass that tests compare with.

The files are complete: weights in any supported format, and a GPT-2 style tokenizer with a ChatML template.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from stepwell.models.config import DecoderConfig, expected_tensors
from stepwell.models.phi3 import Phi3Config
from stepwell.weights.gguf import GgufFile
from tests.reference.kernels import k_quant_blocks
from tests.support.gguf_writer import ARRAY, STRING, Tensor, Typed, gguf_bytes

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
    rope_theta: float = 10_000.0,
    rope_freqs: Sequence[float] = (),
) -> dict[str, Array]:
    """Write a model to ``path``; the weights as a reader of the file sees them, by name, with shape (outputs, inputs).

    ``formats`` is that of the layers' matrices, ``embed_format`` that of the embedding and the output matrix; ``mixed``
    has exceptions, by the last part of the name (``attn_v``).  Rows (hidden, ffn, n_heads * head_dim) must be whole
    blocks of their format: multiples of 32, for K-quants of 256; any for F32, F16 and BF16.  ``rope_freqs`` divide the
    frequencies of rotation.
    """
    config = DecoderConfig(
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocab,
        context_length=context,
        rope_theta=rope_theta,
        rope_dim=head_dim,
        rms_eps=1e-5,
        tied_embeddings=tied,
        rope_factors=("rope_freqs.weight",) if rope_freqs else (),
    )
    return _write(path, config, seed, formats, embed_format, mixed or {}, {"rope_freqs.weight": rope_freqs})


def write_tiny_phi3(
    path: Path,
    *,
    seed: int = 0,
    n_layers: int = 2,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 96,
    vocab: int = 320,
    formats: str = "Q4_1",
    embed_format: str = "Q8_0",
    tied: bool = True,
    context: int = 256,
    rope_dim: int = 16,
    original_context: int = 256,
    short: Sequence[float] = (),
    long: Sequence[float] = (),
    sliding_window: int = 0,
) -> dict[str, Array]:
    """Like ``write_tiny_llama``.  ``short`` and ``long`` divide the frequencies of sequences up to the original context
    and of longer ones.
    """
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    extended = bool(short) and context > original_context
    stretch = math.sqrt(1 + math.log(context / original_context) / math.log(original_context)) if extended else 1.0
    config = Phi3Config(
        hidden_size=n_heads * head_dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocab,
        context_length=context,
        rope_theta=10_000.0,
        rope_dim=rope_dim,
        rms_eps=1e-5,
        tied_embeddings=tied,
        rope_factors=names if short else (),
        original_context=original_context,
        rope_scale=stretch,
        sliding_window=sliding_window,
    )
    return _write(path, config, seed, formats, embed_format, {}, dict(zip(names, (short, long), strict=True)))


def _write(
    path: Path,
    config: DecoderConfig,
    seed: int,
    formats: str,
    embed_format: str,
    mixed: Mapping[str, str],
    factors: Mapping[str, Sequence[float]],
) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    tensors, weights = [], {}
    for name, shape in expected_tensors(config).items():
        if name in factors:
            values, kind = np.array(factors[name]), "F32"
        elif len(shape) == 1:
            values, kind = random.uniform(0.5, 1.5, size=shape), "F32"
        else:
            # Scaled so that activations keep their size from layer to layer and logits spread over several units.
            spread = 1.0 if name == "token_embd.weight" else 1.5 / shape[0] ** 0.5
            values = random.normal(size=shape[::-1]) * spread
            kind = mixed.get(name.split(".")[-2], formats if name.startswith("blk.") else embed_format)
        quantised_type = gguf.GGMLQuantizationType[kind]
        if kind.endswith("_K"):  # which the package reads but does not write
            packed = k_quant_blocks(kind, shape[1], shape[0], spread, random)
        else:
            packed = gguf.quants.quantize(values.astype(np.float32), quantised_type)
        tensors.append(Tensor(name, shape, quantised_type.value, packed.tobytes()))
        weights[name] = gguf.quants.dequantize(packed, quantised_type).astype(np.float64)
    path.write_bytes(gguf_bytes(_metadata(config) | tokenizer_metadata(config.vocab_size), tensors))
    return weights


def _metadata(config: DecoderConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": config.n_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.rope_dim,
        "vocab_size": config.vocab_size,
    }
    if config.architecture == "phi3":
        keys["rope.scaling.original_context_length"] = config.original_context
        keys["attention.sliding_window"] = config.sliding_window
        if config.rope_factors:
            keys["rope.scaling.attn_factor"] = config.rope_scale
    else:
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    names = {"general.architecture": config.architecture, "general.name": f"Tiny random {config.architecture}"}
    return names | {f"{config.architecture}.{key}": value for key, value in keys.items()}


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


def reference_llama(weights: Mapping[str, npt.NDArray[Any]], config: DecoderConfig, ids: list[int]) -> Array:
    """Logits [len(ids), vocab] of one causal forward pass from position 0, in float64.

    Where frequencies depend on the sequence's length, those of ``len(ids)`` are taken for all positions.
    """

    def weight(name: str) -> Array:
        return np.asarray(weights[name], dtype=np.float64)

    def rms_norm(x: Array, name: str) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_eps) * weight(name)

    n_tokens = len(ids)
    frequencies = _frequencies(weights, config, n_tokens)
    visible = np.tril(np.ones((n_tokens, n_tokens), dtype=bool))
    if config.sliding_window:
        visible &= ~np.tril(visible, -config.sliding_window)
    embedding = weights["token_embd.weight"]
    x = np.asarray(embedding[ids], dtype=np.float64)
    for layer in range(config.n_layers):
        block = f"blk.{layer}"
        h = rms_norm(x, f"{block}.attn_norm.weight")
        stack = np.concatenate([weight(f"{block}.{name}.weight") for name in config.stacks["qkv"]])
        heads = (h @ stack.T).reshape(n_tokens, -1, config.head_dim)
        q, k, v = np.split(heads, [config.n_heads, config.n_heads + config.n_kv_heads], axis=1)
        q, k = rope(q, config, frequencies), rope(k, config, frequencies)
        x = x + _attention(q, k, v, visible) @ weight(f"{block}.attn_output.weight").T
        h = rms_norm(x, f"{block}.ffn_norm.weight")
        stack = np.concatenate([weight(f"{block}.{name}.weight") for name in config.stacks["gate_up"]])
        gate, up = np.split(h @ stack.T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(f"{block}.ffn_down.weight").T
    x = rms_norm(x, "output_norm.weight")
    return x @ np.asarray(embedding if config.tied_embeddings else weights["output.weight"], dtype=np.float64).T


def reference_steps(
    weights: Mapping[str, npt.NDArray[Any]], config: DecoderConfig, prompt: list[int], chosen: list[int]
) -> Array:
    """The logits [len(chosen), vocab] by which each of ``chosen`` was chosen, with the frequencies of that length."""
    ids, first = prompt + chosen[:-1], len(prompt) - 1
    logits = reference_llama(weights, config, ids)
    short = min(config.original_context, len(ids)) if len(config.rope_factors) > 1 else 0
    if short > first:
        logits[:short] = reference_llama(weights, config, ids[:short])
    return logits[first:]


def _frequencies(weights: Mapping[str, npt.NDArray[Any]], config: DecoderConfig, n_tokens: int) -> Array:
    """Angle per position of each rotated pair of a head."""
    frequencies = config.rope_theta ** (-np.arange(0, config.rope_dim, 2) / config.rope_dim)
    if not config.rope_factors:
        return frequencies
    is_long = len(config.rope_factors) > 1 and n_tokens > config.original_context
    return frequencies / np.asarray(weights[config.rope_factors[is_long]], dtype=np.float64)


def rope(x: Array, config: DecoderConfig, frequencies: Array) -> Array:
    """Turn the pairs of the rotated part of each head of ``x`` [T, heads, head_dim] by position * frequency.

    GGUF's llama stores the Q and K rows so that pairs are neighbours, (2i, 2i+1); phi3 as they are trained, with pairs
    of halves, (i, i + rope_dim / 2).
    """
    angles = np.arange(len(x))[:, None, None] * frequencies
    cos, sin = np.cos(angles) * config.rope_scale, np.sin(angles) * config.rope_scale
    half = config.rope_dim // 2
    pairs = (
        (slice(half), slice(half, 2 * half))
        if config.architecture == "phi3"
        else (slice(0, None, 2), slice(1, None, 2))
    )
    first, second = (x[..., part] for part in pairs)
    turned = x.copy()
    turned[..., pairs[0]] = first * cos - second * sin
    turned[..., pairs[1]] = first * sin + second * cos
    return turned


def _attention(q: Array, k: Array, v: Array, visible: npt.NDArray[np.bool_]) -> Array:
    """Attention [T, heads * head_dim] of ``q`` [T, heads, d] over ``k`` and ``v`` [T, kv_heads, d]."""
    n_tokens, n_heads, head_dim = q.shape
    group = n_heads // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(head_dim)
    scores = np.where(visible, scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", scores, v).reshape(n_tokens, n_heads * head_dim)
