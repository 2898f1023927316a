"""Which layout a file's tensors get, what it takes in memory, and what cannot be put into one matrix."""

import asyncio
from itertools import combinations
from pathlib import Path

import pytest

from stepwell.errors import Unsupported
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.source import FileSource
from stepwell.kernels.layouts import LAYOUT_OF_FORMAT, LAYOUTS, layout_of_formats
from stepwell.launch.launcher import Launcher
from stepwell.memory.pool import BufferPool
from stepwell.models.llama import DecoderModel
from stepwell.weights.formats import FORMATS
from stepwell.weights.gguf import read_gguf
from tests.support.tiny_llama import write_tiny_llama

BITS = {  # per weight, of the table in kernels/layouts.py
    "F32": 32, "F16": 16, "BF16": 16, "u4": 5, "u4m": 6, "u5": 6, "u5m": 7, "u6/16": 8, "u6m/16": 10,
    "u8": 9, "u8m": 10, "u8/16": 10, "u8m/16": 12,
}  # fmt: skip


def bits_per_weight(name: str) -> float:
    layout = LAYOUTS[name]
    return 8 * (layout.words_bytes(3, 256) + layout.scales_bytes(3, 256)) / (3 * 256)


def test_every_format_has_a_layout_of_about_its_size() -> None:
    assert {row.name for row in FORMATS.values()} == LAYOUT_OF_FORMAT.keys()
    assert {name: bits_per_weight(name) for name in LAYOUTS} == BITS
    for row in FORMATS.values():
        in_file = 8 * row.block_bytes / row.block_size
        assert in_file <= bits_per_weight(LAYOUT_OF_FORMAT[row.name].name) <= in_file + 1.5, row.name


def test_a_common_layout_holds_what_each_of_its_formats_needs() -> None:
    quantised = [name for name, layout in LAYOUT_OF_FORMAT.items() if layout.quantised]
    for count in (1, 2, 3):
        for names in combinations(quantised, count):
            common = layout_of_formats(names)
            assert common is not None, names
            assert common is LAYOUTS[common.name]
            for own in map(LAYOUT_OF_FORMAT.__getitem__, names):
                assert common.bits >= own.bits and common.group <= own.group and common.minimum >= own.minimum
    assert layout_of_formats(["F16", "F16"]) is LAYOUTS["F16"]
    assert layout_of_formats(["F16", "BF16"]) is LAYOUTS["F32"]
    assert layout_of_formats(["Q8_0", "BF16"]) is None


async def load(path: Path, device: FakeDevice) -> DecoderModel:
    source = FileSource(path)
    return await DecoderModel.load(await read_gguf(source), source, Launcher(device, BufferPool(device)))


def test_quantised_and_float_tensors_of_one_matrix_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mixed.gguf"
    write_tiny_llama(path, formats="Q4_0", mixed={"attn_v": "F16"})
    device = FakeDevice()
    found = r"attn_q.weight is Q4_0, blk.0.attn_k.weight is Q4_0, blk.0.attn_v.weight is F16: no layout holds"
    with pytest.raises(Unsupported, match=found):
        asyncio.run(load(path, device))
    assert device.table_sizes()["buffers"] == 0


def test_a_matrix_of_mixed_types_takes_the_common_layout(tmp_path: Path) -> None:
    path = tmp_path / "mixed.gguf"
    sizes = {"hidden": 256, "n_heads": 16, "ffn": 256, "n_layers": 1}
    write_tiny_llama(path, formats="Q4_K", embed_format="Q6_K", mixed={"attn_v": "Q6_K"}, **sizes)
    device = FakeDevice()
    model = asyncio.run(load(path, device))
    weights = model.weights
    assert {name: matrix.format for name, matrix in weights.matrices.items()} == {
        "token_embd": "u6/16",
        "blk.0.qkv": "u6m/16",
        "blk.0.attn_output": "u4m",
        "blk.0.gate_up": "u4m",
        "blk.0.ffn_down": "u4m",
        "output": "u6/16",
    }
    for matrix in weights.matrices.values():
        nbytes = sum(buffer.requested for buffer in matrix.buffers)
        assert nbytes * 8 == matrix.n * matrix.k * BITS[matrix.format]
