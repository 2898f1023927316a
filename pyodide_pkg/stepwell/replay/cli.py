"""``python -m stepwell.replay``: replay a workload or a recorded trace through the pool's policies, without a GPU."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stepwell.errors import BadRequest, StepwellError
from stepwell.memory.policies import POLICIES, PolicyEntry, make_policy
from stepwell.memory.policies.base import Policy
from stepwell.replay import what_if_cli
from stepwell.replay.cli_input import add_span, budget_bytes, check_folder, in_processes, read_events
from stepwell.replay.oracle import Clairvoyant
from stepwell.replay.simulator import Replay, simulate
from stepwell.replay.simulator_report import PolicyFigures, figures, kv_boundaries, table
from stepwell.replay.traces import write_trace
from stepwell.replay.workloads import WORKLOADS

ERAS = {"bucket-A": "A", "bucket-C": "C"}
"""``bucket`` is the pool of onnxruntime-web 1.26 to 1.29, era B; the eras before and after have names of their own."""
CLAIRVOYANT = "clairvoyant"
"""The name of the policy that knows the future."""
BENCH_TOKENS = 64
"""Tokens of a workload that ``bench`` replays by default."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.  Exit codes: 0 done; 1 the trace or an option is wrong (argparse's own errors: 2)."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except (StepwellError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    choices = (
        "workloads:\n"
        + "".join(f"  {name:9} {workload.summary}\n" for name, workload in WORKLOADS.items())
        + "\npolicies:\n"
        + "".join(f"  {name:13} {_describe(entry)}\n" for name, entry in POLICIES.items())
        + "".join(f"  {name:13} bucket in era {era}\n" for name, era in ERAS.items())
        + f"  {CLAIRVOYANT:13} adaptive's size classes with knowledge of the future: what no policy can beat\n"
    )
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m stepwell.replay", description=__doc__, epilog=choices, formatter_class=layout
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    summary = "creates per token, peak and mean memory of each policy"
    command = commands.add_parser("simulate", help=summary, description=summary, epilog=choices, formatter_class=layout)
    _add_input(command)
    command.add_argument("--policy", default="all", help="a policy, or all (default)")
    command.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of the policy; may be repeated"
    )
    command.add_argument("--budget", type=float, metavar="MiB", help="of reserved memory; default: none")
    command.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    command.add_argument("--jobs", type=int, metavar="N", help="processes; default: one per core")
    command.set_defaults(command=_simulate)

    what_if_cli.add_command(commands)

    command = commands.add_parser("bench", help="microseconds that one acquire and release take")
    _add_input(command, default_last=BENCH_TOKENS)
    command.add_argument("--policy", default="adaptive", help="a policy, or all; default: adaptive")
    command.add_argument("--rounds", type=int, metavar="N", default=5, help="the fastest of N counts (default 5)")
    command.set_defaults(command=_bench, option=[])

    command = commands.add_parser("trace", help="write a workload as a trace file (gzip if its name ends in .gz)")
    _add_input(command)
    command.add_argument("out", type=Path, metavar="OUT")
    command.set_defaults(command=_write_trace)
    return parser


def _describe(entry: PolicyEntry) -> str:
    options = ", ".join(option.name for option in entry.options)
    return f"{entry.summary} (options: {options})" if options else entry.summary


def _add_input(command: argparse.ArgumentParser, default_last: int | None = None) -> None:
    command.add_argument(
        "--workload",
        default="kv64",
        metavar="NAME|TRACE",
        help=f"{', '.join(WORKLOADS)} (default kv64), or a trace file",
    )
    add_span(command, default_last)


def _policy_names(options: argparse.Namespace) -> list[str]:
    """The policies to replay; ``all`` shows the clairvoyant one last, because no program could use it."""
    known = [*POLICIES, *ERAS, CLAIRVOYANT]
    if options.policy == "all":
        if options.option:
            raise BadRequest("--option goes with one policy: name it with --policy.")
        return known
    if options.policy not in known:
        raise BadRequest(f"policy {options.policy!r}: choose all or one of {', '.join(known)}.")
    return [options.policy]


def _make(name: str, options: argparse.Namespace) -> Policy:
    settings = {}
    for text in options.option:
        key, equals, value = text.partition("=")
        if not equals:
            raise BadRequest(f"--option {text!r}: write NAME=VALUE.")
        settings[key] = value
    if name == CLAIRVOYANT:
        return Clairvoyant(read_events(options), make_policy("adaptive", **settings).size_class)
    if name in ERAS:
        return make_policy("bucket", **settings | {"era": ERAS[name]})
    return make_policy(name, **settings)


def _replay(options: argparse.Namespace, name: str) -> tuple[str, PolicyFigures, Replay, float]:
    """One policy's figures and the seconds that they took."""
    start = time.perf_counter()
    replay = simulate(read_events(options), _make(name, options), budget_bytes(options))
    boundaries = kv_boundaries() if options.workload in WORKLOADS and options.workload != "static" else []
    return name, figures(replay, boundaries), replay, time.perf_counter() - start


def _simulate(options: argparse.Namespace) -> None:
    names = _policy_names(options)
    check_folder("--json", options.json)
    results = {}
    for count, (name, found, replay, seconds) in enumerate(
        in_processes(partial(_replay, options), names, options.jobs), 1
    ):
        sys.stderr.write(f"{count}/{len(names)}  {name}: {len(replay.tokens):,} tokens in {seconds:.1f} s\n")
        results[name] = (found, replay)
    results = {name: results[name] for name in names}
    sys.stdout.write(table(results))
    if options.json is not None:
        usable = {name: found for name, (found, _) in results.items() if len(names) == 1 or name != CLAIRVOYANT}
        options.json.write_text(json.dumps({"workload": options.workload, "policies": usable}, indent=1) + "\n")


def _bench(options: argparse.Namespace) -> None:
    from stepwell.replay.bench import measure

    if options.rounds < 1:
        raise BadRequest(f"--rounds {options.rounds}: it must be 1 or more.")
    if options.workload in WORKLOADS and options.last is None:
        first = WORKLOADS[options.workload].first if options.first is None else options.first
        options.first, options.last = first, first + BENCH_TOKENS
    events = list(read_events(options))
    sys.stdout.write(f"{'policy':13}  us per pair: policy alone, with the pool\n")
    for name in _policy_names(options):
        found = measure(events, partial(_make, name, options), options.rounds)
        sys.stdout.write(f"{name:13}  {found.policy_us:24.2f}, {found.pool_us:13.2f}\n")


def _write_trace(options: argparse.Namespace) -> None:
    metadata = {"workload": options.workload, "from": options.first, "to": options.last}
    count = write_trace(options.out, read_events(options), metadata)
    sys.stderr.write(f"{options.out}: {count:,} events, {options.out.stat().st_size:,} B\n")
