"""Interprets a flat program (``program.py``) for ``FakeDevice``: the order of an encoder and a queue, with their rules.

WRITE and PARAMS take effect at once, like queue.writeBuffer; everything else is recorded and runs at SUBMIT.  So a
write to a range that recorded, unsubmitted commands use would overtake them: WebGPU allows it silently, here it is an
error.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from stepwell.errors import UsageError
from stepwell.gpu.device import BufferUsage, DeviceInfo, Layout
from stepwell.gpu.fake_objects import FakeBindGroup, FakeBuffer, FakePipeline
from stepwell.gpu.fake_profile import FakeProfiler, now_ms
from stepwell.gpu.program import Op, Scalar

_OPERANDS: Mapping[int, int] = {
    Op.BEGIN_PASS: 0,
    Op.END_PASS: 0,
    Op.DISPATCH: 5,
    Op.COPY: 5,
    Op.CLEAR: 3,
    Op.WRITE: 3,
    Op.SUBMIT: 0,
    Op.SCALARS: 5,
    Op.IMMEDIATES: 0,
    Op.PARAMS: 3,
    Op.DISPATCH_BY_LENGTH: 6,
    Op.COPY_PAST: 3,
    Op.COPY_OUT: 3,
}
_OF_THE_STEP = (Op.IMMEDIATES, Op.PARAMS, Op.DISPATCH_BY_LENGTH, Op.COPY_PAST, Op.COPY_OUT)
_MASK_BITS = int(Scalar.POSITION | Scalar.ROWS | Scalar.LENGTH | Scalar.DRAW)
_Object = TypeVar("_Object", FakeBuffer, FakePipeline, FakeBindGroup)


class QueueHost(Protocol):
    """The device whose programs run: its limits, its objects by handle, its log and its ``profiler``."""

    profiler: FakeProfiler

    @property
    def info(self) -> DeviceInfo:
        """As in ``Device``."""

    def get(self, handle: int, kind: type[_Object], purpose: str) -> _Object:
        """The live object of ``handle``; without one of that ``kind`` a UsageError that begins with ``purpose``."""

    def note(self, *entry: object) -> None:
        """Add ``entry`` to the log."""


class FakeQueue:
    """One run over one program on ``device``.

    ``rehearse`` checks the rules of a plan without any effect; SCALARS are placeholders then.  ``handles`` are those of
    the objects met, with the buffers of the bind groups.
    """

    def __init__(self, device: QueueHost, *, rehearse: bool = False) -> None:
        self.device, self.rehearse = device, rehearse
        self.handles: set[int] = set()
        self.max_grid = device.info.limits["maxComputeWorkgroupsPerDimension"]
        self.in_pass = self.has_encoder = False
        self.position = self.length = self.staging = 0
        self.has_scalars = False
        self.block = array("I", (0, 0, 0, 0))
        self.immediates: memoryview | None = None
        self.recorded: list[Callable[[], None]] = []
        self.used: defaultdict[FakeBuffer, set[tuple[int, int]]] = defaultdict(set)
        self.encoding_since = now_ms()

    def run(self, words: "array[int]") -> None:
        """Execute the program ``words``.  Raises UsageError at the word that breaks a rule."""
        handlers: dict[int, Callable[..., None]] = {
            Op.BEGIN_PASS: self._begin_pass,
            Op.END_PASS: self._end_pass,
            Op.DISPATCH: self._dispatch,
            Op.COPY: self._copy,
            Op.CLEAR: self._clear,
            Op.SUBMIT: self._submit,
            Op.SCALARS: self._scalars,
            Op.IMMEDIATES: self._immediates,
            Op.PARAMS: self._params,
            Op.DISPATCH_BY_LENGTH: self._dispatch_by_length,
            Op.COPY_PAST: self._copy_past,
            Op.COPY_OUT: self._copy_out,
        }
        if words.itemsize != 4 or words.typecode not in "IL":
            raise UsageError(f"a program is unsigned 32-bit words; this is array('{words.typecode}').")
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
            if op == Op.SCALARS and at:
                raise UsageError(f"word {at}: SCALARS is the first instruction of a program, or missing.")
            if op in _OF_THE_STEP and not self.has_scalars:
                raise UsageError(f"word {at}: {Op(op).name} in a program that does not begin with SCALARS.")
            if not self.rehearse:
                self.device.note(Op(op).name.lower(), *operands)
            if op == Op.WRITE:
                self._write(operands[0], operands[1], words[at + 4 : end], "WRITE")
            else:
                handlers[op](*operands)
            at = end
        if self.in_pass:
            raise UsageError("the program ends inside an open pass. Add END_PASS and SUBMIT.")
        if self.has_encoder:
            raise UsageError("the program ends with unsubmitted work. Add SUBMIT.")

    # ---- passes -----------------------------------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        self._outside_pass("BEGIN_PASS")
        self.in_pass = self.has_encoder = True
        self.immediates = None
        if self.device.profiler.passes:
            self.recorded.append(self.device.profiler.begin_pass)

    def _end_pass(self) -> None:
        self._inside_pass("END_PASS")
        self.in_pass = False
        if self.device.profiler.passes:
            self.recorded.append(self.device.profiler.end_pass)

    def _immediates(self) -> None:
        self._inside_pass("IMMEDIATES")
        self.immediates = memoryview(self.block.tobytes())

    def _dispatch(self, pipeline_handle: int, group_handle: int, x: int, y: int, z: int) -> None:
        self._inside_pass("DISPATCH")
        pipeline = self._get(pipeline_handle, FakePipeline, "DISPATCH")
        group = self._get(group_handle, FakeBindGroup, "DISPATCH")
        if group.layout[:2] != pipeline.layout[:2]:
            raise UsageError(
                f"DISPATCH of {pipeline} with bind group {group_handle}: the pipeline's layout is "
                f"{_layout(pipeline.layout)}, the group's {_layout(group.layout)}."
            )
        if max(x, y, z) > self.max_grid:
            raise UsageError(
                f"DISPATCH of {pipeline}: grid ({x:,}, {y:,}, {z:,}); the device allows {self.max_grid:,} "
                "per dimension (maxComputeWorkgroupsPerDimension). Spread the grid over two dimensions."
            )
        if group.conflict:
            raise UsageError(f"DISPATCH of {pipeline}: {group.conflict}")
        immediates = self.immediates if pipeline.layout.immediate_bytes else None
        if pipeline.layout.immediate_bytes and immediates is None:
            raise UsageError(f"DISPATCH of {pipeline}: its immediates were not set in this pass. Add IMMEDIATES.")
        for buffer, offset, size in group.entries:
            if buffer.destroyed or buffer.mapped:
                buffer.need_usable(f"DISPATCH of {pipeline} with bind group {group_handle}")
            self.used[buffer].add((offset, size))
        if self.rehearse:
            self.handles.update(buffer.handle for buffer, _, _ in group.entries)
        kernel = pipeline.kernel
        if kernel is not None:
            first = [] if immediates is None else [immediates]
            self.recorded.append(lambda: kernel([*first, *group.views()], (x, y, z)))

    def _dispatch_by_length(self, pipeline: int, group: int, unit: int, y: int, z: int, most: int) -> None:
        if not unit or not most:
            raise UsageError(f"DISPATCH_BY_LENGTH of unit {unit}, at most {most}.")
        self._dispatch(pipeline, group, min(-(-self.length // unit), most), y, z)

    # ---- copies -----------------------------------------------------------------------------------------------------

    def _copy(self, source_handle: int, source_offset: int, target_handle: int, offset: int, nbytes: int) -> None:
        self._outside_pass("COPY")
        source = self._buffer(source_handle, source_offset, nbytes, BufferUsage.COPY_SRC, "COPY from")
        target = self._buffer(target_handle, offset, nbytes, BufferUsage.COPY_DST, "COPY to")
        if source is target:
            raise UsageError(f"COPY inside one buffer: {source}. WebGPU allows copies between two buffers only.")
        self.used[source].add((source_offset, nbytes))
        self.used[target].add((offset, nbytes))
        self._record(lambda: target.copy_from(source, source_offset, offset, nbytes))

    def _copy_past(self, source: int, target: int, unit: int) -> None:
        self._outside_pass("COPY_PAST")
        if unit % 4:
            raise UsageError(f"COPY_PAST of unit {unit:,} B; it must be a multiple of 4.")
        self.has_encoder = True
        if self.position * unit:
            self._copy(source, 0, target, 0, self.position * unit)
        else:
            self._get(source, FakeBuffer, "COPY_PAST from")
            self._get(target, FakeBuffer, "COPY_PAST to")

    def _copy_out(self, source: int, offset: int, nbytes: int) -> None:
        self._outside_pass("COPY_OUT")
        if self.rehearse:
            self._buffer(source, offset, nbytes, BufferUsage.COPY_SRC, "COPY_OUT from")
        else:
            self._copy(source, offset, self.staging, 0, nbytes)

    def _clear(self, handle: int, offset: int, nbytes: int) -> None:
        self._outside_pass("CLEAR")
        buffer = self._buffer(handle, offset, nbytes, BufferUsage.COPY_DST, "CLEAR")
        self.used[buffer].add((offset, nbytes))
        self._record(lambda: buffer.clear(offset, nbytes))

    # ---- the queue --------------------------------------------------------------------------------------------------

    def _scalars(self, position: int, rows: int, length: int, draw: int, staging: int) -> None:
        self.position, self.length, self.staging = position, length, staging
        self.block, self.has_scalars = array("I", (position, rows, length, draw)), True

    def _params(self, handle: int, offset: int, mask: int) -> None:
        if mask & ~_MASK_BITS:
            raise UsageError(f"PARAMS with mask {mask:#b}; its bits are position, rows, length and draw.")
        masked = array("I", (word if mask >> bit & 1 else 0 for bit, word in enumerate(self.block)))
        self._write(handle, offset, masked, "PARAMS")

    def _write(self, handle: int, offset: int, words: "array[int]", name: str) -> None:
        nbytes = 4 * len(words)
        buffer = self._buffer(handle, offset, nbytes, BufferUsage.COPY_DST, name)
        if any(start < offset + nbytes and offset < start + size for start, size in self.used.get(buffer, ())):
            raise UsageError(
                f"{name} of {nbytes:,} B at {offset:,} to {buffer}, a range that recorded and unsubmitted commands "
                "use: the write would run before them. Write first, or SUBMIT in between."
            )
        if not self.rehearse:
            buffer.put(offset, memoryview(words).cast("B"))

    def _submit(self) -> None:
        self._outside_pass("SUBMIT")
        if self.has_encoder and not self.rehearse:
            profiler = self.device.profiler
            encoded = profiler.add_span("encode", self.encoding_since)
            for command in self.recorded:
                command()
            self.encoding_since = profiler.add_span("submit", encoded)
        self.recorded.clear()
        self.used.clear()
        self.has_encoder = False

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _get(self, handle: int, kind: type[_Object], purpose: str) -> _Object:
        self.handles.add(handle)
        return self.device.get(handle, kind, purpose)

    def _buffer(self, handle: int, offset: int, nbytes: int, usage: BufferUsage, purpose: str) -> FakeBuffer:
        buffer = self._get(handle, FakeBuffer, purpose)
        buffer.need(usage, purpose)
        buffer.need_range(offset, nbytes, purpose)
        if not self.rehearse:
            buffer.need_usable(purpose)
        return buffer

    def _record(self, command: Callable[[], None]) -> None:
        self.has_encoder = True
        self.recorded.append(command)

    def _inside_pass(self, name: str) -> None:
        if not self.in_pass:
            raise UsageError(f"{name} outside an open pass. Add BEGIN_PASS before it.")

    def _outside_pass(self, name: str) -> None:
        if self.in_pass:
            raise UsageError(f"{name} inside an open pass. Add END_PASS before it.")


def _layout(layout: Layout) -> str:
    return f"({', '.join(layout.bindings)}) from binding {layout.first}"
