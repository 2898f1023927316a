"""The reference of the kernel tests against an independent reader of the same blocks."""

import gguf
import numpy as np
import pytest

from tests.reference import kernels


def dequantised(kind: str, raw: kernels.Bytes) -> kernels.Floats:
    plain = {"F32": np.float32, "F16": np.float16}.get(kind)
    values = gguf.quants.dequantize(raw if plain is None else raw.view(plain), gguf.GGMLQuantizationType[kind])
    return np.asarray(values, dtype=np.float32)


@pytest.mark.parametrize("kind", kernels.FORMATS)
def test_blocks_are_read_like_ggufs(kind: str) -> None:
    """gguf computes in f32: scale * element + minimum has two roundings there, and K-quants' no more; none here."""
    raw = kernels.random_blocks(kind, 16, 512, np.random.default_rng(1))
    expected = dequantised(kind, raw)
    blocks = kernels.blocks_of(kind, raw)
    assert (np.abs(blocks.weights - expected) <= 2 * kernels.U * blocks.magnitudes).all()
    assert len(np.unique(expected)) > 500
    at = kernels.HALVES.get(kind, (0,))[0]
    halves = raw.reshape(16, -1, kernels.FORMATS[kind].nbytes)[2::8, :, at : at + 2].copy().view(np.float16)
    smallest = np.abs(halves.astype(np.float64))
    assert kind in ("F32", "BF16") or ((smallest > 0) & (smallest < 2.0**-14)).any()  # f16 denormals are among the data


@pytest.mark.parametrize("kind", kernels.FORMATS)
def test_patterns_are_all_there_and_read_like_ggufs(kind: str) -> None:
    raw = kernels.pattern_blocks(kind, np.random.default_rng(2))
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the floats
        blocks = kernels.blocks_of(kind, raw)
        expected = dequantised(kind, raw).astype(np.float64)
        weights, magnitudes = blocks.weights, blocks.magnitudes
    finite = np.isfinite(expected)
    assert (np.abs(weights[finite] - expected[finite]) <= 2 * kernels.U * magnitudes[finite]).all()
    if not kernels.is_quantised(kind):
        halves = raw.view(np.uint16)[:, :: 2 if kind == "F32" else 1]
        assert len(np.unique(halves)) == 1 << 16
        return
    assert finite.all()
    codes = blocks.codes.reshape(1024, 256)
    assert all(len(np.unique(codes[:, column])) == 2 ** kernels.FORMATS[kind].bits for column in range(256))
    if kind.endswith("_K"):
        of_block = raw.reshape(1024, -1)
        for which in (0, 1):
            small = kernels.small_scales(kind, of_block, which)
            assert all(len(np.unique(column)) == (256 if kind == "Q6_K" else 64) for column in small.T)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_random_k_quants_have_the_spread_asked_for(kind: str) -> None:
    weights = dequantised(kind, kernels.k_quant_blocks(kind, 64, 1024, 0.05, np.random.default_rng(3)))
    assert weights.shape == (64, 1024)
    assert weights.std() == pytest.approx(0.05, rel=0.15)
    assert abs(weights.mean()) < 0.002
