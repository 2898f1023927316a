"""The parameters of a policy as a table, so that a page, a command line and a test can list, check and set them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from stepwell.errors import BadRequest

Limits = Mapping[int, int]
"""Bytes of a size class → the number of free buffers it keeps."""
OptionValue = int | float | bool | str | Limits
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_ENTRY = re.compile(r"\s*([\d.]+)\s*([A-Za-z]*)\s*:\s*(\d+)\s*")


class OptionKind(StrEnum):
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    CHOICE = "choice"
    LIMITS = "limits"


@dataclass(frozen=True, slots=True)
class Option:
    """One parameter: its kind, its default, and what is allowed (``minimum`` to ``maximum``, or ``choices``)."""

    name: str
    kind: OptionKind
    default: OptionValue
    summary: str
    minimum: float = 0
    maximum: float = float("inf")
    choices: tuple[str, ...] = ()

    def parse(self, value: object, policy: str) -> OptionValue:
        """``value`` in this option's type; BadRequest with the range if it is none.  Text is read as in a form."""
        try:
            return self._parse(value)
        except (TypeError, ValueError) as error:
            raise BadRequest(f"policy {policy}, option {self.name}: {value!r}; {self._expected()}.") from error

    def _parse(self, value: object) -> OptionValue:
        match self.kind:
            case OptionKind.BOOL:
                return _boolean(value)
            case OptionKind.CHOICE:
                if value not in self.choices:
                    raise ValueError(value)
                return str(value)
            case OptionKind.LIMITS:
                return parse_limits(value)
            case OptionKind.INT | OptionKind.FLOAT:
                if isinstance(value, bool) or not isinstance(value, int | float | str):
                    raise TypeError(value)
                number = int(value) if self.kind is OptionKind.INT else float(value)
                if not self.minimum <= number <= self.maximum or (isinstance(value, float) and number != value):
                    raise ValueError(value)
                return number

    def _expected(self) -> str:
        match self.kind:
            case OptionKind.BOOL:
                return "it must be true or false"
            case OptionKind.CHOICE:
                return f"it must be one of {', '.join(self.choices)}"
            case OptionKind.LIMITS:
                return "it must be a table such as '4 MiB:64, 8 MiB:64' (sizes are multiples of 4 B, counts 0 or more)"
            case _:
                return f"it must be {self.kind} from {self.minimum:,} to {self.maximum:,}"


def parse_options(policy: str, options: Iterable[Option], values: Mapping[str, object]) -> dict[str, OptionValue]:
    """``values`` checked against the table; only those given are returned."""
    known = {option.name: option for option in options}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise BadRequest(f"policy {policy}: no option {unknown[0]!r}. It has {', '.join(known) or 'none'}.")
    return {name: known[name].parse(value, policy) for name, value in values.items()}


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


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(value)
