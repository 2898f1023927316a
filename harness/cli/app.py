"""The command line: ``site``, ``serve``, ``run``, ``demo``, ``compare``, ``ablate``, ``attach``, ``attach-cost``,
``docs``.

Exit codes: 0 done; 1 the run failed; 2 something on this machine is missing, or an option is wrong.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from harness import CACHE, ROOT, HarnessError, RunError, SetupError
from harness.cli import arms as cli_arms
from harness.cli import attach as cli_attach
from harness.cli import demo, docs, report
from harness.cli import page as cli_page
from harness.cli.page import (
    ModelOption,
    PageOptions,
    Printer,
    WithModel,
    console,
    with_page_options,
)
from harness.cli.run_options import Asked, takes_run_options, values_of
from harness.page import record as records
from harness.page import summary
from harness.page.scenario import Scenario, kv_workload, read_prompt
from harness.page.setup import ensure_browser
from harness.site.server import SiteServer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Build the page, serve it, and measure it in Chrome.",
)


def main() -> None:
    """Run the command line; every HarnessError is one message and an exit code."""
    try:
        app()
    except HarnessError as error:
        console.print(f"[bold red]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


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
    built = cli_page.build_with_progress(with_model=model)
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
    built = cli_page.build_with_progress(with_model=model)
    with SiteServer(built.root, port, quiet=not log) as server:
        console.print(f"[bold]{server.url}[/]  (Ctrl-C ends)", highlight=False)
        try:
            server.wait()
        except KeyboardInterrupt:
            console.print("stopped")


@app.command()
@with_page_options()
@takes_run_options()
def run(
    model: ModelOption = "smollm2",
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with the prompt, taken as it is.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Where to write the table of --kernel-times for a document.")
    ] = None,
    tuning: Annotated[
        Path, typer.Option("--tuning", help="Where what was tuned is kept, for all adapters and models.")
    ] = CACHE / "tuning.json",
    tuned: Annotated[
        bool, typer.Option("--tuned/--no-tuned", help="Use what was tuned before on this adapter.")
    ] = True,
    json: Annotated[Path | None, typer.Option("--json", help="Where to write the run record.")] = None,
    *,
    asked: Asked,
    page: PageOptions,
) -> None:
    """Run one prompt through the real page in a browser, stream the answer, and write a record of every token.

    Ctrl-C presses the page's Stop button; what was measured until then is still written.
    """
    if markdown and not asked["kernel_times"]:
        raise SetupError("--markdown is for the table of --kernel-times: give both.")
    options = values_of(asked)
    if workload := options.get("workload") or kv_workload(model):
        options["workload"] = workload
    else:
        options["prompt"] = read_prompt(asked["prompt"], prompt_file, asked["prompt_ids"], asked["prompt_length"])
    if not tuned:
        options["launch"] = {**options.get("launch", {}), "tuned": "false"}
    scenario = Scenario(model=model, **options)
    pages = cli_page.open_page(page, scenario, tuning=tuning)
    with pages as (runner, status):
        record = runner.run(scenario, Printer(status), lambda text: status.update(escape(text)))
        cli_page.print_tuning(runner.tuned())
        if scenario.tune:
            cli_page.keep_tuning(runner, tuning)
        trace = runner.trace() if scenario.trace else ""
        pool_trace = runner.pool_trace() if scenario.pool_trace else ""
    cli_page.print_runs([record])
    for line in (summary.launch_line(record), *str(record["memory"].get("explanation", "")).splitlines()):
        console.print(f"[dim]·[/] {escape(line)}", highlight=False, soft_wrap=True)
    if "kernels" in record:
        cli_page.print_kernels(record, markdown)
    if json:
        records.write(record, json)
        console.print(f"record: {json}", highlight=False, soft_wrap=True)
    if trace:
        cli_page.write_text(asked["trace"], trace)
    if pool_trace:
        cli_page.write_pool_trace(asked["pool_trace"], pool_trace)
    if record["finish_reason"] == "cancelled":
        raise RunError("stopped before the run was complete", "Cancelled")


@app.command(name="demo")
@with_page_options()
def run_demo(
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per run.")] = demo.TOKENS,
    out: Annotated[Path, typer.Option(help="Where the records and the report go.")] = ROOT / "out",
    *,
    page: PageOptions,
) -> None:
    """Ask the demo model a question with three KV caches; print a table of every run and write an HTML report."""
    wanted = demo.scenarios(tokens)

    def follow(scenario: Scenario) -> "Printer":
        console.print(f"\n[bold]{scenario.kv}, {scenario.policy}[/]  {escape(scenario.prompt)}", highlight=False)
        return Printer(status)

    with cli_page.open_page(page, *wanted) as (runner, status):
        found = demo.run_all(runner, wanted, follow, lambda text: status.update(escape(text)))
    cli_page.print_runs(found)
    for path in demo.save(found, out):
        cli_page.print_written(path)
    if len(found) < len(wanted):
        raise RunError("cancelled before the last run", "Cancelled")
    check = report.same_tokens(found)
    if not check.holds:
        raise RunError(check.text, "Divergence")
    console.print(f"[green]✓[/] {escape(check.text)}", highlight=False)


@app.command(name="docs")
def run_docs() -> None:
    """Write docs/protocol.md and the record's schema as the tables of options have them now."""
    for path, text in docs.made().items():
        cli_page.write_text(path, text)


app.command(name="compare")(cli_arms.run_compare)
app.command(name="ablate")(cli_arms.run_ablate)
app.command(name="attach")(cli_attach.run_attach)
app.command(name="attach-cost")(cli_arms.run_attach_cost)
