"""From a recorded step to programs: where passes begin and end, what is submitted when, which writes are left out."""

from collections.abc import Iterator

from stepwell.gpu.clock import now_ms
from stepwell.gpu.device import Binding
from stepwell.gpu.program import STEP_BYTES, Program
from stepwell.launch.bind_groups import create_bind_group
from stepwell.launch.context import LaunchContext
from stepwell.launch.counters import Counters
from stepwell.launch.parameters import Words
from stepwell.step.recorder import ByLength, Copy, CopyOut, CopyPast, Launch, Step, Write


class Assembly:
    """One step on its way to the device.

    ``whole``: one program that can be replayed with other scalars, so every write that depends on them is in it;
    else the programs come one by one as they are due for submission.
    """

    def __init__(self, context: LaunchContext, step: Step, *, whole: bool) -> None:
        self._context = context
        self._step = step
        self._whole = whole
        self._counters = Counters()
        self._scalars = (step.position, step.rows, step.length, step.draw)
        self._words: dict[int, Words] = {}  # by what of them a kernel reads
        self._program = self._new_program()
        self._once = self._new_program()  # of a whole step: writes that need not be repeated with it
        self.written_once: set[Binding] = set()
        self._has_work = False  # of the program: something that runs at its submit
        self._immediates_set = False  # in the open pass
        self._dispatches = 0  # since the last submit
        self._submitted_ms = 0.0
        self.written: dict[Binding, Words] = {}
        self.pipelines: set[int] = set()
        self.groups: set[int] = set()
        self.slot_buffers: set[int] = set()  # the buffers that they are in
        self.own_groups: list[int] = []  # that no cache holds

    @property
    def counters(self) -> Counters:
        """What was assembled so far."""
        return self._counters

    def programs(self) -> Iterator[Program]:
        """The step's programs, each to be submitted before the next is asked for."""
        context = self._context
        pacing_ms = context.options.submit_every_ms
        every = context.options.submit_every
        self._submitted_ms = now_ms() if pacing_ms > 0 else 0.0
        if context.parameters is not None:
            context.parameters.begin_step()
        for command in self._step.commands:
            kind = type(command)
            if kind is Write:
                if self._has_work:  # the queue takes a write at once: what came before must be with it by then
                    yield from self._submit()
                    if context.parameters is not None:
                        context.parameters.flushed()
                self._write(command)  # type: ignore[arg-type]
                continue
            if kind is not Launch:
                self._copy(command)  # type: ignore[arg-type]
                continue
            self._launch(command)  # type: ignore[arg-type]
            due = 0 < every <= self._dispatches
            if due or (pacing_ms > 0 and now_ms() - self._submitted_ms >= pacing_ms):
                yield from self._submit()
        if self._has_work or self._whole:
            yield from self._submit(last=True)
        elif len(self._program.words) > _SCALAR_WORDS:
            yield self._program  # writes only

    def _new_program(self) -> Program:
        program = Program()
        program.scalars(*self._scalars, self._step.staging)
        return program

    def _submit(self, last: bool = False) -> Iterator[Program]:
        program = self._program
        self._end_pass()
        if self._has_work:
            program.submit()
            self._counters.submits += 1
            self._counters.encoders += 1
        self._has_work = False
        self._dispatches = 0
        if not self._whole or last:
            if self.written_once:
                yield self._once
            self._program = self._new_program()
            yield program
        if self._context.options.submit_every_ms > 0:
            self._submitted_ms = now_ms()

    def _end_pass(self) -> None:
        if self._program.in_pass:
            self._program.end_pass()

    def _write(self, command: Write) -> None:
        self._program.write(*command)
        self._counters.uploads += 1
        self._counters.upload_bytes += 4 * len(command.words)

    def _copy(self, command: Copy | CopyPast | CopyOut) -> None:
        self._end_pass()
        program = self._program
        if isinstance(command, Copy):
            program.copy(*command)
        elif isinstance(command, CopyPast):
            program.copy_past(*command)
        else:
            program.copy_out(*command)
        self._has_work = True
        self._counters.copies += 1

    def _launch(self, command: Launch) -> None:
        context, counters, program = self._context, self._counters, self._program
        options = context.options
        pipeline, _, fields = context.kernels[command.variant]
        slot = None
        if fields is not None and context.parameters is not None:
            slot = self._place(pipeline, fields)
        if options.bind_group_cache:
            group = context.bind_groups.get(context, counters, pipeline, command.buffers, slot)
        else:
            group = create_bind_group(context.device, pipeline, command.buffers, slot)
            self.own_groups.append(group)
            counters.bind_groups_created += 1
        if self._whole:
            self.pipelines.add(pipeline)
            self.groups.add(group)
            if slot is not None:
                self.slot_buffers.add(slot.buffer)
        if not program.in_pass:
            program.begin_pass()
            counters.passes += 1
            self._immediates_set = False
        if fields is not None and slot is None and not (self._immediates_set and options.skip_uploads):
            program.immediates()
            counters.immediates += 1
            counters.immediates_bytes += STEP_BYTES
            self._immediates_set = True
        grid = command.grid
        if isinstance(grid, ByLength):
            program.dispatch_by_length(pipeline, group, *grid)
        else:
            program.dispatch(pipeline, group, grid)
        if not options.shared_pass:
            program.end_pass()
        self._has_work = True
        self._dispatches += 1
        counters.launches += 1

    def _place(self, pipeline: int, fields: int) -> Binding:
        """The launch's slot, with its scalars in it: written unless it is known to hold them."""
        context, counters = self._context, self._counters
        assert context.parameters is not None
        slot = context.parameters.slot(pipeline)
        words = self._words.get(fields)
        if words is None:
            words = tuple(value if fields >> bit & 1 else 0 for bit, value in enumerate(self._scalars))
            self._words[fields] = words
        written = self.written.get(slot)  # earlier in this step: a flush has made the slot free again
        program = self._program
        if context.options.skip_uploads and not (self._whole and fields):
            if context.shadow.holds(slot, words) if written is None else written == words:
                counters.uploads_skipped += 1
                return slot
            if self._whole and written is None:
                # a plan repeats what may be different when it is replayed; of this launch's slot nothing is read
                program = self._once
                self.written_once.add(slot)
        program.params(slot.buffer, slot.offset, fields)
        self.written[slot] = words
        counters.uploads += 1
        counters.upload_bytes += STEP_BYTES
        return slot


_SCALAR_WORDS = 6  # SCALARS and its operands
