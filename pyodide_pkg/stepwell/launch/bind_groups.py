"""The bind-group cache: a decode step binds the same buffers as the step before.

Keys are exact tuples (pipeline, buffer, …) of handles.  Handles are never reused, so an entry of a destroyed buffer is
unreachable and needs no invalidation: it leaves by least recent use.  The bound must exceed the launches of one step,
or a cyclic scan misses every time.
"""

from collections.abc import Callable

from stepwell.gpu.device import Binding, Device
from stepwell.launch.counters import Counters

DEFAULT_BIND_GROUPS = 2048


class BindGroupCache:
    def __init__(self, device: Device, counters: Counters, bound: int = DEFAULT_BIND_GROUPS) -> None:
        if bound < 1:
            raise ValueError(f"a cache of {bound} bind groups holds nothing")
        self._device = device
        self._counters = counters
        self._bound = bound
        self._groups: dict[tuple[int, tuple[int, ...]], int] = {}  # in order of use: oldest first
        self._destroy: Callable[[int], None] = device.destroy

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, pipeline: int, buffers: tuple[int, ...]) -> int:
        """The bind group of these whole buffers for this pipeline."""
        key = (pipeline, buffers)
        groups = self._groups
        handle = groups.pop(key, None)
        if handle is None:
            handle = self._device.create_bind_group(pipeline, [Binding(buffer) for buffer in buffers])
            self._counters.bind_groups_created += 1
            if len(groups) >= self._bound:
                self._destroy(groups.pop(next(iter(groups))))
                self._counters.bind_groups_evicted += 1
        else:
            self._counters.bind_groups_reused += 1
        groups[key] = handle
        return handle

    def clear(self) -> None:
        for handle in self._groups.values():
            self._destroy(handle)
        self._groups.clear()
