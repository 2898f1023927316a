"""What each kernel computes, in numpy and float64: the numeric truth of ``tests/browser/kernels/test_kernels.py``.

Where a result is a sum, its magnitude is given too: the sum of the absolute values of the terms *as the kernel forms
them*, which is what a rounding error is measured against.  ``U`` is the unit roundoff of f32.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stepwell.kernels.layouts import LAYOUT_OF_FORMAT, MatrixLayout

Array = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]

U = 2.0**-24
BLOCK = 32
GROUP = 16  # of the smallest run of weights that share a scale


class Format(NamedTuple):
    """A tensor format of a file: weights and bytes per block, bits of an element, and what codes are counted from."""

    weights: int
    nbytes: int
    bits: int
    offset: int | None = None  # None: a block has minimums instead


FORMATS = {
    "F32": Format(1, 4, 32, 0),
    "F16": Format(1, 2, 16, 0),
    "BF16": Format(1, 2, 16, 0),
    "Q4_0": Format(32, 18, 4, 8),
    "Q4_1": Format(32, 20, 4),
    "Q5_0": Format(32, 22, 5, 16),
    "Q5_1": Format(32, 24, 5),
    "Q8_0": Format(32, 34, 8, 128),
    "Q4_K": Format(256, 144, 4),
    "Q5_K": Format(256, 176, 5),
    "Q6_K": Format(256, 210, 6, 32),
}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block has f16 numbers: its scale, and its minimum if it has one.  The others: at 0."""


def is_quantised(kind: str) -> bool:
    return FORMATS[kind].weights > 1


