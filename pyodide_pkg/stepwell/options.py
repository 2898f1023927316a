"""Options as rows of a table: what may be set, how a value is checked and read, and how it is written and described."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite
from types import MappingProxyType
from typing import Any

from stepwell.errors import BadRequest

Limits = Mapping[int, int]
"""Bytes of a size class → the number of free buffers it keeps."""
OptionValue = int | float | bool | str | Limits
"""A value of an option; the text of a CHOICE or TEXT."""
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_ENTRY = re.compile(r"\s*([\d.]+)\s*([A-Za-z]*)\s*:\s*(\d+)\s*")
_ESCAPES = str.maketrans({"\\": "\\\\", "|": "\\|", "\n": "\\n", "\t": "\\t"})


class OptionKind(StrEnum):
    """What the values of an option are; ``write`` says how each is typed."""

    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    CHOICE = "choice"
    LIMITS = "limits"  # a table of size classes
    TEXT = "text"
    TEXTS = "texts"
    IDS = "ids"  # a list of whole numbers
    VALUES = "values"  # options of another table, by name


@dataclass(frozen=True, slots=True)
class Option:
    """One row: a name, a kind, a default, a sentence, and what is allowed: ``minimum`` to ``maximum``, or ``choices``.

    ``default`` None: whoever uses the option chooses.  ``above``: ``minimum`` itself is not allowed.
    """

    name: str
    kind: OptionKind
    default: Any
    summary: str
    minimum: float = -inf
    maximum: float = inf
    choices: tuple[str, ...] = ()
    above: bool = False

    def parse(self, value: object, what: str) -> Any:
        """``value`` in this option's type; a text is read as it is typed into a form.  Raises as ``check``."""
        return self._checked(value, what, read=True)

    def check(self, value: object, what: str) -> Any:
        """``value`` in this option's type.

        BadRequest, with what is allowed, for a value of another type or out of range; ``what`` says whose option it is.
        """
        return self._checked(value, what, read=False)

    def write(self, value: Any) -> str:
        """``value`` as a person types it into a form: texts between bars, ids between commas; empty for None."""
        match self.kind:
            case _ if value is None:
                return ""
            case OptionKind.BOOL:
                return str(value).lower()
            case OptionKind.TEXTS:
                return "|".join(text.translate(_ESCAPES) for text in value)
            case OptionKind.IDS:
                return ",".join(map(str, value))
            case OptionKind.LIMITS if not isinstance(value, str):
                return ", ".join(f"{size}:{count}" for size, count in value.items())
            case _:
                return str(value)

    def describe(self) -> dict[str, Any]:
        """The row as JSON has it; a bound that is infinite is null."""
        return {
            "name": self.name,
            "kind": self.kind.value,
            "default": self.default,
            "summary": self.summary,
            "minimum": self.minimum if isfinite(self.minimum) else None,
            "maximum": self.maximum if isfinite(self.maximum) else None,
            "choices": list(self.choices),
        }

    def allowed(self) -> str:
        """What the values are, in words: "a whole number from 1 to 256"."""
        match self.kind:
            case OptionKind.BOOL:
                return "true or false"
            case OptionKind.CHOICE:
                return f"one of {', '.join(self.choices)}"
            case OptionKind.LIMITS:
                return "a table such as '4 MiB:64, 8 MiB:64' (sizes are multiples of 4 B, counts 0 or more)"
            case OptionKind.TEXT:
                return "a text"
            case OptionKind.TEXTS:
                return "a list of texts"
            case OptionKind.IDS:
                return "a list of integers, typed with commas: 1,2,3"
            case OptionKind.VALUES:
                return "a table of names and values"
            case _:
                return ("a whole number" if self.kind is OptionKind.INT else "a number") + self._range()

    def _range(self) -> str:
        low, high = (bound if isfinite(bound) else None for bound in (self.minimum, self.maximum))
        if low is None:
            return "" if high is None else f" up to {high:,}"
        if self.above:
            return f" above {low:,}" + ("" if high is None else f" and up to {high:,}")
        return f", {low:,} or more" if high is None else f" from {low:,} to {high:,}"

    def _checked(self, value: object, what: str, *, read: bool) -> Any:
        try:
            return self._typed(self._read(value) if read and isinstance(value, str) else value)
        except (TypeError, ValueError, OverflowError):
            raise BadRequest(f"{what}, option {self.name}: {value!r}; it must be {self.allowed()}.") from None

    def _read(self, text: str) -> object:
        match self.kind:
            case OptionKind.INT:
                return int(text)
            case OptionKind.FLOAT:
                return float(text)
            case OptionKind.BOOL if text.lower() in ("true", "false"):
                return text.lower() == "true"
            case OptionKind.IDS:
                return _ids_of(text)
            case _:
                return text

    def _typed(self, value: Any) -> Any:
        match self.kind:
            case OptionKind.INT | OptionKind.FLOAT:
                return self._number(value)
            case OptionKind.CHOICE:
                _need(value in self.choices)
                return str(value)
            case OptionKind.BOOL:
                _need(isinstance(value, bool))
                return value
            case OptionKind.LIMITS:
                return parse_limits(value)
            case OptionKind.TEXT:
                _need(isinstance(value, str))
                return str(value)
            case OptionKind.VALUES:
                _need(isinstance(value, Mapping))
                return dict(value)
            case OptionKind.TEXTS | OptionKind.IDS:
                item = str if self.kind is OptionKind.TEXTS else int
                _need(isinstance(value, list | tuple) and all(type(each) is item for each in value))
                return tuple(value)

    def _number(self, value: Any) -> int | float:
        allowed = (int,) if self.kind is OptionKind.INT else (int, float)
        _need(isinstance(value, allowed) and not isinstance(value, bool) and isfinite(value))
        _need(self.minimum <= value <= self.maximum and not (self.above and value == self.minimum))
        return int(value) if self.kind is OptionKind.INT else float(value)


