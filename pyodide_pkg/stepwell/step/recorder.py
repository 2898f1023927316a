"""Recording: a step as plain data, before anything touches the GPU.

A model's code calls a ``Recorder``; the finished ``Step`` holds writes, copies and launches in order.  It names kernels
by ``Variant`` and buffers by handle, so it can be inspected, compiled ahead, submitted and compared in tests.  What
changes from token to token (position, rows, length, draw) stands in the step alone: its commands refer to it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stepwell.gpu.device import Binding
from stepwell.gpu.program import ANY_NUMBER
from stepwell.memory.buffer import Buffer
from stepwell.step.shapes import Shapes

Constant = int | float | bool | str | tuple[int, ...]
"""A constant of a kernel's template."""


class ByLength(NamedTuple):
    """A grid whose x is ceil(length / ``unit``), ``length`` being that of the step, and at most ``most``."""

    unit: int
    y: int
    z: int
    most: int = ANY_NUMBER

    def at(self, length: int) -> tuple[int, int, int]:
        """The grid in a step whose end is at ``length`` positions."""
        return min(-(-length // self.unit), self.most), self.y, self.z


Grid = tuple[int, int, int] | ByLength
"""Workgroups in x, y and z."""
Shape = tuple[int, ...]
"""A shape class of a node."""


class Variant(NamedTuple):
    """What a pipeline is compiled from: a kernel and the constants its template gets.  Hashable; the cache key."""

    kernel: str
    constants: tuple[tuple[str, Constant], ...] = ()

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={value}' for name, value in self.constants)})"


class Write(NamedTuple):
    """32-bit ``words`` from the host to ``buffer`` at ``offset`` bytes; what was recorded before is submitted first."""

    buffer: int
    offset: int
    words: tuple[int, ...]


class Copy(NamedTuple):
    """A copy of ``nbytes`` bytes between two buffers."""

    source: int
    source_offset: int
    target: int
    target_offset: int
    nbytes: int


class CopyPast(NamedTuple):
    """A copy of the first position * ``unit`` bytes, from the start of ``source`` to the start of ``target``."""

    source: int
    target: int
    unit: int


class CopyOut(NamedTuple):
    """A copy of ``nbytes`` bytes to the start of the step's staging buffer, to be read back."""

    source: int
    offset: int
    nbytes: int


class Launch(NamedTuple):
    """One dispatch: ``buffers`` in binding order, bound whole (an int) or in part (a Binding).

    ``node`` is the operation of the model's graph, ``shape`` its shape class: variants are bounded per node and class.
    """

    variant: Variant
    buffers: tuple[int | Binding, ...]
    grid: Grid
    node: str
    shape: Shape

    @property
    def use(self) -> tuple[str, Shape, Variant]:
        """(node, shape class, variant): the key of the cache of kernels."""
        return self.node, self.shape, self.variant


Command = Write | Copy | CopyPast | CopyOut | Launch
"""A command of a step."""


class Step(NamedTuple):
    """The commands of a step of ``rows`` tokens, the first of them at ``position``.

    ``staging`` is the buffer that CopyOut fills, 0: none.  ``draw`` is the random number by which a sampled token is
    chosen (``kernels/sampling.py``).
    """

    position: int
    rows: int
    staging: int
    commands: tuple[Command, ...]
    draw: int = 0

    @property
    def length(self) -> int:
        """Positions at the end of the step."""
        return self.position + self.rows

    @property
    def buffers(self) -> set[int]:
        """The handles of all buffers that the step writes, copies or binds."""
        found = {self.staging} if self.staging else set()
        for command in self.commands:
            if isinstance(command, Launch):
                found.update(entry.buffer if isinstance(entry, Binding) else entry for entry in command.buffers)
            elif isinstance(command, Write):
                found.add(command.buffer)
            elif isinstance(command, CopyOut):
                found.add(command.source)
            else:
                found.update((command.source, command.target))
        return found

    @property
    def uses(self) -> list[tuple[str, Shape, Variant]]:
        """(node, shape class, variant) of every launch, in order."""
        return [command.use for command in self.commands if isinstance(command, Launch)]


class Recorder:
    """Collects the commands of one step: no GPU object, no JS, and cheap enough to run for every token.

    ``position``, ``rows`` and ``draw`` are those of the step; ``shapes`` gives shape classes.
    """

    __slots__ = ("_commands", "_shape", "draw", "position", "rows", "shapes")

    def __init__(
        self,
        position: int = 0,
        rows: int = 1,
        shapes: Shapes = Shapes(),  # noqa: B008 - immutable
        draw: int = 0,
    ) -> None:
        self.position, self.rows, self.shapes, self.draw = position, rows, shapes, draw
        self._shape: Shape = (shapes.width(rows),)
        self._commands: list[Command] = []

    def write(self, buffer: Buffer, offset: int, words: Sequence[int]) -> None:
        """Record a write of 32-bit ``words`` at ``offset`` bytes; what was recorded before it is submitted first."""
        self._commands.append(Write(buffer.id, offset, tuple(words)))

    def copy(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        """Record a copy of ``nbytes`` bytes; nothing for 0."""
        if nbytes:
            self._commands.append(Copy(source.id, source_offset, target.id, target_offset, nbytes))

    def copy_past(self, source: Buffer, target: Buffer, unit: int) -> None:
        """Record a copy of the positions before the step's, ``unit`` bytes each."""
        if self.position:
            self._commands.append(CopyPast(source.id, target.id, unit))

    def copy_out(self, source: Buffer, offset: int, nbytes: int) -> None:
        """Record a copy of ``nbytes`` bytes to the start of the step's staging buffer."""
        self._commands.append(CopyOut(source.id, offset, nbytes))

    def launch(
        self,
        variant: Variant,
        buffers: Sequence[Buffer],
        grid: Grid,
        node: str = "",
        shape: Shape | None = None,
    ) -> None:
        """Record a dispatch of ``variant`` over ``grid``, with ``buffers`` in binding order.

        ``shape`` is the step's width class by default; without a ``node`` the variant is not bounded.
        """
        handles = tuple([buffer.id for buffer in buffers])
        self._commands.append(Launch(variant, handles, grid, node, self._shape if shape is None else shape))

    def finish(self, staging: Buffer | None = None) -> Step:
        """The step; ``staging`` is the buffer to which ``copy_out`` copies."""
        return Step(self.position, self.rows, 0 if staging is None else staging.id, tuple(self._commands), self.draw)
