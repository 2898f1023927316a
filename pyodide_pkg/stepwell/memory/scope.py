"""A scope of activation buffers: what one step acquires and gives back together."""

from collections.abc import Callable
from typing import Protocol

from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool

Workspaces = Callable[[str, tuple[int, ...], str, int], Buffer]
"""(node, shape class, label, bytes) -> the workspace that this variant of the node owns."""


class Acquires(Protocol):
    """What a model records with: hands out activations, which end with the step, and workspaces."""

    def acquire(self, nbytes: int, label: str) -> Buffer:
        """An activation of ``nbytes``."""

    def workspace(self, node: str, shape: tuple[int, ...], label: str, nbytes: int) -> Buffer:
        """The workspace of ``nbytes`` that the variant of ``node`` for the class ``shape`` owns."""


class Scope(Acquires):
    """The activations of a step: acquired one by one (``held``), released in reverse order.

    The order matters: with last-in-first-out free lists each site then gets the same buffer in every step, which keeps
    bind groups valid.
    """

    def __init__(self, pool: BufferPool, workspaces: Workspaces | None = None) -> None:
        self._pool = pool
        self.held: list[Buffer] = []
        self._workspaces = workspaces

    def workspace(self, node: str, shape: tuple[int, ...], label: str, nbytes: int) -> Buffer:
        """The variant's workspace; without a cache of variants an activation like any other."""
        if self._workspaces is None:
            return self.acquire(nbytes, label)
        return self._workspaces(node, shape, label, nbytes)

    def acquire(self, nbytes: int, label: str) -> Buffer:
        buffer = self._pool.acquire(nbytes, Role.ACTIVATION, label, len(self.held))
        self.held.append(buffer)
        return buffer

    def end_step(self) -> None:
        """Give back what ends with a step that was submitted, or will not be."""
        self.release()

    def release(self) -> None:
        """Release every buffer that is held."""
        while self.held:
            self._pool.release(self.held.pop())


class KeptScope(Scope):
    """A scope for steps that are all alike: it keeps its buffers, and the n-th acquire of a step gets the n-th one."""

    def __init__(self, pool: BufferPool, workspaces: Workspaces) -> None:
        super().__init__(pool, workspaces)
        self._next = 0

    def acquire(self, nbytes: int, label: str) -> Buffer:
        if self._next < len(self.held) and self.held[self._next].requested != nbytes:
            while len(self.held) > self._next:
                self._pool.release(self.held.pop())
        if self._next == len(self.held):
            super().acquire(nbytes, label)
        self._next += 1
        return self.held[self._next - 1]

    def end_step(self) -> None:
        self._next = 0

    def release(self) -> None:
        super().release()
        self._next = 0
