"""The cost of one acquire and its release: a trace replayed and timed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepwell.errors import BadTrace
from stepwell.gpu.fake_device import FakeDevice
from stepwell.memory.buffer import Buffer
from stepwell.memory.policies.base import Policy, Request
from stepwell.memory.pool import BufferPool
from stepwell.replay.traces import ACQUIRE, FLUSH, RELEASE, Event

LIMITS = {"maxBufferSize": 1 << 36, "maxStorageBufferBindingSize": 1 << 36}
"""Limits of the device: none that a trace could reach."""


@dataclass(frozen=True, slots=True)
class PairCost:
    """The microseconds of a pair of acquire and release, with the flushes and run starts between them.

    ``policy_us``: the policy's decisions alone.  ``pool_us``: the whole pool, with its books, on a device that does
    nothing but count.  The loop that reads the events is subtracted; times are the processor's, not the clock's.
    """

    pairs: int
    policy_us: float
    pool_us: float


def measure(events: Sequence[Event], make: Callable[[], Policy], rounds: int) -> PairCost:
    """The cost of replaying ``events``: the fastest of ``rounds``, each with a fresh policy of ``make``.

    BadTrace if no event is an acquire.
    """
    pairs = sum(op == ACQUIRE for op, _, _ in events)
    if not pairs:
        raise BadTrace("the trace has no acquire: there is nothing to measure.")
    loop = min(_timed(lambda: _idle(events)) for _ in range(rounds))
    alone = min(_timed(lambda: _drive_policy(events, make())) for _ in range(rounds))
    whole = min(_timed(lambda: _drive_pool(events, make())) for _ in range(rounds))
    return PairCost(pairs, *((seconds - loop) / pairs * 1e6 for seconds in (alone, whole)))


def _timed(action: Callable[[], None]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def _idle(events: Sequence[Event]) -> None:
    leases: dict[int, object] = {}
    for op, value, request in events:
        if op == ACQUIRE:
            leases[value] = request
        elif op == RELEASE:
            leases.pop(value)


def _drive_policy(events: Sequence[Event], policy: Policy) -> None:
    leases: dict[int, tuple[int, Request, int]] = {}
    created = 0
    for op, value, request in events:
        if op == ACQUIRE:
            size = policy.size_class(request)
            buffer_id = policy.acquire(request, size)
            if buffer_id is None:
                created += 1
                buffer_id = created
            leases[value] = (buffer_id, request, size)
        elif op == RELEASE:
            policy.release(*leases.pop(value), True)
        elif op == FLUSH:
            policy.flush()
        else:
            policy.begin_run()


def _drive_pool(events: Sequence[Event], policy: Policy) -> None:
    pool = BufferPool(FakeDevice(limits=LIMITS, log_limit=0), policy)
    leases: dict[int, Buffer] = {}
    for op, value, request in events:
        if op == ACQUIRE:
            leases[value] = pool.acquire(request.nbytes, request.role, "", request.site)
        elif op == RELEASE:
            pool.release(leases.pop(value))
        elif op == FLUSH:
            pool.flush()
        else:
            pool.begin_run()
