"""Where kernels find the step's scalars when the device has no immediates: 16-byte uniform slots, and their shadows.

``UniformPool`` gives a launch the slot of its place in the batch, which is what WebGPU runtimes do: anything that moves
a flush shifts the slots, and with them bind groups and contents.  ``CallSites`` gives the k-th launch of a pipeline in
a step a slot of its own for good, whatever else happens in between.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from stepwell.gpu.device import Binding
from stepwell.gpu.program import STEP_BYTES
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool

Words = tuple[int, ...]
"""The words of a slot: position, rows, length, draw; 0 for those that its kernel does not read."""


class Parameters(Protocol):
    """Hands out the slots of a step's launches, in order."""

    def begin_step(self) -> None:
        """Begin the slots of a step."""

    def flushed(self) -> None:
        """Note that everything recorded was submitted in the middle of a step, because the host reads or writes."""

    def slot(self, pipeline: int) -> Binding:
        """The slot of the next launch."""

    def forget(self, pipelines: Iterable[int], buffers: Iterable[int]) -> None:
        """Forget ``pipelines``, which are about to be destroyed (the signature is that of ``KernelCache.on_evict``)."""

    def clear(self) -> None:
        """Give the buffers back; the next launches get new ones."""


class Arena:
    """Slots one after the other in uniform buffers, any number of them."""

    def __init__(self, pool: BufferPool) -> None:
        limits = pool.device.info.limits
        self._stride = max(STEP_BYTES, limits["minUniformBufferOffsetAlignment"])
        self._nbytes = min(limits["maxUniformBufferBindingSize"], 1 << 16) // self._stride * self._stride
        self._pool = pool
        self._buffers: list[Buffer] = []
        self._used = 0
        self._generation = pool.inventory.generation

    def renewed(self) -> bool:
        """Whether the buffers died with their device and were dropped."""
        if self._generation == self._pool.inventory.generation:
            return False
        self._generation = self._pool.inventory.generation
        self._buffers.clear()
        self._used = 0
        return True

    def take(self) -> Binding:
        """One more slot."""
        per_buffer = self._nbytes // self._stride
        number, place = divmod(self._used, per_buffer)
        if number == len(self._buffers):
            self._buffers.append(self._pool.acquire(self._nbytes, Role.UNIFORM, "parameters", number, host=True))
        self._used += 1
        return Binding(self._buffers[number].id, place * self._stride, STEP_BYTES)

    def clear(self) -> None:
        """Give the buffers back; the next slots are in new ones."""
        if not self.renewed():
            for buffer in self._buffers:
                self._pool.release(buffer)
        self._buffers.clear()
        self._used = 0


class UniformPool:
    """The n-th launch since the last flush gets the n-th slot."""

    def __init__(self, pool: BufferPool) -> None:
        self._arena = Arena(pool)
        self._slots: list[Binding] = []
        self._next = 0

    def begin_step(self) -> None:
        self._next = 0
        if self._arena.renewed():
            self._slots.clear()

    def flushed(self) -> None:
        self._next = 0

    def slot(self, pipeline: int) -> Binding:
        if self._next == len(self._slots):
            self._slots.append(self._arena.take())
        self._next += 1
        return self._slots[self._next - 1]

    def forget(self, pipelines: Iterable[int], buffers: Iterable[int]) -> None:
        """Do nothing: slots belong to no pipeline."""

    def clear(self) -> None:
        self._slots.clear()
        self._arena.clear()


class CallSites:
    """The k-th launch of a pipeline in a step is a call site: it keeps its slot."""

    def __init__(self, pool: BufferPool) -> None:
        self._arena = Arena(pool)
        self._slots: dict[tuple[int, int], Binding] = {}
        self._free: list[Binding] = []  # of pipelines that are gone
        self._launched: dict[int, int] = {}  # of each pipeline, in this step

    def begin_step(self) -> None:
        self._launched.clear()
        if self._arena.renewed():
            self._slots.clear()
            self._free.clear()

    def flushed(self) -> None:
        """Do nothing: slots do not depend on it."""

    def slot(self, pipeline: int) -> Binding:
        number = self._launched.get(pipeline, 0)
        self._launched[pipeline] = number + 1
        site = (pipeline, number)
        slot = self._slots.get(site)
        if slot is None:
            slot = self._slots[site] = self._free.pop() if self._free else self._arena.take()
        return slot

    def forget(self, pipelines: Iterable[int], buffers: Iterable[int]) -> None:
        """Give the slots of ``pipelines`` to other sites: else kernels that come and go would take ever more."""
        gone = frozenset(pipelines)
        for site in [site for site in self._slots if site[0] in gone]:
            self._free.append(self._slots.pop(site))

    def clear(self) -> None:
        self._slots.clear()
        self._free.clear()
        self._arena.clear()


class Shadow:
    """The words that each slot holds: those of the last write that was issued.  It knows nothing of tensor data."""

    def __init__(self) -> None:
        self._words: dict[Binding, Words] = {}

    def __len__(self) -> int:
        """The number of slots whose words are known."""
        return len(self._words)

    def holds(self, slot: Binding, words: Words) -> bool:
        """Whether ``slot`` is known to hold ``words``."""
        return self._words.get(slot) == words

    def issued(self, writes: Mapping[Binding, Words]) -> None:
        """Note ``writes`` (slot -> words) that were issued."""
        self._words.update(writes)

    def doubt(self, slots: Iterable[Binding]) -> None:
        """Forget ``slots``: they may have been written with words that are not known here, or not at all."""
        for slot in slots:
            self._words.pop(slot, None)

    def clear(self) -> None:
        """Forget every slot: they were replaced, or written by others."""
        self._words.clear()
