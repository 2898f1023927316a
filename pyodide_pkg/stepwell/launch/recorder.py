"""Recording: a step as plain data, before anything touches the GPU.

A model's code calls a ``Recorder``; the finished ``Step`` holds writes, then copies and launches in order.  It names
kernels by ``Variant`` and buffers by handle, so it can be inspected, compiled ahead, submitted and compared in tests.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stepwell.memory.buffer import Buffer

Constant = int | float | bool | str | tuple[int, ...]
Grid = tuple[int, int, int]


class Variant(NamedTuple):
    """What a pipeline is compiled from: a kernel and the constants its template gets.  Hashable; the cache key."""

    kernel: str
    constants: tuple[tuple[str, Constant], ...] = ()

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={value}' for name, value in self.constants)})"


class Write(NamedTuple):
    """A few 32-bit words for a small buffer; takes effect before every copy and launch of the step."""

    buffer: int
    offset: int
    words: tuple[int, ...]


class Copy(NamedTuple):
    source: int
    source_offset: int
    target: int
    target_offset: int
    nbytes: int


class Launch(NamedTuple):
    """One dispatch: ``buffers`` in binding order, bound whole."""

    variant: Variant
    buffers: tuple[int, ...]
    grid: Grid


class Step(NamedTuple):
    writes: tuple[Write, ...]
    commands: tuple[Copy | Launch, ...]

    @property
    def buffers(self) -> set[int]:
        """The handles of all buffers that the step writes, copies or binds."""
        found = {write.buffer for write in self.writes}
        for command in self.commands:
            found.update(command.buffers if isinstance(command, Launch) else (command.source, command.target))
        return found

    @property
    def variants(self) -> set[Variant]:
        return {command.variant for command in self.commands if isinstance(command, Launch)}


class Recorder:
    """Collects one step.  Cheap enough to run for every token; no GPU object, no JS."""

    __slots__ = ("_commands", "_writes")

    def __init__(self) -> None:
        self._writes: list[Write] = []
        self._commands: list[Copy | Launch] = []

    def write(self, buffer: Buffer, offset: int, words: Sequence[int]) -> None:
        self._writes.append(Write(buffer.id, offset, tuple(words)))

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        if nbytes:
            self._commands.append(Copy(source.id, source_offset, target.id, target_offset, nbytes))

    def launch(self, variant: Variant, buffers: Sequence[Buffer], grid: Grid) -> None:
        self._commands.append(Launch(variant, tuple([buffer.id for buffer in buffers]), grid))

    def finish(self) -> Step:
        return Step(tuple(self._writes), tuple(self._commands))
