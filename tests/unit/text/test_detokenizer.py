"""Streaming text: whole characters from any cut of the bytes, and stop strings over any cut of the text."""

import asyncio
import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stepwell.errors import BadRequest
from stepwell.gpu.source import FileSource
from stepwell.text.detokenizer import Detokenizer, StopMatcher
from stepwell.text.tokenizer import Tokenizer
from stepwell.weights.gguf import read_gguf
from tests.support.demo_model import demo_model_path
from tests.support.paths import DATA
from tests.support.tiny_vocabulary import symbols, tiny_metadata, tiny_sentencepiece

ORACLE = json.loads((DATA / "smollm2-oracle.json").read_text())
SPECIAL, USER_DEFINED = 256, 257  # ids in BYTES


def no_encoder(_: str) -> Any:
    return None


BYTES = Tokenizer(tiny_metadata(special=["<|im_end|>"], user_defined=["<é>"]), no_encoder)


def tokenizer_of(pieces: Sequence[bytes]) -> tuple[Tokenizer, list[int]]:
    """A vocabulary with a token for each piece, and the pieces as ids."""
    tokens = list(dict.fromkeys(map(symbols, pieces))) or ["a"]
    tokenizer = Tokenizer(tiny_metadata(tokens=tokens, token_type=[1] * len(tokens)), no_encoder)
    return tokenizer, [tokens.index(symbols(piece)) for piece in pieces]


@st.composite
def cut(draw: st.DrawFn, whole: st.SearchStrategy[Any]) -> list[Any]:
    """A string or bytes, cut anywhere into pieces that are not empty."""
    value = draw(whole)
    places = draw(st.sets(st.integers(1, max(1, len(value) - 1)), max_size=12)) if len(value) > 1 else set()
    return [value[a:b] for a, b in pairwise(sorted({0, len(value), *places}))]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(asyncio.run(read_gguf(FileSource(demo_model_path()))).metadata, no_encoder)


# Detokenizer


@given(cut(st.text(max_size=30).map(str.encode)))
@settings(deadline=None)
def test_any_cut_of_a_text_gives_the_text(pieces: list[bytes]) -> None:
    tokenizer, ids = tokenizer_of(pieces)
    assume(not any(map(tokenizer.is_control, ids)))  # an end of generation, by its name, is no text
    detokenizer = Detokenizer(tokenizer)
    got = ""
    for token_id, data in zip(ids, accumulate(pieces), strict=True):
        got += detokenizer.push(token_id)
        assert got == data.decode(errors="ignore")  # every character that is complete, and no other
    assert detokenizer.finish() == ""


@given(st.text(st.characters(codec="utf-8", min_codepoint=0x800, exclude_characters="\ufffd"), min_size=1, max_size=10))
@settings(deadline=None)
def test_byte_by_byte_no_character_is_broken(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    pushed = [detokenizer.push(byte) for byte in text.encode()]
    assert [piece for piece in pushed if piece] == list(text)
    assert detokenizer.finish() == ""


@given(cut(st.binary(max_size=30)))
@settings(deadline=None)
def test_any_cut_of_any_bytes_equals_decoding_at_once(pieces: list[bytes]) -> None:
    tokenizer, ids = tokenizer_of(pieces)
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == b"".join(pieces).decode(errors="replace")


@pytest.mark.parametrize(
    ("data", "pushed", "rest"),
    [
        (b"\xff", ["\ufffd"], ""),
        (b"\x80a", ["\ufffd", "a"], ""),
        (b"\xe2(", ["", "\ufffd("], ""),
        (b"\xe2\x82(", ["", "", "\ufffd("], ""),
        (b"\xf0\x9f\x98\x80", ["", "", "", "\U0001f600"], ""),
        (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd"], ""),  # a surrogate
        (b"\xc3\xc3\xa9", ["", "\ufffd", "é"], ""),
        (b"a\xf0\x9f", ["a", "", ""], "\ufffd"),
    ],
)
def test_bad_bytes_are_replaced_as_soon_as_known(data: bytes, pushed: list[str], rest: str) -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(byte) for byte in data] == pushed
    assert detokenizer.finish() == rest


def test_control_tokens_show_only_on_request() -> None:
    ids = [ord("a"), SPECIAL, USER_DEFINED, ord("b")]
    assert [*map(Detokenizer(BYTES).push, ids)] == ["a", "", "<é>", "b"]
    assert [*map(Detokenizer(BYTES, skip_special=False).push, ids)] == ["a", "<|im_end|>", "<é>", "b"]


def test_a_control_token_inside_a_character() -> None:
    ids = [0xC3, SPECIAL, 0xA9]
    assert [*map(Detokenizer(BYTES).push, ids)] == ["", "", "é"]
    assert [*map(Detokenizer(BYTES, skip_special=False).push, ids)] == ["", "\ufffd<|im_end|>", "\ufffd"]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=10))
