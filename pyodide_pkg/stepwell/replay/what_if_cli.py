"""``python -m stepwell.replay what-if TRACE``: the command, and the answer of ``what_if`` as text."""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.memory.buffer import mib
from stepwell.replay.cli_input import add_span, budget_bytes, check_folder, in_processes, read_events
from stepwell.replay.simulator_report import MIB, align
from stepwell.replay.traces import read_metadata
from stepwell.replay.what_if import (
    CREATE_US,
    CREATE_US_PER_MIB,
    Costs,
    Setting,
    WhatIf,
    compare,
    recorded_costs,
    recorded_setting,
    settings,
    survey,
    try_setting,
)
from stepwell.replay.what_if_outcome import Outcome, Survey
from stepwell.replay.what_if_settings import NO_POOL
from stepwell.replay.workloads import WORKLOADS

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  (argparse has no public name for it)

_Task = tuple[Setting, int | None]

_EPILOG = f"""\
Record a trace from a live pool, run the model, and save it; the metadata is optional, but makes the answer yours:

  recorder = TraceRecorder(pool)                     # from stepwell.replay.traces
  ...
  recorder.save(Path("session.trace.gz"), {{"policy": "bucket", "options": {{}},
                                           "create_us": 90, "create_us_per_mib": 75}})

"policy" and "options" are what it was recorded under, "create_us" and "create_us_per_mib" what creating a buffer took
there. Without them the baseline is bucket (ONNX Runtime's pool), and a create is assumed to take {CREATE_US:g} us and
{CREATE_US_PER_MIB:g} us per MiB, as measured on an H200. Either can be given here instead.

A trace that stepwell.attach recorded is of a runtime without this pool: no pool is compared with one under it, which
gives every buffer the size asked for, and the answer is a line of JavaScript. measureCosts() of the attachment puts the
costs into the trace.

creates and MiB are means over all tokens, as simulate prints them. later, most creates, ms and ms saved leave out the
first two tokens, which fill the pool under every policy. A run without KV is called a run instead of a token.

With --budget every setting is replayed as a pool with that budget would run it; those that exceed it even so are left
out. The baseline has no budget.
"""


def add_command(commands: "Commands") -> None:
    """Add the command ``what-if`` to ``commands``."""
    summary = "what a recorded trace would have cost under every policy, and which setting to take"
    command = commands.add_parser(
        "what-if",
        help=summary,
        description=summary,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("workload", metavar="TRACE", help=f"a trace file, or one of {', '.join(WORKLOADS)}")
    add_span(command)
    command.add_argument("--baseline", metavar="POLICY", help="compare with this policy; default: what was recorded")
    command.add_argument("--create-us", type=float, metavar="US", help="microseconds that creating any buffer takes")
    command.add_argument("--create-us-per-mib", type=float, metavar="US", help="and those for each MiB of it")
    command.add_argument("--budget", type=float, metavar="MiB", help="of reserved memory; default: none")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a report with a chart to this file")
    command.add_argument("--jobs", type=int, metavar="N", help="processes; default: one per core")
    command.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Replay every setting and print the answer; BadTrace or BadRequest for what is wrong with trace or ``options``."""
    check_folder("--json", options.json)
    check_folder("--html", options.html)
    budget = budget_bytes(options)
    events = read_events(options)  # says what is wrong with the name or the span
    metadata = {} if options.workload in WORKLOADS else read_metadata(Path(options.workload))
    costs = recorded_costs(metadata, options.create_us, options.create_us_per_mib)
    baseline, baseline_from = recorded_setting(metadata, options.baseline)
    found = survey(events, metadata)
    outcomes = _try_all(options, costs, found, baseline, budget)
    answer = compare(found, outcomes[1:], outcomes[0], baseline_from, costs, budget)
    sys.stdout.write(text(answer))
    if options.json is not None:
        document = {"trace": options.workload, **answer}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.html is not None:
        from stepwell.replay.what_if_html import page  # jinja2 is slow to import

        options.html.write_text(page(answer, Path(options.workload).name), encoding="utf-8")


def _try_all(
    options: argparse.Namespace, costs: Costs, found: Survey, baseline: Setting, budget: int | None
) -> list[Outcome]:
    """The outcome of the baseline without a budget, then those of all settings in their order."""
    tasks: list[_Task] = [(baseline, None), *((setting, budget) for setting in settings(found.attached))]
    outcomes: dict[int, Outcome] = {}
    for count, (index, outcome) in enumerate(
        in_processes(partial(_try, options, costs, found.unit), list(enumerate(tasks)), options.jobs), 1
    ):
        sys.stderr.write(f"{count}/{len(tasks)}  {outcome['label']}\n")
        outcomes[index] = outcome
    return [outcomes[index] for index in range(len(tasks))]


def _try(options: argparse.Namespace, costs: Costs, unit: str, numbered: tuple[int, _Task]) -> tuple[int, Outcome]:
    index, (setting, budget) = numbered
    return index, try_setting(read_events(options), setting, costs, unit, budget)


def text(answer: WhatIf) -> str:
    """The ``answer`` as text: recommendation, assumptions, table, and the classes that hurt under the baseline."""
    baseline = answer["baseline"]
    parts = [answer["sentence"], _assumptions(answer)]
    if answer["settings"]:
        parts.append(align(_rows(answer)))
    if answer["over_budget"]:
        parts.append(f"Over the budget and left out: {', '.join(answer['over_budget'])}.")
    under = f"Under {baseline['label']}" if baseline["label"] != NO_POOL else "Without a pool"
    if baseline["hurting"]:
        lines = [f"{under}:", *(f"- {row['why']}" for row in baseline["hurting"])]
        parts.append("\n".join(lines))
    else:
        parts.append(f"{under} no size class creates its buffers again and again.")
    best = next((found for found in answer["settings"] if found["label"] == answer["recommended"]), None)
    if answer["code"] is not None:
        parts.append(f"Recommended: {answer['code']}")
    elif best is not None:
        options = "".join(f" --option {name}={value!r}" for name, value in best["options"].items())
        parts.append(f"Recommended: --policy {best['policy']}{options}")
    return "\n\n".join(parts) + "\n"


def _assumptions(answer: WhatIf) -> str:
    budget = answer["budget_bytes"]
    limit = "" if budget is None else f" Budget: {mib(budget)}."
    return (
        f"{answer['runs']:,} {answer['unit']}s. Baseline: {answer['baseline']['label']} ({answer['baseline_from']}). "
        f"Creating a buffer: {answer['create_us']:g} us and {answer['create_us_per_mib']:g} us per MiB "
        f"({answer['costs_from']}).{limit}"
    )


def _rows(answer: WhatIf) -> Sequence[Sequence[str]]:
    unit = answer["unit"]
    rows = [
        ["setting", f"creates/{unit}", f"MiB/{unit}", "later", "most creates", "peak MiB", f"ms/{unit}", "ms saved", ""]
    ]
    rows += [
        [
            found["label"],
            f"{found['creates_per_token']:.3f}",
            f"{found['mib_per_token']:.2f}",
            f"{found['steady_creates_per_token']:.3f}",
            f"{found['max_creates_in_token']:,}",
            f"{found['peak_bytes'] / MIB:,.0f}",
            f"{found['ms_per_token']:.2f}",
            f"{found['saved_ms_per_token']:.2f}",
            "<" if found["label"] == answer["recommended"] else "",
        ]
        for found in answer["settings"]
    ]
    return rows
