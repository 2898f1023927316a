"""The parts that commands share: the console, the options that choose a browser, and the page opened in it."""

import gzip
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from playwright.sync_api import Browser
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from harness import SetupError
from harness.cli import kernel_report
from harness.page import summary
from harness.page.browser import FINE_GPU_CLOCK, VARIABLE, AdapterProfile, open_browser
from harness.page.record import Record
from harness.page.run import PageRunner
from harness.page.scenario import Scenario
from harness.site.build import Site, build_site, load_site
from harness.site.server import SiteServer

console = Console(stderr=True)
SOFTWARE_NOTE = "[yellow]Software adapter: the times are those of this machine's CPU, not of a GPU.[/]"
"""The remark on times of a software adapter."""


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """The options that choose the site, the browser and its adapter; commands take them by ``with_page_options``."""

    profile: Annotated[
        AdapterProfile, typer.Option(help="The adapter: SwiftShader on the CPU, or this machine's GPU.")
    ] = AdapterProfile.SOFTWARE
    flag: Annotated[list[str] | None, typer.Option("--flag", help="A further browser argument; may be repeated.")] = (
        None
    )
    browser: Annotated[
        str | None, typer.Option(help=f"Chrome or Chromium to start; else ${VARIABLE}, else what is found.")
    ] = None
    headed: Annotated[bool, typer.Option("--headed", help="Show the browser's window.")] = False
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the boot, and then each run, may take.")] = 600.0
    built: Annotated[
        Path | None,
        typer.Option(
            "--site", help="Serve this folder, built before by [bold]site[/], as it is; else bring dist/ up to date."
        ),
    ] = None


