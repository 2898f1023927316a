"""The WebGPU adapter of a running browser, asserted by computing with it: names alone prove nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Page

from harness import SetupError
from harness.page.browser import AdapterProfile
from stepwell.gpu.device import DeviceInfo

# Vulkan's GPU process may still be starting when the page asks first.
PATIENCE_S = 20.0
_PAUSE_S = 0.5

_PROBE = """async () => {
  if (!navigator.gpu) return {problem: isSecureContext
    ? "this browser has no navigator.gpu" : "the page is not a secure context, so navigator.gpu is missing"};
  const adapter = await navigator.gpu.requestAdapter();
  if (!adapter) return {problem: "requestAdapter() found no adapter", retry: true};
  const device = await adapter.requestDevice();
  const info = adapter.info;
  const words = 256;
  const input = Uint32Array.from({length: words}, (_, i) => i * 2654435761);
  const code = `@group(0) @binding(0) var<storage, read_write> x: array<u32>;
    @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3u) {
      x[id.x] = x[id.x] * 3u + id.x;
    }`;
  const usage = GPUBufferUsage;
  const data = device.createBuffer({size: 4 * words, usage: usage.STORAGE | usage.COPY_DST | usage.COPY_SRC});
  const back = device.createBuffer({size: 4 * words, usage: usage.MAP_READ | usage.COPY_DST});
  device.queue.writeBuffer(data, 0, input);
  const pipeline = await device.createComputePipelineAsync(
    {layout: "auto", compute: {module: device.createShaderModule({code})}});
  const group = device.createBindGroup(
    {layout: pipeline.getBindGroupLayout(0), entries: [{binding: 0, resource: {buffer: data}}]});
  const encoder = device.createCommandEncoder();
  const pass = encoder.beginComputePass();
  pass.setPipeline(pipeline); pass.setBindGroup(0, group); pass.dispatchWorkgroups(words / 64); pass.end();
  encoder.copyBufferToBuffer(data, 0, back, 0, 4 * words);
  device.queue.submit([encoder.finish()]);
  await back.mapAsync(GPUMapMode.READ);
  const values = [...new Uint32Array(back.getMappedRange())];
  device.destroy();
  return {vendor: info.vendor, architecture: info.architecture, description: info.description,
    is_fallback: info.isFallbackAdapter ?? adapter.isFallbackAdapter ?? false, values};
}"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A WebGPU adapter that has computed a kernel correctly."""

    vendor: str
    architecture: str
    description: str
    is_fallback: bool
    is_software: bool

    def __str__(self) -> str:
        names = dict.fromkeys(name for name in (self.vendor, self.architecture, self.description) if name)
        return f"{' '.join(names) or 'unnamed adapter'} ({'software, on the CPU' if self.is_software else 'hardware'})"


def assert_adapter(
    page: Page, profile: AdapterProfile, *, patience_s: float = PATIENCE_S, sleep: Callable[[float], None] = time.sleep
) -> Adapter:
    """Run a kernel in ``page`` (any page of a secure context) and compare its result; SetupError when this fails.

    The hardware ``profile`` refuses a software adapter.  A late adapter is waited for up to ``patience_s`` seconds, by
    ``sleep``.
    """
    deadline = time.monotonic() + patience_s
    while True:
        found = page.evaluate(_PROBE)
        problem = _problem(found, profile)
        if problem is None:
            return _adapter(found)
        if not _may_change(found) or time.monotonic() >= deadline:
            raise SetupError(f"{problem}. {_advice(profile)}")
        sleep(_PAUSE_S)


def _problem(found: dict[str, Any], profile: AdapterProfile) -> str | None:
    if "problem" in found:
        return str(found["problem"])
    expected = [(i * 2654435761 % 2**32 * 3 + i) % 2**32 for i in range(256)]
    wrong = sum(a != b for a, b in zip(found["values"], expected, strict=True))
    if wrong:
        return f"{_adapter(found)} computed {wrong} of {len(expected)} values of a test kernel wrong"
    if profile is AdapterProfile.HARDWARE and _adapter(found).is_software:
        return f"the hardware profile got {_adapter(found)}"
    return None


def _may_change(found: dict[str, Any]) -> bool:
    return bool(found.get("retry")) or ("values" in found and _adapter(found).is_software)


def _adapter(found: dict[str, Any]) -> Adapter:
    vendor, architecture, description = (str(found.get(key) or "") for key in ("vendor", "architecture", "description"))
    info = DeviceInfo(vendor, architecture, description, bool(found["is_fallback"]), limits={}, features=frozenset())
    return Adapter(vendor, architecture, description, info.is_fallback, info.is_software)


def _advice(profile: AdapterProfile) -> str:
    if profile is AdapterProfile.HARDWARE:
        return (
            "Look at chrome://gpu; on Linux the Vulkan loader and the GPU's driver must be installed "
            "(VK_DRIVER_FILES names the driver's file). --profile software uses the CPU."
        )
    return "The software adapter needs a full Chrome or Chromium of version 121 or newer, not a headless shell."
