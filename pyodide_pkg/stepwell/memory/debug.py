"""Debug mode: a released buffer is overwritten, and kept out of use for some runs.

A command that still reads it then reads a conspicuous pattern (as f32: -2.87e-16) instead of plausible old values.
"""

from collections.abc import Callable
from typing import NamedTuple

from stepwell.gpu.device import Device
from stepwell.memory.slots import Slot

POISON = 0xA5
"""The byte that released buffers are filled with."""
QUARANTINE_RUNS = 2
"""Runs for which a released buffer is kept aside."""
_CHUNK_BYTES = 1 << 20


class _Inmate(NamedTuple):
    slot: Slot
    since_run: int


class Quarantine:
    """Released buffers on their way back to their policy, for ``runs`` runs."""

    def __init__(self, runs: int = QUARANTINE_RUNS) -> None:
        self._runs = runs
        self._fresh: list[Slot] = []  # released since the last flush: recorded commands may use them
        self._inmates: list[_Inmate] = []

    def add(self, slot: Slot) -> None:
        """Take a buffer that was just released."""
        self._fresh.append(slot)

    def flush(self, device: Device, run: int) -> None:
        """Overwrite what was released before ``run``'s flush: a queue write now comes after all that was submitted."""
        for slot in self._fresh:
            chunk = bytes([POISON]) * min(slot.size, _CHUNK_BYTES)
            for offset in range(0, slot.size, len(chunk)):
                device.write_buffer(slot.id, offset, chunk[: slot.size - offset])
            slot.dirty_bytes = slot.size
            self._inmates.append(_Inmate(slot, run))
        self._fresh.clear()

    def begin_run(self, run: int, give_back: Callable[[Slot], None]) -> None:
        """Call ``give_back`` for every buffer whose time is over when ``run`` begins."""
        while self._inmates and run - self._inmates[0].since_run >= self._runs:
            give_back(self._inmates.pop(0).slot)

    def drain(self) -> list[int]:
        """Forget every buffer in it; returns their ids."""
        ids = [slot.id for slot in self._fresh] + [inmate.slot.id for inmate in self._inmates]
        self._fresh.clear()
        self._inmates.clear()
        return ids
