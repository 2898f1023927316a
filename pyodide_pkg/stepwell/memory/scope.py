"""A scope of activation buffers: what one step acquires and gives back together."""

from collections.abc import Callable
from typing import Protocol

from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool

Workspaces = Callable[[str, tuple[int, ...], str, int], Buffer]
"""(node, shape class, label, bytes) -> the workspace that this variant of the node owns."""


class Acquires(Protocol):
    """What a model records with: anything that hands out activations, which end with the step, and workspaces."""

    def acquire(self, nbytes: int, label: str) -> Buffer: ...

    def workspace(self, node: str, shape: tuple[int, ...], label: str, nbytes: int) -> Buffer: ...


class Scope:
    """Acquires activations one by one and releases them in reverse order.

    The order matters: with last-in-first-out free lists each site then gets the same buffer in every step, which keeps
    bind groups valid.
    """

    def __init__(self, pool: BufferPool, workspaces: Workspaces | None = None) -> None:
        self._pool = pool
        self.held: list[Buffer] = []
        self._workspaces = workspaces

    def workspace(self, node: str, shape: tuple[int, ...], label: str, nbytes: int) -> Buffer:
        """Without a cache of variants a workspace is an activation like any other."""
        if self._workspaces is None:
            return self.acquire(nbytes, label)
        return self._workspaces(node, shape, label, nbytes)

    def acquire(self, nbytes: int, label: str) -> Buffer:
        buffer = self._pool.acquire(nbytes, Role.ACTIVATION, label, len(self.held))
        self.held.append(buffer)
        return buffer

    def end_step(self) -> None:
        """The step was submitted, or will not be."""
        self.release()

    def release(self) -> None:
        while self.held:
            self._pool.release(self.held.pop())


class KeptScope(Scope):
    """Keeps its buffers from step to step, for steps that are all alike: the n-th acquire gets the n-th buffer."""

    def __init__(self, pool: BufferPool, workspaces: Workspaces) -> None:
        super().__init__(pool, workspaces)
        self._next = 0

    def acquire(self, nbytes: int, label: str) -> Buffer:
        if self._next < len(self.held) and self.held[self._next].requested != nbytes:
            del_from = self.held[self._next :]
            self.held = self.held[: self._next]
            for buffer in reversed(del_from):
                self._pool.release(buffer)
        if self._next == len(self.held):
            super().acquire(nbytes, label)
        self._next += 1
        return self.held[self._next - 1]

    def end_step(self) -> None:
        self._next = 0

    def release(self) -> None:
        super().release()
        self._next = 0
