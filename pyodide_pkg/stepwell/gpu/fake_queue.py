"""Interprets a flat program (``program.py``) for ``FakeDevice``: the order of an encoder and a queue, with their rules.

WRITE takes effect at once, like queue.writeBuffer; everything else is recorded and runs at SUBMIT.  So a WRITE to a
buffer that recorded, unsubmitted commands use would overtake them: WebGPU allows it silently, here it is an error.
"""

from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from stepwell.errors import UsageError
from stepwell.gpu.device import BufferUsage
from stepwell.gpu.fake_objects import FakeBindGroup, FakeBuffer, FakePipeline
from stepwell.gpu.program import Op

if TYPE_CHECKING:
    from stepwell.gpu.fake_device import FakeDevice

_OPERANDS: Mapping[int, int] = {
    Op.BEGIN_PASS: 0,
    Op.END_PASS: 0,
    Op.DISPATCH: 5,
    Op.COPY: 5,
    Op.CLEAR: 3,
    Op.WRITE: 3,
    Op.SUBMIT: 0,
}


class FakeQueue:
    """One run over one program; raises UsageError at the word that breaks a rule."""

    def __init__(self, device: "FakeDevice") -> None:
        self.device = device
        self.max_grid = device.info.limits["maxComputeWorkgroupsPerDimension"]
        self.in_pass = False
        self.recorded: list[Callable[[], None]] = []
        self.has_encoder = False
        self.used: set[FakeBuffer] = set()

    def run(self, words: "array[int]") -> None:
        handlers: dict[int, Callable[..., None]] = {
            Op.BEGIN_PASS: self._begin_pass,
            Op.END_PASS: self._end_pass,
            Op.DISPATCH: self._dispatch,
            Op.COPY: self._copy,
            Op.CLEAR: self._clear,
            Op.SUBMIT: self._submit,
        }
        at = 0
        while at < len(words):
            op = words[at]
            if op not in _OPERANDS:
                raise UsageError(f"word {at}: unknown opcode {op}; known are {min(_OPERANDS)} to {max(_OPERANDS)}.")
            end = at + 1 + _OPERANDS[op]
            operands = words[at + 1 : end]
            if op == Op.WRITE and len(operands) == _OPERANDS[op]:
                end += operands[2]
            if end > len(words):
                raise UsageError(f"word {at}: {Op(op).name} needs {end - at} words, the program has {len(words) - at}.")
            self.device.note(Op(op).name.lower(), *operands)
            if op == Op.WRITE:
                self._write(operands[0], operands[1], words[at + 4 : end])
            else:
                handlers[op](*operands)
            at = end
        if self.in_pass:
            raise UsageError("the program ends inside an open pass. Add END_PASS and SUBMIT.")
        if self.has_encoder:
            raise UsageError("the program ends with unsubmitted work. Add SUBMIT.")

    def _begin_pass(self) -> None:
        self._outside_pass("BEGIN_PASS")
        self.in_pass = self.has_encoder = True

    def _end_pass(self) -> None:
        if not self.in_pass:
            raise UsageError("END_PASS without an open pass.")
        self.in_pass = False

    def _dispatch(self, pipeline_handle: int, group_handle: int, x: int, y: int, z: int) -> None:
        if not self.in_pass:
            raise UsageError("DISPATCH outside a pass. Add BEGIN_PASS before it.")
        pipeline = self.device.get(pipeline_handle, FakePipeline, "DISPATCH")
        group = self.device.get(group_handle, FakeBindGroup, "DISPATCH")
        if group.bindings != pipeline.bindings:
            raise UsageError(
                f"DISPATCH of {pipeline} with bind group {group_handle}: the pipeline's layout is "
                f"{_layout(pipeline.bindings)}, the group's {_layout(group.bindings)}."
            )
        if max(x, y, z) > self.max_grid:
            raise UsageError(
                f"DISPATCH of {pipeline}: grid ({x:,}, {y:,}, {z:,}); the device allows {self.max_grid:,} "
                "per dimension (maxComputeWorkgroupsPerDimension). Spread the grid over two dimensions."
            )
        if group.conflict:
            raise UsageError(f"DISPATCH of {pipeline}: {group.conflict}")
        for buffer, _, _ in group.entries:
            if buffer.destroyed or buffer.mapped:
                buffer.need_usable(f"DISPATCH of {pipeline} with bind group {group_handle}")
            self.used.add(buffer)
        kernel = pipeline.kernel
        if kernel is not None:
            self.recorded.append(lambda: kernel(group.views(), (x, y, z)))

    def _copy(self, source_handle: int, source_offset: int, target_handle: int, offset: int, nbytes: int) -> None:
        self._outside_pass("COPY")
        source = self._buffer(source_handle, source_offset, nbytes, BufferUsage.COPY_SRC, "COPY from")
        target = self._buffer(target_handle, offset, nbytes, BufferUsage.COPY_DST, "COPY to")
        if source is target:
            raise UsageError(f"COPY inside one buffer: {source}. WebGPU allows copies between two buffers only.")
        self._record(lambda: target.copy_from(source, source_offset, offset, nbytes), source, target)

    def _clear(self, handle: int, offset: int, nbytes: int) -> None:
        self._outside_pass("CLEAR")
        buffer = self._buffer(handle, offset, nbytes, BufferUsage.COPY_DST, "CLEAR")
        self._record(lambda: buffer.clear(offset, nbytes), buffer)

    def _write(self, handle: int, offset: int, words: "array[int]") -> None:
        buffer = self._buffer(handle, offset, len(words) * 4, BufferUsage.COPY_DST, "WRITE")
        if buffer in self.used:
            raise UsageError(
                f"WRITE to {buffer}, which recorded and unsubmitted commands use: the write would run before them. "
                "Write first, or SUBMIT in between."
            )
        buffer.put(offset, memoryview(words).cast("B"))

    def _submit(self) -> None:
        self._outside_pass("SUBMIT")
        for command in self.recorded:
            command()
        self.recorded.clear()
        self.used.clear()
        self.has_encoder = False

    def _buffer(self, handle: int, offset: int, nbytes: int, usage: BufferUsage, purpose: str) -> FakeBuffer:
        buffer = self.device.get(handle, FakeBuffer, purpose)
        buffer.need(usage, purpose)
        buffer.need_range(offset, nbytes, purpose)
        buffer.need_usable(purpose)
        return buffer

    def _record(self, command: Callable[[], None], *buffers: FakeBuffer) -> None:
        self.has_encoder = True
        self.recorded.append(command)
        self.used.update(buffers)

    def _outside_pass(self, name: str) -> None:
        if self.in_pass:
            raise UsageError(f"{name} inside an open pass. Add END_PASS before it.")


def _layout(bindings: tuple[str, ...]) -> str:
    return "(" + ", ".join(bindings) + ")"
