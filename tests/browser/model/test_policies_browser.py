"""Every policy and KV mode on the real device: a model with as many tensors as SmolLM2, tiny beside them.

A policy chooses buffers.  So ids and logits are those of all others, bit by bit, and those of float64 (the ids); what
the pool did is what the policy says.  test_oracle.py has real weights.
"""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stepwell.decode.kv_modes import KV_MODES
from stepwell.gpu.source import FileSource
from stepwell.memory.policies import POLICIES
from stepwell.models.config import DecoderConfig
from stepwell.weights.gguf import read_gguf
from tests.browser.conftest import Lab, encode
from tests.support.tiny_llama import reference_llama, write_tiny_llama

pytestmark = pytest.mark.browser
SHARES_A_PAGE = True

PROMPT = [(7 * i) % 300 + 3 for i in range(37)]
FIRST = 8  # ids that are computed in float64, too
OPEN = """
import base64, json, sys
from js import makeTokenizer
from stepwell.gpu.source import BytesSource
from stepwell.page.frontend import Frontend

async def main(args):
    sys.messages = []
    sys.frontend = Frontend(lambda text: sys.messages.append(json.loads(text)), "{}", makeTokenizer)
    await sys.frontend.open()
    await sys.frontend.load_source('{"name": "tiny"}', BytesSource(base64.b64decode(args["model"]), "tiny"))
"""
RUN = """
import json, sys

async def main(args):
    sys.messages.clear()
    await sys.frontend.run(json.dumps(args))
    return next(m for m in sys.messages if m["type"] in ("done", "error"))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int]]:
    """A model of 30 layers whose K and V have 768 B a position, and the first ids that it gives."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    weights = write_tiny_llama(path, n_layers=30, n_heads=3, n_kv_heads=3, head_dim=64)
    with ThreadPoolExecutor(1) as threads:  # Playwright's loop runs in this one
        file = threads.submit(asyncio.run, read_gguf(FileSource(path))).result()
    ids = list(PROMPT)
    for _ in range(FIRST):
        ids.append(int(reference_llama(weights, DecoderConfig.from_gguf(file), ids)[-1].argmax()))
    return path.read_bytes(), ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def model(lab: Lab, tiny: tuple[bytes, list[int]]) -> Iterator[Lab]:
    lab.run(OPEN, model=encode(tiny[0]))
    yield lab
    lab.run("import sys\nasync def main(args):\n    sys.frontend.close()")


def run(model: Lab, kv: str, policy: str, tokens: int) -> dict[str, Any]:
    asked = {"prompt": "", "prompt_ids": PROMPT, "tokens": tokens, "ban_eos": True, "digest": True, "context": 128}
    message = model.run(RUN, kv=kv, policy=policy, **asked)
    assert message["type"] == "done", json.dumps(message)[:2000]
    record: dict[str, Any] = message["record"]
    return record


@pytest.fixture(scope="module")
def expected(model: Lab, tiny: tuple[bytes, list[int]]) -> list[tuple[int, str]]:
    """(id, digest of the logits) of every token."""
    record = run(model, "static", "disabled", 64)
    assert record["token_ids"][:FIRST] == tiny[1]
    found = [(token, step["digest"]) for token, step in zip(record["token_ids"], record["tokens"], strict=True)]
    assert len(set(found)) == 64
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv", KV_MODES)
def test_same_logits_under_every_policy(model: Lab, expected: list[tuple[int, str]], kv: str, policy: str) -> None:
    """Fewer tokens where every step asks the pool for the same: K and V that stay, or policies without size classes."""
    classless = policy in ("exact", "lazy_release", "disabled")
    asked = 64 if kv in ("grow", "donate") and not classless else 24
    record = run(model, kv, policy, asked)
    tokens = record["tokens"]
    found = [(token, step["digest"]) for token, step in zip(record["token_ids"], tokens, strict=True)]
    assert found == expected[:asked]
    recorded = {i for i, token in enumerate(tokens) if token["refused"] == "recorded"}  # done twice and compared
    live = [token for i, token in enumerate(tokens[1:], 1) if i not in recorded]
    software = record["environment"]["adapter"]["is_software"]
    assert {token["launches"] for token in live} == {274 if software else 155}
    assert {token["passes"] for token in live} == {1}
    created = [token["buffers_created"] for token in tokens[3:]]
    classes = [token["kv_class_bytes"] for token in tokens]
    if kv == "donate":  # 37 positions, 64 with room, 96 with more: one growth in 64 tokens
        copies = 3  # token and logits, together, out
        assert max(token["copies"] for token in live) - copies <= 8
        return
    if policy == "adaptive":
        crossing = {i for i in range(1, asked) if classes[i] != classes[i - 1]} if kv == "grow" else set()
        beside = {i for i in range(3, asked) if crossing & {i, i - 1, i - 2} or i in recorded}
        assert {count for i, count in enumerate(created, 3) if i not in beside} == {0}
    if policy == "bucket":
        # 768 B x 38..100 positions: classes of 32, 64 and 128 KiB keep 50 of the 60 tensors
        same = [i for i in range(3, asked) if len(set(classes[i - 2 : i + 1])) == 1 and i not in recorded]
        assert {created[i - 3] for i in same} == ({10} if kv == "grow" else {0})
    if policy == "disabled":
        assert min(created) >= (60 if kv == "grow" else 0)  # the other buffers of a decode step stay with the session
    if kv in ("static", "paged"):  # of 61 positions, which one slab has
        assert recorded == {1}
        assert [token["replayed"] for token in tokens[2:]] == [1] * (asked - 2)
