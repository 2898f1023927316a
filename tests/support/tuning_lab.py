"""A device for the autotuner: its kernels take the time that a test says, on a clock of its own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepwell.errors import ShaderError
from stepwell.gpu.device import DeviceInfo, Layout
from stepwell.gpu.fake_device import TIMESTAMPS, FakeDevice
from stepwell.gpu.fake_objects import DEFAULT_LIMITS
from stepwell.gpu.fake_profile import FakeProfiler
from stepwell.kernels.tuning import ProductKey, Tiling
from tests.support.tiny_llama import write_tiny_llama

LIMITS = {**DEFAULT_LIMITS, "maxComputeInvocationsPerWorkgroup": 1024, "maxComputeWorkgroupSizeX": 1024}
GPU = DeviceInfo("acme", "gpu", "", False, LIMITS, frozenset({TIMESTAMPS, "subgroups"}), 32, 32, immediate_bytes=64)
PRODUCTS = 5  # of a decode step: qkv, attention's output, gate|up, down, logits
Cost = Callable[[ProductKey, Tiling], float]


class Clock(FakeProfiler):
    """The GPU's, in microseconds: passes take what their kernels cost."""

    def __init__(self) -> None:
        super().__init__()
        self.us = 0.0
        self._began_us = 0.0

    def begin_pass(self) -> None:
        self._began_us = self.us

    def end_pass(self) -> None:
        self.passes_us.append(self.us - self._began_us)


class TimedDevice(FakeDevice):
    """A product takes ``cost`` times 0.1 ms; its result is always the same but for the product of ``wrong``.

    ``broken``: what does not compile.
    """

    def __init__(self, cost: Cost, info: DeviceInfo = GPU) -> None:
        super().__init__(info, log_limit=0)
        self.profiler = self.clock = Clock()
        self._cost = cost
        self.wrong: Callable[[Tiling], float] = lambda tiling: 0.0
        self.broken: Callable[[Tiling], bool] = lambda tiling: False
        self.compiled: list[tuple[ProductKey, Tiling]] = []

    async def create_pipeline(self, code: str, layout: Layout, label: str = "") -> int:
        kernel, _, rest = label.rstrip(")").partition("(")
        if kernel in ("matvec", "matmul_quad"):
            constants = dict(part.split("=") for part in rest.split(", "))
            key, tiling = named(kernel, constants)
            if self.broken(tiling):
                raise ShaderError("too many registers")
            self.compiled.append((key, tiling))
            self.kernels[label] = self._meaning(key, tiling, len(layout.bindings))
        return await super().create_pipeline(code, layout, label)

    def _meaning(self, key: ProductKey, tiling: Tiling, bindings: int) -> Any:
        def run(views: Sequence[memoryview], grid: tuple[int, int, int]) -> None:
            assert grid[0] == -(-key.outputs // tiling.outputs)
            self.clock.us += 100 * self._cost(key, tiling)
            for view in views[-bindings:]:
                if not view.readonly:
                    view.cast("f")[0] = 0.5 + self.wrong(tiling)

        return run


def named(kernel: str, constants: dict[str, Any]) -> tuple[ProductKey, Tiling]:
    typed = {name: int(value) if value.isdigit() else value for name, value in constants.items()}
    typed["subgroups"] = typed.get("subgroups") == "True"
    tiling = Tiling(typed.get("wide", 4), typed["per"], typed.get("splits", 1), typed.get("ahead", 0))
    return ProductKey.of(kernel, typed), tiling


def write_model(path: Path) -> Path:
    """One whose products can be shared out in several ways."""
    write_tiny_llama(path, hidden=256, ffn=512, n_heads=8, n_kv_heads=4, head_dim=32, n_layers=2, context=1024)
    return path
