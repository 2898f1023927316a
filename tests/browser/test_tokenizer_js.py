"""The tokenizer of the page: @huggingface/tokenizers, built from the GGUF metadata, over the stored cases."""

import json
from pathlib import Path

import pytest

from harness.site import Site
from tests.browser.conftest import Lab

pytestmark = pytest.mark.browser
CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2-tokenizer-cases.json").read_text("utf-8"))["cases"]


def test_every_case(lab: Lab, site: Site, server_url: str) -> None:
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
