"""What each kernel computes, in numpy and float64: the numeric truth of ``tests/browser/test_kernels.py``.

Where a result is a sum, its magnitude is given too: the sum of the absolute values of the terms *as the kernel forms
them*, which is what a rounding error is measured against.  ``U`` is the unit roundoff of f32.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

U = 2.0**-24
BLOCK = 32
BLOCK_BYTES = {"F32": 128, "F16": 64, "Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
ELEMENT_BITS = {"F32": 32, "F16": 16, "Q8_0": 8, "Q4_0": 4, "Q4_1": 4}


def random_blocks(kind: str, n: int, k: int, random: np.random.Generator) -> Bytes:
    """Rows of a GGUF tensor, n of k weights: [n, bytes of a row].

    Of every eight rows some are extreme: zero, denormal, negative or large scales, elements all lowest or all highest.
    """
    raw = random.integers(0, 256, size=(n, k // 32, BLOCK_BYTES[kind]), dtype=np.uint8)
    if kind in ("F32", "F16"):
        dtype = np.dtype(np.float32 if kind == "F32" else np.float16)
        values = random.normal(size=(n, k)).astype(dtype)
        values[1::8] = 0
        values[2::8] *= dtype.type(2.0**-18)  # denormal in F16
        values[3::8] *= dtype.type(2.0**12)
        return values.view(np.uint8).reshape(n, -1)
    numbers = 2 if kind == "Q4_1" else 1  # of f16 before the codes: scale, minimum
    scales = random.uniform(-0.1, 0.1, size=(n, k // 32, numbers)).astype(np.float16)
    scales[1::8] = 0
    scales[2::8] = np.float16(2.0**-24) * random.integers(1, 1024, size=scales[2::8].shape)  # all the denormals
    scales[3::8] = -np.abs(scales[3::8])
    scales[4::8] = np.float16(250)
    raw[5::8, :, 2 * numbers :] = 0xFF if kind != "Q8_0" else 0x7F
    raw[6::8, :, 2 * numbers :] = 0x00 if kind != "Q8_0" else 0x80
    raw[..., : 2 * numbers] = scales.view(np.uint8)
    return raw.reshape(n, -1)


class Blocks(NamedTuple):
    """A matrix [n][k] taken apart: weight = scale * element + minimum.  Elements of quantised formats count from zero.

    ``elements`` [n, k / 32, 32]; ``scale`` and ``minimum`` [n, k / 32]; ``codes`` are the elements' bits.
    """

    elements: Array
    scale: Array
    minimum: Array
    codes: Words

    @property
    def weights(self) -> Array:
        values = self.scale[..., None] * self.elements + self.minimum[..., None]
        return values.reshape(len(values), -1)


def blocks_of(kind: str, raw: Bytes) -> Blocks:
    """Decode the rows of a GGUF tensor: ``raw`` [n, bytes of a row]."""
    raw = np.ascontiguousarray(raw).reshape(len(raw), -1, BLOCK_BYTES[kind])
    one, zero = np.ones(raw.shape[:2]), np.zeros(raw.shape[:2])
    if kind == "F32":
        return Blocks(raw.view(np.float32).astype(np.float64), one, zero, raw.view(np.uint32))
    if kind == "F16":
        return Blocks(raw.view(np.float16).astype(np.float64), one, zero, raw.view(np.uint16).astype(np.uint32))
    scale = raw[..., :2].copy().view(np.float16)[..., 0].astype(np.float64)
    if kind == "Q8_0":
        codes = raw[..., 2:].view(np.int8).astype(np.int64) + 128
        minimum = -128 * scale
    else:
        packed = raw[..., -16:]
        codes = np.concatenate([packed & 15, packed >> 4], axis=-1)
        minimum = raw[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float64) if kind == "Q4_1" else -8 * scale
    return Blocks(codes.astype(np.float64), scale, minimum, codes.astype(np.uint32))


def repack(kind: str, raw: Bytes) -> tuple[Words, Floats]:
    """words [k / 32, vectors, n, 4] and scales [k / 32, n, 2], as ``kernels/wgsl/formats.wgsl`` lays them out."""
    blocks = blocks_of(kind, raw)
    bits = ELEMENT_BITS[kind]
    grouped = blocks.codes.reshape(*blocks.scale.shape, -1, 4, 32 // bits).astype(np.uint64)
    words = (grouped << np.arange(0, 32, bits, dtype=np.uint64)).sum(axis=-1).astype(np.uint32)
    scales = np.stack([blocks.scale, blocks.minimum], axis=-1).astype(np.float32)
    return np.ascontiguousarray(words.transpose(1, 2, 0, 3)), np.ascontiguousarray(scales.transpose(1, 0, 2))


def matmul(x: Array, blocks: Blocks) -> tuple[Array, Array]:
    """x [rows, k] times the transposed weights: [rows, n], and its magnitude."""
    size = np.abs(blocks.scale[..., None] * blocks.elements) + np.abs(blocks.minimum[..., None])
    return x @ blocks.weights.T, np.abs(x) @ size.reshape(len(size), -1).T


def silu(x: Array) -> Array:
    small = np.exp(-np.abs(x))  # of either sign without overflow
    return np.asarray(x * np.where(x < 0, small, 1) / (1 + small))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def rope(x: Array, positions: npt.NDArray[np.int64], rope_dim: int, theta: float) -> Array:
    """Turn the first ``rope_dim`` of each head of ``x`` [rows, heads, head_dim], as neighbouring pairs."""
    frequencies = theta ** (-np.arange(0, rope_dim, 2) / rope_dim)
    pairs = x[..., :rope_dim:2] + 1j * x[..., 1:rope_dim:2]
    turned = pairs * np.exp(1j * positions[:, None, None] * frequencies)
    result = x.copy()
    result[..., :rope_dim:2], result[..., 1:rope_dim:2] = turned.real, turned.imag
    return result


class Attention(NamedTuple):
    """``out`` [rows, heads, head_dim] = ``weights`` [rows, heads, positions] x ``values`` [heads, positions, head_dim].

    ``weights`` are the softmax of ``scores``, whose sums have this ``magnitude``; all three are 0 where hidden.
    """

    out: Array
    scores: Array
    weights: Array
    magnitude: Array
    values: Array


def attention(q: Array, k: Array, v: Array, position: int) -> Attention:
    """``q`` [rows, heads, d] from ``position`` on, causal, over ``k`` and ``v`` [positions, kv_heads, d]."""
    rows, heads, head_dim = q.shape
    group = heads // k.shape[1]
    keys, values = (np.repeat(cache, group, axis=1).transpose(1, 0, 2) for cache in (k, v))
    scores = np.einsum("rhd,hpd->rhp", q, keys) / np.sqrt(head_dim)
    magnitude = np.einsum("rhd,hpd->rhp", np.abs(q), np.abs(keys)) / np.sqrt(head_dim)
    visible = (np.arange(len(k)) <= position + np.arange(rows)[:, None])[:, None]
    weights = np.where(visible, np.exp(scores - scores.max(axis=-1, keepdims=True, where=visible, initial=-np.inf)), 0)
    weights /= weights.sum(axis=-1, keepdims=True)
    return Attention(np.einsum("rhp,hpd->rhd", weights, values), scores * visible, weights, magnitude * visible, values)


def argmax(logits: Floats, ban: tuple[int, ...]) -> int:
    """The smallest of the ids whose logit is largest among those that are not banned."""
    allowed = logits.astype(np.float64)
    allowed[list(ban)] = -np.inf
    return int(np.argmax(allowed))