def random_blocks(kind: str, n: int, k: int, random: np.random.Generator) -> Bytes:
    """Rows of a GGUF tensor, n of k weights: [n, bytes of a row].

    Of every eight rows some are extreme: zero, denormal, negative or large scales, elements all lowest or all highest.
    """
    form = FORMATS[kind]
    if not is_quantised(kind):
        values = random.normal(size=(n, k)).astype(np.float16 if kind == "F16" else np.float32)
        values[1::8] = 0
        values[2::8] *= values.dtype.type(2.0**-18)  # denormal in F16
        values[3::8] *= values.dtype.type(2.0**12)
        raw = values.view(np.uint8).reshape(n, k, -1)
        return np.ascontiguousarray(raw[..., -form.nbytes :]).reshape(n, -1)  # BF16: the upper half of an F32
    raw = random.integers(0, 256, size=(n, k // form.weights, form.nbytes), dtype=np.uint8)
    raw[5::8] = 0x7F if kind == "Q8_0" else 0xFF  # the scales of K-quants, too
    raw[6::8] = 0x80 if kind == "Q8_0" else 0x00
    scales = random.uniform(-0.1, 0.1, size=(*raw.shape[:2], 2)).astype(np.float16)
    scales[1::8] = 0
    scales[2::8] = np.float16(2.0**-24) * random.integers(1, 1024, size=scales[2::8].shape)  # all the denormals
    scales[3::8] = -np.abs(scales[3::8])
    scales[4::8] = np.float16(250)
    set_halves(kind, raw, scales)
    return raw.reshape(n, -1)


def set_halves(kind: str, raw: Bytes, values: npt.NDArray[np.float16]) -> None:
    """Make ``values`` [..., 2] the scales and minimums of the blocks ``raw`` [..., bytes of a block]."""
    for i, at in enumerate(HALVES.get(kind, (0,))):
        raw[..., at : at + 2] = np.ascontiguousarray(values[..., i : i + 1]).view(np.uint8)


def pattern_blocks(kind: str, random: np.random.Generator) -> Bytes:
    """1,024 rows of 256 weights in which every element has every code, and every scale of K-quants every value.

    Each byte of a block takes all 256 values four times, in an order of its own.  Scales and minimums: the f16 numbers
    of largest and smallest size, normal and denormal, zeros, and random ones.  Floats: all patterns of 16 bits.
    """
    form = FORMATS[kind]
    if not is_quantised(kind):
        patterns = np.concatenate([random.permutation(1 << 16) for _ in range(4)]).astype(np.uint16)
        wide = np.stack([random.permutation(patterns), patterns], axis=-1)  # F32: both halves have all of them
        return np.ascontiguousarray(wide if kind == "F32" else patterns).view(np.uint8).reshape(1024, -1)
    blocks = 256 // form.weights
    orders = [[random.permutation(256) for _ in range(blocks * form.nbytes)] for _ in range(4)]
    raw = np.concatenate([np.stack(order, axis=-1) for order in orders]).astype(np.uint8)
    raw = raw.reshape(1024, blocks, form.nbytes)
    finite = np.arange(0x7C00, dtype=np.uint16)
    halves = random.choice(np.concatenate([finite, finite | 0x8000]), size=(1024, blocks, 2)).view(np.float16)
    extremes = np.array([65504, 2.0**-14, 2.0**-14 - 2.0**-24, 2.0**-24, 0], dtype=np.float16)
    halves[:10, :, 0] = np.concatenate([extremes, -extremes])[:, None]
    halves[10:20, :, 1] = np.concatenate([extremes, -extremes])[:, None]
    set_halves(kind, raw, halves)
    return raw.reshape(1024, -1)


def k_quant_blocks(kind: str, n: int, k: int, std: float, random: np.random.Generator) -> Bytes:
    """Rows of Q4_K, Q5_K or Q6_K: random weights of mean zero and about this standard deviation.

    For models made of random weights: the gguf package reads K-quants but does not write them.
    """
    form = FORMATS[kind]
    raw = random.integers(0, 256, size=(n, k // 256, form.nbytes), dtype=np.uint8)
    highest = 2**form.bits - 1
    if kind == "Q6_K":
        raw[..., 192:208] = random.integers(32, 96, size=(n, k // 256, 16))
        scale = std / (64 * highest / 12**0.5)
    else:
        # equal 6-bit scales and minimums: the low six bits of the first eight bytes, and nibbles of the last four
        small = random.integers(16, 64, size=(n, k // 256, 8), dtype=np.uint8)
        first, last = small[..., :4], small[..., 4:]
        top = (last >> 4) << 6
        raw[..., 4:16] = np.concatenate([first | top, first | top, (last & 15) | ((last & 15) << 4)], axis=-1)
        scale = std / (40 * highest / 12**0.5)
    halves = np.full((n, k // 256, 2), scale, dtype=np.float16)
    halves[..., 1] *= np.float16(highest / 2)
    set_halves(kind, raw, halves)
    return raw.reshape(n, -1)


class Blocks(NamedTuple):
    """A matrix [n][k] taken apart: weight = scale * element + minimum.  Elements of quantised formats count from zero.

    ``elements`` [n, k / 16, 16]; ``scale`` and ``minimum`` [n, k / 16]; ``codes`` are the elements' bits.
    """

    elements: Array
    scale: Array
    minimum: Array
    codes: Words

    @property
    def weights(self) -> Array:
        values = self.scale[..., None] * self.elements + self.minimum[..., None]
        return values.reshape(len(values), -1)

    @property
    def magnitudes(self) -> Array:
        """Of each weight, the sum of the absolute values of its terms."""
        values = np.abs(self.scale[..., None] * self.elements) + np.abs(self.minimum[..., None])
        return values.reshape(len(values), -1)


def blocks_of(kind: str, raw: Bytes) -> Blocks:
    """Decode the rows of a GGUF tensor: ``raw`` [n, bytes of a row]."""
    form = FORMATS[kind]
    raw = np.ascontiguousarray(raw).reshape(len(raw), -1, form.nbytes)
    if not is_quantised(kind):
        codes = raw.view(np.uint16 if form.bits == 16 else np.uint32).astype(np.uint32)
        wide = codes << np.uint32(16) if kind == "BF16" else codes
        values = raw.view(np.float16) if kind == "F16" else wide.view(np.float32)
        elements = values.astype(np.float64).reshape(len(raw), -1, GROUP)
        one, zero = np.ones(elements.shape[:2]), np.zeros(elements.shape[:2])
        return Blocks(elements, one, zero, codes.reshape(elements.shape))
    codes = _codes(kind, raw).reshape(len(raw), -1, GROUP)
    halves = [raw[..., at : at + 2].copy().view(np.float16).astype(np.float64) for at in HALVES.get(kind, (0,))]
    scale = halves[0] * small_scales(kind, raw, 0)
    minimum = -form.offset * scale if form.offset else halves[-1] * small_scales(kind, raw, 1)
    each = codes.shape[1] // (scale.size // len(raw))  # a scale's groups of 16
    scale, minimum = (np.repeat(values.reshape(len(raw), -1), each, axis=1) for values in (scale, minimum))
    return Blocks(codes.astype(np.float64), scale, minimum, codes.astype(np.uint32))


def _codes(kind: str, raw: Bytes) -> Bytes:
    """The elements of blocks [..., bytes], counted from zero, in order."""

    def split(packed: Bytes, bits: int) -> list[Bytes]:
        """The fields of ``bits`` bits of each byte, the lowest first."""
        return [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]

    if kind == "Q8_0":
        return raw[..., 2:] ^ 0x80
    if kind == "Q6_K":
        halves = []
        for half in (0, 1):
            low = split(raw[..., 64 * half : 64 * half + 64], 4)
            high = split(raw[..., 128 + 32 * half : 160 + 32 * half], 2)
            halves.append(np.concatenate(low, axis=-1) | np.concatenate(high, axis=-1) << 4)
        return np.concatenate(halves, axis=-1)
    if kind in ("Q4_K", "Q5_K"):
        runs = [raw[..., at : at + 32] for at in range(FORMATS[kind].nbytes - 128, FORMATS[kind].nbytes, 32)]
        codes = np.concatenate([nibbles for run in runs for nibbles in split(run, 4)], axis=-1)
        return codes | np.concatenate(split(raw[..., 16:48], 1), axis=-1) << 4 if kind == "Q5_K" else codes
    codes = np.concatenate(split(raw[..., -16:], 4), axis=-1)
    if kind in ("Q5_0", "Q5_1"):
        codes |= np.unpackbits(raw[..., -20:-16], axis=-1, bitorder="little") << 4
    return codes


def small_scales(kind: str, raw: Bytes, which: int) -> Array:
    """The integers of a K-quant that multiply its scale (``which`` 0) or its minimum (1); ±1 for other formats."""
    if kind == "Q6_K":
        return raw[..., 192:208].view(np.int8).astype(np.float64)
    if kind not in ("Q4_K", "Q5_K"):
        return np.ones(1)
    first, second, last = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    if which == 0:
        return np.concatenate([first & 63, (last & 15) | (first >> 6) << 4], axis=-1).astype(np.float64)
    return -np.concatenate([second & 63, last >> 4 | (second >> 6) << 4], axis=-1).astype(np.float64)


def repack(kind: str, raw: Bytes, layout: MatrixLayout | None = None) -> tuple[Words, Words]:
    """words [k / 32, vectors, n, 4] and scales [k / 32, scale vectors, n, scale width] of the format's own layout or a
    wider one, as ``kernels/wgsl/formats.wgsl`` lays them out.
    """
    layout = layout or LAYOUT_OF_FORMAT[kind]
    blocks = blocks_of(kind, raw)
    n = len(blocks.codes)
    if not layout.quantised:
        widened = layout.bits != FORMATS[kind].bits
        codes = blocks.elements.astype(np.float32).view(np.uint32) if widened else blocks.codes
        words = _pack(codes.reshape(n, -1, layout.vectors, 4, 32 // layout.bits), layout.bits)
        return np.ascontiguousarray(words.transpose(1, 2, 0, 3)), np.zeros((words.shape[1], 0, n, 4), np.uint32)
    moved = layout.offset - (FORMATS[kind].offset or 0) if layout.offset else 0
    codes = blocks.codes.reshape(n, -1, BLOCK) + np.uint32(moved)
    eights = codes.reshape(n, -1, 4, 2, 4)  # [word][half][byte]
    if layout.bits == 8:
        words = _pack(codes.reshape(n, -1, 2, 4, 4), 8)
    else:
        words = _pack((eights & 15).swapaxes(-1, -2).reshape(n, -1, 1, 4, 8), 4)  # nibbles from the lowest up
    numbers = [blocks.scale, blocks.minimum][: 2 if layout.minimum else 1]
    scales = np.stack(numbers, axis=-1).astype(np.float32).view(np.uint32)
    scales = scales[:, :: layout.group // GROUP].reshape(n, -1, layout.scale_words - layout.high_words)
    if layout.high_words:
        above = (eights >> 4).swapaxes(-1, -2).reshape(n, -1, layout.high_words, 4 // layout.high_words, 8)
        # [high word][its words of nibbles][nibble] -> within each nibble, one after the other
        high = _pack(above.swapaxes(-1, -2).reshape(*above.shape[:3], -1), layout.bits - 4)
        scales = np.concatenate([scales, high], axis=-1)
    scales = scales.reshape(n, -1, layout.scale_vectors, layout.scale_width)
    return np.ascontiguousarray(words.transpose(1, 2, 0, 3)), np.ascontiguousarray(scales.transpose(1, 2, 0, 3))


def _pack(codes: Words, bits: int) -> Words:
    """Words out of codes of ``bits`` bits along the last axis, the lowest first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    return (codes.astype(np.uint64) << shifts).sum(axis=-1, dtype=np.uint64).astype(np.uint32)


def matmul(x: Array, blocks: Blocks) -> tuple[Array, Array]:
    """x [rows, k] times the transposed weights: [rows, n], and its magnitude."""
    return x @ blocks.weights.T, np.abs(x) @ blocks.magnitudes.T


def silu(x: Array) -> Array:
    small = np.exp(-np.abs(x))  # of either sign without overflow
    return np.asarray(x * np.where(x < 0, small, 1) / (1 + small))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def rope(x: Array, positions: npt.NDArray[Any], rope_dim: int, theta: float) -> Array:
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


def attention(q: Array, k: Array, v: Array, position: int, window: int = 0) -> Attention:
    """``q`` [rows, heads, d] from ``position`` on, causal, over ``k`` and ``v`` [positions, kv_heads, d].

    With a ``window`` a row sees so many positions, the last of which is its own.
    """
    rows, heads, head_dim = q.shape
    group = heads // k.shape[1]
    keys, values = (np.repeat(cache, group, axis=1).transpose(1, 0, 2) for cache in (k, v))
    scores = np.einsum("rhd,hpd->rhp", q, keys) / np.sqrt(head_dim)
    magnitude = np.einsum("rhd,hpd->rhp", np.abs(q), np.abs(keys)) / np.sqrt(head_dim)
    behind = (position + np.arange(rows)[:, None] - np.arange(len(k)))[:, None]  # how far a position is before a row's
    visible = (behind >= 0) & (behind < (window or len(k)))
    weights = np.where(visible, np.exp(scores - scores.max(axis=-1, keepdims=True, where=visible, initial=-np.inf)), 0)
    weights /= weights.sum(axis=-1, keepdims=True)
    return Attention(np.einsum("rhp,hpd->rhd", weights, values), scores * visible, weights, magnitude * visible, values)


def argmax(logits: Floats, ban: tuple[int, ...]) -> int:
    """The smallest of the ids whose logit is largest among those that are not banned."""
    allowed = logits.astype(np.float64)
    allowed[list(ban)] = -np.inf
    return int(np.argmax(allowed))
