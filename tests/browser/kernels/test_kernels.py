"""Every kernel against its float64 reference, over odd shapes, with the variants of every kind of adapter.

A tolerance bounds what correct f32 arithmetic can be off, from the accuracies that WGSL asks for (its section "Floating
point accuracy"): +, -, * correctly rounded, division to 2.5 ulps, inverseSqrt to 2, exp(x) to 3 + 2|x|, and sums in any
order.  An ulp of x is at most 2 U |x|.  n additions are off by at most n U times the sum of the terms' absolute values:
that scales with the data, and one wrong term of hundreds exceeds it by orders of magnitude.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from stepwell.gpu.device import DeviceInfo
from stepwell.kernels import KERNELS
from stepwell.kernels.layouts import LAYOUT_OF_FORMAT, MatrixLayout, layout_of_formats
from stepwell.kernels.ops import Heads, Ops
from stepwell.kernels.tuning import SHADER_F16, Tile, Tuning
from stepwell.kernels.tuning import TILES as SHIPPED_TILES
from stepwell.launch.selection import tuning_for
from stepwell.models.config import DecoderConfig
from stepwell.models.rope import rotation_tables
from tests.browser.conftest import Lab
from tests.browser.kernels.kernel_lab import (
    SMALLEST_HALF,
    Case,
    Contents,
    KernelLab,
    cache_buffers,
    cache_of,
    half,
    half_error,
    is_poison,
    poison,
    poison_half,
)
from tests.reference import kernels as reference
from tests.reference.kernels import Array, U
from tests.support.covering import cover

pytestmark = pytest.mark.browser
SHARES_A_PAGE = True


def adapter(description: str, subgroup_size: int = 0) -> DeviceInfo:
    return DeviceInfo("", "", description, False, {}, frozenset(), subgroup_size, subgroup_size)


TUNINGS = {
    "quad+subgroups": tuning_for(adapter("SwiftShader", 4)),
    "quad": tuning_for(adapter("SwiftShader")),
    "split": tuning_for(adapter("a GPU", 32)),
}
FORMATS = tuple(reference.FORMATS)


@pytest.fixture(scope="module")
def kernels(lab: Lab) -> KernelLab:
    return KernelLab(lab)


def random_of(shape: object) -> np.random.Generator:
    return np.random.default_rng(crc32(str(shape).encode()))


def f32(values: Array) -> npt.NDArray[np.float32]:
    return values.astype(np.float32)


def assert_within(got: Contents, expected: Array, tolerance: Array) -> None:
    """Every element is finite and within its own tolerance."""
    with np.errstate(invalid="ignore", divide="ignore"):
        excess = np.abs(got.astype(np.float64) - expected) / tolerance
    wrong = ~(excess <= 1) & ~((got == expected) & (tolerance == 0))
    if wrong.any():
        worst = np.argwhere(wrong)[0]
        at = tuple(worst.tolist())
        pytest.fail(
            f"{wrong.sum()} of {wrong.size} elements are wrong; the first at {at}: "
            f"{got[at]} instead of {expected[at]} ± {tolerance[at]:.2g}"
        )


# ---- weights -----------------------------------------------------------------------------------------------------


MIXTURES = [
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q6_K", "Q5_K", "Q4_0"),
    ("Q4_0", "Q4_1", "Q5_0"),
    ("Q4_0", "Q6_K", "Q5_0"),
    ("Q5_0", "Q4_0", "Q8_0"),
    ("Q5_1", "Q8_0", "Q5_0"),
    ("Q6_K", "Q8_0", "Q5_0"),
    ("Q6_K", "Q8_0", "Q4_K"),
    ("Q5_K", "Q4_1", "Q8_0"),
    ("F32", "F16", "BF16"),
]
REPACKS = [(kind,) * 3 for kind in FORMATS] + MIXTURES
STACK = ((0, 7), (7, 1), (9, 66))  # first row and rows of each tensor; row 8 belongs to none
ALL_ROWS = 77
HEAD_DIM, ROPE_DIM = 24, 20
PAIRINGS = ((), (), (2 * HEAD_DIM, HEAD_DIM, ROPE_DIM))  # the third begins with two heads that are rotated by halves


def mixture_layout(formats: tuple[str, ...]) -> MatrixLayout:
    layout = layout_of_formats(formats)
    assert layout is not None
    return layout


def repack_case(formats: tuple[str, str, str]) -> Case:
    """Three tensors of one matrix."""
    random = random_of(formats)
    columns = 512 if any(kind.endswith("_K") for kind in formats) else 96
    tensors = {
        f"raw{i}": reference.random_blocks(kind, rows, columns, random)
        for i, (kind, (_, rows)) in enumerate(zip(formats, STACK, strict=True))
    }
    layout = mixture_layout(formats)
    blocks = columns // 32
    words, scales = (blocks, layout.vectors, ALL_ROWS, 4), (blocks, layout.scale_vectors, ALL_ROWS, layout.scale_width)
    return Case(
        TUNINGS["quad"],
        {**tensors, "words": poison(*words, dtype=np.uint32), "scales": poison(*scales, dtype=np.uint32)},
        [
            ("repack", (f"raw{i}", formats[i], "w", rows, first), {"pairing": PAIRINGS[i]})
            for i, (first, rows) in enumerate(STACK)
        ],
        ("words", "scales"),
        {"w": matrix_entry(layout, ALL_ROWS, columns)},
    )


def matrix_entry(layout: MatrixLayout, n: int, k: int) -> tuple[str, int, int, str, str]:
    return layout.name, n, k, "words", "scales" if layout.quantised else ""


@pytest.mark.parametrize("formats", REPACKS, ids="+".join)
def test_repack(kernels: KernelLab, formats: tuple[str, str, str]) -> None:
    """Exact: bits are moved, and an f16 scale has an exact f32, also times a power of two or an integer of 8 bits.

    Rows i and i + ROPE_DIM / 2 of a head that is rotated by halves become neighbours.
    """
    case, got = kernels.run(repack_case, REPACKS, formats)
    layout = mixture_layout(formats)
    untouched = np.ones(ALL_ROWS, dtype=bool)
    for i, (first, rows) in enumerate(STACK):
        untouched[first : first + rows] = False
        words, scales = reference.repack(formats[i], case.buffers[f"raw{i}"], layout)
        if PAIRINGS[i]:
            pairs = np.arange(ROPE_DIM).reshape(2, -1).T.ravel()
            head = np.concatenate([pairs, np.arange(ROPE_DIM, HEAD_DIM)])
            order = np.concatenate([head, head + HEAD_DIM, np.arange(2 * HEAD_DIM, rows)])
            words, scales = words[:, :, order], scales[:, :, order]
        np.testing.assert_array_equal(got["words"][:, :, first : first + rows], words)
        np.testing.assert_array_equal(got["scales"][:, :, first : first + rows], scales)
    assert is_poison(got["words"][:, :, untouched]).all()
    assert is_poison(got["scales"][:, :, untouched]).all()


def pattern_case(kind: str) -> Case:
    """Every row of a tensor with every pattern, repacked and looked up."""
    raw = reference.pattern_blocks(kind, random_of(kind))
    layout = LAYOUT_OF_FORMAT[kind]
    words, scales = poison(layout.words_bytes(1024, 256) // 4), poison(layout.scales_bytes(1024, 256) // 4)
    ids = np.arange(1024, dtype=np.uint32)
    return Case(
        TUNINGS["quad"],
        {"raw": raw, "words": words, "scales": scales, "ids": ids, "x": poison(1024, 256)},
        [("repack", ("raw", kind, "w", 1024, 0), {}), ("embed", ("ids", "x", "w", 1024), {})],
        ("x",),
        {"w": matrix_entry(layout, 1024, 256)},
        rows=1024,
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_every_pattern_is_read_like_ggufs(kernels: KernelLab, kind: str) -> None:
    """Against the gguf package itself, which computes in f32 with at most two roundings; here is at most one.

    Denormal f32 may be flushed to zero; infinities and NaNs, which no model has, are left out.
    """
    case, got = kernels.run(pattern_case, FORMATS, kind)
    raw = case.buffers["raw"]
    plain = {"F32": np.float32, "F16": np.float16}.get(kind)
    with np.errstate(invalid="ignore"):
        expected = gguf.quants.dequantize(raw if plain is None else raw.view(plain), gguf.GGMLQuantizationType[kind])
    finite = np.isfinite(expected)
    assert finite.mean() > 0.9
    tolerance = np.full(expected.shape, 2.0**-126)
    if reference.is_quantised(kind):
        tolerance += 3 * U * reference.blocks_of(kind, raw).magnitudes
    assert_within(got["x"][finite], expected[finite].astype(np.float64), tolerance[finite])


def packed(raw: reference.Bytes, kind: str, layout: MatrixLayout) -> dict[str, Contents]:
    words, scales = reference.repack(kind, raw, layout)
    return {"words": words, "scales": scales} if layout.quantised else {"words": words}


class Matmul(NamedTuple):
    tuning: str
    format: str
    rows: int
    n: int
    k: int
    mode: str = "plain"
    beside: str = ""  # the format of another tensor of the matrix, for which this one is widened

    @property
    def layout(self) -> MatrixLayout:
        return mixture_layout((self.format, self.beside or self.format))


class Weights(NamedTuple):
    format: str
    n: int
    k: int
    mode: str = "plain"
    beside: str = ""


WEIGHTS = [
    *(Weights("F32", 33, 160), Weights("F16", 50, 32), Weights("Q4_0", 50, 96), Weights("Q4_1", 100, 160)),
    *(Weights("Q8_0", 33, 32), Weights("BF16", 50, 32), Weights("Q5_0", 33, 96), Weights("Q5_1", 34, 160)),
    Weights("Q6_K", 33, 256),
    *(Weights(kind, 33, 256) for kind in ("Q4_K", "Q5_K")),  # in the layouts of Q4_1 and Q5_1
    *(Weights(kind, 33, 256, beside="Q8_0") for kind in ("Q6_K", "Q4_K")),
    Weights("Q6_K", 33, 256, beside="Q4_K"),
    Weights("Q8_0", 33, 256, beside="Q5_1"),
    Weights("Q4_1", 96, 64),  # whole workgroups only
    Weights("Q8_0", 1, 544),  # more blocks than `split` shares out evenly
    Weights("Q4_0", 33, 32, "residual"),
    *(Weights(kind, 100, 96, "swiglu") for kind in ("Q4_1", "F16")),
    Weights("Q6_K", 34, 256, "swiglu"),
]
ROWS = {"one": (1,), "some": (3, 4, 5)}  # rows above one share a pipeline of tiles: a part of one, a whole one, both


def matmuls() -> list[Matmul]:
    """Every two of: an adapter's kernel, weights, one row or several.  The pipelines are what takes time."""
    chosen = cover({"tuning": list(TUNINGS), "weights": WEIGHTS, "rows": list(ROWS)})
    return [Matmul(tuning, weights[0], count, *weights[1:]) for tuning, weights, name in chosen for count in ROWS[name]]


