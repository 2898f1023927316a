"""The command line: ``site``, ``serve``, ``run``, ``demo``, ``compare``.

Exit codes: 0 done; 1 the run failed; 2 something on this machine is missing, or an option is wrong.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from harness import ROOT, compare, demo, report, summary
from harness import record as records
from harness.browser import VARIABLE, Profile, open_browser
from harness.errors import HarnessError, RunError, SetupError
from harness.record import Record
from harness.run import PageRunner
from harness.scenario import Kv, Scenario, read_options, read_prompt
from harness.server import SiteServer
from harness.setup import ensure_browser
from harness.site import Site, build_site, load_site

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Build the page, serve it, and measure it in Chrome.",
)
console = Console(stderr=True)
SOFTWARE_NOTE = "[yellow]Software adapter: the times are those of this machine's CPU, not of a GPU.[/]"

ProfileOption = Annotated[Profile, typer.Option(help="The adapter: SwiftShader on the CPU, or this machine's GPU.")]
FlagOption = Annotated[list[str] | None, typer.Option("--flag", help="A further browser argument; may be repeated.")]
BrowserOption = Annotated[
    str | None, typer.Option(help=f"Chrome or Chromium to start; else ${VARIABLE}, else what is found.")
]
HeadedOption = Annotated[bool, typer.Option("--headed", help="Show the browser's window.")]
TimeoutOption = Annotated[float, typer.Option(min=1, help="Seconds that the boot, and then each run, may take.")]
BuiltOption = Annotated[
    Path | None,
    typer.Option(
        "--site", help="Serve this folder, built before by [bold]site[/], as it is; else bring dist/ up to date."
    ),
]
FromOption = Annotated[
    int | None, typer.Option("--from", min=1, help="Positions that the workload's first step fills.")
]
BudgetOption = Annotated[int | None, typer.Option(min=1, help="MiB that the pool may reserve; else no limit.")]
HardOption = Annotated[bool, typer.Option("--hard", help="Fail rather than exceed the budget.")]
WithModel = Annotated[bool, typer.Option("--model/--no-model", help="Bundle the demo model (93 MB, fetched once).")]


def main() -> None:
    """Run the command line; every HarnessError is one message and an exit code."""
    try:
        app()
    except HarnessError as error:
        console.print(f"[bold red]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


def build_with_progress(*, with_model: bool = True) -> Site:
    with console.status("building the site") as status:

        def tell(text: str) -> None:
            status.update(escape(text))
            console.print(f"[dim]· {escape(text)}[/]", highlight=False)

        return build_site(with_model=with_model, report=tell)


@app.command()
def setup() -> None:
    """Prepare this machine: find a browser (root on Debian or Ubuntu: install one), fetch what the site is made of."""
    found = ensure_browser(lambda text: console.print(escape(text), highlight=False, soft_wrap=True))
    site()
    if found:
        console.print(f"browser: {found}", highlight=False, soft_wrap=True)


@app.command()
def site(model: WithModel = True) -> None:
    """Build [bold]dist/[/]: the page, Pyodide, the wheels with their lock file, and the demo model."""
    built = build_with_progress(with_model=model)
    files = built.manifest["files"]
    total = sum(entry["bytes"] for entry in files.values())
    names = ", ".join(entry["id"] for entry in built.manifest["models"]) or "none"
    console.print(
        f"{built.root}: {len(files)} files, {total / 1e6:.1f} MB; models: {names}", highlight=False, soft_wrap=True
    )


@app.command()
def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    model: WithModel = True,
    log: Annotated[bool, typer.Option("--log", help="Print each request.")] = False,
) -> None:
    """Build the site and serve it on this machine only, until Ctrl-C."""
    built = build_with_progress(with_model=model)
    with SiteServer(built.root, port, quiet=not log) as server:
        console.print(f"[bold]{server.url}[/]  (Ctrl-C ends)", highlight=False)
        try:
            server.wait()
        except KeyboardInterrupt:
            console.print("stopped")


@app.command()
def run(
    model: Annotated[str, typer.Option(help="A bundled model's id, or the path of a .gguf file.")] = "smollm2",
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with the prompt, taken as it is.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt without the chat template.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    policy: Annotated[str, typer.Option(help="The cache policy; an unknown name lists them.")] = "adaptive",
    kv: Annotated[
        Kv, typer.Option(help="Grow the KV cache by a new buffer per step, or allocate it once.")
    ] = Kv.STATIC,
    ban_eos: Annotated[bool, typer.Option("--ban-eos", help="Never choose an end-of-sequence token.")] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Treat end-of-sequence tokens like any other.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy, chosen on the GPU.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1: off.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    context: Annotated[int | None, typer.Option(min=1, help="KV positions; else as many as the run needs.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer; may be repeated.")] = None,
    top_logits: Annotated[int, typer.Option(min=0, help="Largest logits to keep per token in the record.")] = 0,
    workload: Annotated[
        str | None, typer.Option(help="kv64 or kv16 in place of a model: growing tensors and nothing else.")
    ] = None,
    start: FromOption = None,
    policy_option: Annotated[
        list[str] | None, typer.Option(help="name=value of the policy's table; may be repeated.")
    ] = None,
    budget: BudgetOption = None,
    hard: HardOption = False,
    json: Annotated[Path | None, typer.Option("--json", help="Where to write the run record.")] = None,
    profile: ProfileOption = Profile.SOFTWARE,
    flag: FlagOption = None,
    browser: BrowserOption = None,
    headed: HeadedOption = False,
    timeout: TimeoutOption = 600.0,
    built: BuiltOption = None,
) -> None:
    """Run one prompt through the real page in a browser, stream the answer, and write a record of every token.

    Ctrl-C presses the page's Stop button; what was measured until then is still written.
    """
    if ban_eos and ignore_eos:
        raise SetupError("--ban-eos and --ignore-eos exclude each other.")
    scenario = Scenario(
        prompt=(prompt or "") if workload else read_prompt(prompt, prompt_file),
        model=model,
        raw=raw,
        tokens=tokens,
        policy=policy,
        kv=kv,
        eos="ban" if ban_eos else "ignore" if ignore_eos else "stop",
        context=context,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        top_logits=top_logits,
        workload=workload,
        start=start,
        policy_options=read_options(policy_option or []),
        budget_mib=budget,
        hard_budget=hard,
    )
    with open_page(profile, flag or [], browser, headed, timeout, built, scenario) as (runner, status):
        record = runner.run(scenario, Printer(status), lambda text: status.update(escape(text)))
    print_runs([record])
    for line in str(record["memory"].get("explanation", "")).splitlines():
        console.print(f"[dim]·[/] {escape(line)}", highlight=False, soft_wrap=True)
    if json:
        records.write(record, json)
        console.print(f"record: {json}", highlight=False, soft_wrap=True)
    if record["finish_reason"] == "cancelled":
        raise RunError("stopped before the run was complete", "Cancelled")


@app.command(name="demo")
def run_demo(
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per run.")] = demo.TOKENS,
    out: Annotated[Path, typer.Option(help="Where the records and the report go.")] = ROOT / "out",
    profile: ProfileOption = Profile.SOFTWARE,
    flag: FlagOption = None,
    browser: BrowserOption = None,
    headed: HeadedOption = False,
    timeout: TimeoutOption = 600.0,
    built: BuiltOption = None,
) -> None:
    """Ask the demo model a question with three KV caches; print a table of every run and write an HTML report."""
    wanted = demo.scenarios(tokens)

    def follow(scenario: Scenario) -> "Printer":
        console.print(f"\n[bold]{scenario.kv}, {scenario.policy}[/]  {escape(scenario.prompt)}", highlight=False)
        return Printer(status)

    with open_page(profile, flag or [], browser, headed, timeout, built, *wanted) as (runner, status):
        found = demo.run_all(runner, wanted, follow, lambda text: status.update(escape(text)))
    print_runs(found)
    for path in demo.save(found, out):
        console.print(f"written: {path}", highlight=False, soft_wrap=True)
    if len(found) < len(wanted):
        raise RunError("cancelled before the last run", "Cancelled")
    check = report.same_tokens(found)
    if not check.holds:
        raise RunError(check.text, "Divergence")
    console.print(f"[green]✓[/] {escape(check.text)}", highlight=False)


@app.command(name="compare")
def run_compare(
    workload: Annotated[str, typer.Option(help="kv64 or kv16.")] = "kv64",
    arms: Annotated[
        str, typer.Option(help="static, or a policy, or policy:option=value;…; separated by commas.")
    ] = "adaptive,bucket,static",
    start: Annotated[
        list[int] | None, typer.Option("--from", min=1, help="Where runs start; may be repeated. Else around 2,048.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Steps per run.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="How often each arm runs at each start.")] = 3,
    warm_up: Annotated[int, typer.Option(min=0, help="First steps of a run that do not count.")] = compare.WARM_UP,
    budget: BudgetOption = None,
    hard: HardOption = False,
    json: Annotated[Path | None, typer.Option("--json", help="Where to write figures and records.")] = None,
    profile: ProfileOption = Profile.SOFTWARE,
    flag: FlagOption = None,
    browser: BrowserOption = None,
    headed: HeadedOption = False,
    timeout: TimeoutOption = 600.0,
    built: BuiltOption = None,
) -> None:
    """Run a workload's arms in turns in one browser; print medians and ratios to the static control."""
    plan = compare.Plan(
        workload, compare.parse_arms(arms), tuple(start or [2036]), tokens, rounds, warm_up, budget, hard
    )
    wanted = [plan.scenario(arm, first) for first in plan.starts for arm in plan.arms]
    with open_page(profile, flag or [], browser, headed, timeout, built, *wanted) as (runner, status):
        found = compare.run_plan(
            plan,
            lambda scenario: runner.run(scenario, lambda _: None, lambda _: None),
            lambda text: status.update(escape(text)),
        )
    if not found:
        raise RunError("stopped before the first run was complete", "Cancelled")
    console.print(compare.table(plan, found))
    if any(summary.is_software(run.record) for run in found):
        console.print(SOFTWARE_NOTE)
    if json:
        records.write(compare.as_json(plan, found), json)
        console.print(f"written: {json}", highlight=False, soft_wrap=True)
    check = report.same_results([[run.record for run in found if run.start == first] for first in plan.starts])
    if not check.holds:
        raise RunError(check.text, "Divergence")
    if len(found) < plan.rounds * len(wanted):
        raise RunError("stopped before the last run", "Cancelled")


