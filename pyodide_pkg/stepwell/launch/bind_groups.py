"""The bind-group cache: a decode step binds the same buffers as the step before.

Keys are exact tuples of a pipeline's handle, the buffers' handles in binding order (with offset and size where a part
is bound) and the parameter slot, if any; parameter *values* are not in them.  Handles are never reused, not even by
another device, so an entry of a destroyed buffer is unreachable and needs no invalidation, and several launchers can
share one cache: dead entries leave by least recent use.  The bound must exceed the launches of one step, or a cyclic
scan misses every time.
"""

import warnings
from collections.abc import Callable
from typing import Protocol

from stepwell.errors import BadRequest, DeviceLost
from stepwell.gpu.device import Binding, Device
from stepwell.launch.counters import Counters

DEFAULT_BIND_GROUPS = 2048
"""Bind groups that a cache keeps by default."""
Entries = tuple[int | Binding, ...]
"""The buffers that a launch binds, in order, each as a whole (its handle) or in part."""


def create_bind_group(device: Device, pipeline: int, buffers: Entries, slot: Binding | None) -> int:
    """A bind group of ``pipeline``: the parameter ``slot`` first, if it has one, then ``buffers``."""
    entries = [entry if isinstance(entry, Binding) else Binding(entry) for entry in buffers]
    return device.create_bind_group(pipeline, entries if slot is None else [slot, *entries])


class Owner(Protocol):
    """The owner of a group: a launcher's context."""

    @property
    def device(self) -> Device:
        """The device of its groups."""


class BindGroupCache:
    """At most ``bound`` bind groups of any number of launchers and devices; the least recently used one makes room."""

    def __init__(self, bound: int = DEFAULT_BIND_GROUPS) -> None:
        if bound < 1:
            raise BadRequest(f"a cache of {bound} bind groups holds nothing; ask for 1 or more.")
        self.bound = bound
        self.on_evict: list[Callable[[int], None]] = []  # told a group's handle before it is destroyed
        self._groups: dict[tuple[int, Entries, Binding | None], tuple[int, Owner]] = {}  # oldest use first
        self._evicted: list[tuple[int, Owner]] = []  # the step that is being issued may use them still
        self._warned = False

    def __len__(self) -> int:
        return len(self._groups)

    def get(
        self, owner: Owner, counters: Counters, pipeline: int, buffers: Entries, slot: Binding | None = None
    ) -> int:
        """The bind group of ``buffers`` for ``pipeline``, made if it is not there; ``counters`` say which."""
        key = (pipeline, buffers, slot)
        groups = self._groups
        entry = groups.pop(key, None)
        if entry is None:
            entry = (create_bind_group(owner.device, pipeline, buffers, slot), owner)
            counters.bind_groups_created += 1
            if len(groups) >= self.bound:
                self._evicted.append(groups.pop(next(iter(groups))))
                counters.bind_groups_evicted += 1
        else:
            counters.bind_groups_reused += 1
        groups[key] = entry
        return entry[0]

    def expect(self, launches: int) -> None:
        """Warn, once, if two steps of ``launches`` launches do not fit."""
        if 2 * launches > self.bound and not self._warned:
            self._warned = True
            warnings.warn(
                f"a step of {launches:,} launches and a cache of {self.bound:,} bind groups: it should hold two steps' "
                f"worth, or every launch may miss. Set bind_groups to {2 * launches:,} or more.",
                RuntimeWarning,
                stacklevel=2,
            )

    def sweep(self) -> None:
        """Destroy the evicted groups; all recorded work must have been submitted."""
        while self._evicted:
            self._destroy(*self._evicted.pop())

    def clear(self, owner: Owner | None = None) -> None:
        """Destroy every group, or those of ``owner``.  Safe after a device was lost."""
        self.sweep()
        for key, (handle, whose) in list(self._groups.items()):
            if owner is None or whose is owner:
                del self._groups[key]
                self._destroy(handle, whose)

    def _destroy(self, handle: int, owner: Owner) -> None:
        for told in self.on_evict:
            told(handle)
        try:
            owner.device.destroy(handle)
        except DeviceLost:
            return  # it died with its device
