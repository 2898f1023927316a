"""The tokenizer: equal to llama.cpp on the demo model, and its rules and refusals on a vocabulary of a few tokens."""

import asyncio
import json
import subprocess
import sys
from array import array
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import BadFile, Unsupported
from stepwell.gpu.source import FileSource
from stepwell.text.backends import js_backend, rust_backend
from stepwell.text.tokenizer import Tokenizer, tokenizer_json
from stepwell.weights.gguf import read_gguf
from tests.support.demo_model import demo_model_path
from tests.support.paths import DATA, ROOT
from tests.support.tiny_vocabulary import tiny_metadata

ORACLE = json.loads((DATA / "smollm2-oracle.json").read_text())
CASES = json.loads((DATA / "smollm2-tokenizer-cases.json").read_text())["cases"]


@pytest.fixture(scope="module")
def demo_metadata() -> dict[str, Any]:
    return dict(asyncio.run(read_gguf(FileSource(demo_model_path()))).metadata)


@pytest.fixture(scope="module")
def demo(demo_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(demo_metadata, rust_backend)


def tiny(*args: Any, **keys: Any) -> Tokenizer:
    return Tokenizer(tiny_metadata(*args, **keys), rust_backend)


# The demo model


def test_demo_ids_equal_those_of_llama_cpp(demo: Tokenizer) -> None:
    assert len(CASES) == 200
    assert [case for case in CASES if demo.encode(case["text"]) != case["ids"]] == []


@pytest.mark.parametrize("name", ORACLE["prompts"])
def test_demo_prompt_ids_equal_the_oracle(demo: Tokenizer, name: str) -> None:
    assert demo.encode(ORACLE["prompts"][name]["prompt"]) == ORACLE["prompts"][name]["prompt_ids"]


def test_demo_special_tokens(demo: Tokenizer) -> None:
    assert demo.vocab_size == 49152
    assert demo.eog_ids == frozenset(ORACLE["eog_ids"])
    assert [i for i in range(demo.vocab_size) if demo.is_control(i)] == list(range(17))
    assert (demo.bos_token, demo.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_demo_token_bytes_equal_the_library_decoder(demo: Tokenizer, demo_metadata: dict[str, Any]) -> None:
    library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(demo_metadata)))
    decoded = library.decode_batch([[i] for i in range(demo.vocab_size)], skip_special_tokens=False)
    ours = [demo.token_bytes(i).decode(errors="replace") for i in range(demo.vocab_size)]
    assert [i for i in range(demo.vocab_size) if decoded[i] != ours[i]] == []


# The rules, on a few tokens


@given(st.binary())
@settings(deadline=None)
def test_token_bytes_of_byte_tokens(data: bytes) -> None:
    tokenizer = Tokenizer(tiny_metadata(), lambda _: lambda _: ())
    assert b"".join(map(tokenizer.token_bytes, data)) == data


def test_merges_by_rank_within_words() -> None:
    tokenizer = tiny(["a b", "b c", "Ġ ab", "1 1"])
    ab, bc, space_ab = 256, 257, 258
    assert tokenizer.encode("abc") == [ab, ord("c")]
    assert tokenizer.encode("bc abc") == [bc, space_ab, ord("c")]
    assert tokenizer.encode("11") == [ord("1"), ord("1")]  # the pre-tokenizer keeps digits apart
    assert tokenizer.token_bytes(space_ab) == b" ab"


def test_special_and_user_defined_tokens_are_parsed() -> None:
    tokenizer = tiny(special=["<|im_start|>"], user_defined=["<tool é>"])
    start, tool = 256, 257
    assert tokenizer.encode("x<tool é><|im_start|> y") == [ord("x"), tool, start, ord(" "), ord("y")]
    assert tokenizer.token_bytes(tool) == "<tool é>".encode()
    assert tokenizer.token_bytes(start) == b"<|im_start|>"
    assert (tokenizer.is_control(start), tokenizer.is_control(tool), tokenizer.is_control(0)) == (True, False, False)


def test_added_tokens_carry_their_flags() -> None:
    document: Any = tokenizer_json(tiny_metadata(special=["<a>"], user_defined=["<b>"]))
    assert [(token["id"], token["content"], token["special"]) for token in document["added_tokens"]] == [
        (256, "<a>", True),
        (257, "<b>", False),
    ]


def test_a_normal_token_outside_the_alphabet_is_its_own_text() -> None:
    tokens = [*map(chr, range(0x21, 0x7F)), "a b"]
    tokenizer = Tokenizer(tiny_metadata(tokens=tokens, token_type=[1] * len(tokens)), rust_backend)
    assert tokenizer.token_bytes(len(tokens) - 1) == b"a b"


@pytest.mark.parametrize(
    ("text", "equal"), [("a\ud800b", "a\ufffdb"), ("\udc00", "\ufffd"), ("\ud83d\ude00", "\U0001f600"), ("", "")]
)
def test_lone_surrogates_are_replaced(text: str, equal: str) -> None:
    assert tiny().encode(text) == list(equal.encode())


@pytest.mark.parametrize(
    ("keys", "text", "ids"),
    [
        ({"bos_token_id": 256}, "a", [97]),
        ({"bos_token_id": 256, "add_bos_token": False}, "a", [97]),
        ({"bos_token_id": 256, "add_bos_token": True}, "a", [256, 97]),
        ({"bos_token_id": 256, "add_bos_token": True}, "", [256]),
        ({"bos_token_id": 256, "add_bos_token": True}, "<s>a", [256, 97]),
    ],
)
def test_bos_is_added_once_where_the_file_asks(keys: dict[str, Any], text: str, ids: list[int]) -> None:
    assert tiny(special=["<s>"], **keys).encode(text) == ids


