"""The command line: ``site``, ``serve``, ``run``, ``demo``, ``compare``, ``ablate``, ``attach``, ``attach-cost``.

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
from harness.cli import demo, report
from harness.cli import page as cli_page
from harness.cli.page import (
    BudgetOption,
    FromOption,
    HardOption,
    KvTypeOption,
    ModelOption,
    PageOptions,
    PolicyOption,
    Printer,
    RawOption,
    WithModel,
    console,
    with_page_options,
)
from harness.page import record as records
from harness.page import summary
from harness.page.scenario import Kv, KvType, Scenario, kv_workload, read_ids, read_options, read_prompt
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
def run(
    model: ModelOption = "smollm2",
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with the prompt, taken as it is.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="The prompt as token ids, taken as they are: 1,2,3.")] = None,
    prompt_length: Annotated[
        int | None, typer.Option(min=1, help="A prompt of so many pseudo-random ids, by the seed: to time long ones.")
    ] = None,
    raw: RawOption = False,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    policy: PolicyOption = "adaptive",
    kv: Annotated[
        Kv, typer.Option(help="Grow the KV cache by a new buffer per step, or allocate it once.")
    ] = Kv.STATIC,
    kv_type: KvTypeOption = KvType.F32,
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
    launch: Annotated[
        list[str] | None, typer.Option(help="name=value of the launch options; an unknown name lists them.")
    ] = None,
    digest: Annotated[
        bool, typer.Option("--digest", help="Keep a digest of every step's logits in the record.")
    ] = False,
    gpu_time: Annotated[
        bool, typer.Option("--gpu-time", help="Time every pass on the GPU (needs timestamp-query).")
    ] = False,
    kernel_times: Annotated[
        bool,
        typer.Option("--kernel-times", help="After the run, a table of GPU time per kernel (needs timestamp-query)."),
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Where to write the table of --kernel-times for a document.")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time the model's kernels on this adapter first, and remember the fastest.")
    ] = False,
    tune_ms: Annotated[int, typer.Option(min=1, help="How long that may take, in milliseconds.")] = 30_000,
    tuning: Annotated[
        Path, typer.Option("--tuning", help="Where what was tuned is kept, for all adapters and models.")
    ] = CACHE / "tuning.json",
    tuned: Annotated[
        bool, typer.Option("--tuned/--no-tuned", help="Use what was tuned before on this adapter.")
    ] = True,
    json: Annotated[Path | None, typer.Option("--json", help="Where to write the run record.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Where to write the run as a trace for ui.perfetto.dev.")
    ] = None,
    pool_trace: Annotated[
        Path | None,
        typer.Option("--pool-trace", help="Where to write what the run asked of the pool (.trace, .trace.gz)."),
    ] = None,
    *,
    page: PageOptions,
) -> None:
    """Run one prompt through the real page in a browser, stream the answer, and write a record of every token.

    Ctrl-C presses the page's Stop button; what was measured until then is still written.
    """
    if markdown and not kernel_times:
        raise SetupError("--markdown is for the table of --kernel-times: give both.")
    if ban_eos and ignore_eos:
        raise SetupError("--ban-eos and --ignore-eos exclude each other.")
    workload = workload or kv_workload(model)
    scenario = Scenario(
        prompt=(prompt or "") if workload else read_prompt(prompt, prompt_file, prompt_ids, prompt_length),
        model=model,
        raw=raw,
        tokens=tokens,
        policy=policy,
        kv=kv,
        kv_type=kv_type,
        eos="ban" if ban_eos else "ignore" if ignore_eos else "stop",
        context=context,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        top_logits=top_logits,
        prompt_ids=read_ids(prompt_ids),
        prompt_length=prompt_length,
        workload=workload,
        start=start,
        policy_options=read_options(policy_option or []),
        budget_mib=budget,
        hard_budget=hard,
        launch=read_options(launch or [], "--launch") | ({} if tuned else {"tuned": "false"}),
        tune_ms=tune_ms if tune else None,
        digest=digest,
        gpu_time=gpu_time,
        trace=trace is not None,
        kernel_times=kernel_times,
        pool_trace=pool_trace is not None,
    )
    pages = cli_page.open_page(page, scenario, tuning=tuning)
    with pages as (runner, status):
        record = runner.run(scenario, Printer(status), lambda text: status.update(escape(text)))
        cli_page.print_tuning(runner.tuned())
        if tune:
            cli_page.keep_tuning(runner, tuning)
        spans = runner.trace() if trace else ""
        asked = runner.pool_trace() if pool_trace else ""
    cli_page.print_runs([record])
    for line in (summary.launch_line(record), *str(record["memory"].get("explanation", "")).splitlines()):
        console.print(f"[dim]·[/] {escape(line)}", highlight=False, soft_wrap=True)
    if "kernels" in record:
        cli_page.print_kernels(record, markdown)
    if json:
        records.write(record, json)
        console.print(f"record: {json}", highlight=False, soft_wrap=True)
    if trace:
        cli_page.write_text(trace, spans)
    if pool_trace:
        cli_page.write_pool_trace(pool_trace, asked)
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


app.command(name="compare")(cli_arms.run_compare)
app.command(name="ablate")(cli_arms.run_ablate)
app.command(name="attach")(cli_attach.run_attach)
app.command(name="attach-cost")(cli_arms.run_attach_cost)
