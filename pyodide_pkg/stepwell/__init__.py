"""GPU memory and launch caching for language-model decode in the browser."""

from importlib.metadata import PackageNotFoundError, version

from stepwell.attach import attach
from stepwell.gpu import open_device
from stepwell.gpu.device import Binding, BindingType, BufferUsage
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool

try:
    __version__ = version("stepwell")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"

__all__ = [
    "Binding",
    "BindingType",
    "Buffer",
    "BufferPool",
    "BufferUsage",
    "Role",
    "__version__",
    "attach",
    "open_device",
]
