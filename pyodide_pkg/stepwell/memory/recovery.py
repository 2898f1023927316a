"""Memory that ran out and devices that died: what the pool does, in which order, and what it tells the caller.

WebGPU reports a failed allocation late, through an error scope, and after a loss every call fails or pretends to
succeed.  So: loss is checked first, then sizes (``acquire`` refuses what no device limit allows), then memory.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from stepwell.errors import BudgetExceeded, DeviceLost, OutOfMemory
from stepwell.memory.buffer import mib
from stepwell.memory.class_stats import Eviction
from stepwell.memory.pool import BufferPool

T = TypeVar("T")


async def fence(pool: BufferPool) -> None:
    """Wait until the GPU has done all that was submitted: the bytes of destroyed buffers are free then."""
    serial = pool.inventory.serial
    try:
        await pool.device.wait()
    except DeviceLost:
        pool.note_lost()
        raise
    pool.inventory.note_complete(serial)


async def make_room(pool: BufferPool, nbytes: int) -> None:
    """Destroy free buffers until ``nbytes`` more fit the budget, and wait until the GPU has let go of them.

    Not from within a step of the pool: PoolError.
    """
    async with pool.step():
        pool.flush()
        pool.reclaim(pool.budget.excess(pool.inventory.held_bytes + nbytes))
        pool.flush()
        await fence(pool)


async def recover(pool: BufferPool) -> None:
    """Give up all free buffers after an OutOfMemory, wait for the GPU, and lower the budget.

    The step that failed must have been abandoned, and its turn given back.  Leases that are younger than the last step
    known to be good may have no memory: they are destroyed when they are released.  Raises DeviceLost if the device is
    gone.
    """
    async with pool.step():
        reserved = pool.ledger.reserved_bytes
        pool.inventory.note_failure("oom")
        await _settle_errors(pool)
        pool.inventory.doubt_unconfirmed()
        pool.flush()
        pool.trim(Eviction.OOM)
        pool.flush()
        await fence(pool)
        pool.budget.shrink(reserved)


async def _settle_errors(pool: BufferPool) -> None:
    """Collect the errors of the failed step's other buffers; what is submitted may still be running after that."""
    try:
        await pool.device.wait()
    except DeviceLost:
        pool.note_lost()
        raise
    except OutOfMemory:
        return


async def retrying(pool: BufferPool, step: Callable[[], Awaitable[T]]) -> T:
    """Run ``step``; when memory runs out, make room and run it once more.

    ``step`` is a transaction: when it raises it has given back what it acquired, and its turn, and can run again.  If
    it fails again, the error says who holds what.  Not from within a step of the pool.
    """
    try:
        return await step()
    except BudgetExceeded as error:
        await make_room(pool, error.requested)
    except OutOfMemory:
        await recover(pool)
    except DeviceLost:
        pool.note_lost()
        raise
    try:
        return await step()
    except OutOfMemory as error:
        pool.inventory.note_failure("oom")
        raise OutOfMemory(f"{error} It failed again after all free buffers were given up. {holders(pool)}") from error
    except DeviceLost:
        pool.note_lost()
        raise


def holders(pool: BufferPool, lines: int = 5) -> str:
    """A text of who holds what, the largest first: ``kv 1.2 GiB in 64 buffers (k 600 MiB, v 600 MiB); weights …``."""
    by_role: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for buffer in pool.inventory.leases():
        group = buffer.label.rstrip("0123456789.") or "unnamed"
        by_role.setdefault(buffer.role.value, Counter())[group] += buffer.size
        counts[buffer.role.value] += 1
    parts = []
    for role, labels in sorted(by_role.items(), key=lambda item: -item[1].total())[:lines]:
        largest = ", ".join(f"{label} {mib(nbytes)}" for label, nbytes in labels.most_common(3))
        parts.append(f"{role} {mib(labels.total())} in {counts[role]:,} buffers ({largest})")
    held = "; ".join(parts) or "nothing is leased"
    free = pool.ledger.reserved_bytes - pool.ledger.in_use_bytes
    return f"In use {mib(pool.ledger.in_use_bytes)}, free {mib(free)}. Held by: {held}."
