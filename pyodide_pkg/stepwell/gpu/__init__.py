"""The seam to WebGPU.  Only this folder and ``attach/`` may import ``js`` or ``pyodide``."""

from collections.abc import Mapping, Sequence

from stepwell.errors import NoWebGPU
from stepwell.gpu.device import Device


async def open_device(need: Mapping[str, int] | None = None, need_features: Sequence[str] = ()) -> Device:
    """The browser's WebGPU device.

    ``need`` maps limit names of the WebGPU spec to the least value the caller can work with; ``need_features`` names
    features.  Raises MissingCapability for one that the adapter lacks, and NoWebGPU where there is no adapter.
    """
    try:
        from stepwell.gpu.js_device import open_js_device
    except ImportError:
        raise NoWebGPU(
            "No browser here: open_device() needs Pyodide. Use stepwell.gpu.fake_device off the browser."
        ) from None
    return await open_js_device(need or {}, need_features)
