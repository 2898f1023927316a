"""The demonstration: one question, three ways of keeping the KV cache, the same tokens; a table and a report."""

import re
from collections.abc import Callable
from pathlib import Path

from harness.cli import report
from harness.page import record as records
from harness.page.record import Record
from harness.page.run import PageRunner
from harness.page.scenario import Scenario
from harness.page.summary import label

QUESTION = "What is the capital of France?"
"""The prompt."""
TOKENS = 64
"""Tokens of an answer."""


def scenarios(tokens: int = TOKENS) -> list[Scenario]:
    """The runs that are shown: the fast way, and the growing KV cache under our policy and ONNX Runtime's."""
    # The model would end its answer after a few words; with EOS banned there is something to time.
    choices = [("static", "adaptive"), ("grow", "adaptive"), ("grow", "bucket")]
    return [Scenario(QUESTION, tokens=tokens, kv=kv, policy=policy, ban_eos=True) for kv, policy in choices]


def run_all(
    runner: PageRunner,
    wanted: list[Scenario],
    follow: Callable[[Scenario], Callable[[str], None]],
    on_phase: Callable[[str], None],
) -> list[Record]:
    """Run each of ``wanted``; a cancelled run is the last one.

    ``follow`` gives what takes a run's answer as it grows; ``on_phase`` is told what the page is doing.
    """
    found: list[Record] = []
    for scenario in wanted:
        found.append(runner.run(scenario, follow(scenario), on_phase))
        if found[-1]["finish_reason"] == "cancelled":
            break
    return found


def save(found: list[Record], folder: Path) -> list[Path]:
    """Write each record of ``found`` and the report of them all to ``folder``; the report's path comes last."""
    paths = []
    for item in found:
        path = folder / f"{re.sub(r'[^a-z0-9]+', '-', label(item))}.json"
        records.write(item, path)
        paths.append(path)
    page = folder / "report.html"
    page.write_text(report.render(found), encoding="utf-8")
    return [*paths, page]
