"""Every family of vocabularies: equal to the ``tokenizers`` and ``sentencepiece`` libraries, and their own rules."""

import json
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from stepwell.errors import BadFile
from stepwell.text.backends import rust_backend
from stepwell.text.detokenizer import Detokenizer
from stepwell.text.pre_tokenizers import PRE_TOKENIZERS
from stepwell.text.tokenizer import Tokenizer, tokenizer_json
from tests.support.paths import DATA
from tests.support.tiny_vocabulary import tiny_metadata, tiny_sentencepiece
from tests.support.trained_vocabularies import FAMILIES, TEXTS, trained

SENTENCEPIECE = json.loads((DATA / "sentencepiece-cases.json").read_text("utf-8"))
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "phi-2": "gpt-2"}


@cache
def ours(family: str) -> Tokenizer:
    return Tokenizer(trained(family).metadata, rust_backend)


@cache
def our_document(family: str) -> tokenizers.Tokenizer:
    """What the library makes of the tokenizer.json that we write."""
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(trained(family).metadata)))


def back(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return "".join(map(detokenizer.push, ids)) + detokenizer.finish()


def composed(family: str, text: str) -> str:
    return normalizers.NFC().normalize_str(text) if family == "qwen2" else text


def characters() -> st.SearchStrategy[str]:
    """Texts of what the patterns tell apart, and of any character but the one that SentencePiece has for a space."""
    telling = st.sampled_from(
        [*"aZéÉǅʰ中\u0301's\u017fT 1٣½ \t\r\n\u0085\u00a0\u3000/.-_😀", "'ll", "'RE", "  ", "\r\n"]
    )
    return st.lists(telling | st.characters(codec="utf-8", exclude_characters="\u2581"), max_size=24).map("".join)


# Against the libraries


def test_every_pre_tokenizer_has_a_reference() -> None:
    assert set(PRE_TOKENIZERS) == {*FAMILIES, *ALIASES} - {"sentencepiece"}
    assert all(PRE_TOKENIZERS[alias] == PRE_TOKENIZERS[name] for alias, name in ALIASES.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_equal_those_of_the_trained_tokenizer(family: str) -> None:
    tokenizer, reference = ours(family), trained(family)
    assert len(TEXTS) > 230
    assert [text for text in TEXTS if tokenizer.encode(text) != reference.ids(text)] == []


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"sentencepiece"}))
@given(text=characters())
@settings(deadline=None, max_examples=150)
def test_words_are_cut_as_by_the_reference(family: str, text: str) -> None:
    cut, expected = (t.pre_tokenizer.pre_tokenize_str(text) for t in (our_document(family), trained(family).library))
    assert cut == expected


def test_the_families_differ() -> None:
    """Else the comparison could not tell one pattern from another."""
    text = "HelloWorld it'S 1234 x/\n\ny"
    cuts = {pre: str(our_document(pre).pre_tokenizer.pre_tokenize_str(text)) for pre in FAMILIES[:-1]}
    assert cuts["llama-bpe"] == cuts["dbrx"]  # one pattern; they differ in ignore_merges
    assert len(set(cuts.values())) == len(cuts) - 1


def test_sentencepiece_ids_equal_those_of_the_library() -> None:
    tokenizer = Tokenizer(SENTENCEPIECE["metadata"], rust_backend)
    assert len(SENTENCEPIECE["cases"]) == 176
    wrong = [case for case in SENTENCEPIECE["cases"] if tokenizer.encode(case["text"]) != [1, *case["ids"]]]
    assert wrong == []


@pytest.mark.parametrize("family", FAMILIES)
@given(text=characters())
@settings(deadline=None, max_examples=100)
def test_any_text_comes_back(family: str, text: str) -> None:
    tokenizer = ours(family)
    assert back(tokenizer, tokenizer.encode(text)) == composed(family, text)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stored_text_comes_back_as_the_library_decodes_it(family: str) -> None:
    tokenizer, documents = ours(family), (trained(family).library, our_document(family))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert {library.decode(ids) for library in documents} == {back(tokenizer, ids)}
        assert back(tokenizer, ids, skip_special=False) == composed(family, text)


# Byte-level rules


def test_llama_3_takes_a_word_that_is_a_token_whole() -> None:
    tokens = [*tiny_metadata()["tokenizer.ggml.tokens"], "abc"]  # type: ignore[misc]
    for pre, ids in (("llama-bpe", [256]), ("dbrx", [97, 98, 99])):
        metadata = tiny_metadata(pre=pre, tokens=tokens, token_type=[1] * 257)
        assert Tokenizer(metadata, rust_backend).encode("abc") == ids


def test_llama_3_begins_with_bos_unless_the_file_says_no() -> None:
    keys: dict[str, Any] = {"pre": "llama-bpe", "special": ["<|begin_of_text|>"], "bos_token_id": 256}
    assert Tokenizer(tiny_metadata(**keys), rust_backend).encode("a") == [256, 97]
    assert Tokenizer(tiny_metadata(**keys, add_bos_token=False), rust_backend).encode("a") == [97]
    assert Tokenizer(tiny_metadata(pre="llama-bpe"), rust_backend).encode("a") == [97]  # there is none


