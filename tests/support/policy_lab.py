"""What the tests of policies share: requests, and the decode loop with a growing KV cache on a pool."""

from stepwell.gpu.fake_device import FakeDevice
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.policies.base import Policy, Request
from stepwell.memory.pool import BufferPool

KIB, MIB = 1 << 10, 1 << 20
LARGE = {"maxBufferSize": 1 << 33, "maxStorageBufferBindingSize": 1 << 33}


def request(nbytes: int, site: int = 0, role: Role = Role.KV) -> Request:
    return Request(nbytes, role, site)


class GrowingKv:
    """The decode loop with a growing KV cache: each step acquires all present tensors, then releases the past ones."""

    def __init__(self, policy: str | Policy, tensors: int, position_bytes: int, positions: int) -> None:
        self.pool = BufferPool(FakeDevice(limits=LARGE, log_limit=0), policy)
        self.tensors, self.position_bytes, self.positions = tensors, position_bytes, positions
        self.past = self._present()

    def _present(self) -> list[Buffer]:
        nbytes = self.position_bytes * self.positions
        return [self.pool.acquire(nbytes, Role.KV, site=site) for site in range(self.tensors)]

    def step(self) -> int:
        """One decode step; how many buffers it created."""
        before = self.pool.ledger.created
        self.pool.begin_run()
        self.positions += 1
        present = self._present()
        self.pool.flush()
        for buffer in reversed(self.past):
            self.pool.release(buffer)
        self.past = present
        return self.pool.ledger.created - before

    def steps(self, count: int) -> list[int]:
        return [self.step() for _ in range(count)]