@pytest.mark.parametrize(
    ("special", "keys", "eog"),
    [
        (["<x>"], {}, []),
        (["<x>", "<y>"], {"eos_token_id": 257}, ["<y>"]),
        (["<x>", "<y>"], {"eot_token_id": 256, "eom_token_id": 257}, ["<x>", "<y>"]),
        (["<|im_end|>", "<|endoftext|>", "<x>"], {}, ["<|im_end|>", "<|endoftext|>"]),
        (["<reponame>", "<|repo_name|>", "<PAD>"], {}, ["<|repo_name|>", "<PAD>"]),
        (["<reponame>", "<x>"], {"fim_rep_token_id": 257}, ["<x>"]),
    ],
)
def test_end_of_generation(special: list[str], keys: dict[str, Any], eog: list[str]) -> None:
    tokenizer = tiny(special=special, **keys)
    assert tokenizer.eog_ids == {256 + special.index(token) for token in eog}


def test_an_end_of_generation_token_is_control_whatever_its_type() -> None:
    tokenizer = tiny(user_defined=["<|im_end|>"])
    assert tokenizer.is_control(256)
    document: Any = tokenizer_json(tiny_metadata(user_defined=["<|im_end|>"]))
    assert [token["special"] for token in document["added_tokens"]] == [True]


class Int32ArrayProxy:
    """What Pyodide gives for an Int32Array, as far as the backend uses it."""

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def to_py(self) -> memoryview:
        return memoryview(array("i", self._values))


def test_js_backend_converts_what_the_page_gives() -> None:
    received: list[str] = []

    def make_tokenizer(document: str) -> Any:
        received.append(document)
        return lambda text: Int32ArrayProxy([len(text), -1])

    metadata = tiny_metadata(special=["<é>"])
    tokenizer = Tokenizer(metadata, js_backend(make_tokenizer))
    assert tokenizer.encode("abc") == [3, -1]
    assert [json.loads(document) for document in received] == [tokenizer_json(metadata)]


# What is refused


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"model": None}, BadFile, "tokenizer.ggml.model is missing"),
        ({"model": "t5"}, Unsupported, "'t5'; supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE)."),
        ({"model": ["gpt2"]}, Unsupported, "supported: 'gpt2'"),
        ({"pre": None}, Unsupported, "None; supported: 'smollm', 'llama-bpe'"),
        ({"pre": "tekken"}, Unsupported, "'tekken'; supported: 'smollm', 'llama-bpe'"),
        ({"pre": ["smollm"]}, Unsupported, "supported: 'smollm'"),
        ({"tokens": None}, BadFile, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, BadFile, "has 256 entries, tokenizer.ggml.tokens has 0"),
        ({"tokens": [], "token_type": []}, BadFile, "tokens is empty"),
        ({"tokens": "abc"}, BadFile, "tokens is not an array of str"),
        ({"tokens": ["a", 1], "token_type": [1, 1]}, BadFile, "tokens is not an array of str"),
        ({"tokens": ["a", "b", "a"], "token_type": [1] * 3}, BadFile, "'a' is both token 0 and token 2"),
        ({"tokens": ["a", ""], "token_type": [1] * 2}, BadFile, "token 1 is empty"),
        ({"token_type": None}, BadFile, "token_type is missing"),
        ({"token_type": [1] * 255}, BadFile, "token_type has 255 entries, tokenizer.ggml.tokens has 256"),
        ({"token_type": ["1"] * 256}, BadFile, "token_type is not an array of int"),
        ({"merges": None}, BadFile, "merges is missing"),
        ({"merges": [1]}, BadFile, "merges is not an array of str"),
        ({"merges": ["a b"]}, BadFile, "merge 0, 'a b', is not two tokens that make a third"),
        ({"merges": ["ab"]}, BadFile, "merge 0, 'ab'"),
        ({"merges": [""]}, BadFile, "merge 0, ''"),
        ({"eos_token_id": 256}, BadFile, "eos_token_id is 256; the vocabulary has the ids 0 to 255"),
        ({"bos_token_id": -1}, BadFile, "bos_token_id is -1"),
        ({"eot_token_id": True}, BadFile, "eot_token_id is True"),
        ({"fim_pad_token_id": "0"}, BadFile, "fim_pad_token_id is '0'"),
        ({"add_bos_token": 1}, BadFile, "add_bos_token is 1"),
        ({"add_bos_token": True}, BadFile, "there is no tokenizer.ggml.bos_token_id"),
    ],
)
def test_bad_metadata_is_refused_with_the_key(keys: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        tokenizer_json(tiny_metadata(**keys))
    assert words in str(caught.value)


def test_a_merge_of_three_is_refused() -> None:
    tokens = ["a", "b c", "ab c"]
    with pytest.raises(BadFile, match="merge 0, 'a b c'"):
        tokenizer_json(tiny_metadata(tokens=tokens, token_type=[1] * 3, merges=["a b c"]))


def test_libraries_are_imported_only_when_used() -> None:
    modules = "stepwell.text.tokenizer, stepwell.text.detokenizer, stepwell.text.chat, stepwell.text.backends"
    code = f"import sys, {modules}; print(sorted(sys.modules.keys() & {{'jinja2', 'tokenizers'}}))"
    path = str(ROOT / "pyodide_pkg")
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": path}
    )
    assert run.stdout.strip() == "[]"
