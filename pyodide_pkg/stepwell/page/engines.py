"""The engines of a page: one launcher per set of launch options, on one device, pool and model."""

from stepwell.gpu.device import Device
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.memory.pool import BufferPool
from stepwell.tuning.remembered import Remembered

ENGINES = 8  # as many as the ablation has arms, so that none is built twice


class Engines:
    """Builds a launcher when its options are first asked for; beyond ``bound`` the least recently used one is closed.

    Each has kernels, bind groups and plans of its own, so that what one run finds in its caches was put there by runs
    with the same options.
    """

    def __init__(self, device: Device, pool: BufferPool, bound: int = ENGINES) -> None:
        self.device = device
        self.pool = pool
        self.remembered = Remembered(device.info)  # what was tuned, for all launchers that are to use it
        self._bound = bound
        self._launchers: dict[LaunchOptions, Launcher] = {}  # in order of use: oldest first

    def __len__(self) -> int:
        return len(self._launchers)

    def get(self, options: LaunchOptions) -> Launcher:
        """The launcher with ``options``, made if there is none.  No run may be under way: another one may be closed."""
        launcher = self._launchers.pop(options, None)
        if launcher is None:
            launcher = Launcher(self.device, self.pool, options, tilings=self.remembered.tilings)
        self._launchers[options] = launcher
        while len(self._launchers) > self._bound:
            self._launchers.pop(next(iter(self._launchers))).close()
        return launcher

    def release(self) -> None:
        """Give back every launcher: the next model has other kernels, and larger workspaces for the same shapes."""
        while self._launchers:
            self._launchers.popitem()[1].close()

    def close(self) -> None:
        """Give back every launcher, the pool and the device."""
        self.release()
        self.pool.close()
        self.device.close()
