"""The reference of the kernel tests against an independent reader of the same blocks."""

import gguf
import numpy as np
import pytest

from tests.reference import kernels


@pytest.mark.parametrize("kind", kernels.BLOCK_BYTES)
def test_blocks_are_read_like_ggufs(kind: str) -> None:
    """gguf computes in f32: scale * element + minimum has two roundings there, none here."""
    raw = kernels.random_blocks(kind, 16, 96, np.random.default_rng(1))
    kind_of_file = gguf.GGMLQuantizationType[kind]
    plain = {"F32": np.float32, "F16": np.float16}.get(kind)
    expected = gguf.quants.dequantize(raw if plain is None else raw.view(plain), kind_of_file)
    blocks = kernels.blocks_of(kind, raw)
    size = np.abs(blocks.scale[..., None] * blocks.elements) + np.abs(blocks.minimum[..., None])
    assert (np.abs(blocks.weights - expected) <= 2 * kernels.U * size.reshape(blocks.weights.shape)).all()
    smallest = np.abs(blocks.scale[2::8] if kind.startswith("Q") else blocks.weights[2::8])
    assert kind == "F32" or (smallest < 2.0**-14).any()  # f16 denormals are among the tests' data
