"""The run record's JSON Schema: the parts that tables say are made from them, and the whole written as a file.

``record.schema.json`` is complete as it is committed.  What it says of the scenario comes from ``RUN_OPTIONS``, of the
launch options from theirs; the rest is written by hand.  ``python -m harness docs`` brings the file up to date.
"""

import json
from collections.abc import Mapping
from typing import Any

from stepwell.launch.options import OPTIONS
from stepwell.options import Option, OptionKind
from stepwell.page.run_options import RUN_OPTIONS

_WIDTH = 120
_OWN = ("model", "sha256")  # of a scenario, beside the request
_TYPES: Mapping[OptionKind, dict[str, Any]] = {
    OptionKind.INT: {"type": "integer"},
    OptionKind.FLOAT: {"type": "number"},
    OptionKind.BOOL: {"type": "boolean"},
    OptionKind.TEXT: {"type": "string"},
    OptionKind.TEXTS: {"type": "array", "items": {"type": "string"}},
    OptionKind.IDS: {"$ref": "#/$defs/ids"},
    OptionKind.VALUES: {"type": "object"},
}


def complete(schema: dict[str, Any]) -> dict[str, Any]:
    """The ``schema`` with its scenario and its launch options as the tables have them now."""
    scenario, launch = (schema["properties"][name] for name in ("scenario", "launch"))
    own = {name: scenario["properties"][name] for name in _OWN}
    made = scenario | {
        "required": [*_OWN, *(name for name, option in RUN_OPTIONS.items() if option.always)],
        "properties": own | {name: property_of(option) for name, option in RUN_OPTIONS.items()},
    }
    options = launch["properties"]["options"] | {"required": [option.name for option in OPTIONS]}
    launched = launch | {"properties": launch["properties"] | {"options": options}}
    return schema | {"properties": schema["properties"] | {"scenario": made, "launch": launched}}


def property_of(option: Option) -> dict[str, Any]:
    """What a record may have for ``option``: null too, where that is the default."""
    if option.kind is OptionKind.CHOICE:
        made: dict[str, Any] = {"enum": list(option.choices)}
    else:
        made = dict(_TYPES[option.kind])
    bounds = option.describe()
    if bounds["minimum"] is not None:
        made["exclusiveMinimum" if option.above else "minimum"] = option.minimum
    if bounds["maximum"] is not None:
        made["maximum"] = option.maximum
    if option.kind is OptionKind.TEXT and option.default != "":
        made["minLength"] = 1
    if option.default is None:
        made = {"anyOf": [{"type": "null"}, made]}
    return {"description": option.summary, **made}


def dumps(value: Any, used: int = 0, indent: int = 0) -> str:
    """JSON for people: what fits a line is on one.  ``used``: columns taken on the first line."""
    line = _one_line(value)
    if used + len(line) < _WIDTH or not isinstance(value, dict | list) or not value:
        return line
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        keys = {key: f"{json.dumps(key, ensure_ascii=False)}: " for key in value}
        items = [keys[key] + dumps(value[key], indent + 2 + len(keys[key]), indent + 2) for key in value]
        return "{\n" + ",\n".join(pad + item for item in items) + "\n" + " " * indent + "}"
    if all(isinstance(item, str) for item in value):
        return "[\n" + _filled(value, pad) + "\n" + " " * indent + "]"
    return "[\n" + ",\n".join(pad + dumps(item, indent + 2, indent + 2) for item in value) + "\n" + " " * indent + "]"


def _one_line(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "{ " + ", ".join(f"{json.dumps(key)}: {_one_line(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_one_line, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _filled(texts: list[str], pad: str) -> str:
    """Texts of a list, as many to a line as there is room for."""
    lines = [pad]
    for number, text in enumerate(texts):
        item = json.dumps(text) + ("," if number < len(texts) - 1 else "")
        if len(lines[-1]) + 1 + len(item) > _WIDTH:
            lines.append(pad)
        lines[-1] += item if lines[-1] == pad else " " + item
    return "\n".join(lines)
