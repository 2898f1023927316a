"""What the parts of a launcher share: the device and pool they work on, the options, and the caches."""

from dataclasses import dataclass

from stepwell.gpu.device import Device
from stepwell.launch.bind_groups import BindGroupCache
from stepwell.launch.kernel_cache import KernelCache
from stepwell.launch.options import LaunchOptions
from stepwell.launch.parameters import Parameters, Shadow
from stepwell.memory.pool import BufferPool


@dataclass(frozen=True, slots=True, eq=False)
class LaunchContext:
    """The owner of a launcher's bind groups.  ``parameters`` is None where scalars are immediates."""

    device: Device
    pool: BufferPool
    options: LaunchOptions
    kernels: KernelCache
    bind_groups: BindGroupCache
    parameters: Parameters | None
    shadow: Shadow
