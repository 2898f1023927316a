"""The kernels of a GPU's decode step against float64, on this adapter: with its subgroups, and without.

Tolerances as in test_kernels.py.  Small workgroups (two or eight outputs, a few sets of threads) stand for large ones:
every way through the kernels is taken, shuffles between sets of threads included.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from stepwell.gpu.device import DeviceInfo
from stepwell.kernels.fused import FusedOps
from stepwell.kernels.kv import KVTensors
from stepwell.kernels.layouts import LAYOUT_OF_FORMAT
from stepwell.kernels.ops import Heads, Matrix, Ops
from stepwell.launch.selection import tuning_for
from stepwell.memory.buffer import Buffer, Role
from stepwell.models.config import DecoderConfig
from stepwell.models.rope import rotation_tables
from stepwell.step.recorder import Launch, Recorder
from tests.browser.conftest import Lab
from tests.browser.kernels.kernel_lab import (
    Case,
    KernelLab,
    cache_buffers,
    cache_of,
    half,
    half_error,
    is_poison,
    poison,
    poison_half,
)
from tests.browser.kernels.test_kernels import assert_within, f32, finished, matrix_entry, packed, random_of
from tests.reference import kernels as reference
from tests.reference.kernels import U
from tests.support.covering import FULL, cover

pytestmark = pytest.mark.browser
SHARES_A_PAGE = True

GPU = replace(
    tuning_for(DeviceInfo("", "", "a GPU", False, {}, frozenset())),
    argmax_parts=4, decode_chunk=32, attention_threads=32, attention_lanes=4, attention_shares=5,
    workgroups=4, decode_ahead=2, slabs=2,
)  # fmt: skip
TUNINGS = {
    "plain": replace(GPU, subgroup=0, decode_threads=64, decode_widest=8, attention_threads=24),
    # two sets in a subgroup
    "subgroups": replace(GPU, subgroup=4, decode_wide=2, decode_widest=2, decode_threads=16, slabs=5),
    # two subgroups in a set; all blocks ahead; too little memory for the values of all query heads at once
    "wide": replace(GPU, subgroup=4, decode_threads=32, decode_widest=8, decode_ahead=9, workgroup_bytes=1, slabs=1),
    "wider": replace(GPU, subgroup=4, decode_threads=64, workgroups=2),  # as wide as the outputs allow
    "integers": replace(GPU, subgroup=4, dot4=True, decode_threads=32, decode_widest=8, attention_threads=64),
}
EPS = 1e-5
THETA = 10_000.0


@pytest.fixture(scope="module")
def kernels(lab: Lab) -> KernelLab:
    return KernelLab(lab)


class Product(NamedTuple):
    tuning: str
    format: str
    n: int
    k: int
    before: str = "plain"
    after: str = "plain"


def products() -> list[Product]:
    shapes = [Product(tuning, "Q4_1", 50, 160) for tuning in TUNINGS]
    shapes += [Product("subgroups", kind, 33, 96) for kind in ("F32", "F16", "BF16", "Q4_0", "Q5_0", "Q5_1", "Q8_0")]
    shapes += [Product("subgroups", kind, 33, 256) for kind in ("Q4_K", "Q5_K", "Q6_K")]
    shapes += [Product(tuning, "Q4_0", 300, 544) for tuning in ("subgroups", "wider")]  # several outputs per thread
    shapes += [Product("integers", kind, 33, 256) for kind in LAYOUT_OF_FORMAT]
    shapes += [Product(tuning, "Q4_1", 40, 96, "norm", "swiglu") for tuning in TUNINGS]
    shapes += [Product(tuning, "Q8_0", 33, 64, "norm") for tuning in TUNINGS]
    shapes += [Product(tuning, "Q4_1", 33, 96, "plain", "residual") for tuning in TUNINGS]
    return shapes


PRODUCTS = products()


def product_case(shape: Product) -> Case:
    random = random_of(shape)
    swiglu = shape.after == "swiglu"
    y = f32(random.normal(size=shape.n)) if shape.after == "residual" else poison(shape.n // 2 if swiglu else shape.n)
    buffers = {
        "x": f32(random.normal(size=shape.k)),
        "weight": f32(random.uniform(-2, 2, size=shape.k)),
        "y": y,
        **packed(blocks_of(shape), shape.format, LAYOUT_OF_FORMAT[shape.format]),
    }
    options = {"after": shape.after, "node": "tested"}
    call: tuple[str, tuple[Any, ...], dict[str, Any]] = ("product", ("x", "w", "y"), options)
    if shape.before == "norm":
        call = ("norm_product", ("x", "weight", EPS, "w", "y"), options)
    matrix = matrix_entry(LAYOUT_OF_FORMAT[shape.format], shape.n, shape.k)
    return Case(TUNINGS[shape.tuning], buffers, [call], ("y",), {"w": matrix}, fused=True)


def blocks_of(shape: Product) -> reference.Bytes:
    return reference.random_blocks(shape.format, shape.n, shape.k, random_of(shape))


def rounding_to_integers(x: Any, blocks: Any) -> Any:
    """What a product can lose if each value of x is off by half a unit: 1 / 32,639 of the largest of its block."""
    units = np.abs(x).reshape(-1, 32).max(axis=1).repeat(32) / 32_639
    return reference.matmul((units / 2 * 1.001)[None], blocks)[1][0]


@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_products(kernels: KernelLab, shape: Product) -> None:
    """As test_matmul and test_rms_norm: an error of the norm is an error of every product."""
    case, got = kernels.run(product_case, PRODUCTS, shape)
    x = case.buffers["x"].astype(np.float64)[None]
    normed = 0.0
    if shape.before == "norm":
        x = reference.rms_norm(x, case.buffers["weight"].astype(np.float64), EPS)
        normed = (shape.k / 2 + 10) * U
    expected, magnitude = reference.matmul(x, reference.blocks_of(shape.format, blocks_of(shape)))
    expected, magnitude = expected[0], magnitude[0]
    tolerance = ((shape.k + 8) * U + normed) * magnitude
    if TUNINGS[shape.tuning].dot4 and LAYOUT_OF_FORMAT[shape.format].quantised:
        tolerance += rounding_to_integers(x[0], reference.blocks_of(shape.format, blocks_of(shape)))
    assert_within(got["y"], *finished(shape.after, case.buffers["y"], expected, magnitude, tolerance))


class Qkv(NamedTuple):
    tuning: str
    heads: tuple[int, int, int, int]  # heads, kv_heads, head_dim, rope_dim
    position: int
    slabs: tuple[int, ...] = ()  # positions of each
    half: bool = False  # K and V are f16


QKVS = [Qkv(tuning, (4, 2, 16, 16), position) for tuning in TUNINGS for position in (0, 777)]
QKVS += [Qkv("subgroups", (3, 3, 16, 8), 100), Qkv("plain", (9, 3, 64, 64), 8191)]
QKVS += [Qkv("plain", (4, 2, 16, 8), 777, half=True), Qkv("integers", (4, 2, 16, 16), 40, (32, 16, 48), half=True)]
HIDDEN = 64


def qkv_case(shape: Qkv) -> Case:
    heads, kv_heads, head_dim, rope_dim = shape.heads
    random = random_of(shape)
    n = (heads + 2 * kv_heads) * head_dim
    config = DecoderConfig(
        hidden_size=32, n_layers=1, n_heads=heads, n_kv_heads=kv_heads, head_dim=rope_dim, ffn_size=32, vocab_size=1,
        context_length=1, rope_theta=THETA, rope_dim=rope_dim, rms_eps=EPS, tied_embeddings=True,
    )  # fmt: skip
    cache = (poison_half if shape.half else poison)(sum(shape.slabs) or shape.position + 3, kv_heads, head_dim)
    caches = cache_buffers(cache, cache, shape.slabs)
    return Case(
        TUNINGS[shape.tuning],
        {
            "x": f32(random.normal(size=HIDDEN)),
            "weight": f32(random.uniform(-2, 2, size=HIDDEN)),
            "digits": np.frombuffer(rotation_tables(config), dtype=np.float32),
            "turns": poison(rope_dim),
            "q": poison(heads, head_dim),
            **caches,
            **packed(reference.random_blocks("Q4_1", n, HIDDEN, random_of(shape)), "Q4_1", LAYOUT_OF_FORMAT["Q4_1"]),
        },
        [
            ("rope_turns", ("digits", "turns", "geometry"), {}),
            ("norm_qkv", ("x", "weight", EPS, "w", "turns", "q", "kv", "geometry"), {}),
        ],
        ("q", *caches),
        {"w": matrix_entry(LAYOUT_OF_FORMAT["Q4_1"], n, HIDDEN)},
        {"geometry": shape.heads},
        {"kv": (tuple(caches), shape.slabs)},
        half=shape.half,
        position=shape.position,
        fused=True,
    )


@pytest.mark.parametrize("shape", QKVS, ids=str)
def test_norm_qkv(kernels: KernelLab, shape: Qkv) -> None:
    case, got = kernels.run(qkv_case, QKVS, shape)
    heads, kv_heads, head_dim, rope_dim = shape.heads
    n = (heads + 2 * kv_heads) * head_dim
    x = reference.rms_norm(case.buffers["x"].astype(np.float64)[None], case.buffers["weight"].astype(np.float64), EPS)
    blocks = reference.blocks_of("Q4_1", reference.random_blocks("Q4_1", n, HIDDEN, random_of(shape)))
    product, magnitude = reference.matmul(x, blocks)
    rounded = rounding_to_integers(x[0], blocks) if TUNINGS[shape.tuning].dot4 else 0.0
    error = ((((HIDDEN + 8) + HIDDEN / 2 + 10) * U) * magnitude + rounded).reshape(1, -1, head_dim)
    rows = product.reshape(1, -1, head_dim)
    positions = np.array([shape.position])
    ones = 20  # one complex product per digit of the position, of which most are with 1

    def check(found: Any, original: Any, error: Any) -> None:
        expected = reference.rope(original, positions, rope_dim, THETA)[0]
        length = np.hypot(original[..., ::2], original[..., 1::2]).repeat(2, axis=-1)[0]
        spread = error[0].reshape(*error[0].shape[:-1], -1, 2).sum(axis=-1).repeat(2, axis=-1)
        rounded = 1.001 * half_error(expected) if found.dtype == np.float16 else 0.0
        assert_within(found, expected, spread + (ones * (5**0.5 + 1) + 5**0.5) * 1.01 * U * length + rounded)

    k, v = cache_of(got, shape.slabs)
    check(got["q"], rows[:, :heads], error[:, :heads])
    check(k[shape.position], rows[:, heads : heads + kv_heads], error[:, heads : heads + kv_heads])
    values, rounded = rows[0, heads + kv_heads :], error[0, heads + kv_heads :]
    assert_within(v[shape.position], values, rounded + (1.001 * half_error(values) if shape.half else 0.0))
    for name, tensor in (("k", k), ("v", v)):
        rest = np.delete(tensor, shape.position, axis=0)
        assert is_poison(rest).all(), f"{name} has changed at other positions"


class Attention(NamedTuple):
    tuning: str
    heads: tuple[int, int, int]
    length: int
    top: float = 0.0
    window: int = 0
    slabs: tuple[int, ...] = ()  # positions of each
    half: bool = False  # K and V are f16


SLABS = (48, 16, 32, 144, 16, 16, 64)  # of a paged cache: more than a launch binds, tiles that end with their slab
WINDOWS = (1, 50, 300)
# a pipeline each: every tuning has one, every window two tunings
WINDOWED = cover({"tuning": list(TUNINGS), "window": WINDOWS}, full=True)[:: 1 if FULL else 2]
ATTENTIONS = [
    *(Attention(tuning, (4, 2, 16), length) for tuning in TUNINGS for length in (1, 31, 32, 33, 130)),
    *(Attention("subgroups", heads, 70) for heads in ((9, 3, 64), (8, 1, 32), (3, 3, 24))),
    *(Attention(tuning, (4, 2, 16), 100, top=80) for tuning in TUNINGS),
    *(Attention(tuning, (4, 2, 16), 200, window=window) for tuning, window in WINDOWED),
    Attention("integers", (8, 4, 16), 700),  # several tiles for each share
    Attention("integers", (8, 4, 16), 640),  # more shares than two teams read at once
    Attention("subgroups", (4, 2, 16), 640),
    Attention("integers", (12, 6, 16), 700),  # fewer shares
    *(Attention(tuning, (4, 2, 16), length, slabs=SLABS) for tuning in TUNINGS for length in (1, 96, 97, 290)),
    *(Attention("subgroups", heads, 250, slabs=SLABS) for heads in ((9, 3, 64), (3, 3, 24))),
    *(Attention(tuning, (4, 2, 16), 250, window=100, slabs=SLABS) for tuning in ("wide", "integers")),
    Attention("integers", (8, 4, 16), 70, slabs=(96,)),
    *(Attention("subgroups", (4, 2, 16), sum(SLABS[:n]) - 9, slabs=SLABS[:n], half=n == 3) for n in (1, 2, 3, 4, 6)),
    Attention("subgroups", (4, 2, 16), 90, slabs=SLABS[:3]),  # the last of four places has the third slab again
    *(Attention(tuning, (4, 2, 16), 130, half=True) for tuning in TUNINGS),
    Attention("subgroups", (9, 3, 64), 70, half=True),
    *(Attention(tuning, (4, 2, 16), 250, slabs=SLABS, half=True) for tuning in ("plain", "integers")),
]
OUT = 24  # outputs of the product behind attention


def attention_case(shape: Attention) -> Case:
    heads, kv_heads, head_dim = shape.heads
    random = random_of(shape)
    q = random.normal(size=(1, heads, head_dim))
    cache = {name: poison(sum(shape.slabs) or shape.length + 2, kv_heads, head_dim).copy() for name in "kv"}
    for contents in cache.values():
        contents[: shape.length] = random.normal(size=(shape.length, kv_heads, head_dim))
    if shape.half:
        cache = {name: np.where(np.isnan(c), poison_half(*c.shape), half(c)) for name, c in cache.items()}
    if shape.top:
        k, v = (cache[name][: shape.length] for name in "kv")
        q *= shape.top / np.abs(reference.attention(q, k, v, shape.length - 1).scores).max()
    tuning = TUNINGS[shape.tuning]
    tiles = sum(-(-positions // tuning.decode_chunk) for positions in shape.slabs or (shape.length,))
    longest = -(-tiles // FusedOps(tuning).shares(Heads(*shape.heads, head_dim)))
    chunks = -(-tiles // longest)  # shares: as few as make none longer
    caches = cache_buffers(cache["k"], cache["v"], shape.slabs)
    partials, normals = Ops(tuning).partials_bytes(Heads(*shape.heads, head_dim), (1, chunks))
    k_size = heads * head_dim // 32 * 32
    identity = np.eye(heads * head_dim, dtype=np.float32)
    assert k_size == heads * head_dim or head_dim == 24
    buffers = {"q": f32(q[0]), **caches, "partials": poison(partials // 4), "normals": poison(normals // 4)}
    calls = [("attention", ("q", "kv", "partials", "normals", "geometry", (1, chunks)), {})]
    outputs: tuple[str, ...] = ("partials", "normals")
    matrices = {}
    if k_size == heads * head_dim:
        words, _ = reference.repack("F32", identity.view(np.uint8).reshape(heads * head_dim, -1))
        buffers |= {"words": words, "y": np.zeros(heads * head_dim, dtype=np.float32)}
        calls.append(("merged_product", ("partials", "normals", "kv", "w", "y", "geometry"), {}))
        outputs = ("y",)
        matrices = {"w": matrix_entry(LAYOUT_OF_FORMAT["F32"], heads * head_dim, heads * head_dim)}
    return Case(
        tuning, buffers, calls, outputs, matrices, {"geometry": (*shape.heads, head_dim, shape.window)},
        {"kv": (tuple(caches), shape.slabs)}, half=shape.half, position=shape.length - 1, fused=True,
    )  # fmt: skip


@pytest.mark.parametrize("shape", ATTENTIONS, ids=str)
def test_attention(kernels: KernelLab, shape: Attention) -> None:
    """As test_attention in test_kernels.py; the product behind it is with the identity, added to zeros."""
    case, got = kernels.run(attention_case, ATTENTIONS, shape)
    heads, _, head_dim = shape.heads
    queries = case.buffers["q"][None].astype(np.float64)
    k, v = (tensor[: shape.length].astype(np.float64) for tensor in cache_of(case.buffers, shape.slabs))
    exact = reference.attention(queries, k, v, shape.length - 1, shape.window)
    score_error = (head_dim + 2) * U * exact.magnitude.max(axis=-1, keepdims=True)
    distance = -np.log(np.where(exact.weights > 0, exact.weights, 1))
    error = 2 * score_error + 2 * U * (6 + 4 * distance) + 2 * U * shape.length
    spread = np.einsum("rhp,rhp,hpd->rhd", exact.weights, error, np.abs(exact.values))
    spread += np.abs(exact.out) * np.einsum("rhp,rhp->rh", exact.weights, error)[..., None]
    if "y" in got:
        found = got["y"].reshape(heads, head_dim)
    else:
        chunks = got["normals"].size // (2 * heads)
        normals = got["normals"].reshape(chunks, heads, 2).astype(np.float64)
        parts = got["partials"].reshape(chunks, heads, head_dim).astype(np.float64)
        scale = np.exp(normals[..., 0] - normals[..., 0].max(axis=0))
        found = (parts * scale[..., None]).sum(axis=0) / (normals[..., 1] * scale).sum(axis=0)[:, None]
    assert_within(found, exact.out[0], spread[0] + 4 * U * np.abs(exact.out[0]))


def test_one_launch_within_the_limits_of_every_device() -> None:
    rec, buffer = Recorder(7), Buffer(1, 1 << 30, 1 << 30, Role.ACTIVATION)
    fused, heads = FusedOps(GPU), Heads(24, 8, 128, 96)
    matrix = Matrix(LAYOUT_OF_FORMAT["Q4_0"].name, 5120, 3072, buffer, buffer)
    fused.norm_qkv(rec, buffer, buffer, EPS, matrix, buffer, buffer, KVTensors(buffer, buffer), heads)
    (launch,) = [command for command in rec.finish().commands if isinstance(command, Launch)]
    assert launch.grid[1:] == (1, 1)
    assert len(launch.buffers) <= 8  # maxStorageBuffersPerShaderStage
