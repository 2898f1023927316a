"""The commands that run several arms in turns in one browser: ``compare``, ``ablate`` and ``attach-cost``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from harness import RunError
from harness.arms import ablate, ablate_report, attach_cost, compare
from harness.cli import demo, report
from harness.cli import page as cli_page
from harness.cli.page import (
    ModelOption,
    PageOptions,
    console,
    with_page_options,
)
from harness.cli.run_options import Asked, takes_run_options, values_of
from harness.page import record as records
from harness.page.scenario import Scenario

RoundsOption = Annotated[int, typer.Option(min=1, help="How often each arm runs.")]


@with_page_options()
@takes_run_options("budget_mib", "hard_budget")
def run_compare(
    workload: Annotated[str, typer.Option(help="kv64 or kv16.")] = "kv64",
    arms: Annotated[
        str, typer.Option(help="static, or a policy, or policy:option=value;…; separated by commas.")
    ] = "adaptive,bucket,static",
    start: Annotated[
        list[int] | None, typer.Option("--from", min=1, help="Where runs start; may be repeated. Else around 2,048.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Steps per run.")] = 24,
    rounds: RoundsOption = 3,
    warm_up: Annotated[int, typer.Option(min=0, help="First steps of a run that do not count.")] = compare.WARM_UP,
    json: Annotated[Path | None, typer.Option("--json", help="Where to write figures and records.")] = None,
    *,
    asked: Asked,
    page: PageOptions,
) -> None:
    """Run a workload's arms in turns in one browser; print medians and ratios to the static control."""
    plan = compare.Comparison(
        arms=compare.parse_arms(arms), rounds=rounds, steps=tokens, skip=warm_up, starts=tuple(start or [2036]),
        base=Scenario(workload=workload, **values_of(asked)),
    )  # fmt: skip
    wanted = [plan.scenario(turn) for turn in plan]
    with cli_page.open_page(page, *wanted) as (runner, status):
        found = compare.run_all(plan, runner.run, lambda text: status.update(escape(text)))
    if not found:
        raise RunError("stopped before the first run was complete", "Cancelled")
    console.print(compare.table(plan, found))
    cli_page.print_software_note([run.result for run in found])
    if json:
        records.write(compare.as_json(plan, found), json)
        cli_page.print_written(json)
    check = report.same_results([[run.result for run in found if run.start == first] for first in plan.starts])
    if not check.holds:
        raise RunError(check.text, "Divergence")
    if len(found) < len(plan):
        raise RunError("stopped before the last run", "Cancelled")


@with_page_options()
@takes_run_options("kv", "kv_type", "policy", "raw")
def run_ablate(
    model: ModelOption = "smollm2",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per run.")] = 64,
    rounds: RoundsOption = 5,
    prompt: Annotated[str, typer.Option(help="The prompt.")] = demo.QUESTION,
    warm_up: Annotated[int, typer.Option(min=1, help="First tokens of a run that do not count.")] = ablate.WARM_UP,
    arms: Annotated[
        str | None, typer.Option(help="Some of the arms, separated by commas; main always runs. Else all.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Where to write the table for people.")] = None,
    *,
    asked: Asked,
    page: PageOptions,
) -> None:
    """Add one switch of the launch path after the other; print what each saves, and check that none changes a bit.

    All arms run in one page, each with an engine of its own: once untimed with a digest of every step's logits, then
    [bold]--rounds[/] times in turns.
    """
    chosen = ablate.choose_arms(arms)
    base = Scenario(prompt, model, **values_of(asked))
    plan = ablate.Ablation(arms=chosen, rounds=rounds, steps=tokens, skip=warm_up, base=base)
    wanted = [plan.scenario(arm) for arm in plan.arms]
    with cli_page.open_page(page, *wanted) as (runner, status):
        found = ablate.run_all(plan, runner.run, lambda text: status.update(escape(text)))
    console.print(ablate_report.table(found))
    for note in ablate_report.notes(found):
        console.print(f"[yellow]·[/] {escape(note)}", highlight=False, soft_wrap=True)
    cli_page.print_software_note([found.reference])
    if json:
        records.write(ablate_report.as_json(found), json)
        cli_page.print_written(json)
    if markdown:
        cli_page.write_text(markdown, ablate_report.markdown(found))
    if differing := [row for row in found.rows if not row.bit_identical]:
        raise RunError("; ".join(f"{row.arm.name}: {row.difference}" for row in differing), "Divergence")
    console.print(f"[green]✓[/] {escape(ablate_report.identical(found))}", highlight=False)


@with_page_options("headed", "timeout")
def run_attach_cost(
    rounds: RoundsOption = 9,
    *,
    page: PageOptions,
) -> None:
    """Time createBuffer and destroy: the browser's own, and attached with every buffer a reused one."""
    with cli_page.open_site(page) as opened:
        times = attach_cost.measure(opened.browser, opened.url, rounds, lambda text: opened.status.update(escape(text)))
    console.print(attach_cost.table(times))