def parse_options(options: Iterable[Option], values: Mapping[str, object], what: str) -> dict[str, Any]:
    """``values``, texts among them read, by the rows of ``options``; BadRequest for what is unknown or not allowed."""
    known = _known(options, values, what)
    return {name: known[name].parse(value, what) for name, value in values.items()}


def check_options(options: Iterable[Option], values: Mapping[str, object], what: str) -> dict[str, Any]:
    """The same for values that have their types already, as JSON has them."""
    known = _known(options, values, what)
    return {name: known[name].check(value, what) for name, value in values.items()}


def _known(options: Iterable[Option], names: Iterable[str], what: str) -> dict[str, Option]:
    known = {option.name: option for option in options}
    if unknown := sorted(set(names) - set(known)):
        raise BadRequest(f"{what}: no option {unknown[0]!r}. It has {', '.join(known) or 'none'}.")
    return known


def parse_limits(value: object) -> Limits:
    """A limit table: a mapping of bytes to counts, or text such as ``4 MiB:64, 8388608:10``."""
    if isinstance(value, str):
        entries = [_ENTRY.fullmatch(entry) for entry in value.split(",")]
        if None in entries:
            raise ValueError(value)
        pairs = [entry.groups() for entry in entries if entry is not None]
        table = {int(float(number) * _unit(unit)): int(count) for number, unit, count in pairs}
    elif isinstance(value, Mapping):
        table = {int(size): int(count) for size, count in value.items()}
    else:
        raise TypeError(value)
    for size, count in table.items():
        if size <= 0 or size % 4 or count < 0:
            raise BadRequest(f"limit table: {size:,} B keeps {count}; need a multiple of 4 B and a count of 0 or more.")
    if not table:
        raise ValueError(value)
    return MappingProxyType(table)


def _unit(name: str) -> int:
    if name.lower() not in _UNITS:
        raise ValueError(name)
    return _UNITS[name.lower()]


def _ids_of(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    _need(all(part.isascii() and part.isdigit() for part in parts))
    return tuple(map(int, parts))


def _need(condition: bool) -> None:
    if not condition:
        raise ValueError
