"""Run options on the command line: an option of a command for each row of the table, and what was given for it."""

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import Any

import typer

from harness import SetupError
from harness.page.scenario import read_options
from stepwell.errors import BadRequest
from stepwell.options import OptionKind
from stepwell.page.run_options import RUN_OPTIONS, RunOption

Asked = Mapping[str, Any]
"""What was typed for run options, by their names; None: nothing."""
_TYPES: Mapping[OptionKind, Any] = {
    OptionKind.INT: int,
    OptionKind.FLOAT: float,
    OptionKind.BOOL: bool,
    OptionKind.TEXTS: list[str],
    OptionKind.VALUES: list[str],
}


def takes_run_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the run options of these ``names``, or all of them, after its first parameter.

    It takes what was typed, by the names of the rows, as one argument, ``asked``; ``values_of`` makes values of it.
    """
    added = {name: parameter(RUN_OPTIONS[name]) for name in names or RUN_OPTIONS}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**given: Any) -> None:
            command(asked={name: given.pop(name) for name in added}, **given)

        own = inspect.signature(command)
        first, *rest = (each for each in own.parameters.values() if each.name != "asked")
        keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*added.values(), *rest)]
        call.__signature__ = own.replace(parameters=[first, *keywords])  # type: ignore[attr-defined]
        return call

    return decorate


def parameter(option: RunOption) -> inspect.Parameter:
    """The parameter that typer makes a command-line option of: its type, range, choices, default and help."""
    kind: Any = _TYPES.get(option.kind, str)
    default, help_text = option.default or None, option.summary
    if option.file:
        kind, help_text = Path, f"where to write {option.summary}"
    elif option.kind is OptionKind.CHOICE:
        kind = _choices(option)
        default = kind(default)
    elif option.kind is OptionKind.VALUES:
        help_text = f"{option.summary}: name=value, may be repeated"
    elif option.kind is OptionKind.TEXTS:
        help_text = f"{option.summary}; may be repeated"
    elif option.kind in (OptionKind.BOOL, OptionKind.INT, OptionKind.FLOAT):
        default = option.default
    made = typer.Option(
        default,
        option.option,
        help=help_text[0].upper() + help_text[1:] + ".",
        min=option.minimum if isfinite(option.minimum) else None,
        max=option.maximum if isfinite(option.maximum) else None,
    )
    annotation = kind if default is not None else kind | None
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=made, annotation=annotation)


def _choices(option: RunOption) -> Any:
    """What typer makes a choice of: it shows them and refuses any other."""
    return StrEnum(option.name, [(value, value) for value in option.choices])


def values_of(asked: Asked) -> dict[str, Any]:
    """What a scenario takes of the options ``asked`` for; of a file that is to be written, whether it is."""
    return {name: _value(RUN_OPTIONS[name], given) for name, given in asked.items() if given is not None}


def _value(option: RunOption, given: Any) -> Any:
    if option.file:
        return True
    if option.kind is OptionKind.VALUES:
        return read_options(given, option.option)
    if option.kind is not OptionKind.IDS:
        return given
    try:
        return option.parse(given, option.option)
    except BadRequest as error:
        raise SetupError(str(error)) from error
