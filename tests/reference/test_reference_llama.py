"""The float64 reference forward pass agrees with the stored logits of the demo model.  Takes about 5 s."""

import asyncio
import json

import numpy as np
import pytest

from stepwell.gpu.source import FileSource
from stepwell.models.config import DecoderConfig
from stepwell.weights.gguf import read_gguf
from tests.support.demo_model import demo_model_path
from tests.support.paths import DATA
from tests.support.tiny_llama import FileWeights, reference_llama

ORACLE = DATA / "smollm2-oracle.json"


def test_agrees_with_the_stored_logits() -> None:
    """Tolerance 1e-6: the stored logits are rounded to six decimals (5e-7 reached)."""
    path = demo_model_path()
    file = asyncio.run(read_gguf(FileSource(path)))
    case = json.loads(ORACLE.read_text())["prompts"]["france"]
    logits = reference_llama(FileWeights(path, file), DecoderConfig.from_gguf(file), case["prompt_ids"])[-1]
    best = np.argsort(logits)[::-1][:5]
    expected = case["natural"]["top5_logits"][0]
    assert best.tolist() == [token for token, _ in expected]
    np.testing.assert_allclose(logits[best], [logit for _, logit in expected], rtol=0, atol=1e-6)
    assert np.logaddexp.reduce(logits) == pytest.approx(case["natural"]["logsumexp"][0], abs=1e-6)
