"""What code costs, counted and not timed: the same figure on an idle machine and on a busy one."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def lines_counted(counts: Callable[[str], bool] = lambda file: True) -> Iterator[Callable[[], int]]:
    """Lines of Python that have run since the block began, in every function of a file that ``counts``."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "call":
            return trace if counts(frame.f_code.co_filename) else None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: lines
    finally:
        sys.settrace(before)


def lines_run(action: Callable[[], object]) -> int:
    """Lines of Python that ``action`` runs."""
    with lines_counted() as lines:
        action()
        return lines()
