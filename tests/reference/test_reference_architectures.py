"""The float64 forward pass agrees with what transformers computed of the tiny models, in float32.  Takes seconds."""

import asyncio
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from stepwell.gpu.source import FileSource
from stepwell.models import ARCHITECTURES
from stepwell.models.config import read_architecture
from stepwell.weights.gguf import read_gguf
from tests.support.tiny_architectures import STEPS, TINY_MODELS, reference_file
from tests.support.tiny_llama import reference_steps


@pytest.mark.parametrize("name", TINY_MODELS)
def test_agrees_with_transformers(tmp_path: Path, name: str) -> None:
    """Tolerance 2e-4: f32 sums of at most 192 products on the other side, logits of several units (3e-5 reached)."""
    path = tmp_path / "tiny.gguf"
    weights = TINY_MODELS[name].make(path)
    stored = json.loads(reference_file(name).read_text())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == stored["sha256"], "not the model that the file is about"
    file = asyncio.run(read_gguf(FileSource(path)))
    config = ARCHITECTURES[read_architecture(file)].config_type.from_gguf(file)
    prompt = TINY_MODELS[name].prompt_ids()
    assert prompt == stored["prompt_ids"]
    logits = reference_steps(weights, config, prompt, stored["ids"])
    assert logits.argmax(axis=1).tolist() == stored["ids"]
    assert len(stored["ids"]) == STEPS
    for step, best in stored["top_logits"].items():
        assert [index for index, _ in best] == np.argsort(logits[int(step)])[::-1][: len(best)].tolist()
        expected = [logit for _, logit in best]
        np.testing.assert_allclose(logits[int(step), [index for index, _ in best]], expected, rtol=0, atol=2e-4)
