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
"""

from array import array
from collections.abc import Iterable
from enum import IntEnum


class Op(IntEnum):
    BEGIN_PASS = 1
    END_PASS = 2
    DISPATCH = 3
    COPY = 4
    CLEAR = 5
    WRITE = 6
    SUBMIT = 7


class Program:
    """Builds the words of one step.  ``words`` is what ``Device.submit`` takes."""

    __slots__ = ("in_pass", "words")

    def __init__(self) -> None:
        self.words = array("I")
        self.in_pass = False

    def begin_pass(self) -> None:
        self.words.append(Op.BEGIN_PASS)
        self.in_pass = True

    def end_pass(self) -> None:
        self.words.append(Op.END_PASS)
        self.in_pass = False

    def dispatch(self, pipeline: int, bind_group: int, grid: tuple[int, int, int]) -> None:
        self.words.extend((Op.DISPATCH, pipeline, bind_group, *grid))

    def copy(self, source: int, source_offset: int, target: int, target_offset: int, nbytes: int) -> None:
        self.words.extend((Op.COPY, source, source_offset, target, target_offset, nbytes))

    def clear(self, buffer: int, offset: int, nbytes: int) -> None:
        self.words.extend((Op.CLEAR, buffer, offset, nbytes))

    def write(self, buffer: int, offset: int, values: Iterable[int]) -> None:
        data = array("I", values)
        self.words.extend((Op.WRITE, buffer, offset, len(data)))
        self.words.extend(data)

    def submit(self) -> None:
        self.words.append(Op.SUBMIT)