class Printer:
    """Writes the answer to standard output as it comes; the spinner gives way to it."""

    def __init__(self, status: Status) -> None:
        self._status = status
        status.start()

    def __call__(self, text: str) -> None:
        if text:
            self._status.stop()
            print(text, end="", flush=True)  # noqa: T201 - the answer is this command's output


@contextmanager
def open_page(
    profile: Profile,
    flags: list[str],
    browser: str | None,
    headed: bool,
    timeout_s: float,
    built: Path | None,
    *wanted: Scenario,
) -> Iterator[tuple[PageRunner, Status]]:
    """The page of ``built``, else of the up-to-date dist/, in a browser; and the spinner that says what it is doing."""
    bundled = [scenario for scenario in wanted if scenario.file is None and scenario.workload is None]
    with_model = bool(bundled)
    site = load_site(built) if built else build_with_progress(with_model=with_model)
    for scenario in bundled:
        if site.model(scenario.model) is None:
            known = ", ".join(entry["id"] for entry in site.manifest["models"]) or "none"
            raise SetupError(
                f"the site has no model {scenario.model!r} (it has: {known}). Give the path of a .gguf file."
            )
    with (
        SiteServer(site.root) as server,
        open_browser(profile, flags, choice=browser, headed=headed) as (started, arguments),
        console.status("starting the page") as status,
        PageRunner(started, server.url, profile, arguments, timeout_s=timeout_s) as runner,
    ):
        kind = "[yellow]software[/]" if runner.adapter.is_software else "[green]hardware[/]"
        console.print(
            f"adapter: {escape(str(runner.adapter))}, {kind} profile; browser {started.version}", highlight=False
        )
        yield runner, status


def print_runs(found: list[Record]) -> None:
    """The tables of some runs, under the label that software figures must carry."""
    console.print("\n")
    for record in found:
        console.print(summary.token_table(record))
    console.print(summary.summary_table(found))
    if any(summary.is_software(record) for record in found):
        console.print(SOFTWARE_NOTE)
