"""How the products of a decode step are shared out over threads: the rule, and the table that goes before it."""

from dataclasses import replace

import pytest

from stepwell.gpu.device import DeviceInfo
from stepwell.kernels.fused import FusedOps, default_tiling
from stepwell.kernels.kv import ceil_div
from stepwell.kernels.ops import Matrix
from stepwell.kernels.tuning import ProductKey, Tiling, Tuning
from stepwell.launch.selection import tuning_for
from stepwell.memory.buffer import Buffer, Role
from stepwell.step.recorder import Launch, Recorder

LIMITS = {"maxComputeInvocationsPerWorkgroup": 1024, "maxComputeWorkgroupStorageSize": 32768}
GPU = tuning_for(DeviceInfo("nvidia", "a GPU", "", False, LIMITS, frozenset(), 32, 32))


def buffer(handle: int) -> Buffer:
    return Buffer(handle, 4096, 4096, Role.ACTIVATION, "", 0, 1)


def matrix(n: int, k: int, layout: str = "u4m") -> Matrix:
    return Matrix(layout, n, k, buffer(3), buffer(4))


def launched(tuning: Tuning, n: int, k: int) -> tuple[dict[str, object], object]:
    """The constants and the grid of down + residual with a matrix [n][k]."""
    rec = Recorder(0, 1)
    FusedOps(tuning).product(rec, buffer(1), matrix(n, k), buffer(2), "residual", "ffn_down")
    launch = rec.finish().commands[0]
    assert isinstance(launch, Launch)
    return dict(launch.variant.constants), launch.grid


@pytest.mark.parametrize(("n", "k"), [(576, 1536), (3072, 8192), (49152, 576), (200064, 3072)])
def test_the_rule_fills_whole_subgroups_with_a_thread_per_output(n: int, k: int) -> None:
    tiling = default_tiling(GPU, n, matrix(n, k))
    assert (tiling.wide * tiling.splits) % GPU.subgroup == 0
    assert tiling.wide * tiling.splits <= GPU.decode_threads
    constants, grid = launched(GPU, n, k)
    assert (constants["wide"], constants["per"], constants["splits"]) == (tiling.wide, tiling.per, tiling.splits)
    assert grid == (ceil_div(n, tiling.wide * tiling.per), 1, 1)


def test_a_measured_tiling_goes_before_the_rule_for_its_product_alone() -> None:
    measured = Tiling(16, 2, 4)
    assert default_tiling(GPU, 576, matrix(576, 1536)) != measured
    tuned = replace(GPU, tilings={ProductKey("matvec", "plain", "residual", "u4m", 1536, 576, 32): measured})
    constants, grid = launched(tuned, 576, 1536)
    assert (constants["wide"], constants["per"], constants["splits"], grid) == (16, 2, 4, (18, 1, 1))
    assert launched(tuned, 576, 1504) == launched(GPU, 576, 1504)


def test_what_is_read_ahead_leaves_room_for_a_norm_and_for_other_rows() -> None:
    assert default_tiling(GPU, 576, matrix(576, 1536)).ahead == GPU.decode_ahead
    assert default_tiling(GPU, 576, matrix(576, 1536), "norm").ahead == GPU.decode_ahead // 2
    assert default_tiling(GPU, 1536, matrix(3072, 576), "norm").ahead == GPU.decode_ahead // 4  # gate and up
    assert default_tiling(GPU, 200_064, matrix(200_064, 3072), "norm").ahead == 1  # four outputs per thread


@pytest.mark.parametrize("workgroup_bytes", [16384, 32768, 49152])
@pytest.mark.parametrize("width", [576, 960, 2048, 3072])
def test_threads_without_weights_help_to_put_the_shares_of_attention_together(width: int, workgroup_bytes: int) -> None:
    """As many as its memory and the limit of threads allow; a product without a merge has none."""
    tuning = replace(GPU, workgroup_bytes=workgroup_bytes)
    octets = width // 8
    without, tiling = (default_tiling(tuning, width, matrix(width, width), before) for before in ("plain", "merge"))
    assert tiling == replace(without, splits=tiling.splits)
    assert tiling.splits >= without.splits
    threads = tiling.wide * tiling.splits
    assert threads <= tuning.decode_threads
    assert threads % tuning.subgroup == 0
    if workgroup_bytes == 49152:
        assert threads // octets == tuning.decode_threads // octets
    if FusedOps(tuning).fits(width):
        assert FusedOps(tuning).needs(width) <= workgroup_bytes


def test_integers_where_the_adapter_knows_them_and_a_workgroup_has_room_for_x() -> None:
    integers = replace(GPU, dot4=True)
    assert default_tiling(GPU, 576, matrix(576, 1536)).arithmetic == "f32"  # the browser does not know dot4I8Packed
    assert default_tiling(integers, 576, matrix(576, 1536)).arithmetic == "dot4"
    assert default_tiling(integers, 576, matrix(576, 1536, "F16")).arithmetic == "f32"
    assert default_tiling(replace(integers, subgroup=0), 576, matrix(576, 1536)).arithmetic == "f32"
    widest = (GPU.workgroup_bytes - 8_192) // 80 * 32
    assert default_tiling(integers, 576, matrix(576, widest)).arithmetic == "dot4"
    assert default_tiling(integers, 576, matrix(576, widest + 32)).arithmetic == "f32"
