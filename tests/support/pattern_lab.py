"""The kernels of the growing-KV workload in numpy, for FakeDevice."""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from stepwell.decode.kv_pattern import KVPattern
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.fake_objects import KernelFunction
from stepwell.launch.launcher import Launcher
from stepwell.memory.pool import BufferPool
from stepwell.step.recorder import Variant


def kernels(workload: str, skip: str = "") -> dict[str, KernelFunction]:
    """The launches of kv_pattern.wgsl by pipeline label; ``skip`` leaves out the work of one mode."""
    constants = {str(variant): dict(variant.constants) for variant in _variants(workload)}
    return {label: meaning(c) for label, c in constants.items() if c["mode"] != skip}


@cache
def _variants(workload: str) -> list[Variant]:
    device = FakeDevice(log_limit=0)
    launcher = Launcher(device, BufferPool(device))
    asyncio.run(KVPattern(workload, launcher, kv="grow", start=1, tokens=1).prepare())
    return launcher.kernels.variants


def meaning(c: dict[str, Any]) -> KernelFunction:
    """What the variant with the constants ``c`` computes."""

    def run(views: Sequence[memoryview], grid: tuple[int, int, int]) -> None:
        arrays = [np.frombuffer(view, np.uint32) for view in views]
        position, _, length = (int(word) for word in arrays[0][:3])
        if c["mode"] == "seed":
            arrays[1][: c["words"]] = np.arange(c["words"], dtype=np.uint32) + position
        elif c["mode"] == "mix":
            x = arrays[1][np.arange(c["words"]) % c["x_words"]].astype(np.uint64)
            arrays[2][: c["words"]] = (x * c["mul"] + c["add"]) & 0xFFFFFFFF
        elif c["mode"] == "append":
            salt = int(arrays[2][0])
            for p in range(position, position + grid[0]):
                row = np.arange(c["words"], dtype=np.uint64) + p * c["row_factor"] + salt
                arrays[1][p * c["words"] : (p + 1) * c["words"]] = row & 0xFFFFFFFF
        else:
            p = np.arange(length)
            read = arrays[1][p * c["words"] + p * c["stride"] % c["words"]].astype(np.uint64)
            arrays[2][1] = int(read.sum()) & 0xFFFFFFFF

    return run
