"""DecoderConfig from metadata, its defaults and refusals, and the check of a file's tensors against it."""

import asyncio
import re
import struct
from array import array
from dataclasses import replace
from typing import Any

import pytest

from stepwell.errors import BadFile, Unsupported
from stepwell.gpu.source import BytesSource, FileSource
from stepwell.models.config import DecoderConfig, check_tensors, expected_tensors, read_architecture
from stepwell.models.rope import read_factors, rotation_tables
from stepwell.weights.formats import FORMATS
from stepwell.weights.gguf import GgufFile, read_gguf
from tests.support.demo_model import demo_model_path
from tests.support.gguf_writer import Tensor, gguf_bytes

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 0.0078125,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}
BASE = DecoderConfig(
    hidden_size=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    head_dim=8,
    ffn_size=64,
    vocab_size=3,
    context_length=64,
    rope_theta=10_000.0,
    rope_dim=8,
    rms_eps=0.0078125,
    tied_embeddings=True,
)
F32, F16 = 0, 1


def tensors(config: DecoderConfig, norm_type: int = F32) -> dict[str, Tensor]:
    """Zeros for every tensor of ``config``; matrices in F16."""
    table = {}
    for name, shape in expected_tensors(config).items():
        kind = FORMATS[norm_type if len(shape) == 1 else F16]
        size = kind.nbytes(shape[0] * (shape[1] if len(shape) > 1 else 1))
        table[name] = Tensor(name, shape, kind.ggml_type, bytes(size))
    return table


def file_of(metadata: dict[str, Any], table: dict[str, Tensor] | None = None) -> GgufFile:
    """A file with ``metadata``, in which None removes a key."""
    kept = {key: value for key, value in metadata.items() if value is not None}
    return asyncio.run(read_gguf(BytesSource(gguf_bytes(kept, (table or {}).values()), "m.gguf")))


def config_of(**changes: Any) -> DecoderConfig:
    """The config of METADATA with keys changed; ``__`` in a name stands for a dot."""
    return DecoderConfig.from_gguf(
        file_of(METADATA | {key.replace("__", "."): value for key, value in changes.items()})
    )


def test_defaults_are_llama_cpps() -> None:
    assert config_of() == BASE


def test_every_key_counts() -> None:
    config = config_of(
        llama__attention__head_count_kv=2,
        llama__attention__key_length=16,
        llama__attention__value_length=16,
        llama__rope__dimension_count=16,
        llama__rope__freq_base=100_000.0,
    )
    assert (config.n_kv_heads, config.head_dim, config.rope_dim, config.rope_theta) == (2, 16, 16, 100_000.0)


def test_the_vocabulary_is_the_tokenizers_or_else_the_keys() -> None:
    assert config_of(llama__vocab_size=9).vocab_size == 3
    assert config_of(llama__vocab_size=9, tokenizer__ggml__tokens=None).vocab_size == 9


def test_equal_values_per_layer_are_one_value() -> None:
    assert config_of(llama__attention__head_count_kv=[2, 2]).n_kv_heads == 2
    with pytest.raises(Unsupported, match=r"'llama\.attention\.head_count_kv' is different from layer to layer"):
        config_of(llama__attention__head_count_kv=[2, 4])


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 4.0},
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 1.0},
        {"llama__rope__scaling__type": "linear"},
        {"llama__rope__scale_linear": 0.0},
        {"llama__expert_count": 0},
        {"llama__attention__causal": True},
    ],
)
def test_variations_that_change_nothing_are_accepted(changes: dict[str, Any]) -> None:
    assert config_of(**changes) == BASE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "phi3"}, "architecture 'phi3'"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 8.0},
            r"scaling\.type' is 'yarn' \(factor 8",
        ),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0}, r"scaling\.factor' is 2"),
        ({"llama__rope__scale_linear": 4.0}, r"'llama\.rope\.scale_linear' is 4"),
        ({"llama__expert_count": 8}, r"'llama\.expert_count' is 8"),
        ({"llama__attention__causal": False}, r"'llama\.attention\.causal' is False"),
        ({"llama__attention__value_length": 4}, r"'llama\.attention\.value_length' is 4"),
        ({"llama__rope__dimension_count": 4}, "4 of 8 dimensions per head are rotated"),
    ],
)
def test_variations_that_change_the_arithmetic_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=rf"^m\.gguf: .*{message}"):
        config_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": None}, r"'general\.architecture' is missing"),
        ({"general__architecture": 7}, r"'general\.architecture' is not a string"),
        ({"llama__block_count": None}, r"the key 'llama\.block_count' is missing; an integer is needed"),
        ({"llama__embedding_length": "32"}, r"'llama\.embedding_length' is '32'; an integer"),
        ({"llama__embedding_length": True}, r"'llama\.embedding_length' is True; an integer"),
        ({"llama__rope__freq_base": "x"}, r"'llama\.rope\.freq_base' is 'x'; a number"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
        ({"tokenizer__ggml__tokens": None}, r"'llama\.vocab_size' is missing"),
        ({"llama__block_count": 0}, "n_layers is 0"),
        ({"llama__block_count": 2**32 - 1}, "n_layers is 4,294,967,295; at most 512"),
        ({"llama__attention__head_count": 0}, "n_heads is 0"),
        ({"llama__attention__head_count": 3, "llama__attention__head_count_kv": 2}, "3 query heads cannot share 2"),
        ({"llama__attention__head_count_kv": 0}, "n_kv_heads is 0"),
        ({"llama__attention__head_count_kv": []}, r"'llama\.attention\.head_count_kv' is \[\]"),
        ({"llama__context_length": 0}, "context_length is 0"),
        ({"llama__rope__freq_base": -1.0}, r"rope_theta is -1\.0"),
        ({"llama__rope__freq_base": float("nan")}, "rope_theta is nan"),
        ({"llama__attention__layer_norm_rms_epsilon": float("inf")}, "rms_eps is inf"),
        ({"llama__attention__key_length": 7, "llama__attention__value_length": 7}, "head_dim is 7"),
        ({"tokenizer__ggml__tokens": []}, "vocab_size is 0"),
    ],
)
def test_values_that_no_model_has_are_bad_files(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadFile, match=rf"^m\.gguf: .*{message}"):
        config_of(**changes)


