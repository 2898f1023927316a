"""The tokenizer of the page: @huggingface/tokenizers, built from the GGUF metadata, over the stored cases, and over
vocabularies of every family."""

import json

import pytest

from harness.site.build import Site
from tests.browser.conftest import Lab
from tests.support.paths import DATA
from tests.support.tiny_vocabulary import tiny_sentencepiece
from tests.support.trained_vocabularies import FAMILIES, TEXTS, trained

pytestmark = pytest.mark.browser
CASES = json.loads((DATA / "smollm2-tokenizer-cases.json").read_text("utf-8"))["cases"]
SENTENCEPIECE = json.loads((DATA / "sentencepiece-cases.json").read_text("utf-8"))


def test_every_case_of_the_demo_model(lab: Lab, site: Site, server_url: str) -> None:
    source = """
from js import makeTokenizer
from stepwell.gpu.js_device import open_url
from stepwell.text.backends import js_backend
from stepwell.text.tokenizer import Tokenizer
from stepwell.weights.gguf import read_gguf

async def main(args):
    file = await read_gguf(await open_url(args["url"], "smollm2"))
    tokenizer = Tokenizer(file.metadata, js_backend(makeTokenizer))
    return [tokenizer.encode(text) for text in args["texts"]]
"""
    entry = site.model("smollm2")
    assert entry is not None
    ids = lab.run(source, url=f"{server_url.rstrip('/')}/{entry['file']}", texts=[case["text"] for case in CASES])
    assert len(CASES) == 200
    assert [case["text"] for case, got in zip(CASES, ids, strict=True) if got != case["ids"]] == []


# The metadata goes over as text: JavaScript would make an int of a float like 1.0.
ENCODE = """
import json
from js import makeTokenizer
from stepwell.text.backends import js_backend
from stepwell.text.tokenizer import Tokenizer

async def main(args):
    tokenizer = Tokenizer(json.loads(args["metadata"]), js_backend(makeTokenizer))
    return [tokenizer.encode(text) for text in args["texts"]]
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_equal_those_of_the_trained_tokenizer(lab: Lab, family: str) -> None:
    reference = trained(family)
    ids = lab.run(ENCODE, metadata=json.dumps(reference.metadata), texts=TEXTS)
    assert len(TEXTS) > 230
    assert [text for text, got in zip(TEXTS, ids, strict=True) if got != reference.ids(text)] == []


def test_sentencepiece_ids_equal_those_of_the_library(lab: Lab) -> None:
    cases = SENTENCEPIECE["cases"]
    ids = lab.run(ENCODE, metadata=json.dumps(SENTENCEPIECE["metadata"]), texts=[case["text"] for case in cases])
    assert len(cases) == 176
    assert [case["text"] for case, got in zip(cases, ids, strict=True) if got != [1, *case["ids"]]] == []


def test_special_tokens_of_phi_3_take_the_white_space_after_them(lab: Lab) -> None:
    pieces, special = ["▁", "a", "\n"], ["<|user|>", "<|end|>", "<|endoftext|>"]
    metadata = {"general.architecture": "phi3", **tiny_sentencepiece(pieces, special=special)}
    text = "<|user|>\n a<|end|>\n<|user|><|endoftext|>\na"
    assert lab.run(ENCODE, metadata=json.dumps(metadata), texts=[text]) == [
        [1, 262, 259, 260, 263, 262, 264, 259, 261, 260]
    ]
