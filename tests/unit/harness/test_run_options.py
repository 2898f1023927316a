"""The table of run options: a made-up row is found everywhere; what is generated is what is committed."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.models import CommandInfo
from typer.testing import CliRunner

from harness import RunError, SetupError
from harness.cli import app as cli
from harness.cli import docs
from harness.cli.page import with_page_options
from harness.cli.run_options import takes_run_options
from harness.page import record as records
from harness.page import record_schema
from harness.page.scenario import Scenario
from harness.site.build import options_script
from stepwell.errors import BadRequest
from stepwell.options import OptionKind
from stepwell.page.request import RunRequest
from stepwell.page.run_options import OWN, RADIO, RUN_OPTIONS, RunOption, Where
from tests.support.run_options import MADE_UP
from tests.support.run_records import make_record
from tests.unit.harness.test_cli import FakePage

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> RunOption:
    """A row more, and the command that is made of the rows."""
    rows: Any = RUN_OPTIONS
    monkeypatch.setitem(rows, MADE_UP.name, MADE_UP)
    made_anew = with_page_options()(takes_run_options()(inspect.unwrap(cli.run)))
    others = [command for command in cli.app.registered_commands if command.callback is not cli.run]
    monkeypatch.setattr(cli.app, "registered_commands", [*others, CommandInfo(name="run", callback=made_anew)])
    return MADE_UP


def test_a_made_up_option_is_in_the_request_and_its_errors(made_up: RunOption) -> None:
    assert RunRequest.from_json('{"prompt": "x"}').made_up == 7
    asked = RunRequest.from_json('{"prompt": "x", "made_up": 3}')
    assert asked.made_up == asked.as_dict()["made_up"] == 3
    for given, words in [
        ({"prompt": "x", "made_up": 10}, "request, option made_up: 10; it must be a whole number from 1 to 9"),
        ({"prompt": "x", "made_up": "3"}, "option made_up: '3'"),
        ({"workload": "kv64", "made_up": 3}, "made_up is for a model; kv64 has no made-up part"),
        ({"prompt": "x", "colour": 3}, ", made_up."),
    ]:
        with pytest.raises(BadRequest) as caught:
            RunRequest.from_json(json.dumps(given))
        assert words in str(caught.value)


def test_a_made_up_option_is_on_the_command_line_and_reaches_the_form(
    made_up: RunOption, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = runner.invoke(cli.app, ["run", "--help"]).output
    assert re.search(r"--made-up +<int range> \[1<=x<=9\] +Nobody asked for it\. \[default: 7\]", shown)
    page = FakePage(make_record([30]), make_record([30]))
    page.install(monkeypatch)
    for given in ([], ["--made-up", "3"]):
        done = runner.invoke(cli.app, ["run", "--prompt", "x", *given])
        assert done.exit_code == 0, done.output
    assert page.scenarios == [Scenario("x"), Scenario("x", made_up=3)]
    assert [scenario.fields["made_up"] for scenario in page.scenarios] == ["7", "3"]
    assert runner.invoke(cli.app, ["run", "--prompt", "x", "--made-up", "10"]).exit_code == 2
    with pytest.raises(SetupError, match="made_up: 10; it must be a whole number from 1 to 9"):
        Scenario("x", made_up=10)


def test_a_made_up_option_is_in_the_schema_the_document_and_the_page(made_up: RunOption) -> None:
    files = docs.made()
    schema = json.loads(files[records.SCHEMA_FILE])
    row = {"description": "nobody asked for it", "type": "integer", "minimum": 1, "maximum": 9}
    assert schema["properties"]["scenario"]["properties"]["made_up"] == row
    line = "| `made_up` | nobody asked for it | a whole number from 1 to 9 | `7` | model | `--made-up` | `made_up` |"
    assert line in files[docs.PROTOCOL].splitlines()
    rows = json.loads(options_script().removeprefix("export const RUN_OPTIONS = ").removesuffix(";\n"))
    assert [found["name"] for found in rows] == list(RUN_OPTIONS)
    assert rows[-1] == made_up.describe()
    assert (rows[-1]["form"], rows[-1]["control"], rows[-1]["where"]) == ("sampling", "made_up", "model")


def test_what_is_generated_is_what_is_committed() -> None:
    for path, text in docs.made().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not up to date: python -m harness docs"


def test_the_commands_write_what_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "made", lambda: {tmp_path / "deep" / "a.md": "text\n"})
    done = runner.invoke(cli.app, ["docs"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "deep" / "a.md").read_text() == "text\n"


def test_the_documents_prose_fits_its_lines() -> None:
    lines = docs.PROTOCOL.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("| ")] == []


def test_json_is_written_for_people() -> None:
    value = {"a": ["x" * 50, "y" * 50, "z" * 50], "b": [{"c": None, "d": "é" * 100}, 1], "e": {}, "f": []}
    text = record_schema.dumps(value)
    assert json.loads(text) == value
    assert max(map(len, text.splitlines())) <= 120
    assert record_schema.dumps({"a": [1, 2.5], "b": True}) == '{ "a": [1, 2.5], "b": true }'


@pytest.mark.parametrize("name", RUN_OPTIONS)
def test_every_row_is_whole(name: str) -> None:
    option = RUN_OPTIONS[name]
    assert option.name == name
    assert option.summary and not option.summary.endswith(".")
    assert option.default is None or option.check(option.default, "row") == option.default
    assert option.where is Where.ANY or option.always or option.lacks or option.needs, "others ignore or refuse it"
    assert bool(option.label) == (option.form not in ("", RADIO)) or name == "prompt", "what people call its control"
    assert option.form in ("", OWN, RADIO) or option.kind is not OptionKind.VALUES
    assert not option.needs or option.needs in RUN_OPTIONS


def test_names_on_the_command_line_and_in_the_form_are_no_ones_else() -> None:
    flags = [option.option for option in RUN_OPTIONS.values()]
    assert len(set(flags)) == len(flags)
    controls = [(option.field, option.on) for option in RUN_OPTIONS.values()]
    assert len(set(controls)) == len(controls)


@pytest.mark.parametrize(
    ("name", "value"),
    [(option.name, option.default) for option in RUN_OPTIONS.values() if option.default is not None],
)
def test_a_record_with_defaults_follows_the_schema(name: str, value: Any) -> None:
    record = make_record([30, 10])
    record["scenario"][name] = json.loads(json.dumps(value))
    assert records.check(record) is record
    record["scenario"][name] = object
    with pytest.raises(RunError, match=name):
        records.check(record)
