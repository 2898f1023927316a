"""The flat integer program: one step's GPU work as unsigned 32-bit words, executed by one call.

Each instruction is an opcode followed by its operands.  Handles are the ints that a ``Device`` returned; offsets and
sizes are bytes.  ``executor.js`` and ``FakeDevice`` interpret the same words, so this table is their contract:

    BEGIN_PASS                                             open a compute pass (opens the encoder if there is none)
    END_PASS                                               close it
    DISPATCH   pipeline, bind group, x, y, z               one launch; needs an open pass
    COPY       source, offset, target, offset, nbytes      buffer to buffer; no pass may be open
    CLEAR      buffer, offset, nbytes                      zero fill; no pass may be open
    WRITE      buffer, offset, count, word, …              queue.writeBuffer: runs *before* what is not yet submitted
    SUBMIT                                                 finish the encoder and submit it
    SCALARS    position, rows, length, draw, staging       the step's own numbers; first of all, or missing
    IMMEDIATES                                             the step block as the pass's immediates; needs an open pass
    PARAMS     buffer, offset, mask                        queue.writeBuffer of the step block, like WRITE
    DISPATCH_BY_LENGTH  pipeline, bind group, unit, y, z, most     DISPATCH with x = length / unit, rounded up, or most
    COPY_PAST  source, target, unit                        copies position * unit bytes, from start to start, like COPY
    COPY_OUT   source, offset, nbytes                      copies to the start of the staging buffer, like COPY

The step block is 16 bytes: position, rows, length, draw.  ``PARAMS`` writes zero for each word whose bit is not
in ``mask``, so that a buffer stays the same while only other words change.  Immediates hold until the end of the pass.
What changes from step to step is in SCALARS only: a plan (``Device.create_plan``) is a program with other SCALARS.
"""

from array import array
from collections.abc import Iterable
from enum import IntEnum, IntFlag


class Op(IntEnum):
    """The opcodes, described in the module."""

    BEGIN_PASS = 1
    END_PASS = 2
    DISPATCH = 3
    COPY = 4
    CLEAR = 5
    WRITE = 6
    SUBMIT = 7
    SCALARS = 8
    IMMEDIATES = 9
    PARAMS = 10
    DISPATCH_BY_LENGTH = 11
    COPY_PAST = 12
    COPY_OUT = 13


class Scalar(IntFlag):
    """The words of the step block, as the mask of PARAMS selects them."""

    POSITION = 1
    ROWS = 2
    LENGTH = 4
    DRAW = 8


STEP_BYTES = 16
"""Bytes of the step block."""
ANY_NUMBER = 0xFFFF_FFFF
"""The ``most`` of a DISPATCH_BY_LENGTH without a bound."""


class Program:
    """Builds a program; ``Device.submit`` takes its ``words``.  Each method adds the instruction of its name."""

    __slots__ = ("in_pass", "words")

    def __init__(self) -> None:
        self.words = array("I")
        self.in_pass = False

    def begin_pass(self) -> None:
        """Add BEGIN_PASS."""
        self.words.append(Op.BEGIN_PASS)
        self.in_pass = True

    def end_pass(self) -> None:
        """Add END_PASS."""
        self.words.append(Op.END_PASS)
        self.in_pass = False

    def dispatch(self, pipeline: int, bind_group: int, grid: tuple[int, int, int]) -> None:
        """Add DISPATCH."""
        self.words.extend((Op.DISPATCH, pipeline, bind_group, *grid))

    def copy(self, source: int, source_offset: int, target: int, target_offset: int, nbytes: int) -> None:
        """Add COPY."""
        self.words.extend((Op.COPY, source, source_offset, target, target_offset, nbytes))

    def clear(self, buffer: int, offset: int, nbytes: int) -> None:
        """Add CLEAR."""
        self.words.extend((Op.CLEAR, buffer, offset, nbytes))

    def write(self, buffer: int, offset: int, values: Iterable[int]) -> None:
        """Add WRITE of 32-bit ``values``."""
        data = array("I", values)
        self.words.extend((Op.WRITE, buffer, offset, len(data)))
        self.words.extend(data)

    def submit(self) -> None:
        """Add SUBMIT."""
        self.words.append(Op.SUBMIT)

    def scalars(self, position: int, rows: int, length: int, draw: int = 0, staging: int = 0) -> None:
        """Add SCALARS, which comes first; ``staging`` is the handle that ``copy_out`` copies to (0: none)."""
        self.words.extend((Op.SCALARS, position, rows, length, draw, staging))

    def immediates(self) -> None:
        """Add IMMEDIATES."""
        self.words.append(Op.IMMEDIATES)

    def params(self, buffer: int, offset: int, mask: Scalar | int) -> None:
        """Add PARAMS."""
        self.words.extend((Op.PARAMS, buffer, offset, mask))

    def dispatch_by_length(
        self, pipeline: int, bind_group: int, unit: int, y: int, z: int, most: int = ANY_NUMBER
    ) -> None:
        """Add DISPATCH_BY_LENGTH."""
        self.words.extend((Op.DISPATCH_BY_LENGTH, pipeline, bind_group, unit, y, z, most))

    def copy_past(self, source: int, target: int, unit: int) -> None:
        """Add COPY_PAST."""
        self.words.extend((Op.COPY_PAST, source, target, unit))

    def copy_out(self, source: int, offset: int, nbytes: int) -> None:
        """Add COPY_OUT."""
        self.words.extend((Op.COPY_OUT, source, offset, nbytes))
