"""The options ``kernels``, ``fused``, ``subgroups``, ``dot4``, ``f16``: what an adapter makes of them, and cannot."""

from dataclasses import replace

import pytest

from stepwell.errors import BadRequest
from stepwell.gpu.device import DeviceInfo
from stepwell.kernels.fused import FusedOps
from stepwell.kernels.kv import KVTensors
from stepwell.kernels.ops import Heads, Ops
from stepwell.kernels.tuning import DOT4, SHADER_F16, Tuning
from stepwell.launch.options import Kernels, LaunchOptions, Switch
from stepwell.launch.selection import tuning_for
from stepwell.memory.buffer import Buffer, Role
from stepwell.step.recorder import ByLength, Launch, Recorder

LIMITS = {"maxComputeInvocationsPerWorkgroup": 1024, "maxComputeWorkgroupStorageSize": 32768}


def adapter(name: str, least: int = 0, most: int | None = None) -> DeviceInfo:
    return DeviceInfo("", "", name, False, LIMITS, frozenset(), least, least if most is None else most)


CPU, BARE_CPU = adapter("SwiftShader", 4), adapter("SwiftShader")
GPU, VARYING = adapter("a GPU", 32), adapter("a GPU", 8, 32)


def path(info: DeviceInfo, **options: object) -> tuple[str, bool, int, int]:
    """(family, fused, lanes of its quad kernels, lanes of its decode steps)"""
    tuning = tuning_for(info, LaunchOptions.from_dict(options))
    return tuning.matmul, tuning.fused, 4 * tuning.subgroups, tuning.subgroup


def test_left_to_itself_an_adapter_gets_what_suits_it() -> None:
    assert path(CPU) == ("quad", False, 4, 0)
    assert path(BARE_CPU) == ("quad", False, 0, 0)
    assert path(GPU) == ("split", True, 0, 32)
    assert path(VARYING) == ("split", True, 0, 0)
    for info in (CPU, BARE_CPU, GPU, VARYING):
        assert tuning_for(info) == tuning_for(info, LaunchOptions())


@pytest.mark.parametrize(
    ("info", "options", "expected"),
    [
        (CPU, {"subgroups": "on"}, ("quad", False, 4, 0)),
        (CPU, {"subgroups": "off"}, ("quad", False, 0, 0)),
        (CPU, {"fused": "on"}, ("quad", True, 4, 4)),
        (CPU, {"fused": "on", "subgroups": "off"}, ("quad", True, 0, 0)),
        (CPU, {"kernels": "split"}, ("split", False, 0, 0)),
        (CPU, {"kernels": "split", "fused": "on", "subgroups": "on"}, ("split", True, 0, 4)),
        (GPU, {"fused": "off"}, ("split", False, 0, 0)),
        (GPU, {"fused": "on", "subgroups": "on"}, ("split", True, 0, 32)),
        (GPU, {"subgroups": "off"}, ("split", True, 0, 0)),
        (GPU, {"kernels": "quad"}, ("quad", True, 0, 32)),
        (GPU, {"kernels": "quad", "fused": "off"}, ("quad", False, 0, 0)),
        (VARYING, {"fused": "on", "subgroups": "off"}, ("split", True, 0, 0)),
    ],
)
def test_what_is_asked_for(info: DeviceInfo, options: dict[str, str], expected: tuple[str, bool, int, int]) -> None:
    assert path(info, **options) == expected


@pytest.mark.parametrize(
    ("info", "options", "words"),
    [
        (BARE_CPU, {}, "this device has none"),
        (VARYING, {}, "8 to 32 lanes"),
        (adapter("a GPU", 128), {}, "128 lanes; kernels of decode steps know 4 to 64"),
        (GPU, {"fused": "off"}, "split kernels know none: set fused to on"),
        (GPU, {"kernels": "quad", "fused": "off"}, "4 lanes, this adapter's have 32: set fused to on"),
        (CPU, {"kernels": "split"}, "split kernels know none"),
    ],
)
def test_subgroups_that_cannot_be_are_refused_with_the_reason(
    info: DeviceInfo, options: dict[str, str], words: str
) -> None:
    with pytest.raises(BadRequest, match="subgroups is on, but ") as caught:
        tuning_for(info, LaunchOptions.from_dict({"subgroups": "on", **options}))
    assert words in str(caught.value)


def packed(info: DeviceInfo) -> DeviceInfo:
    """The same with integer dot products."""
    return replace(info, language=frozenset({DOT4}))


@pytest.mark.parametrize(
    ("info", "options", "expected"),
    [
        (GPU, {}, False),
        (packed(GPU), {}, True),
        (packed(GPU), {"dot4": "off"}, False),
        (packed(GPU), {"fused": "off"}, False),
        (packed(GPU), {"subgroups": "off"}, False),
        (packed(VARYING), {}, False),
        (packed(CPU), {"fused": "on"}, False),
        (packed(CPU), {"fused": "on", "dot4": "on"}, True),
    ],
)
def test_products_in_integers(info: DeviceInfo, options: dict[str, str], expected: bool) -> None:
    assert tuning_for(info, LaunchOptions.from_dict(options)).dot4 is expected