def test_qwen_2_composes_characters() -> None:
    assert Tokenizer(tiny_metadata(pre="qwen2"), rust_backend).encode("e\u0301") == list("é".encode())
    assert Tokenizer(tiny_metadata(pre="llama-bpe"), rust_backend).encode("e\u0301") == list("e\u0301".encode())


# SentencePiece rules

FIRST = 259  # the id of the first piece of tiny_sentencepiece


def spm(*args: Any, architecture: str = "llama", **keys: Any) -> Tokenizer:
    return Tokenizer({"general.architecture": architecture, **tiny_sentencepiece(*args, **keys)}, rust_backend)


def test_the_best_score_merges_first() -> None:
    assert spm(["bc", "ab", "a", "b", "c", "▁"]).encode("abc") == [1, FIRST + 5, FIRST + 2, FIRST]
    assert spm(["ab", "bc", "a", "b", "c", "▁"]).encode("abc") == [1, FIRST + 5, FIRST, FIRST + 4]


def test_a_token_merges_from_any_two_of_its_parts() -> None:
    pieces = ["abc", "ab", "bc", "▁", "a", "b", "c"]
    assert spm([*pieces]).encode("abc") == [1, FIRST + 3, FIRST]
    assert spm([piece for piece in pieces if piece != "ab"]).encode("abc") == [1, FIRST + 2, FIRST]


def test_a_character_without_a_token_is_its_bytes() -> None:
    tokenizer = spm(["▁", "a"])
    assert tokenizer.encode("aé") == [1, FIRST, FIRST + 1, 3 + 0xC3, 3 + 0xA9]
    assert back(tokenizer, [3 + 0xC3, 3 + 0xA9]) == "é"
    assert tokenizer.encode("<0x41>") == [1, FIRST, *(3 + byte for byte in b"<0x41>")]  # a text, not the token


def test_a_character_with_neither_is_unknown() -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a"]
    tokenizer = spm(tokens=tokens, token_type=[2, 3, 3, 1, 1], scores=[0.0] * 5)
    assert tokenizer.encode("aé") == [1, 3, 4, 0]


def test_the_space_prefix_of_texts_and_after_special_tokens() -> None:
    pieces = ["▁a", "▁", "a"]
    tool = FIRST + 3
    with_prefix = spm(pieces, user_defined=["<tool>"])
    assert with_prefix.encode("a") == [1, FIRST]
    assert with_prefix.encode(" a") == [1, FIRST + 1, FIRST]
    assert with_prefix.encode("a<tool>a") == [1, FIRST, tool, FIRST]
    assert with_prefix.encode("") == [1]
    without = spm(pieces, user_defined=["<tool>"], add_space_prefix=False)
    assert without.encode("a<tool> a") == [1, FIRST + 2, tool, FIRST]
    assert (back(with_prefix, [FIRST]), back(without, [FIRST])) == ("a", " a")


def test_bos_eos_and_unknown_are_llamas_unless_the_file_says_otherwise() -> None:
    tokenizer = spm(["▁", "a"])
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eog_ids) == ("<s>", "</s>", {2})
    assert tokenizer.encode("<s>a") == [1, FIRST, FIRST + 1]
    other = spm(["▁"], special=["<b>", "<e>"], bos_token_id=260, eos_token_id=261, add_bos_token=False)
    assert (other.bos_token, other.eos_token, other.eog_ids) == ("<b>", "<e>", {2, 261})  # "</s>" by its text
    assert other.encode("") == []


def test_special_tokens_of_phi_3_take_the_white_space_after_them() -> None:
    pieces, special = ["▁", "a", "\n"], ["<|user|>", "<|end|>", "<|endoftext|>"]
    user, end, end_of_text = FIRST + 3, FIRST + 4, FIRST + 5
    space, a, line = FIRST, FIRST + 1, FIRST + 2
    text = "<|user|>\n a<|end|>\n<|user|><|endoftext|>\na"
    phi = spm(pieces, special=special, architecture="phi3")
    assert phi.encode(text) == [1, user, space, a, end, user, end_of_text, space, line, a]
    llama = spm(pieces, special=special)
    assert llama.encode("<|user|>\na") == [1, user, space, line, a]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [0.0]}, "scores has 1 entries, tokenizer.ggml.tokens has 260"),
        ({"scores": [0] * 260}, "scores is not an array of float"),
        ({"scores": [0.0] * 259 + [float("nan")]}, "the score of token 259 is not a number"),
        ({"add_space_prefix": 1}, "add_space_prefix is 1"),
        ({"unknown_token_id": 260}, "unknown_token_id is 260"),
        ({"token_type": [6] * 260}, "token 0, '<unk>', is marked as a byte, but is not <0xNN>"),
    ],
)
def test_bad_sentencepiece_metadata_is_refused_with_the_key(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(BadFile) as caught:
        tokenizer_json(tiny_sentencepiece(["a"], **keys))
    assert words in str(caught.value)


@pytest.mark.parametrize("token", ["<0x0a>", "<0x1>", "<0x123>", "0x41", "<0xé1>"])
def test_a_malformed_byte_token_is_refused(token: str) -> None:
    with pytest.raises(BadFile, match="is not <0xNN>"):
        tokenizer_json(tiny_sentencepiece(tokens=["<unk>", token], token_type=[2, 6], scores=[0.0, 0.0]))