TILES = {
    "8 x 8": Tile(8, 8, 1, 1),  # of 8 threads a block, two share a column
    "16 x 16": Tile(16, 16, 2, 2),
    "8 x 64": Tile(8, 64, 1, 8),  # a thread per column
    **{f"{tile.rows} x {tile.columns} as shipped": tile for tile in SHIPPED_TILES},
}


def tiles() -> list[Matmul]:
    """Of `matmul_tile`: a part of a tile, whole ones, and more than one in both directions.

    Every format with one and with two threads that unpack a column, every tile that ships.
    """
    shapes = [Matmul("8 x 8", kind, 9 - i % 7, 21, 256) for i, kind in enumerate(FORMATS)]
    shapes += [Matmul("8 x 64", kind, 2 + i % 7, 70, 256) for i, kind in enumerate(FORMATS)]
    shapes += [Matmul(name, "Q6_K", 5, 33, 256, beside="Q4_K") for name in ("8 x 8", "8 x 64")]
    shapes += [Matmul("16 x 16", "Q4_1", 16, 16, 96)]
    shapes += [Matmul(name, "Q4_1", rows, 20, 96, "residual") for name, rows in (("8 x 8", 2), ("16 x 16", 19))]
    shapes += [Matmul("16 x 16", "Q4_0", rows, 44, 96, "swiglu") for rows in (2, 33)]
    shapes += [Matmul("8 x 64", "Q8_0", 11, 140, 64, "swiglu")]
    shapes += [Matmul(name, "Q4_0", tile.rows + 1, tile.columns + 2, 64) for name, tile in TILES.items()]
    shapes += [Matmul("64 x 64 as shipped", "Q4_1", 7, 74, 32, "swiglu")]
    return shapes


