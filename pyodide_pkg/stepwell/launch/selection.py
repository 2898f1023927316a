"""Chooses the kernels of an adapter, and says why it cannot have others."""

from collections.abc import Mapping
from dataclasses import replace

from stepwell.errors import BadRequest
from stepwell.gpu.device import DeviceInfo
from stepwell.kernels.tuning import BESIDE_SLABS, DOT4, MOST_SLABS, SHADER_F16, ProductKey, Tiling, Tuning
from stepwell.launch.options import Kernels, LaunchOptions, Switch


def tuning_for(
    info: DeviceInfo,
    options: LaunchOptions | None = None,
    tilings: Mapping[ProductKey, Tiling] | None = None,
) -> Tuning:
    """The kernels for the adapter ``info``, as far as ``options`` leave the choice; ``tilings`` were measured on it.

    CPU adapters get few, fat threads and no barriers; GPUs get many threads, and decode steps of few launches.  On a
    CPU adapter a load costs as much as ten arithmetic operations, whatever its address, and a barrier costs more still;
    from 12 outputs per thread on compile time outgrows the gain.  Raises BadRequest, with the reason, for an option
    that asks for what the adapter cannot have.
    """
    options = options or LaunchOptions()
    split = not info.is_software if options.kernels is Kernels.AUTO else options.kernels is Kernels.SPLIT
    fused = _is_on(options.fused, info)
    lanes = info.subgroup_size if info.subgroup_size == info.subgroup_max_size else 0
    if options.subgroups is Switch.OFF:
        lanes = 0
    quads = not split and lanes == 4
    subgroup = lanes if fused and 4 <= lanes <= 64 else 0
    if options.subgroups is Switch.ON and not (quads or subgroup):
        raise BadRequest(f"subgroups is on, but {_why_no_subgroups(info, split, fused)}")
    packed = DOT4 in info.language and subgroup > 0
    if options.dot4 is Switch.ON and not packed:
        raise BadRequest(f"dot4 is on, but {_why_no_dot4(info, fused)}")
    halves = SHADER_F16 in info.features and split
    if options.f16 is Switch.ON and not halves:
        raise BadRequest(f"f16 is on, but {_why_no_f16(info)}")
    return replace(
        _for_decode(_split() if split else _quad(quads), info),
        fused=fused,
        subgroup=subgroup,
        dot4=packed and _is_on(options.dot4, info),
        f16=halves and _is_on(options.f16, info),
        tilings=tilings if options.tuned and tilings is not None else {},
        workgroup_bytes=info.limits.get("maxComputeWorkgroupStorageSize", 16384),
    )


def _is_on(switch: Switch, info: DeviceInfo) -> bool:
    """Whether ``switch`` is on, for a thing that ``auto`` gives to GPUs."""
    return not info.is_software if switch is Switch.AUTO else switch is Switch.ON


def _quad(quads: bool) -> Tuning:
    return Tuning(
        matmul="quad",
        subgroups=quads,
        tile=4,
        norm_threads=4,
        attention_chunk=128 if quads else 32,
        argmax_threads=16,
        elementwise_threads=4,
    )


def _split() -> Tuning:
    return Tuning(
        matmul="split",
        subgroups=False,
        tile=4,
        norm_threads=64,
        attention_chunk=64,
        argmax_threads=256,
        elementwise_threads=64,
        prefill_rows=256,
        tiled_rows=16,
        argmax_parts=64,
        sample_parts=64,
        sample_threads=256,
    )


def _for_decode(tuning: Tuning, info: DeviceInfo) -> Tuning:
    """``tuning`` with the workgroups of fused decode steps; a CPU adapter can only have small ones."""
    if info.is_software:
        return replace(
            tuning,
            decode_wide=4,
            decode_widest=8,
            decode_threads=8,
            decode_chunk=32,
            attention_threads=32,
            workgroups=32,
        )
    slabs = min(MOST_SLABS, info.limits.get("maxStorageBuffersPerShaderStage", 8) - BESIDE_SLABS)
    return replace(
        tuning,
        decode_threads=min(512, info.limits.get("maxComputeInvocationsPerWorkgroup", 256)),
        slabs=slabs if tuning.matmul == "split" else 1,  # quad kernels are long: launches are cheaper
    )


def _why_no_subgroups(info: DeviceInfo, split: bool, fused: bool) -> str:
    least, most = info.subgroup_size, info.subgroup_max_size
    if not least:
        return "this device has none: leave it at auto or off."
    if least != most:
        return (
            f"those of this adapter have {least} to {most} lanes, and kernels are made for one size: use auto or off."
        )
    if fused:
        return f"those of this adapter have {least} lanes; kernels of decode steps know 4 to 64: use auto or off."
    family = "split kernels know none" if split else f"quad kernels know those of 4 lanes, this adapter's have {least}"
    return f"{family}: set fused to on, whose decode steps use them, or leave subgroups at auto."


def _why_no_dot4(info: DeviceInfo, fused: bool) -> str:
    if DOT4 not in info.language:
        return f"this browser's WGSL does not have {DOT4}: leave it at auto or off."
    if not fused:
        return "only fused decode steps know it: set fused to on, or leave dot4 at auto."
    return "its kernels need subgroups of one size, 4 to 64 lanes: leave dot4 at auto or off."


def _why_no_f16(info: DeviceInfo) -> str:
    if SHADER_F16 not in info.features:
        return f"this device does not have {SHADER_F16}: leave it at auto or off."
    return "quad kernels know none: set kernels to split, or leave f16 at auto."
