"""What an acquire and its release cost: lines of Python, on a device that does nothing but count.

``python -m stepwell.replay bench`` has the microseconds.
"""

import pytest

from stepwell.gpu.fake_device import FakeDevice
from stepwell.memory.buffer import Role
from stepwell.memory.pool import BufferPool
from tests.support.counted import lines_run

MOST = 80
"""The test is for a step change, not for a figure: a reused buffer takes 57 to 70 lines, a created one twice that."""


def pair_cost(policy: str, others: int) -> int:
    """Of one acquire and release that reuses a buffer, in a pool that has ``others``, every second one free."""
    pool = BufferPool(FakeDevice(log_limit=0), policy)
    held = [pool.acquire(5000 + 256 * (i % 7), Role.ACTIVATION, "other", i) for i in range(others)]
    for buffer in held[::2]:
        pool.release(buffer)

    def pair() -> None:
        pool.release(pool.acquire(5000, Role.ACTIVATION, "x", 3))

    pair()
    created = pool.ledger.created
    lines = lines_run(pair)
    assert pool.ledger.created == created
    return lines


@pytest.mark.parametrize("policy", ["adaptive", "bucket", "exact", "pow2"])
def test_acquire_and_release_are_cheap_whatever_the_pool_holds(policy: str) -> None:
    alone = pair_cost(policy, 0)
    assert 10 < alone < MOST
    assert pair_cost(policy, 1000) == alone
