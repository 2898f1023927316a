"""Products of many rows: which tile the rule takes, and what every tile has to have."""

from dataclasses import replace

import pytest

from stepwell.gpu.device import DeviceInfo
from stepwell.kernels import render
from stepwell.kernels.kv import ceil_div
from stepwell.kernels.layouts import LAYOUTS, MatrixLayout
from stepwell.kernels.ops import Matrix, Ops
from stepwell.kernels.tuning import TILES, Tile, Tuning
from stepwell.launch.selection import tuning_for
from stepwell.memory.buffer import Buffer, Role
from stepwell.step.recorder import Launch, Recorder


def gpu(workgroup_bytes: int = 32768) -> DeviceInfo:
    limits = {"maxComputeInvocationsPerWorkgroup": 1024, "maxComputeWorkgroupStorageSize": workgroup_bytes}
    return DeviceInfo("nvidia", "", "a GPU", False, limits, frozenset(), 32, 32)


GPU = tuning_for(gpu())


def buffer(handle: int) -> Buffer:
    return Buffer(handle, 1 << 26, 1 << 26, Role.ACTIVATION)


def launched(tuning: Tuning, rows: int, n: int, mode: str = "plain") -> tuple[dict[str, object], object]:
    """The constants and the grid of a product of so many rows with a matrix [n][2048]."""
    rec = Recorder(0, rows)
    matrix = Matrix("u4", n, 2048, buffer(3), buffer(4))
    Ops(tuning).matmul(rec, buffer(1), matrix, buffer(2), rows=rows, mode=mode)
    launch = rec.finish().commands[-1]
    assert isinstance(launch, Launch)
    return dict(launch.variant.constants), launch.grid


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_is_one_that_the_kernel_computes_on_any_gpu(tile: Tile) -> None:
    down, along = tile.rows // tile.tall, tile.columns // tile.across
    assert (down * tile.tall, along * tile.across) == (tile.rows, tile.columns)
    assert down % 8 == along % 8 == 0  # neighbours of a thread's rows are in the same banks
    assert tile.across % 2 == 0  # gate and up
    assert tile.columns <= tile.threads <= 256


def test_without_more_than_the_least_of_memory_there_is_a_tile_for_every_step() -> None:
    least = tuning_for(gpu(16384))
    for rows in (16, 64, 128, 2048):
        tile, stages = least.tile_for(rows, 8192)
        assert stages * tile.nbytes() <= 16384
        assert tile.rows == min(rows, 64)


@pytest.mark.parametrize("rows", [16, 64, 128, 256, 2048])
@pytest.mark.parametrize("columns", [576, 2048, 3072, 16384, 200064])
def test_the_largest_tile_that_leaves_enough_threads(rows: int, columns: int) -> None:
    chosen, stages = GPU.tile_for(rows, columns)
    assert chosen.rows <= rows
    assert stages * chosen.nbytes() <= GPU.workgroup_bytes
    enough = [
        tile
        for tile in TILES
        if tile.rows <= rows
        and ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns) * tile.threads >= GPU.tile_threads
        and tile.nbytes() <= GPU.workgroup_bytes
    ]
    assert chosen == (enough or TILES[-1:])[0]


def test_a_prompt_of_2048_tokens_gets_tall_tiles_and_a_short_one_short_ones() -> None:
    assert GPU.tile_for(2048, 3072)[0] == Tile(128, 64, 8, 8)
    assert GPU.tile_for(64, 16384)[0].rows == 64
    assert GPU.tile_for(16, 16384)[0].rows == 16


@pytest.mark.parametrize(("rows", "n"), [(16, 3072), (20, 3072), (65, 2048), (2047, 16384), (2048, 3080)])
@pytest.mark.parametrize("mode", ["plain", "residual", "swiglu"])
def test_the_grid_covers_every_output_once(rows: int, n: int, mode: str) -> None:
    """The columns of a tile of swiglu are gate and up of half as many outputs."""
    constants, grid = launched(GPU, rows, n, mode)
    tile = Tile(*(int(str(constants[name])) for name in Tile._fields))
    halves = 2 if mode == "swiglu" else 1
    assert grid == (ceil_div(n // halves, tile.columns // halves), ceil_div(rows, tile.rows), 1)


def test_products_in_f16_are_those_of_quantised_weights_and_bring_their_rows_along() -> None:
    tuning = replace(GPU, f16=True)
    rec = Recorder(0, 100)
    quantised, floats = Matrix("u4", 64, 2048, buffer(3), buffer(4)), Matrix("F16", 64, 4096, buffer(3), None)
    assert Ops(GPU).halves_bytes(rec, 100, [quantised]) == 0
    assert Ops(tuning).halves_bytes(rec, 100, [floats]) == 0
    assert Ops(tuning).halves_bytes(rec, 15, [quantised]) == 0
    assert Ops(tuning).halves_bytes(rec, 100, [quantised, floats]) == 128 * (2 * 2048 + 16)
    for matrix in (quantised, floats):
        Ops(tuning).matmul(rec, buffer(1), matrix, buffer(2), rows=100, halves=buffer(5))
    halve, first, second = (command for command in rec.finish().commands if isinstance(command, Launch))
    assert (halve.variant.kernel, halve.grid) == ("halve", (100, 1, 1))
    arithmetic = [dict(launch.variant.constants)["arithmetic"] for launch in (first, second)]
    assert arithmetic == ["f16", "f32"]
    texts = [render("matmul_tile", dict(launch.variant.constants)) for launch in (first, second)]
    assert ["enable f16;" in text for text in texts] == ["vec2h" in text for text in texts] == [True, False]


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS.values() if layout.quantised], ids=str)
def test_f16_sums_cannot_overflow(layout: MatrixLayout) -> None:
    """The largest numbers that there may be of x, below 8, and of W, for half of a run of 32."""
    exact = layout.groups == 1 and not layout.minimum
    largest = layout.offset if exact else 128
    assert largest * (1 + 2**-11) * 8 * 16 < 65504


def test_steps_of_one_width_share_a_variant() -> None:
    """So that prompts of many lengths compile few kernels."""
    variants = {tuple(launched(GPU, rows, 3072)[0].items()) for rows in range(129, 257)}
    assert len(variants) == 1
    assert launched(replace(GPU, tiled_rows=300), 256, 3072)[0].keys() != dict(next(iter(variants))).keys()