MATMULS = [*matmuls(), *tiles()]


def matmul_blocks(shape: Matmul) -> reference.Bytes:
    return reference.random_blocks(shape.format, shape.n, shape.k, random_of(shape))


def matmul_tuning(shape: Matmul) -> Tuning:
    """As shipped for one format; fewer outputs per thread, which compile in a fraction of the time, for the others."""
    if shape.tuning in TILES:
        tile = TILES[shape.tuning]
        room = tile.nbytes() if shape.tuning == "8 x 64" else 32768  # for one block, or for two if they fit
        return replace(TUNINGS["split"], tiled_rows=2, tiles=(tile,), workgroup_bytes=room)
    tuning = TUNINGS[shape.tuning]
    return tuning if shape.format == "Q4_1" else replace(tuning, outputs_per_thread=3, outputs_per_thread_of_tile=2)


def matmul_case(shape: Matmul) -> Case:
    random = random_of(shape)
    x = f32(random.normal(size=(shape.rows, shape.k)))
    y = poison(shape.rows, shape.n // 2 if shape.mode == "swiglu" else shape.n)
    if shape.mode == "residual":
        y = f32(random.normal(size=y.shape))
    return Case(
        matmul_tuning(shape),
        {"x": x, "y": y, **packed(matmul_blocks(shape), shape.format, shape.layout)},
        [("matmul", ("x", "w", "y"), {"rows": shape.rows, "mode": shape.mode})],
        ("y",),
        {"w": matrix_entry(shape.layout, shape.n, shape.k)},
        rows=shape.rows,
    )


def finished(mode: str, y: Array, expected: Array, magnitude: Array, tolerance: Array) -> tuple[Array, Array]:
    """What becomes of products (whose terms' sizes add up to ``magnitude``) and of their tolerance; ``y`` as it was.

    residual: one more addition.  swiglu: silu has a slope below 1.1, so the error of the gate goes through it; exp,
    addition, division and product add (3 + 2|gate|) + 4 ulps.
    """
    if mode == "residual":
        before = y.astype(np.float64)
        return before + expected, tolerance + U * (np.abs(before) + magnitude)
    if mode == "swiglu":
        (gate, up), (gate_error, up_error) = np.split(expected, 2, axis=-1), np.split(tolerance, 2, axis=-1)
        through = 1.1 * gate_error * np.abs(up) + np.abs(reference.silu(gate)) * up_error
        expected = reference.silu(gate) * up
        return expected, through + 2 * U * (7 + 2 * np.abs(gate)) * np.abs(expected)
    return expected, tolerance


@pytest.mark.parametrize("shape", MATMULS, ids=str)
def test_matmul(kernels: KernelLab, shape: Matmul) -> None:
    """Tolerance: k products, k / 32 of them scaled and shifted, added up: (k + 8) roundings of the sum's magnitude."""
    case, got = kernels.run(matmul_case, MATMULS, shape)
    x = case.buffers["x"].astype(np.float64)
    expected, magnitude = reference.matmul(x, reference.blocks_of(shape.format, matmul_blocks(shape)))
    tolerance = (shape.k + 8) * U * magnitude
    assert_within(got["y"], *finished(shape.mode, case.buffers["y"], expected, magnitude, tolerance))


class Halve(NamedTuple):
    rows: int
    k: int


HALVES = [Halve(1, 32), Halve(5, 96), Halve(3, 2080)]  # fewer octets than threads, and more
SIZES = (1.0, 3e4, 1e-3, 0.0, 2.0**-110)


def halve_case(shape: Halve) -> Case:
    x = random_of(shape).normal(size=(shape.rows, shape.k)) * np.resize(SIZES, shape.rows)[:, None]
    return Case(
        TUNINGS["split"],
        {"x": f32(x), "halves": poison(shape.rows * (shape.k // 2 + 4), dtype=np.uint32)},
        [("halve", ("x", "halves", shape.k, shape.rows), {})],
        ("halves",),
        rows=shape.rows,
    )


def halved(x: Array) -> tuple[Array, Array]:
    """What x is multiplied as in f16, and the powers of two that the rows of it were divided by."""
    top = np.maximum(np.abs(x).max(axis=1, keepdims=True), 2.0**-100)
    power = 2.0 ** (np.floor(np.log2(top)) - 2)
    return x / power, power


@pytest.mark.parametrize("shape", HALVES, ids=str)
def test_halve(kernels: KernelLab, shape: Halve) -> None:
    """Tolerance: an f16's; the powers of two are exact, and of a row of tiny numbers the least there is."""
    case, got = kernels.run(halve_case, HALVES, shape)
    values, powers = np.split(got["halves"], [shape.rows * shape.k // 2])
    expected, power = halved(case.buffers["x"].astype(np.float64))
    assert np.abs(expected).max() < 8
    assert_within(values.view(np.float16).reshape(expected.shape), expected, half_error(expected))
    np.testing.assert_array_equal(powers.reshape(-1, 4)[:, 0].view(np.float32), power[:, 0])


def f16_tiles() -> list[tuple[Matmul, int]]:
    """Each with the terms of a sum in f16; every layout with one scale and offset, with minimums, with two scales."""
    shapes = [Matmul("8 x 8", kind, 9 - i % 7, 21, 256) for i, kind in enumerate(QUANTISED)]
    shapes += [Matmul("8 x 64", kind, 2 + i % 7, 70, 256) for i, kind in enumerate(QUANTISED)]
    shapes += [Matmul(name, "Q6_K", 5, 33, 256, beside="Q4_K") for name in ("8 x 8", "8 x 64")]
    shapes += [Matmul("16 x 16", "Q4_1", rows, 44, 96, mode) for rows in (2, 33) for mode in ("residual", "swiglu")]
    shapes += [Matmul("8 x 64", "Q8_0", 11, 140, 64, "swiglu")]
    shapes += [Matmul(name, "Q4_0", tile.rows + 1, tile.columns + 2, 64) for name, tile in TILES.items()]
    return [(shape, run) for i, shape in enumerate(shapes) for run in ((16, 32) if i % 3 == 0 else (32,))]


QUANTISED = [kind for kind in FORMATS if reference.is_quantised(kind)]
F16_TILES = f16_tiles()
OUTLIER = 5000.0  # as the inputs of `down` have them


def f16_case(shape_and_run: tuple[Matmul, int]) -> Case:
    shape, run = shape_and_run
    case = matmul_case(shape)
    x = case.buffers["x"].copy()
    x[0, 3] = OUTLIER
    x[-1] *= f32(np.array(1e-4))
    workspace = poison(shape.rows * (2 * shape.k + 16) // 4)
    ((_, args, options),) = case.calls
    return replace(
        case,
        tuning=replace(case.tuning, f16=True, f16_run=run, workgroup_bytes=case.tuning.workgroup_bytes // 2),
        buffers={**case.buffers, "x": x, "halves": workspace},
        calls=[("matmul", args, {**options, "halves": "halves"})],
    )


@pytest.fixture(scope="module")
def features(lab: Lab) -> list[str]:
    """Of the device."""
    source = "async def main(args):\n    device = await open_device()\n    found = sorted(device.info.features)"
    return list(lab.run(f"from stepwell import open_device\n{source}\n    device.close()\n    return found"))


@pytest.mark.parametrize("shape_and_run", F16_TILES, ids=str)
def test_matmul_in_f16(kernels: KernelLab, features: list[str], shape_and_run: tuple[Matmul, int]) -> None:
    """Tolerance: of 2^-10, an f16 rounded in any direction, one for x, one for the weight, run / 2 for the sums;
    what is subnormal, and may be zero, of a row's and a block's unit; and what is done in f32.

    A device without shader-f16 refuses the shader, and for no other reason.
    """
    shape, run = shape_and_run
    if SHADER_F16 not in features:
        _, result = kernels.batch(f16_case, F16_TILES)[shape_and_run]
        assert "extension 'f16' is not allowed" in result.get("error", ""), result
        return
    case, got = kernels.run(f16_case, F16_TILES, shape_and_run)
    x = case.buffers["x"].astype(np.float64)
    blocks = reference.blocks_of(shape.format, matmul_blocks(shape))
    expected, magnitude = reference.matmul(x, blocks)
    _, power = halved(x)
    units = 2 * np.abs(blocks.scale) + np.abs(blocks.minimum) * shape.layout.minimum  # at least what W is divided by
    units = np.repeat(units.reshape(shape.n, -1, 2).max(axis=-1), 32, axis=1)
    tolerance = (run / 2 + 2) * 2.0**-10 * (np.abs(x) @ np.abs(blocks.weights).T)
    lost = power * np.abs(blocks.weights).sum(axis=1) + np.abs(x) @ units.T + power * 2 * units.sum(axis=1)
    tolerance += SMALLEST_HALF * lost + (shape.k + 8) * U * magnitude
    both = 1.1 * np.multiply(*np.split(tolerance, 2, axis=1)) if shape.mode == "swiglu" else 0  # large enough to count
    expected, tolerance = finished(shape.mode, case.buffers["y"], expected, magnitude, tolerance)
    assert_within(got["y"], expected, tolerance + both)


class Embed(NamedTuple):
    format: str
    width: int


EMBEDS = [Embed(kind, 256 if kind.endswith("_K") else 96) for kind in FORMATS]
EMBEDS += [Embed("Q4_1", 1056)]  # 33 blocks: more than a workgroup's threads
VOCAB = 77
IDS = np.array([0, VOCAB - 1, 5, 5, 70, VOCAB, 2**32 - 1], dtype=np.uint32)  # the last two are not in the vocabulary


def embed_case(shape: Embed) -> Case:
    raw = reference.random_blocks(shape.format, VOCAB, shape.width, random_of(shape))
    return Case(
        TUNINGS["quad"],
        {"ids": IDS, "x": poison(len(IDS), shape.width), **packed(raw, shape.format, LAYOUT_OF_FORMAT[shape.format])},
        [("embed", ("ids", "x", "w", len(IDS)), {})],
        ("x",),
        {"w": matrix_entry(LAYOUT_OF_FORMAT[shape.format], VOCAB, shape.width)},
        rows=len(IDS),
    )


@pytest.mark.parametrize("shape", EMBEDS, ids=str)
def test_embed(kernels: KernelLab, shape: Embed) -> None:
    """Tolerance: none where the weight is exact in f32, which is everywhere but for the addition of a minimum.

    An f16 scale (11 bits) times an element less its offset (8 bits), or times a small scale (7 and a sign) and an
    element (5 and a sign), fits in 24 bits.
    An id beyond the vocabulary gives its last row, as nothing else is there to give.
    """
    _, got = kernels.run(embed_case, EMBEDS, shape)
    blocks = reference.blocks_of(
        shape.format, reference.random_blocks(shape.format, VOCAB, shape.width, random_of(shape))
    )
    expected = blocks.weights[np.minimum(IDS, VOCAB - 1)]
    assert_within(got["x"], expected, np.abs(expected) * (U if LAYOUT_OF_FORMAT[shape.format].minimum else 0))


# ---- activations -------------------------------------------------------------------------------------------------


class RmsNorm(NamedTuple):
    tuning: str
    width: int
    rows: int
    last: bool = False


RMS_NORMS = [
    *(RmsNorm(tuning, width, rows) for tuning in TUNINGS for width in (32, 96, 576) for rows in (1, 5)),
    *(RmsNorm(tuning, 96, rows, last=True) for tuning in TUNINGS for rows in (1, 3)),
]
EPS = 1e-5
ROW_SIZES = (1.0, 1e-20, 1e15, 0.0, 1e-3)  # below sqrt(eps); near the largest whose square has an f32; nothing


def rms_norm_case(shape: RmsNorm) -> Case:
    random = random_of(shape)
    x = random.normal(size=(shape.rows, shape.width)) * np.array(ROW_SIZES)[: shape.rows, None]
    weight = random.uniform(-2, 2, size=shape.width)
    options = {"width": shape.width, "eps": EPS, "rows": shape.rows, "last": shape.last}
    return Case(
        TUNINGS[shape.tuning],
        {"x": f32(x), "weight": f32(weight), "y": poison(1 if shape.last else shape.rows, shape.width)},
        [("rms_norm", ("x", "weight", "y"), options)],
        ("y",),
        rows=shape.rows,
    )


@pytest.mark.parametrize("shape", RMS_NORMS, ids=str)
def test_rms_norm(kernels: KernelLab, shape: RmsNorm) -> None:
    """Tolerance: relative; the mean has `width` roundings and a division, of which the root halves the effect; then
    inverseSqrt (2.5 ulps) and two products.
    """
    case, got = kernels.run(rms_norm_case, RMS_NORMS, shape)
    x, weight = (case.buffers[name].astype(np.float64) for name in ("x", "weight"))
    expected = reference.rms_norm(x[-1:] if shape.last else x, weight, EPS)
    assert_within(got["y"], expected, (shape.width / 2 + 10) * U * np.abs(expected))


class Rope(NamedTuple):
    tuning: str
    heads: tuple[int, int, int, int]  # heads, kv_heads, head_dim, rope_dim
    position: int
    rows: int = 1
    scale: float = 1.0
    long_from: int = 0
    slabs: tuple[int, ...] = ()  # positions of each
    half: bool = False  # K and V are f16

    @property
    def divisor(self) -> float:
        """Of the frequencies."""
        return SLOWER if self.long_from and self.position + self.rows >= self.long_from else 1.0


ROPES = [
    *(Rope("quad", (4, 2, 16, 16), position, rows) for position in (0, 1, 777) for rows in (1, 5)),
    *(Rope("quad", (2, 1, 16, 16), 8192 - rows, rows) for rows in (1, 5)),
    Rope("quad", (3, 3, 16, 8), 100, 3),  # half of the head is rotated
    Rope("quad", (2, 1, 4, 4), 2**17 - 1),
    Rope("quad", (9, 3, 64, 64), 777, 3),
    Rope("split", (9, 3, 64, 64), 1023),
    Rope("split", (3, 1, 24, 24), 50, 2),  # fewer pairs than a workgroup's threads
    *(Rope("quad", (4, 2, 16, 12), position, 2, 1.1875, long_from) for position in (62, 63) for long_from in (0, 65)),
    Rope("split", (4, 2, 16, 12), 5, 3, 1.1875, 1),
    *(Rope(tuning, (4, 2, 16, 16), 40, 3, slabs=(32, 16, 48)) for tuning in ("quad", "split")),
    *(
        Rope(tuning, (4, 2, 16, 16), position, slabs=(32, 16, 48))
        for tuning in ("quad", "split")
        for position in (0, 95)
    ),
    Rope("quad", (4, 2, 16, 12), 777, 5, half=True),
    *(Rope(tuning, (4, 2, 16, 16), 40, 3, slabs=(32, 16, 48), half=True) for tuning in ("quad", "split")),
]
SLOWER = 2.5  # the second table's frequencies are divided by that
THETA = 10_000.0
SPARE = 3  # positions of the cache behind the step's


def rope_case(shape: Rope) -> Case:
    heads, kv_heads, head_dim, rope_dim = shape.heads
    qkv = f32(random_of(shape).normal(size=(shape.rows, heads + 2 * kv_heads, head_dim)))
    positions = sum(shape.slabs) or shape.position + shape.rows + SPARE
    cache = (poison_half if shape.half else poison)(positions, kv_heads, head_dim)
    caches = cache_buffers(cache, cache, shape.slabs)
    config = DecoderConfig(
        hidden_size=32, n_layers=1, n_heads=heads, n_kv_heads=kv_heads, head_dim=rope_dim, ffn_size=32, vocab_size=1,
        context_length=1, rope_theta=THETA, rope_dim=rope_dim, rms_eps=EPS, tied_embeddings=True,
    )  # fmt: skip
    factors = [[1.0] * (rope_dim // 2), [SLOWER] * (rope_dim // 2)] if shape.long_from else []
    turns = np.frombuffer(rotation_tables(config, factors), dtype=np.float32)
    return Case(
        TUNINGS[shape.tuning],
        {"turns": turns, "qkv": qkv, **caches},
        [("rope_append", ("turns", "qkv", "kv", "geometry", shape.rows, shape.long_from), {})],
        ("qkv", *caches),
        heads={"geometry": (*shape.heads, 0, shape.scale)},
        kv={"kv": (tuple(caches), shape.slabs)},
        half=shape.half,
        position=shape.position,
        rows=shape.rows,
    )


@pytest.mark.parametrize("shape", ROPES, ids=str)
def test_rope_append(kernels: KernelLab, shape: Rope) -> None:
    """Tolerance: relative to the pair's length.  Each binary digit 1 of the position is one complex product (sqrt(5) U)
    with a turn rounded to f32 (U); one product more turns the pair; 1 % for second-order terms.

    That is 3e-6 at position 131,071, where an angle rounded to f32 would be off by 4e-3: far positions stay exact.
    v is copied bit by bit, but for rounding to f16, and nothing else of the caches or of qkv changes.
    """
    case, got = kernels.run(rope_case, ROPES, shape)
    heads, kv_heads, _, rope_dim = shape.heads
    before = case.buffers["qkv"]
    queries, keys, values = np.split(before.astype(np.float64), [heads, heads + kv_heads], axis=1)
    positions = shape.position + np.arange(shape.rows)
    ones = np.array([int(position).bit_count() for position in positions])[:, None, None]

    def check(rotated: Contents, original: Array) -> None:
        expected = reference.rope(original, positions / shape.divisor, rope_dim, THETA)
        expected[..., :rope_dim] *= shape.scale
        length = shape.scale * np.hypot(original[..., ::2], original[..., 1::2]).repeat(2, axis=-1)
        rounded = half_error(expected) if rotated.dtype == np.float16 else 0.0
        assert_within(rotated, expected, (ones * (5**0.5 + 1) + 5**0.5) * 1.01 * U * length + rounded)
        if rotated.dtype == np.float32:
            np.testing.assert_array_equal(rotated[..., rope_dim:], original[..., rope_dim:])

    k, v = cache_of(got, shape.slabs)
    check(got["qkv"][:, :heads], queries)
    check(k[positions], keys)
    assert_within(v[positions], values, half_error(values) if shape.half else np.zeros_like(values))
    np.testing.assert_array_equal(got["qkv"][:, heads:], before[:, heads:])
    for name, tensor in (("k", k), ("v", v)):
        assert is_poison(np.delete(tensor, positions, axis=0)).all(), f"{name} has changed at other positions"


class Attention(NamedTuple):
    tuning: str
    heads: tuple[int, int, int]  # heads, kv_heads, head_dim
    position: int
    rows: int = 1
    top: float = 0.0  # the largest score, if it is not to be what it is
    window: int = 0
    slabs: tuple[int, ...] = ()  # positions of each
    half: bool = False  # K and V are f16


SLABS = (48, 16, 32, 144, 16, 16, 64)  # of a paged cache: more than a launch binds, chunks that end with their slab


def attentions(tuning: str) -> list[Attention]:
    """Lengths around the ends of chunks (32, 64 or 128), and steps of several rows that cross them."""
    small, model, many, thin = (
        (4, 2, 16),
        (9, 3, 64),
        (8, 1, 96),
        (3, 3, 24),
    )  # 24: a head that is not shared out in 16s
    shapes = [Attention(tuning, small, length - 1) for length in (1, 2, 31, 32, 33, 127, 128, 129, 300)]
    shapes += [Attention(tuning, small, position, 7) for position in (0, 29, 61, 125)]
    shapes += [Attention(tuning, heads, length - 1) for heads in (model, many, thin) for length in (1, 129)]
    shapes += [Attention(tuning, heads, 30, 5) for heads in (model, many, thin)]
    shapes += [Attention(tuning, heads, position, 3, top=80) for heads in (small, thin) for position in (0, 140)]
    shapes += [Attention(tuning, small, position, 5, window=window) for position in (0, 130) for window in (1, 3, 40)]
    shapes += [Attention(tuning, thin, 300, window=window) for window in (2, 45, 128, 300, 301)]  # of 301 positions
    paged = [
        (small, 0, 1),
        (small, 95, 1),
        (small, 96, 1),
        (model, 299, 1),
        (thin, 335, 1),
        (small, 61, 7),
        (many, 30, 5),
    ]
    shapes += [Attention(tuning, heads, position, rows, slabs=SLABS) for heads, position, rows in paged]
    shapes += [Attention(tuning, thin, 250, 3, window=window, slabs=SLABS) for window in (2, 45, 200)]
    shapes += [Attention(tuning, small, 200, top=80, slabs=SLABS), Attention(tuning, small, 90, 6, slabs=(96,))]
    shapes += [Attention(tuning, small, sum(SLABS[:n]) - 9, 5, slabs=SLABS[:n], half=n == 2) for n in (1, 2, 3, 6)]
    shapes += [Attention(tuning, heads, 128, 3, half=True) for heads in (model, thin)]
    shapes += [Attention(tuning, heads, 250, slabs=SLABS, half=True) for heads in (small, thin)]
    return shapes


ATTENTIONS = [shape for tuning in TUNINGS for shape in attentions(tuning)]


def attention_case(shape: Attention) -> Case:
    heads, kv_heads, head_dim = shape.heads
    random = random_of(shape)
    length = shape.position + shape.rows
    qkv = random.normal(size=(shape.rows, heads + 2 * kv_heads, head_dim))
    cache = {name: poison(sum(shape.slabs) or length + SPARE, kv_heads, head_dim).copy() for name in "kv"}
    for contents in cache.values():
        contents[:length] = random.normal(size=(length, kv_heads, head_dim))
        if shape.window:
            contents[: max(0, shape.position + 1 - shape.window)] = np.nan  # out of every row's window
    if shape.half:
        cache = {name: np.where(np.isnan(c), poison_half(*c.shape), half(c)) for name, c in cache.items()}
    if shape.top:
        scores = reference.attention(qkv[:, :heads], cache["k"][:length], cache["v"][:length], shape.position).scores
        qkv *= shape.top / np.abs(scores).max()
    tuning = TUNINGS[shape.tuning]
    chunks = sum(-(-positions // tuning.attention_chunk) for positions in shape.slabs or (length,))
    partials, normals = Ops(tuning).partials_bytes(Heads(*shape.heads, head_dim), (shape.rows, chunks))
    out = poison(shape.rows, heads, head_dim)
    arguments = ("qkv", "kv", "partials", "normals", "out", "geometry")
    caches = cache_buffers(cache["k"], cache["v"], shape.slabs)
    return Case(
        tuning,
        {"qkv": f32(qkv), **caches, "partials": poison(partials // 4), "normals": poison(normals // 4), "out": out},
        [("attention", arguments, {"rows": shape.rows})],
        ("out", "partials", "normals"),
        heads={"geometry": (*shape.heads, head_dim, shape.window)},
        kv={"kv": (tuple(caches), shape.slabs)},
        half=shape.half,
        position=shape.position,
        rows=shape.rows,
    )


@pytest.mark.parametrize("shape", ATTENTIONS, ids=str)
def test_attention(kernels: KernelLab, shape: Attention) -> None:
    """Tolerance: each weight exp(score - maximum) has a relative error, and so has its part of the result.

    Score and maximum: head_dim + 2 roundings of the sum's magnitude each.  exp: 3 + 2 * distance to the maximum, in
    ulps, and that again for scaling down what was added under a smaller maximum, at most once every fourth position.
    Sums over the positions: a rounding per position.  What is hidden by causality, out of the window or
    behind the step's positions (NaN) has no part at all.
    """
    case, got = kernels.run(attention_case, ATTENTIONS, shape)
    heads, _, head_dim = shape.heads
    length = shape.position + shape.rows
    queries = case.buffers["qkv"][:, :heads].astype(np.float64)
    k, v = (np.nan_to_num(tensor[:length].astype(np.float64)) for tensor in cache_of(case.buffers, shape.slabs))
    exact = reference.attention(queries, k, v, shape.position, shape.window)
    assert shape.top == pytest.approx(0.0) or np.abs(exact.scores).max() == pytest.approx(shape.top, rel=1e-3)
    score_error = (head_dim + 2) * U * exact.magnitude.max(axis=-1, keepdims=True)
    distance = -np.log(np.where(exact.weights > 0, exact.weights, 1))  # to the maximum or a little more
    error = 2 * score_error + 2 * U * (6 + 4 * distance + 3 * length / 4) + 2 * U * length
    spread = np.einsum("rhp,rhp,hpd->rhd", exact.weights, error, np.abs(exact.values))
    spread += np.abs(exact.out) * np.einsum("rhp,rhp->rh", exact.weights, error)[..., None]
    assert_within(got["out"], exact.out, spread)


class Argmax(NamedTuple):
    tuning: str
    size: int
    data: str
    ban: tuple[int, ...] = ()


ARGMAXES = [
    *(Argmax(tuning, size, "random") for tuning in ("quad", "split") for size in (1, 33, 49_152)),
    *(Argmax(tuning, 49_152, "ties") for tuning in ("quad", "split")),
    *(Argmax(tuning, 33, "ties", (6, 22)) for tuning in ("quad", "split")),
    Argmax("quad", 33, "equal"),
    Argmax("quad", 33, "equal", (0, 1)),
    Argmax("quad", 33, "rising", (30, 31, 32)),
    *(
        Argmax(tuning, 33, "lowest", tuple(i for i in range(33) if i != only))
        for tuning in ("quad", "split")
        for only in (0, 17, 32)
    ),
]


def logits_of(shape: Argmax) -> npt.NDArray[np.float32]:
    if shape.data == "equal":
        return np.full(shape.size, -1.5, dtype=np.float32)
    if shape.data == "rising":
        return np.arange(shape.size, dtype=np.float32) - 100
    if shape.data == "lowest":  # the one that is not banned is the lowest number of all
        return np.where(np.isin(np.arange(shape.size), shape.ban), 1, np.finfo(np.float32).min).astype(np.float32)
    logits = random_of(shape).normal(size=shape.size).astype(np.float32)
    if shape.data == "ties":
        logits[[6, 22, 23, 30, shape.size - 1]] = 9.0  # 6 and 22: of one thread; 23, 30: of others
    return logits


def argmax_case(shape: Argmax) -> Case:
    pairs = "pairs" if TUNINGS[shape.tuning].argmax_parts > 1 else None
    return Case(
        TUNINGS[shape.tuning],
        {"logits": logits_of(shape), "pairs": poison(2 * 64, dtype=np.uint32), "token": poison(1, dtype=np.uint32)},
        [("argmax", ("logits", pairs, "token"), {"size": shape.size, "ban": shape.ban})],
        ("token",),
    )


@pytest.mark.parametrize(
    "shape", ARGMAXES, ids=lambda shape: f"{shape.tuning}-{shape.size}-{shape.data}-{len(shape.ban)}"
)
def test_argmax(kernels: KernelLab, shape: Argmax) -> None:
    """Exact: of equal logits the smallest id, and never a banned one."""
    _, got = kernels.run(argmax_case, ARGMAXES, shape)
    assert got["token"].tolist() == [reference.argmax(logits_of(shape), shape.ban)]


# ---- the whole table ---------------------------------------------------------------------------------------------

BATCHES: tuple[tuple[Any, Any], ...] = (
    (repack_case, REPACKS),
    (matmul_case, MATMULS),
    (halve_case, HALVES),
    (embed_case, EMBEDS),
    (rms_norm_case, RMS_NORMS),
    (rope_case, ROPES),
    (attention_case, ATTENTIONS),
    (argmax_case, ARGMAXES),
)


TESTED_ELSEWHERE = {
    "kv_pattern": "../model/test_kv_pattern_browser.py",  # a workload, tested with it
    "matvec": "test_fused_kernels.py",
    "rope_turns": "test_fused_kernels.py",
    "attention_decode": "test_fused_kernels.py",
    "plain_read": "test_kernel_times_browser.py",
    "noise": "../model/test_synthetic_browser.py",
    "sample": "test_sampling_kernel.py",
}


def test_every_kernel_is_tested(kernels: KernelLab) -> None:
    launched = set().union(*(kernels.launched(build, shapes) for build, shapes in BATCHES))
    assert sorted([*launched, *TESTED_ELSEWHERE]) == sorted(KERNELS)
    assert all((Path(__file__).parent / name).exists() for name in TESTED_ELSEWHERE.values())


def test_the_browsers_own_tuning_is_tested(lab: Lab) -> None:
    source = """
from dataclasses import asdict
from stepwell import open_device
from stepwell.launch.selection import tuning_for

async def main(args):
    device = await open_device()
    try:
        return asdict(tuning_for(device.info))
    finally:
        device.close()
"""
    own = Tuning(**lab.run(source))
    own = replace(own, tiles=tuple(Tile(*tile) for tile in own.tiles))

    def of_rows(tuning: Tuning) -> Tuning:
        """But for the decode step, which is tested in test_fused_kernels.py with small workgroups, and for f16."""
        return replace(tuning, subgroup=0, dot4=False, f16=False, slabs=0, workgroup_bytes=0, decode_threads=0)

    assert of_rows(own) in [of_rows(tuning) for tuning in TUNINGS.values()]
