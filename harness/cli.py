"""The command line: ``site``, ``serve``, ``run``, ``demo``.

Exit codes: 0 done; 1 the run failed; 2 something on this machine is missing, or an option is wrong.
"""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from harness.errors import HarnessError
from harness.server import SiteServer
from harness.site import Site, build_site

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Build the page, serve it, and measure it in Chrome.",
)
console = Console(stderr=True)

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

        def report(text: str) -> None:
            status.update(escape(text))
            console.print(f"[dim]· {escape(text)}[/]", highlight=False)

        return build_site(with_model=with_model, report=report)


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
