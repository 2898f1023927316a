"""The command ``attach``: the pool under onnxruntime-web, measured."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from harness import RunError
from harness.arms import attach, attach_report
from harness.arms.attach_page import ArmPages
from harness.cli import page as cli_page
from harness.cli.page import PageOptions, console, with_page_options
from harness.cli.run_options import Asked, takes_run_options
from harness.page import record as records
from harness.page.adapter import Adapter, assert_adapter
from harness.page.run import Interrupt
from harness.site.build import Site

STARTS = [2050, 4100]
"""The positions at which runs start without ``--starts``."""


@with_page_options(timeout=120.0)
@takes_run_options("budget_mib")
def run_attach(
    start: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Positions before the first step; may be repeated. Else 2050 and 4100."),
    ] = None,
    tensors: Annotated[int, typer.Option(help="Growing tensors: 64 (Phi-4-mini) or 16 (Qwen3.5-4B).")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Steps per run.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="How often each arm runs.")] = 3,
    arms: Annotated[
        str, typer.Option(help="bare, static, attached or record, with options as in attached:zero=never; by commas.")
    ] = attach.DEFAULT_ARMS,
    warm_up: Annotated[int, typer.Option(min=0, help="First steps of a run that do not count.")] = attach.WARM_UP,
    json: Annotated[Path | None, typer.Option("--json", help="Where to write figures and steps.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Where to write the table for a document.")
    ] = None,
    *,
    asked: Asked,
    page: PageOptions,
) -> None:
    """Run onnxruntime-web on growing KV tensors, bare, attached and with static KV; print creates, times and ratios.

    All arms run in turns in one browser, and their results must be equal bit by bit. [bold]--timeout[/] bounds a step.
    """
    plan = attach.Benchmark(
        arms=attach.parse_arms(arms, asked["budget_mib"]), rounds=rounds, steps=steps, skip=warm_up,
        starts=tuple(start or STARTS), tensors=tensors,
    )  # fmt: skip
    with cli_page.open_site(page) as opened, Interrupt().catch() as interrupt:
        probe = opened.browser.new_page()
        probe.goto(opened.url + "manifest.json")
        adapter = assert_adapter(probe, page.profile)
        probe.close()
        console.print(f"adapter: {escape(str(adapter))}; browser {opened.browser.version}", highlight=False)
        pages = ArmPages(opened.browser, opened.url, page.timeout)
        found = attach.run_all(
            plan, pages.open, lambda text: opened.status.update(escape(text)), lambda: interrupt.asked
        )
        environment = describe(adapter, opened.browser.version, opened.flags, opened.site)
    if not found:
        raise RunError("stopped before the first run was complete", "Cancelled")
    console.print(attach_report.table(plan, found))
    if adapter.is_software:
        console.print(cli_page.SOFTWARE_NOTE)
    if json:
        records.write(attach_report.as_json(plan, found, environment), json)
        cli_page.print_written(json)
    if markdown:
        cli_page.write_text(markdown, attach_report.markdown(plan, found))
    if len(found) < len(plan):
        raise RunError("stopped before the last run", "Cancelled")


def describe(adapter: Adapter, version: str, flags: list[str], site: Site) -> dict[str, Any]:
    """The environment of the figures: ``adapter``, browser ``version`` and ``flags``, and the versions in ``site``."""
    shown = {name: getattr(adapter, name) for name in ("vendor", "architecture", "description", "is_software")}
    return {
        "adapter": shown,
        "browser": version,
        "flags": flags,
        "onnxruntime_web": site.manifest["versions"]["onnxruntime-web"],
        "stepwell": site.manifest["stepwell"],
    }