@settings(deadline=None)
def test_byte_fallback_tokens_stream_whole_characters(text: str) -> None:
    detokenizer = Detokenizer(Tokenizer(tiny_sentencepiece(add_space_prefix=False), no_encoder))
    pushed = [detokenizer.push(3 + byte) for byte in text.encode()]
    assert [piece for piece in pushed if piece] == list(text)
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    ("ids", "pushed"),
    [
        ([259, 260, 259], ["a", "b", " a"]),  # "▁a", "b"
        ([261, 259], ["", " a"]),  # "▁"
        ([1, 259], ["", "a"]),  # after a control token that is not shown
        ([3 + 0xE2, 3 + 0x82, 3 + 0xAC, 259], ["", "", "€", " a"]),
        ([3 + 0xE2, 259], ["", "\ufffd a"]),
        ([3 + 0x20, 3 + 0x20], ["", " "]),
    ],
)
def test_the_space_in_front_of_the_first_text_is_left_out(ids: list[int], pushed: list[str]) -> None:
    tokenizer = Tokenizer(tiny_sentencepiece(["▁a", "b", "▁"]), no_encoder)
    assert [*map(Detokenizer(tokenizer).push, ids)] == pushed


@pytest.mark.parametrize("mode", ["natural", "free_run", "ban_eog"])
@pytest.mark.parametrize("name", ORACLE["prompts"])
def test_demo_text_equals_the_oracle(demo: Tokenizer, name: str, mode: str) -> None:
    expected = ORACLE["prompts"][name][mode]
    detokenizer = Detokenizer(demo, skip_special=False)
    assert "".join(map(detokenizer.push, expected["ids"])) + detokenizer.finish() == expected["text"]
    quiet = Detokenizer(demo)
    shown = "".join(map(quiet.push, expected["ids"])) + quiet.finish()
    assert shown == expected["text"].replace("<|im_end|>", "").replace("<|im_start|>", "")


# StopMatcher


def stopped(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule, letter by letter: after each letter, does the text end with a stop string?"""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(cut(st.text("abc", max_size=30)), STOPS)
@settings(deadline=None)
def test_stop_strings_equal_the_rule_over_any_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    got = "".join(map(matcher.push, pieces))
    matched = matcher.matched
    got += matcher.finish()
    assert (got, matched) == stopped("".join(pieces), stops)


@given(st.text("abc", max_size=20), STOPS)
@settings(deadline=None)
def test_only_what_may_become_a_stop_string_is_withheld(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if matcher.matched is None:
        starts = [at for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops)]
        assert shown == text[: min(starts, default=len(text))]


def test_nothing_follows_a_stop_string() -> None:
    matcher = StopMatcher(["\n\n", "User:"])
    assert [*map(matcher.push, ["one\n", "two\nUs", "er", ": three", "four"])] == ["one", "\ntwo\n", "", "", ""]
    assert (matcher.matched, matcher.finish()) == ("User:", "")


def test_withheld_text_comes_at_the_end() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("a <en") == "a "
    assert (matcher.finish(), matcher.finish(), matcher.matched) == ("<en", "", None)


@pytest.mark.parametrize("stops", ["stop", [""], ["a", ""], [1]])
def test_stops_that_are_no_strings_are_refused(stops: Any) -> None:
    with pytest.raises(BadRequest, match="list of strings, none of them empty"):
        StopMatcher(stops)
