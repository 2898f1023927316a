"""Phi3Config from metadata, its defaults and refusals, the tensors of a file, and how its heads are laid out."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import pytest

from stepwell.errors import BadFile, Unsupported
from stepwell.gpu.source import BytesSource
from stepwell.models import ARCHITECTURES
from stepwell.models.config import check_tensors, expected_tensors
from stepwell.models.llama import DecoderModel, matrices, pairings
from stepwell.models.phi3 import Phi3, Phi3Config
from stepwell.weights.gguf import GgufFile, read_gguf
from tests.support.gguf_writer import I32, Tensor, Typed, gguf_bytes

F32 = 0  # a tensor type
METADATA: dict[str, Any] = {
    "general.architecture": "phi3",
    "phi3.block_count": 2,
    "phi3.context_length": 4096,
    "phi3.embedding_length": 32,
    "phi3.feed_forward_length": 64,
    "phi3.attention.head_count": 4,
    "phi3.attention.layer_norm_rms_epsilon": 0.0078125,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}
BASE = Phi3Config(
    hidden_size=32, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=8, ffn_size=64, vocab_size=3, context_length=4096,
    rope_theta=10_000.0, rope_dim=8, rms_eps=0.0078125, tied_embeddings=True, original_context=4096,
)  # fmt: skip
EXTENDED = {"phi3__context_length": 131_072, "phi3__rope__scaling__original_context_length": 4096}
FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


def zeros(name: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, shape, F32, bytes(4 * math.prod(shape)))


def file_of(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> GgufFile:
    kept = {key: value for key, value in metadata.items() if value is not None}
    tensors = [zeros(name, shape) for name, shape in shapes.items()]
    return asyncio.run(read_gguf(BytesSource(gguf_bytes(kept, tensors), "m.gguf")))


def config_of(factors: tuple[str, ...] = (), **changes: Any) -> Phi3Config:
    """The config of METADATA with keys changed; ``__`` in a name stands for a dot."""
    metadata = METADATA | {key.replace("__", "."): value for key, value in changes.items()}
    return Phi3Config.from_gguf(file_of(metadata, dict.fromkeys(factors, (4,))))


def test_defaults() -> None:
    assert config_of() == BASE


def test_every_key_counts() -> None:
    config = config_of(
        FACTORS,
        **EXTENDED,
        phi3__attention__head_count_kv=2,
        phi3__attention__sliding_window=2047,
        phi3__rope__dimension_count=6,
        phi3__rope__scaling__attn_factor=1.25,
    )
    assert (config.n_kv_heads, config.rope_dim, config.sliding_window) == (2, 6, 2047)
    assert (config.original_context, config.rope_scale, config.rope_factors) == (4096, 1.25, FACTORS)


def test_the_stretch_follows_from_the_lengths_where_files_do_not_say_it() -> None:
    """Phi-3.5-mini: 32 times 4,096 positions; sqrt(1 + 5 / 12) of ln 2^5 and ln 2^12."""
    assert config_of(FACTORS, **EXTENDED).rope_scale == pytest.approx(math.sqrt(17 / 12), rel=1e-12)
    assert config_of(**EXTENDED).rope_scale == 1.0  # no factors, no stretch
    assert config_of(FACTORS).rope_scale == 1.0  # not extended


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"general__architecture": "llama"}, Unsupported, "architecture 'llama'; this is the reader for 'phi3'"),
        (
            {"phi3__rope__scaling__type": "yarn", "phi3__rope__scaling__factor": 8.0},
            Unsupported,
            r"scaling\.type' is 'yarn' \(factor 8\); supported: none, longrope",
        ),
        ({"phi3__rope__scaling__factor": 8.0}, Unsupported, r"scaling\.factor' is 8"),
        ({"phi3__expert_count": 16}, Unsupported, r"'phi3\.expert_count' is 16"),
        ({"phi3__rope__dimension_count": 10}, BadFile, r"rope_dim is 10; an even number from 2 to head_dim \(8\)"),
        ({"phi3__rope__dimension_count": 5}, BadFile, "rope_dim is 5; an even number"),
        ({"phi3__rope__dimension_count": 0}, BadFile, "rope_dim is 0; an even number"),
        ({"phi3__rope__scaling__attn_factor": -1.0}, BadFile, r"rope_scale is -1\.0; a positive number"),
        ({"phi3__rope__scaling__attn_factor": float("nan")}, BadFile, "rope_scale is nan"),
        ({"phi3__attention__sliding_window": Typed(I32, -1)}, BadFile, "sliding_window is -1"),
        ({"phi3__attention__sliding_window": "all"}, BadFile, r"sliding_window' is 'all'; an integer"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^m\.gguf: .*{message}"):
        config_of(**changes)


def test_an_original_context_of_nothing_is_refused() -> None:
    with pytest.raises(BadFile, match="original_context is 0; at least 1 is needed"):
        config_of(FACTORS, phi3__rope__scaling__original_context_length=0)


def test_longrope_by_name_is_what_the_factors_say() -> None:
    named = {"phi3__rope__scaling__type": "longrope", "phi3__rope__scaling__factor": 32.0}
    assert config_of(FACTORS, **EXTENDED, **named) == config_of(FACTORS, **EXTENDED)


def test_a_whole_file_passes_and_its_tensors_are_the_fused_ones() -> None:
    config = config_of(FACTORS, **EXTENDED, phi3__attention__head_count_kv=2)
    shapes = expected_tensors(config)
    assert shapes["blk.1.attn_qkv.weight"] == (32, (4 + 2 * 2) * 8)
    assert shapes["blk.0.ffn_up.weight"] == (32, 2 * 64)
    assert shapes["blk.0.ffn_down.weight"] == (64, 32)
    assert [shapes[name] for name in FACTORS] == [(4,), (4,)]
    check_tensors(file_of(METADATA, shapes), config)
    with pytest.raises(Unsupported, match=r"1 tensors have no place in a plain phi3 model of 2 layers.*: rope_freqs"):
        check_tensors(file_of(METADATA, shapes | {"rope_freqs.weight": (4,)}), config)


@pytest.mark.parametrize("missing", FACTORS)
def test_factors_come_in_pairs(missing: str) -> None:
    there = tuple(name for name in FACTORS if name != missing)
    config = config_of(there, **EXTENDED)
    shapes = {name: shape for name, shape in expected_tensors(config).items() if name != missing}
    with pytest.raises(BadFile, match=rf"tensor '{missing}' with shape \[4\] is missing"):
        check_tensors(file_of(METADATA, shapes), config)


def test_matrices_and_the_heads_that_are_laid_out_anew() -> None:
    config = config_of(phi3__attention__head_count_kv=2, phi3__rope__dimension_count=6)
    table = matrices(config)
    assert table["blk.0.qkv"] == ("blk.0.attn_qkv.weight",)
    assert table["blk.1.gate_up"] == ("blk.1.ffn_up.weight",)
    assert table["output"] == table["token_embd"]
    rows_of_q_and_k = (4 + 2) * 8
    assert pairings(config) == {f"blk.{i}.attn_qkv.weight": (rows_of_q_and_k, 8, 6) for i in range(2)}


def test_the_architectures() -> None:
    assert list(ARCHITECTURES.items()) == [("llama", DecoderModel), ("phi3", Phi3)]