@pytest.mark.parametrize(
    ("info", "options", "words"),
    [
        (GPU, {}, f"does not have {DOT4}"),
        (packed(GPU), {"fused": "off"}, "only fused decode steps know it: set fused to on"),
        (packed(CPU), {}, "only fused decode steps know it"),
        (packed(VARYING), {}, "subgroups of one size, 4 to 64 lanes"),
        (packed(GPU), {"subgroups": "off"}, "subgroups of one size"),
    ],
)
def test_integers_that_cannot_be_are_refused_with_the_reason(
    info: DeviceInfo, options: dict[str, str], words: str
) -> None:
    with pytest.raises(BadRequest, match="dot4 is on, but ") as caught:
        tuning_for(info, LaunchOptions.from_dict({"dot4": "on", **options}))
    assert words in str(caught.value)


def with_f16(info: DeviceInfo) -> DeviceInfo:
    return replace(info, features=frozenset({SHADER_F16}))


@pytest.mark.parametrize(
    ("info", "options", "expected"),
    [
        (GPU, {}, False),
        (with_f16(GPU), {}, True),
        (with_f16(VARYING), {"fused": "off", "subgroups": "off"}, True),
        (with_f16(GPU), {"f16": "off"}, False),
        (with_f16(GPU), {"kernels": "quad"}, False),
        (with_f16(CPU), {}, False),
        (with_f16(CPU), {"kernels": "split"}, False),
        (with_f16(CPU), {"kernels": "split", "f16": "on"}, True),
    ],
)
def test_prompts_in_f16(info: DeviceInfo, options: dict[str, str], expected: bool) -> None:
    assert tuning_for(info, LaunchOptions.from_dict(options)).f16 is expected


@pytest.mark.parametrize(
    ("info", "options", "words"),
    [
        (GPU, {}, "this device does not have shader-f16: leave it at auto or off"),
        (CPU, {"kernels": "split"}, "does not have shader-f16"),
        (with_f16(CPU), {}, "quad kernels know none: set kernels to split"),
        (with_f16(GPU), {"kernels": "quad"}, "quad kernels know none"),
    ],
)
def test_f16_that_cannot_be_is_refused_with_the_reason(info: DeviceInfo, options: dict[str, str], words: str) -> None:
    with pytest.raises(BadRequest, match="f16 is on, but ") as caught:
        tuning_for(info, LaunchOptions.from_dict({"f16": "on", **options}))
    assert words in str(caught.value)


def test_a_path_does_not_change_what_is_of_the_adapter() -> None:
    """Workgroups of fused steps go by what the adapter is, whatever the family."""

    def decode(tuning: Tuning) -> tuple[int, ...]:
        return tuning.decode_wide, tuning.decode_widest, tuning.decode_threads, tuning.decode_chunk, tuning.workgroups

    for family in (Kernels.QUAD, Kernels.SPLIT):
        options = LaunchOptions(kernels=family, fused=Switch.ON)
        assert decode(tuning_for(CPU, options)) == (4, 8, 8, 32, 32)
        assert decode(tuning_for(GPU, options)) == decode(tuning_for(GPU))
        assert tuning_for(GPU, options).workgroup_bytes == 32768


@pytest.mark.parametrize(("kv_heads", "shares"), [(3, 64), (8, 32)])
def test_attention_of_a_decode_step_has_no_workgroups_without_a_share(kv_heads: int, shares: int) -> None:
    """However long the sequence is; the attention of other steps has one per chunk."""
    tuning, heads = tuning_for(GPU), Heads(3 * kv_heads, kv_heads, 64, 64)
    rec, buffer = Recorder(0), Buffer(1, 1 << 20, 1 << 20, Role.KV)
    kv = KVTensors(buffer, buffer)
    FusedOps(tuning).attention(rec, buffer, kv, buffer, buffer, heads, (1, 1))
    Ops(tuning).attention(rec, buffer, kv, buffer, buffer, buffer, heads, rows=1, shape=(1, 1))
    first, *rest = (launch.grid for launch in rec.finish().commands if isinstance(launch, Launch))
    assert isinstance(first, ByLength)
    chunk = tuning.decode_chunk
    lengths = (1, chunk, chunk + 1, chunk * shares, chunk * shares + 1, 131_072)
    assert [first.at(length) for length in lengths] == [(x, kv_heads, 1) for x in (1, 1, 2, shares, shares, shares)]
    (other,) = (grid for grid in rest if isinstance(grid, ByLength))
    assert other.at(131_072)[0] == 131_072 // tuning.attention_chunk
