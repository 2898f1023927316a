"""A scope of activation buffers: what one step acquires and gives back together."""

from typing import Protocol

from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool


class Acquires(Protocol):
    """What a model records with: anything that hands out activation buffers."""

    def acquire(self, nbytes: int, label: str) -> Buffer: ...


class Scope:
    """Acquires activations one by one and releases them in reverse order.

    The order matters: with last-in-first-out free lists each site then gets the same buffer in every step, which keeps
    bind groups valid.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._held: list[Buffer] = []

    def acquire(self, nbytes: int, label: str) -> Buffer:
        buffer = self._pool.acquire(nbytes, Role.ACTIVATION, label, len(self._held))
        self._held.append(buffer)
        return buffer

    def release(self) -> None:
        while self._held:
            self._pool.release(self._held.pop())
