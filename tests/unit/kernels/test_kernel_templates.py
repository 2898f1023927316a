"""The kernel templates on CPython: constants that are missing or make no sense are refused before any GPU sees them."""

from collections.abc import Mapping

import pytest

from stepwell.errors import BadRequest
from stepwell.gpu.device import BindingType, Layout
from stepwell.kernels import layout_of, render
from stepwell.kernels.ops import Heads, Matrix
from stepwell.memory.buffer import Buffer, Role

MATMUL = {"format": "u4m", "k": 64, "n": 24, "mode": "plain", "tile": 1}
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 16, "chunk": 64, "slabs": 5, "half": True, "column": "z"}
ROPE = {"rope_dim": 16, "rope_scale": 1.0, "long_from": 65, "bits": 20}
CONSTANTS: Mapping[str, Mapping[str, object]] = {
    "repack": {
        "source": "Q8_0",
        "format": "u8",
        "rows": 8,
        "columns": 64,
        "first_row": 0,
        "all_rows": 8,
        "pairing": (4, 4, 2),
        "threads": 4,
    },
    "embed": {"format": "F16", "width": 64, "vocab": 100, "threads": 32},
    "rms_norm": {"width": 64, "eps": 1e-5, "threads": 4, "subgroups": True, "last": False},
    "matmul_quad": {**MATMUL, "per": 3, "subgroups": True},
    "matmul_split": {**MATMUL, "wide": 8, "splits": 2},
    "matmul_tile": {
        **{name: value for name, value in MATMUL.items() if name != "tile"},
        "rows": 8,
        "columns": 8,
        "tall": 1,
        "across": 1,
        "stages": 2,
        "arithmetic": "f16",
        "run": 16,
    },
    "halve": {"k": 64, "threads": 4},
    "rope_append": {"heads": 4, "kv_heads": 2, "head_dim": 16, **ROPE, "slabs": 5, "half": True, "threads": 4},
    "attention_quad": {**HEADS, "window": 0},
    "attention_split": {**HEADS, "window": 0},
    "attention_merge": {"heads": 4, "head_dim": 16, "slabs": 5, "column": "z", "threads": 4},
    "argmax": {"size": 33, "parts": 1, "stage": "all", "ban": (1, 2), "threads": 16},
    "sample": {"stage": "top_p", "size": 33, "parts": 4, "threads": 16, "top_k": True},
    "noise": {"format": "u4m", "n": 24, "k": 64, "deviation": 0.1, "threads": 4},
    "plain_read": {"loads": 16, "threads": 256},
    "rope_turns": {**ROPE, "threads": 4},
    "attention_decode": {**HEADS, "window": 0, "most": 8, "threads": 16, "subgroup": 4, "lanes": 4, "together": True},
    "matvec": {
        "format": "u4m",
        "k": 64,
        "n": 96,
        "wide": 8,
        "per": 1,
        "splits": 2,
        "ahead": 1,
        "arithmetic": "f32",
        "subgroup": 0,
        "before": "norm",
        "eps": 1e-5,
        "after": "rope",
        "heads": 3,
        "kv_heads": 1,
        "head_dim": 16,
        "rope_dim": 16,
        "slabs": 1,
        "half": True,
    },
}


@pytest.mark.parametrize(("kernel", "missing"), [(kernel, name) for kernel in CONSTANTS for name in CONSTANTS[kernel]])
def test_every_constant_is_needed(kernel: str, missing: str) -> None:
    assert layout_of(render(kernel, CONSTANTS[kernel])).bindings
    with pytest.raises(BadRequest, match=f"kernel {kernel}: '{missing}' is undefined"):
        render(kernel, {name: value for name, value in CONSTANTS[kernel].items() if name != missing})


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        ("matmul_quad", {"format": "Q4_1"}),  # a format of files, not a layout
        ("matmul_split", {"format": None}),
        ("repack", {"format": "U8"}),
        ("repack", {"source": "Q2_K"}),
        ("embed", {"format": 3}),
        ("matmul_quad", {"mode": "gelu"}),
        ("matmul_split", {"mode": "Plain"}),
        ("matmul_split", {"k": "64"}),
        ("rms_norm", {"width": None}),
        ("attention_split", {"head_dim": "wide"}),
        ("argmax", {"ban": 5}),
    ],
)
def test_constants_of_no_meaning(kernel: str, constants: Mapping[str, object]) -> None:
    with pytest.raises(BadRequest, match=f"kernel {kernel}: "):
        render(kernel, {**CONSTANTS[kernel], **constants})


def test_unknown_kernel() -> None:
    with pytest.raises(BadRequest, match="no kernel named 'matmul'; there are repack, embed"):
        render("matmul", {})


def test_bindings_are_read_from_the_code() -> None:
    read, write = BindingType.READ_ONLY_STORAGE, BindingType.STORAGE
    quantised = render("matmul_quad", CONSTANTS["matmul_quad"])
    assert layout_of(quantised) == Layout((BindingType.UNIFORM, read, write, read, read))
    plain = render("matmul_quad", {**CONSTANTS["matmul_quad"], "format": "F32"})
    assert layout_of(plain) == Layout((BindingType.UNIFORM, read, write, read))
    one, two = (f"@group(0) @binding({number}) var<storage> v{number}: f32;" for number in (1, 2))
    step = "var<immediate> step: Step;"
    assert layout_of("") == Layout()
    assert layout_of(step + one + two) == Layout((read, read), first=1, immediate_bytes=16)
    for gap in ("@group(0) @binding(0) var<storage> v: f32;" + two, two):
        with pytest.raises(BadRequest, match=r"bindings of group 0 are \[(0, )?2\]"):
            layout_of(gap)
    for immediates in ("var<immediate> other: Other;", step + step):
        with pytest.raises(BadRequest, match="the only ones are one Step"):
            layout_of(immediates)


def test_shapes_that_no_kernel_computes() -> None:
    buffer = Buffer(1, 64, 64, Role.WEIGHTS)
    with pytest.raises(BadRequest, match="rows of 48 weights; multiples of 32"):
        Matrix("F32", 4, 48, buffer, None)
    with pytest.raises(BadRequest, match="no matrix layout 'Q4_1'; there are F32, F16, BF16, u4, u4m"):
        Matrix("Q4_1", 4, 64, buffer, None)
    with pytest.raises(BadRequest, match="head_dim is 6; a multiple of 4"):
        Heads(4, 2, 6, 6)
    with pytest.raises(BadRequest, match="3 query heads cannot share 2"):
        Heads(3, 2, 16, 16)


@pytest.mark.parametrize("kernel", ["attention_quad", "attention_split", "attention_decode"])
@pytest.mark.parametrize("slabs", [0, 1, 2, 4])
def test_attention_chooses_among_the_slabs_that_it_binds(kernel: str, slabs: int) -> None:
    """One is read as a tensor is."""
    code = render(kernel, {**CONSTANTS[kernel], "slabs": slabs})
    assert [f"slab{number}: array" in code for number in range(5)] == [number < slabs for number in range(5)]
    assert ("switch" in code) == (slabs > 1)
    assert code.count("select(s, ") == max(0, slabs - 1)
    assert (f"pages: array<vec4u, {slabs + 1}>" in code) == (slabs > 0)
