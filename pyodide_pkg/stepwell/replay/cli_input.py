"""Parts that the commands of ``python -m stepwell.replay`` share: events, a budget, output files, processes."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from stepwell.errors import BadRequest
from stepwell.replay.simulator import served
from stepwell.replay.simulator_report import MIB
from stepwell.replay.traces import Event, read_trace
from stepwell.replay.workloads import WORKLOADS, workload_events

T = TypeVar("T")
R = TypeVar("R")


def add_span(command: argparse.ArgumentParser, default_last: int | None = None) -> None:
    """Add ``--from`` and ``--to``, which cut a workload; ``default_last``: the tokens without ``--to``."""
    span = "" if default_last is None else f"; default: {default_last} tokens"
    command.add_argument("--from", dest="first", type=int, metavar="S", help="first position (static: first run)")
    command.add_argument("--to", dest="last", type=int, metavar="S", help=f"last position (static: last run){span}")


def read_events(options: argparse.Namespace) -> Iterator[Event]:
    """The events of ``options.workload``, read anew by each call; BadRequest if there is no such workload or file."""
    name = options.workload
    if name in WORKLOADS:
        return workload_events(name, options.first, options.last)
    if not Path(name).is_file():
        raise BadRequest(
            f"workload {name!r}: neither one of {', '.join(WORKLOADS)} nor a trace file. "
            "TraceRecorder in stepwell.replay.traces records one."
        )
    if options.first is not None or options.last is not None:
        raise BadRequest("--from and --to cut workloads; a trace is replayed as it was recorded.")
    return served(read_trace(Path(name)))


def budget_bytes(options: argparse.Namespace) -> int | None:
    """The bytes of ``--budget``, or None; BadRequest unless it is a positive number."""
    if options.budget is None:
        return None
    if not 0 < options.budget < float("inf"):
        raise BadRequest(f"--budget {options.budget}: it must be more than 0 MiB.")
    return int(options.budget * MIB)


def check_folder(option: str, path: Path | None) -> None:
    """Raise BadRequest, before the work begins, if the folder of ``path`` does not exist."""
    if path is not None and not path.parent.is_dir():
        raise BadRequest(f"{option} {path}: there is no folder {path.parent}.")


def in_processes(function: Callable[[T], R], items: Sequence[T], jobs: int | None) -> Iterator[R]:
    """``function(item)`` of all ``items`` in the order they end, in ``jobs`` processes; None: one per core.

    With one process, and where there are none to start, in this one.
    """
    jobs = min(len(items), jobs or os.cpu_count() or 1)
    if jobs <= 1 or sys.platform == "emscripten":
        yield from map(function, items)
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    # spawn: the same on every system, and safe where this process has threads
    with ProcessPoolExecutor(jobs, get_context("spawn")) as executor:
        for future in as_completed([executor.submit(function, item) for item in items]):
            yield future.result()
