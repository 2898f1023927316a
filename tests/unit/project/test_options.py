"""The one parser of options: every kind from JSON and from text, what it refuses, and what it says."""

from typing import Any

import pytest

from stepwell.errors import BadRequest
from stepwell.options import Option, OptionKind, check_options, parse_options

INT = Option("n", OptionKind.INT, 8, "a count", 1, 256)
OPEN = Option("ms", OptionKind.FLOAT, None, "a time", 0)
SHARE = Option("p", OptionKind.FLOAT, 1.0, "a share", 0, 1, above=True)
BOOL = Option("on", OptionKind.BOOL, True, "a switch")
CHOICE = Option("era", OptionKind.CHOICE, "A", "one of several", choices=("A", "B"))
LIMITS = Option("limits", OptionKind.LIMITS, {64: 2, 128: 1}, "a table")
TEXT = Option("name", OptionKind.TEXT, None, "a text")
TEXTS = Option("stop", OptionKind.TEXTS, (), "some texts")
IDS = Option("ids", OptionKind.IDS, None, "some ids")
VALUES = Option("more", OptionKind.VALUES, {}, "another table's")


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        (INT, "12", 12), (INT, " 12 ", 12), (OPEN, "2", 2.0), (SHARE, "1e-3", 0.001), (BOOL, "False", False),
        (CHOICE, "B", "B"), (LIMITS, "64:2", {64: 2}), (TEXT, " a ", " a "), (IDS, "1, 2,30", (1, 2, 30)),
    ],
)  # fmt: skip
def test_a_text_is_read_as_it_is_typed(option: Option, text: str, value: Any) -> None:
    found = option.parse(text, "it")
    assert (found, type(found)) == (value, type(option.check(value, "it")))
    assert option.parse(option.write(found), "it") == found


@pytest.mark.parametrize(
    ("option", "value", "typed"),
    [
        (INT, 256, 256), (OPEN, 3, 3.0), (SHARE, 1, 1.0), (BOOL, False, False), (CHOICE, "A", "A"), (TEXT, "", ""),
        (LIMITS, {"64": 1}, {64: 1}), (TEXTS, ["a", "|"], ("a", "|")), (IDS, [1, 2], (1, 2)),
        (VALUES, {"a": 1}, {"a": 1}),
    ],
)  # fmt: skip
def test_a_value_of_json_has_its_type(option: Option, value: Any, typed: Any) -> None:
    found = option.check(value, "it")
    assert (found, type(found)) == (typed, type(option.parse(value, "it")))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((INT, value) for value in (0, 257, 1.5, 2.0, True, "many", "", None, [1], float("nan"))),
        *((OPEN, value) for value in (-1, False, "x", "nan", "inf", float("nan"), float("inf"), 10**400, "9" * 400)),
        *((SHARE, value) for value in (0, 1.1, -1)),
        *((BOOL, value) for value in (1, "yes", "1", None)),
        *((CHOICE, value) for value in ("C", "", 1, None)),
        *((LIMITS, value) for value in ("", "4 furlongs:3", {}, 3, "9" * 400 + ":1", None)),
        *((TEXT, value) for value in (1, None, ["a"])),
        *((TEXTS, value) for value in ("a", [1], None)),
        *((IDS, value) for value in ("", "1,x", "-1", [1.0], [True], ["1"], 1)),
        *((VALUES, value) for value in ([1], "a=1", None)),
    ],
)
def test_what_is_not_allowed_is_named(option: Option, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        option.parse(value, "policy p")
    assert str(caught.value) == f"policy p, option {option.name}: {value!r}; it must be {option.allowed()}."


def test_values_of_json_are_not_read_as_texts() -> None:
    for option, text in ((INT, "12"), (OPEN, "1"), (BOOL, "true"), (IDS, "1,2")):
        with pytest.raises(BadRequest, match=option.name):
            option.check(text, "request")
        option.parse(text, "request")
    with pytest.raises(BadRequest, match="request, option n: '12'"):
        check_options([INT], {"n": "12"}, "request")
    assert parse_options([INT], {"n": "12"}, "request") == {"n": 12}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (INT, "a whole number from 1 to 256"), (OPEN, "a number, 0 or more"), (SHARE, "a number above 0 and up to 1"),
        (Option("n", OptionKind.INT, 0, "any"), "a whole number"), (CHOICE, "one of A, B"), (BOOL, "true or false"),
        (Option("n", OptionKind.FLOAT, 0, "few", maximum=2000), "a number up to 2,000"),
    ],
)  # fmt: skip
def test_what_is_allowed_in_words(option: Option, words: str) -> None:
    assert option.allowed() == words


def test_a_row_is_written_for_forms_and_described_for_json() -> None:
    assert [option.write(option.default) for option in (INT, OPEN, BOOL, LIMITS, IDS)] == [
        "8", "", "true", "64:2, 128:1", "",
    ]  # fmt: skip
    assert TEXTS.write(("\n\n", "a|b\\")) == r"\n\n|a\|b\\"
    assert TEXTS.write(("###", "\t\\n")) == r"###|\t\\n"
    assert OPEN.describe() == {
        "name": "ms", "kind": "float", "default": None, "summary": "a time", "minimum": 0, "maximum": None,
        "choices": [],
    }  # fmt: skip


def test_an_unknown_option_is_named_with_those_that_there_are() -> None:
    with pytest.raises(BadRequest, match=r"policy x: no option 'a'\. It has n, ms\."):
        parse_options([INT, OPEN], {"b": 1, "a": 1}, "policy x")
    with pytest.raises(BadRequest, match="It has none"):
        check_options([], {"a": 1}, "policy x")
