"""Plain data for a page: policies and launches with their options, workloads, the environment, a pool's classes."""

from collections.abc import Mapping
from typing import Any

from stepwell.attach.bundle import VERSION
from stepwell.gpu.device import DeviceInfo
from stepwell.kernels.layouts import LAYOUT_OF_FORMAT
from stepwell.launch.options import ABLATION, OPTIONS
from stepwell.memory.buffer import CHOSEN_ROLES
from stepwell.memory.policies import POLICIES
from stepwell.memory.pool import BufferPool
from stepwell.models.synthetic import DEFAULT_FORMAT, SHAPES, Synthetic
from stepwell.options import Option
from stepwell.replay.kv_shapes import KV_WORKLOADS, POSITION_BYTES

_CHOSEN = {role.value for role in CHOSEN_ROLES}


def describe_policies() -> list[dict[str, Any]]:
    """The policies and their options, whose defaults are as a person would type them."""
    return [
        {"name": name, "summary": entry.summary, "options": [_as_text(option) for option in entry.options]}
        for name, entry in POLICIES.items()
    ]


def describe_workloads() -> list[dict[str, Any]]:
    """The workloads: their growing tensors, and the bytes of a position in each."""
    return [
        {
            "name": name,
            "summary": f"{shape.tensors} growing tensors, no model: {shape.model}'s KV cache, {shape.remark}",
            "tensors": shape.tensors,
            "position_bytes": POSITION_BYTES,
        }
        for name, shape in KV_WORKLOADS.items()
    ]


def describe_synthetic() -> list[dict[str, Any]]:
    """The synthetic models; ``sizes`` are bytes on the GPU by tensor format, the default first."""
    formats = sorted(LAYOUT_OF_FORMAT, key=lambda kind: kind != DEFAULT_FORMAT)
    rows = []
    for shape, found in SHAPES.items():
        model = Synthetic(shape)
        plan = model.weight_plan
        sizes = {kind: plan.nbytes_in(LAYOUT_OF_FORMAT[kind]) for kind in formats}
        rows.append({"name": model.choice, "title": found.title, "sizes": sizes})
    return rows


def describe_launch_options() -> list[dict[str, Any]]:
    """The launch options; a ``default`` of null is chosen by the launcher, a bound of null is infinite."""
    return [option.describe() for option in OPTIONS]


def describe_ablation() -> list[dict[str, Any]]:
    """The arms of the ablation; ``launch`` has the options of a request for one."""
    return [{"name": name, "launch": options.changes()} for name, options in ABLATION]


def describe_environment(info: DeviceInfo, host: Mapping[str, Any]) -> dict[str, object]:
    """The ``environment`` of a record: the device, and ``host``, which only the page knows."""
    return {
        "adapter": {
            "vendor": info.vendor,
            "architecture": info.architecture,
            "description": info.description,
            "is_fallback": info.is_fallback,
            "is_software": info.is_software,
            "subgroup_size": info.subgroup_size,
        },
        "features": sorted(info.features),
        "browser": host.get("browser"),
        "flags": host.get("flags", []),
        "cross_origin_isolated": host.get("cross_origin_isolated"),
        "timer_resolution_us": host.get("timer_resolution_us"),
        "pyodide": host.get("pyodide"),
        "pyodide_ms": host.get("pyodide_ms"),
        "boot_ms": host.get("boot_ms"),
        "stepwell": VERSION,
    }


def describe_classes(pool: BufferPool) -> list[dict[str, Any]]:
    """The classes that the chosen policy serves; ``keeps``: free buffers it would keep, None for no limit."""
    return [
        {
            **{name: row[name] for name in ("role", "size", "live", "free", "hits", "misses")},
            "keeps": row["target"],
            "evicted": sum(row["evictions"].values()),
        }
        for row in pool.classes()
        if row["role"] in _CHOSEN
    ]


def _as_text(option: Option) -> dict[str, Any]:
    """The row with its default as a person would type it."""
    return option.describe() | {"default": option.write(option.default)}
