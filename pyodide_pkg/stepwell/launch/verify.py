"""The check of a trace before it becomes a plan: done once per plan, over the finite list of what it will do.

What WebGPU would report late, or not at all (a grid beyond the limit is an error that comes after the token), is an
exception here: ranges of every binding and copy, aliasing of what is written, grids, sizes of uniforms.
"""

from collections.abc import Sequence

from stepwell.errors import UsageError
from stepwell.gpu.device import Binding, BindingType, Layout
from stepwell.launch.context import LaunchContext
from stepwell.step.recorder import ByLength, Copy, CopyOut, CopyPast, Launch, Step, Write


def verify(step: Step, context: LaunchContext, end: int) -> int:
    """The last position that the step can be replayed at, at most ``end`` - 1.  UsageError with what is wrong."""
    checker = _Checker(context, step, end)
    for number, command in enumerate(step.commands):
        try:
            checker.check(command)
        except UsageError as error:
            raise UsageError(f"command {number} of the step, {type(command).__name__}: {error}") from None
    if step.position > checker.last_position:
        raise UsageError(f"position {step.position:,} is beyond {checker.last_position:,}, where its copies end")
    return checker.last_position


class _Checker:
    def __init__(self, context: LaunchContext, step: Step, end: int) -> None:
        self._kernels = context.kernels
        self._size = context.pool.inventory.size_of
        self._limits = context.device.info.limits
        self._staging = step.staging
        self._end = end
        self.last_position = end - 1

    def check(self, command: object) -> None:
        if isinstance(command, Launch):
            self._launch(command)
        elif isinstance(command, Copy):
            self._copy(command.source, command.source_offset, command.target, command.target_offset, command.nbytes)
        elif isinstance(command, CopyPast):
            self._copy(command.source, 0, command.target, 0, 0)
            if command.unit <= 0 or command.unit % 4:
                raise UsageError(f"{command.unit:,} B per position; it must be a positive multiple of 4")
            room = min(self._size(command.source), self._size(command.target)) // command.unit
            self.last_position = min(self.last_position, room)
        elif isinstance(command, CopyOut):
            if not self._staging:
                raise UsageError("the step has no staging buffer")
            self._copy(command.source, command.offset, self._staging, 0, command.nbytes)
        elif isinstance(command, Write):
            raise UsageError("what the host writes is another thing at every step, and cannot be part of a plan")

    def _copy(self, source: int, source_offset: int, target: int, offset: int, nbytes: int) -> None:
        if source == target:
            raise UsageError(f"buffer {source} is copied into itself")
        self._range(source, source_offset, nbytes)
        self._range(target, offset, nbytes)

    def _range(self, buffer: int, offset: int, nbytes: int) -> None:
        size = self._size(buffer)
        if offset < 0 or nbytes < 0 or offset % 4 or nbytes % 4 or offset + nbytes > size:
            raise UsageError(f"{offset:,} + {nbytes:,} B of buffer {buffer}, which has {size:,} B (multiples of 4)")

    def _launch(self, launch: Launch) -> None:
        layout = self._kernels[launch.variant].layout
        kinds = layout.bindings[_slots(layout) :]
        if len(kinds) != len(launch.buffers):
            raise UsageError(f"{launch.variant} binds {len(kinds)} buffers, {len(launch.buffers)} are given")
        ranges = [self._binding(entry, kind) for entry, kind in zip(launch.buffers, kinds, strict=True)]
        _check_aliasing(ranges, kinds)
        self._grid(launch)

    def _binding(self, entry: int | Binding, kind: BindingType) -> tuple[int, int, int]:
        buffer, offset, nbytes = entry if isinstance(entry, Binding) else (entry, 0, 0)
        size = self._size(buffer)
        nbytes = nbytes or size - offset
        name = "Uniform" if kind is BindingType.UNIFORM else "Storage"
        alignment, limit = self._limits[f"min{name}BufferOffsetAlignment"], self._limits[f"max{name}BufferBindingSize"]
        if offset % alignment or nbytes <= 0 or nbytes > limit or offset + nbytes > size:
            raise UsageError(
                f"{offset:,} + {nbytes:,} B of buffer {buffer}, which has {size:,} B, bound as {kind}: offsets are "
                f"multiples of {alignment:,}, at most {limit:,} B can be bound"
            )
        return buffer, offset, offset + nbytes

    def _grid(self, launch: Launch) -> None:
        grid = launch.grid
        if isinstance(grid, ByLength):
            grid = grid.at(self._end)
        limit = self._limits["maxComputeWorkgroupsPerDimension"]
        if not all(1 <= count <= limit for count in grid):
            raise UsageError(f"grid {grid} of {launch.variant}; each of the three must be 1 to {limit:,}")


def _slots(layout: Layout) -> int:
    """How many parameter slots come before the buffers: one or none."""
    return 1 if layout.first == 0 and layout.bindings[:1] == (BindingType.UNIFORM,) else 0


def _check_aliasing(ranges: Sequence[tuple[int, int, int]], kinds: Sequence[BindingType]) -> None:
    """What a dispatch writes has no second use in it: none at all if that only reads, no overlap if it writes too."""
    for i, (buffer, begin, end) in enumerate(ranges):
        if kinds[i] is not BindingType.STORAGE:
            continue
        for j, (other, other_begin, other_end) in enumerate(ranges):
            if i == j or other != buffer:
                continue
            if kinds[j] is not BindingType.STORAGE or (begin < other_end and other_begin < end):
                raise UsageError(f"buffer {buffer} is written at binding {i} and used at binding {j} as well")