def test_head_dimensions_that_no_kernel_has_are_refused_before_anything_is_loaded() -> None:
    lengths = {"llama__attention__key_length": 6, "llama__attention__value_length": 6}
    with pytest.raises(Unsupported, match="head_dim is 6; the kernels read four values at a time"):
        config_of(**lengths, llama__rope__dimension_count=6)


def test_a_whole_file_passes() -> None:
    check_tensors(file_of(METADATA, tensors(BASE)), BASE)


def test_an_output_matrix_unties_the_embedding() -> None:
    table = tensors(BASE)
    table["output.weight"] = table["token_embd.weight"]._replace(name="output.weight")
    file = file_of(METADATA, table)
    config = DecoderConfig.from_gguf(file)
    assert not config.tied_embeddings
    check_tensors(file, config)


def test_a_missing_tensor_is_named() -> None:
    for name, shape in expected_tensors(BASE).items():
        table = tensors(BASE)
        del table[name]
        with pytest.raises(BadFile, match=re.escape(f"m.gguf: tensor '{name}' with shape {list(shape)} is missing.")):
            check_tensors(file_of(METADATA, table), BASE)


def test_a_wrong_shape_is_shown_beside_the_right_one() -> None:
    table = tensors(BASE)
    table["blk.1.ffn_down.weight"] = Tensor("blk.1.ffn_down.weight", (32, 64), F16, bytes(4096))
    with pytest.raises(BadFile, match=r"'blk\.1\.ffn_down\.weight' has shape \[32, 64\]; \[64, 32\] is expected"):
        check_tensors(file_of(METADATA, table), BASE)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "rope_factors_long.weight", "blk.0.ffn_gate_inp.weight", "blk.2.attn_q.weight"]
)
def test_a_tensor_without_a_use_is_refused(name: str) -> None:
    table = tensors(BASE) | {name: Tensor(name, (4,), F32, bytes(16))}
    with pytest.raises(Unsupported, match=rf"1 tensors have no place in a plain llama model of 2 layers.*: {name}\."):
        check_tensors(file_of(METADATA, table), BASE)


def test_factors_of_the_frequencies_are_of_the_files_that_have_them() -> None:
    table = tensors(BASE) | {"rope_freqs.weight": Tensor("rope_freqs.weight", (4,), F32, bytes(16))}
    file = file_of(METADATA, table)
    config = DecoderConfig.from_gguf(file)
    assert config == replace(BASE, rope_factors=("rope_freqs.weight",))
    check_tensors(file, config)
    table["rope_freqs.weight"] = Tensor("rope_freqs.weight", (8,), F32, bytes(32))
    with pytest.raises(BadFile, match=r"'rope_freqs\.weight' has shape \[8\]; \[4\] is expected"):
        check_tensors(file_of(METADATA, table), config)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_that_divide_nothing_are_bad_files(value: float) -> None:
    data = struct.pack("<4f", 1.0, 2.0, value, 4.0)
    source = BytesSource(gguf_bytes(METADATA, [Tensor("rope_freqs.weight", (4,), F32, data)]), "m.gguf")

    async def read() -> list[float]:
        return await read_factors(await read_gguf(source), source, "rope_freqs.weight")

    with pytest.raises(BadFile, match=r"m\.gguf: rope_freqs\.weight\[2\] is .*; a positive number is needed"):
        asyncio.run(read())


def test_factors_divide_the_frequencies() -> None:
    plain, divided = (array("f", rotation_tables(BASE, factors)) for factors in ([], [[1.0, 2.0, 4.0, 8.0]]))
    for bit in range(1, 20):
        for pair, shift in enumerate((0, 1, 2, 3)):
            at, halved = 2 * (4 * bit + pair), 2 * (4 * (bit - shift) + pair)
            if shift <= bit:  # 2^bit positions at an eighth of the frequency are 2^(bit - 3)
                assert divided[at : at + 2] == plain[halved : halved + 2]


def test_vectors_are_f32() -> None:
    with pytest.raises(Unsupported, match=r"'blk\.0\.attn_norm\.weight' has type F16; vectors must be F32"):
        check_tensors(file_of(METADATA, tensors(BASE, norm_type=F16)), BASE)


def test_the_demo_model() -> None:
    file = asyncio.run(read_gguf(FileSource(demo_model_path())))
    config = DecoderConfig.from_gguf(file)
    assert read_architecture(file) == "llama"
    assert config == DecoderConfig(
        hidden_size=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        ffn_size=1536,
        vocab_size=49_152,
        context_length=8192,
        rope_theta=100_000.0,
        rope_dim=64,
        rms_eps=config.rms_eps,
        tied_embeddings=True,
    )
    assert config.rms_eps == pytest.approx(1e-5, rel=1e-6)
    check_tensors(file, config)
