"""``stepwell.attach`` off the browser, and the table of what a pair costs."""

from io import StringIO

import pytest
from rich.console import Console

import stepwell
from harness.arms.attach_cost import ARMS, PairTimes, table
from stepwell.errors import NoWebGPU


def test_attach_needs_a_browser() -> None:
    with pytest.raises(NoWebGPU, match=r"needs Pyodide.*stepwell-attach\.js"):
        stepwell.attach(policy="adaptive")


def test_the_median_step_is_shown() -> None:
    text = StringIO()
    bare, always, *_ = ARMS
    times = PairTimes(always, [1.0, 9.0, 3.0], [2.0, 0.5, 0.25], [7.0, 8.0, 1.0])
    assert times.pair_us == 3.25
    Console(file=text, width=100).print(table([times, PairTimes(bare, [1.0], [1.0], [1.0])]))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.getvalue().splitlines() if "│" in line]
    assert rows == [["js", "always", "3.00", "0.50", "3.25", "7.00"], ["bare", "-", "1.00", "1.00", "2.00", "1.00"]]
