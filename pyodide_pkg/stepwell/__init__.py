"""GPU memory and launch caching for language-model decode in the browser."""

from stepwell.attach import attach
from stepwell.attach.bundle import VERSION
from stepwell.gpu import open_device
from stepwell.gpu.device import Binding, BindingType, BufferUsage
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool

__version__ = VERSION

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
