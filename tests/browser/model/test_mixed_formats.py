"""Models whose tensors have different types, as quantisers write them, in Chromium against the float64 forward pass.

llama.cpp gives attn_v and ffn_down of a Q4_K_M or Q5_K_M file more bits in some layers, keeps the embedding in Q6_K,
and takes Q5_0, Q5_1 and Q8_0 where rows are not whole blocks of 256.  q, k and v are one matrix here.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from stepwell.gpu.source import FileSource
from stepwell.models.config import DecoderConfig
from stepwell.weights.gguf import read_gguf
from tests.browser.conftest import Lab, encode
from tests.support.tiny_llama import reference_llama, write_tiny_llama

pytestmark = pytest.mark.browser
SHARES_A_PAGE = True

PROMPT = [5, 300, 17, 17, 42, 99, 3]
STEPS = 6
K_SIZES = {
    "hidden": 256,
    "n_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 32,
    "ffn": 256,
    "vocab": 321,
}  # odd: 210 bytes a row


class Mix(NamedTuple):
    formats: str
    embed_format: str
    mixed: dict[str, str]
    sizes: dict[str, int] = {}  # noqa: RUF012


MIXES = {
    "Q4_K_M": Mix("Q4_K", "Q6_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K"}, K_SIZES),
    "Q5_K_M": Mix("Q5_K", "Q6_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K"}, K_SIZES),
    "Q4_K_M of narrow rows": Mix("Q5_0", "Q8_0", {"attn_v": "Q8_0", "ffn_down": "Q8_0"}),
    "BF16": Mix("BF16", "BF16", {"attn_v": "F32", "ffn_up": "F16"}),
}
SOURCE = """
from base64 import b64decode
from stepwell import BufferPool, open_device
from stepwell.decode.generation import Generation
from stepwell.decode.session import DecodeSession
from stepwell.launch.launcher import Launcher
from stepwell.models.llama import DecoderModel
from stepwell.weights.gguf import read_gguf
from stepwell.gpu.source import BytesSource

async def main(args):
    device = await open_device()
    try:
        pool = BufferPool(device)
        launcher = Launcher(device, pool)
        source = BytesSource(b64decode(args["data"]), "tiny.gguf")
        model = await DecoderModel.load(await read_gguf(source), source, launcher)
        session = DecodeSession(model, launcher, kv="static", context=64)
        generation = Generation(max_tokens=args["steps"], top_logits=20)
        events = [event async for event in session.generate(args["prompt"], generation)]
        return [[event.id, event.top_logits] for event in events]
    finally:
        device.close()
"""


@pytest.mark.parametrize("name", MIXES)
def test_a_file_of_mixed_types_decodes(lab: Lab, tmp_path: Path, name: str) -> None:
    """Tolerance: f32 sums of at most 256 products against float64, logits of several units: 1e-3 (2e-4 reached)."""
    mix = MIXES[name]
    path = tmp_path / "tiny.gguf"
    weights = write_tiny_llama(path, formats=mix.formats, embed_format=mix.embed_format, mixed=mix.mixed, **mix.sizes)
    with ThreadPoolExecutor() as apart:  # Playwright's event loop runs in this one
        config = DecoderConfig.from_gguf(apart.submit(asyncio.run, read_gguf(FileSource(path))).result())
    steps: list[Any] = lab.run(SOURCE, data=encode(path.read_bytes()), prompt=PROMPT, steps=STEPS)
    assert len(steps) == STEPS
    ids = [*PROMPT, *(step[0] for step in steps)]
    expected = reference_llama(weights, config, ids[:-1])[len(PROMPT) - 1 :]
    worst = 0.0
    for (token, best), logits in zip(steps, expected, strict=True):
        assert token == int(np.argmax(logits))
        worst = max(worst, *(abs(logit - logits[index]) for index, logit in best))
    print(f"{name}: largest logit difference {worst:.1e}")
    assert worst < 1e-3
