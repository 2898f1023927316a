"""The tiny models are whole files with a well-formed tokenizer, and the reference forward pass is causal."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from stepwell.gpu.source import FileSource
from stepwell.models.config import DecoderConfig, check_tensors
from stepwell.weights.gguf import GgufFile, read_gguf
from tests.reference.kernels import FORMATS
from tests.support.tiny_llama import FileWeights, byte_alphabet, reference_llama, write_tiny_llama


def read(path: Path) -> GgufFile:
    return asyncio.run(read_gguf(FileSource(path)))


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_tiny_model_is_whole_and_holds_the_returned_weights(tmp_path: Path, formats: str, tied: bool) -> None:
    path = tmp_path / "tiny.gguf"
    sizes = {"hidden": 256, "n_heads": 16, "ffn": 256} if formats.endswith("_K") else {}
    weights = write_tiny_llama(path, seed=3, formats=formats, embed_format=formats, tied=tied, n_layers=1, **sizes)
    file = read(path)
    config = DecoderConfig.from_gguf(file)
    check_tensors(file, config)
    assert config.tied_embeddings is tied
    assert {info.format.name for info in file.tensors.values() if len(info.shape) > 1} == {formats}
    stored = FileWeights(path, file)
    assert stored.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(stored[name], values, err_msg=name)


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        write_tiny_llama(path, seed=seed)
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second != other


def test_the_tokenizer_is_well_formed(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny.gguf", vocab=1000, n_layers=1)
    metadata = read(tmp_path / "tiny.gguf").metadata
    tokens, types, merges = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges"))
    assert isinstance(tokens, list) and isinstance(types, list) and isinstance(merges, list)
    assert len(tokens) == len(set(tokens)) == len(types) == 1000
    assert tokens[3:259] == byte_alphabet()
    assert len(set(byte_alphabet())) == 256
    assert byte_alphabet()[ord(" ")] == "Ġ"
    known = set(tokens[3:259])
    for merge in merges:
        left, right = merge.split(" ")
        assert {left, right} <= known
        known.add(left + right)
    assert known == set(tokens[3:])


def test_a_position_sees_only_what_is_before_it(tmp_path: Path) -> None:
    weights = write_tiny_llama(tmp_path / "tiny.gguf", head_dim=32, n_heads=6, n_kv_heads=2)
    config = DecoderConfig.from_gguf(read(tmp_path / "tiny.gguf"))
    ids = [5, 300, 17, 17, 42]
    logits = reference_llama(weights, config, ids)
    assert logits.shape == (5, 320)
    np.testing.assert_allclose(reference_llama(weights, config, ids[:3]), logits[:3], atol=1e-12)
    assert np.abs(reference_llama(weights, config, [6, *ids[1:]])[-1] - logits[-1]).max() > 1e-3
    assert logits.std(axis=1).min() > 1
