"""The memory bandwidth that a kernel gets which only reads, and the cost of a compute pass that does nothing."""

from typing import NamedTuple

from stepwell.errors import BudgetExceeded, OutOfMemory
from stepwell.gpu.device import DeviceInfo
from stepwell.kernels.ops import Matrix, Ops
from stepwell.launch.launcher import Launcher
from stepwell.launch.selection import tuning_for
from stepwell.memory.buffer import Buffer, Role
from stepwell.step.recorder import Recorder, Variant

THREADS = 256
"""Threads per workgroup."""
LOADS = 16
"""Loads of 16 bytes per thread."""
UNIT_BYTES = THREADS * LOADS * 16
"""Bytes that a workgroup reads."""
COLUMNS = 4096
"""Columns of the random matrix that is read."""
GPU_BYTES = 1 << 30
"""Bytes to read on a GPU: far beyond every cache, and it takes long beside the cost of a pass."""
CPU_BYTES = 16 << 20
"""Bytes to read on a CPU adapter."""
LEAST_BYTES = 64 << 20
"""The least bytes worth reading on a GPU: less would fit caches."""
REPEATS = 8
"""Passes that read."""


class PlainRead(NamedTuple):
    """``us``: microseconds of the fastest of REPEATS passes that read ``nbytes`` once, less those of an empty pass."""

    nbytes: int
    us: float

    @property
    def gb_s(self) -> float | None:
        """Bandwidth in units of 10^9 bytes per second; None when the clock is too coarse to tell."""
        return self.nbytes / self.us / 1e3 if self.us > 0 else None


def record_read(rec: Recorder, words: Buffer, sums: Buffer, nbytes: int) -> None:
    """sums[i] = the sum of the words that thread i reads of ``words``; ``nbytes``: in all, a multiple of UNIT_BYTES."""
    variant = Variant("plain_read", (("loads", LOADS), ("threads", THREADS)))
    rec.launch(variant, (sums, words), (nbytes // UNIT_BYTES, 1, 1))


def record_empty(rec: Recorder, sums: Buffer, times: int) -> None:
    """Record ``times`` launches that write the same word: they wait for each other as the launches of a step do."""
    for _ in range(times):
        rec.launch(Variant("plain_read", (("loads", 0), ("threads", 1))), (sums,), (1, 1, 1))


def size_for(info: DeviceInfo) -> int:
    """Bytes to read on the device of ``info``: as many as it can bind, at most GPU_BYTES, or CPU_BYTES on a CPU."""
    limit = min(info.limits["maxBufferSize"], info.limits["maxStorageBufferBindingSize"])
    return min(CPU_BYTES if info.is_software else GPU_BYTES, limit // UNIT_BYTES * UNIT_BYTES)


async def time_plain_read(launcher: Launcher, pass_us: float) -> PlainRead | None:
    """Measure reading, while the device times passes and ``launcher`` gives each launch a pass of its own.

    ``pass_us``: microseconds of an empty pass.  Without room for the buffer, half of it is tried, down to LEAST_BYTES;
    returns None if there is no room for that either.
    """
    nbytes = size_for(launcher.device.info)
    while True:
        try:
            passes = await _read(launcher, nbytes)
        except (OutOfMemory, BudgetExceeded):
            nbytes //= 2
            if nbytes < LEAST_BYTES:
                return None
        else:
            return PlainRead(nbytes, max(0.0, min(passes) - pass_us))


async def _read(launcher: Launcher, nbytes: int) -> tuple[float, ...]:
    """Microseconds of each pass that reads ``nbytes``."""
    pool, device = launcher.pool, launcher.device
    held: list[Buffer] = []
    try:
        # weights: of exactly that size, and not kept afterwards
        held.append(pool.acquire(nbytes, Role.WEIGHTS, "plain read"))
        held.append(pool.acquire(nbytes // LOADS // 4, Role.WEIGHTS, "plain read sums"))
        words, sums = held
        # random words: memory may hold equal ones in less room
        filling = Recorder()
        Ops(tuning_for(device.info)).noise(filling, Matrix("F32", nbytes // 4 // COLUMNS, COLUMNS, words, None), 1.0)
        reading = Recorder()
        for _ in range(REPEATS):
            record_read(reading, words, sums, nbytes)
        await launcher.issue(filling.finish())
        await launcher.wait()
        await device.take_profile()
        await launcher.issue(reading.finish())
        return (await device.take_profile()).passes_us
    finally:
        for buffer in held:
            pool.release(buffer)
        pool.flush()