def with_page_options(*without: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the PageOptions, except those in ``without``; it takes them as one argument, ``page``.

    ``defaults`` replace those of the options that they name.
    """
    added = [
        option.replace(default=defaults.get(name, option.default))
        for name, option in inspect.signature(PageOptions).parameters.items()
        if name not in without
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command)

        @wraps(command)
        def call(**given: Any) -> None:
            chosen = {option.name: given.pop(option.name) for option in added}
            command(**given, page=PageOptions(**chosen))

        kept = [option for option in own.parameters.values() if option.name != "page"]
        call.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        return call

    return decorate


WithModel = Annotated[bool, typer.Option("--model/--no-model", help="Bundle the demo model (93 MB, fetched once).")]
ModelOption = Annotated[
    str, typer.Option(help="A bundled model's id, the path of a .gguf file, or synthetic:NAME[:FORMAT].")
]


def build_with_progress(*, with_model: bool = True) -> Site:
    """Build dist/, with the demo model if ``with_model``, and print each step."""
    with console.status("building the site") as status:

        def tell(text: str) -> None:
            status.update(escape(text))
            console.print(f"[dim]· {escape(text)}[/]", highlight=False)

        return build_site(with_model=with_model, report=tell)


class Opened(NamedTuple):
    """A ``site`` that is served at ``url``, the ``browser`` started for it with ``flags``, and the spinner."""

    site: Site
    url: str
    browser: Browser
    flags: list[str]
    status: Status


@contextmanager
def open_site(page: PageOptions, *, models: Sequence[str] = (), flags: Sequence[str] = ()) -> Iterator[Opened]:
    """Serve the site of ``page``, else the up-to-date dist/, and start the browser, with ``flags`` besides its own.

    SetupError when the site has not all of the bundled ``models``.
    """
    site = load_site(page.built) if page.built else build_with_progress(with_model=bool(models))
    for model in models:
        if site.model(model) is None:
            known = ", ".join(entry["id"] for entry in site.manifest["models"]) or "none"
            raise SetupError(f"the site has no model {model!r} (it has: {known}). Give the path of a .gguf file.")
    flags = list(dict.fromkeys([*(page.flag or []), *flags]))
    with (
        SiteServer(site.root) as server,
        open_browser(page.profile, flags, choice=page.browser, headed=page.headed) as (browser, arguments),
        console.status("starting the page") as status,
    ):
        yield Opened(site, server.url, browser, arguments, status)


@contextmanager
def open_page(page: PageOptions, *wanted: Scenario, tuning: Path | None = None) -> Iterator[tuple[PageRunner, Status]]:
    """Open the page for runs of ``wanted``, and print its adapter; yields the page and the spinner.

    ``tuning``: a file that the page reads its remembered tuning from, if it is there.
    """
    models = [scenario.model for scenario in wanted if scenario.is_bundled]
    flags = [FINE_GPU_CLOCK] if any(scenario.times_gpu for scenario in wanted) else []
    with (
        open_site(page, models=models, flags=flags) as opened,
        PageRunner(
            opened.browser, opened.url, page.profile, opened.flags, timeout_s=page.timeout, tuning=read_tuning(tuning)
        ) as runner,
    ):
        kind = "[yellow]software[/]" if runner.adapter.is_software else "[green]hardware[/]"
        console.print(
            f"adapter: {escape(str(runner.adapter))}, {kind} profile; browser {opened.browser.version}", highlight=False
        )
        yield runner, opened.status


def read_tuning(path: Path | None) -> str | None:
    """The text of the tuning in ``path``; None where there is none.  The page says which parts it cannot use."""
    if path is None or not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        console.print(f"[yellow]{escape(str(path))} cannot be read and is ignored: {escape(str(error))}[/]")
        return None


def print_tuning(found: Record) -> None:
    """Print the notices and the outcome of ``found``, what the page says of its tuning."""
    for notice in found["notices"]:
        console.print(f"[yellow]{escape(notice)}[/]", highlight=False, soft_wrap=True)
    if found["outcome"] is not None:
        for line in summary.tuning_lines(found["outcome"]):
            console.print(f"[dim]·[/] {escape(line)}", highlight=False, soft_wrap=True)


def keep_tuning(runner: PageRunner, path: Path) -> None:
    """Write the tuning that the page of ``runner`` remembers to ``path``."""
    text = runner.tuning()
    if text is not None:
        write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, in a folder that need not be there, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print_written(path)


def print_written(path: Path) -> None:
    """Say that ``path`` was written."""
    console.print(f"written: {path}", highlight=False, soft_wrap=True)


def write_pool_trace(path: Path, text: str) -> None:
    """Write the trace ``text``, compressed where the name of ``path`` says so, and say what to do with it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    print_written(path)
    console.print(f"[dim]· python -m stepwell.replay what-if {escape(str(path))}[/]", highlight=False, soft_wrap=True)


def print_software_note(found: list[Record]) -> None:
    """Print the label that software figures must carry, if any record of ``found`` is of a software adapter."""
    if any(summary.is_software(record) for record in found):
        console.print(SOFTWARE_NOTE)


def print_runs(found: list[Record]) -> None:
    """Print the tables of the runs ``found``."""
    console.print("\n")
    for record in found:
        console.print(summary.token_table(record))
    console.print(summary.summary_table(found))
    print_software_note(found)


def print_kernels(record: Record, markdown: Path | None) -> None:
    """Print the table of GPU time per kernel of ``record``, and write it to ``markdown`` if given."""
    console.print(kernel_report.table(record))
    for line in kernel_report.lines(record):
        console.print(f"[dim]·[/] {escape(line)}", highlight=False, soft_wrap=True)
    print_software_note([record])
    if markdown:
        write_text(markdown, kernel_report.markdown(record))


class Printer:
    """A writer of the answer to standard output as it comes; the spinner gives way to it."""

    def __init__(self, status: Status) -> None:
        self._status = status
        status.start()

    def __call__(self, text: str) -> None:
        if text:
            self._status.stop()
            print(text, end="", flush=True)  # noqa: T201 - the answer is this command's output
