"""The demo model through the decode step of GPUs, on this adapter: the ids and logits of the stored reference."""

from collections.abc import Iterator

import pytest

from harness.site import Site
from tests.browser.conftest import Lab
from tests.browser.test_oracle import LOGIT_TOLERANCE, OPEN, PROMPTS, run

pytestmark = pytest.mark.browser

AS_A_GPU = """
from dataclasses import replace
from stepwell.kernels.tuning import tuning_for
from stepwell.models import llama
from stepwell.weights import loader

def pretend(subgroup, dot4):
    '''Models get a GPU's decode step, in workgroups that a CPU can stand; 0: without subgroups.'''
    def tuning(info):
        return replace(
            tuning_for(info), fused=True, subgroup=subgroup, dot4=dot4, decode_wide=4, decode_widest=8,
            decode_threads=8, decode_chunk=32, attention_threads=32, workgroups=32, argmax_parts=4,
        )
    llama.tuning_for = loader.tuning_for = tuning
"""


@pytest.fixture(
    scope="module", params=[(0, False), (4, False), (4, True)], ids=["no subgroups", "subgroups", "integers"]
)
def model(request: pytest.FixtureRequest, lab: Lab, site: Site, server_url: str) -> Iterator[Lab]:
    entry = site.model("smollm2")
    assert entry is not None, "the demo model is part of the set-up: make setup fetches it"
    source = OPEN.replace("async def main(args):\n", "async def main(args):\n    pretend(*args['path'])\n")
    (message,) = lab.run(AS_A_GPU + source, url=f"{server_url.rstrip('/')}/{entry['file']}", path=request.param)
    assert message["type"] == "model", message
    yield lab
    restore = "llama.tuning_for = loader.tuning_for = tuning_for"
    lab.run(AS_A_GPU + f"import sys\nasync def main(args):\n    {restore}\n    sys.lab_frontend.close()")


def test_logits(model: Lab) -> None:
    record = run(model, "story", tokens=6, kv="static", top_logits=8)
    expected = PROMPTS["story"]["natural"]
    assert record["token_ids"] == expected["ids"][:6]
    worst = 0.0
    for token, stored in zip(record["tokens"], expected["top5_logits"], strict=False):
        measured = dict(map(tuple, token["top_logits"]))
        worst = max(worst, *(abs(measured[index] - logit) for index, logit in stored))
    assert worst <= LOGIT_TOLERANCE
    print(f"largest logit difference {worst:.2e}")


@pytest.mark.parametrize("kv", ["static", "grow"])
def test_ids_chosen_on_the_gpu(model: Lab, kv: str) -> None:
    record = run(model, "france", tokens=12, kv=kv, ban_eos=True)
    assert record["token_ids"] == PROMPTS["france"]["ban_eog"]["ids"][:12]
    live = [token for token in record["tokens"][1:] if token["refused"] != "recorded"]
    assert {token["launches"] for token in live} == {5 * 30 + 5}  # embed, rope_turns, output, argmax in two
