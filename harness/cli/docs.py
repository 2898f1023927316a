"""docs/protocol.md and the record's schema, made from the tables of options: what ``python -m harness docs`` writes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness import ROOT
from harness.page import record_schema
from harness.page.record import SCHEMA_FILE
from stepwell.launch.options import OPTIONS
from stepwell.memory.policies import POLICIES
from stepwell.options import Option, OptionKind
from stepwell.page.run_options import RUN_OPTIONS, RunOption
from stepwell.page.what_if import OPTIONS as QUESTION

PROTOCOL = ROOT / "docs" / "protocol.md"
"""The page of the protocol."""
_ELSEWHERE = {"scenario", "options"}  # of the record: the tables before it have what they hold
_Schema = Mapping[str, Any]


class Field(NamedTuple):
    """One row of the table of the record's fields."""

    path: str
    type: str
    text: str


def made() -> dict[Path, str]:
    """The files and what they should hold."""
    schema = record_schema.complete(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))
    return {SCHEMA_FILE: record_schema.dumps(schema) + "\n", PROTOCOL: render(schema)}


def render(schema: _Schema) -> str:
    """docs/protocol.md, of the tables as they are and of the record's ``schema``."""
    environment = Environment(
        loader=PackageLoader("harness.cli", "."),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {
        "cell": lambda text: text.replace("|", "\\|"),
        "allowed": Option.allowed,
        "default_of": default_of,
        "control": control,
        "fill": lambda text: fill(text, 120, break_long_words=False, break_on_hyphens=False),
    }
    return environment.get_template("protocol.md.j2").render(
        options=list(RUN_OPTIONS.values()),
        policies=POLICIES,
        launch_options=OPTIONS,
        question=QUESTION,
        option_fields=list(OPTIONS[0].describe()),
        schema=schema,
        fields=list(fields_of(schema, schema, "")),
    )


def default_of(option: Option) -> str:
    """The default as a person types it, or what is chosen instead."""
    if option.default is None:
        return option.empty if isinstance(option, RunOption) else "auto"
    if option.kind is OptionKind.LIMITS:
        return f"{len(option.default)} sizes"
    text = option.write(option.default)
    return f"`{text}`" if text and option.kind is not OptionKind.VALUES else "none"


def control(option: RunOption) -> str:
    """The control that sets ``option``, and for which choice."""
    if option.kind is OptionKind.VALUES:
        return f"`{option.field}NAME`"
    if option.on:
        return f"`{option.field}={option.on}`"
    return f"`{option.field}`" if option.form else "`model`"


def fields_of(schema: _Schema, part: _Schema, path: str) -> Iterator[Field]:
    """The fields below ``part`` of the ``schema``, which is at ``path``, from the outside in."""
    part = _resolved(schema, part)
    for name, entry in part.get("properties", {}).items():
        optional = "" if name in part.get("required", part["properties"]) else "?"
        found = _resolved(schema, entry)
        below = f"{path}.{name}{optional}".lstrip(".")
        yield Field(below, type_of(schema, found), found.get("description", ""))
        if name in _ELSEWHERE:
            continue
        for shown, inner in _inside(found):
            yield from fields_of(schema, inner, below + shown)


def type_of(schema: _Schema, part: _Schema) -> str:
    """The type of a value in words: "number or null", "text[]" for a list."""
    part = _resolved(schema, part)
    if "anyOf" in part:
        return " or ".join(sorted((type_of(schema, each) for each in part["anyOf"]), key="null".__eq__))
    if "const" in part:
        return json.dumps(part["const"])
    if "enum" in part:
        return ", ".join(json.dumps(value) for value in part["enum"])
    if "prefixItems" in part:
        return f"[{', '.join(type_of(schema, each) for each in part['prefixItems'])}]"
    if part.get("type") == "array":
        return f"{type_of(schema, part['items'])}[]"
    kind = str(part.get("type", "object"))
    return {"integer": "whole number", "string": "text"}.get(kind, kind)


def _inside(part: _Schema) -> Iterator[tuple[str, _Schema]]:
    """The parts whose fields are listed below ``part``, and what a path has for each."""
    yield "", part
    yield from (("", each) for each in part.get("anyOf", ()))
    if part.get("type") == "array" and isinstance(part["items"], Mapping):
        yield "[]", part["items"]
    if isinstance(part.get("additionalProperties"), Mapping):
        yield ".NAME", part["additionalProperties"]


def _resolved(schema: _Schema, part: _Schema) -> _Schema:
    """``part`` with what it refers to; its own words come first."""
    if "$ref" not in part:
        return part
    return {**schema["$defs"][part["$ref"].rpartition("/")[2]], **part}
