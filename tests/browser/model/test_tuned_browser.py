"""Tuning on the real page: measured and kept within seconds, used by the next page, and the ids stay the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from harness.page.browser import AdapterProfile
from harness.page.run import PageRunner
from harness.page.scenario import Scenario
from harness.site.build import Site
from tests.browser.conftest import Lab, encode
from tests.support.covering import FULL
from tests.support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.browser
ALTERNATIVES = """
from base64 import b64decode
from stepwell import BufferPool, open_device
from stepwell.tuning.autotune import Autotuner, differences, tolerance
from stepwell.tuning.candidates import alternatives, retiled
from stepwell.kernels.products import tiling_of
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.models.llama import DecoderModel
from stepwell.weights.gguf import read_gguf
from stepwell.gpu.source import BytesSource

async def main(args):
    device = await open_device()
    try:
        launcher = Launcher(device, BufferPool(device), LaunchOptions.from_dict(args["options"]))
        source = BytesSource(b64decode(args["data"]), "tiny.gguf")
        model = await DecoderModel.load(await read_gguf(source), source, launcher)
        tuner = Autotuner(model, launcher, 1e9)
        rows = []
        for number, (key, (launch, *_)) in enumerate(tuner.products().items()):
            default = tiling_of(launch.variant)
            tried = alternatives(key, default, launcher.tuning)
            tried = [default, *tried[1 + number % args["every"] :: args["every"]]]
            tilings = await tuner.compiled(key, launch, tried)
            expected = await tuner.results(launch)
            for tiling in tilings[1:]:
                worst = 0.0
                for wanted, got in zip(expected, await tuner.results(retiled(launch, tiling))):
                    error = max(differences(wanted, got), default=0.0)
                    worst = max(worst, error / (tolerance(key.k) * max(map(abs, wanted))))
                rows.append([key.kernel, key.before + " " + key.after, str(tiling), worst])
        tuner.close()
        return {"rows": rows, "refused": tuner.outcome.refused}
    finally:
        device.close()
"""
PER = {"swiglu": 4}  # outputs per thread that no rule would choose; others get 6


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({"fused": "on", "dot4": "on"}, "matvec"),
        ({"fused": "on", "subgroups": "off"}, "matvec"),
        ({"fused": "off"}, "matmul_quad"),
    ],
)
def test_every_alternative_gives_the_same_but_for_rounding(
    lab: Lab, tmp_path: Path, options: dict[str, str], kernel: str
) -> None:
    """Every second that the tuner would try for a tiny model, of its products in turns (all with STEPWELL_FULL), by its
    own check: far below the tolerance, which has room for models of some thousand columns whose rounding errors add up
    less kindly."""
    file = tmp_path / "tiny.gguf"
    write_tiny_llama(file, hidden=128, ffn=256, n_heads=4, n_kv_heads=2, head_dim=32, n_layers=1, vocab=300)
    found = lab.run(ALTERNATIVES, data=encode(file.read_bytes()), options=options, every=1 if FULL else 2)
    assert found["refused"] == []
    rows = found["rows"]
    assert {name for name, *_ in rows} == {kernel}
    assert len({product for _, product, *_ in rows}) == (5 if kernel == "matvec" else 3)
    assert all(("dot4" in tiling) == ("dot4" in options) for *_, tiling, _ in rows)
    assert len(rows) >= (10 if FULL else 5)
    worst = max(share for *_, share in rows)
    print(f"{options}: {len(rows)} alternatives, at most {worst:.1%} of the tolerance")
    assert worst < 0.5


def other_choices(text: str, record: dict[str, Any]) -> str:
    """The kept text with a choice of its own for every product of the demo model on a CPU adapter."""
    document = json.loads(text)
    (own,) = document["adapters"]
    adapter = record["environment"]["adapter"]
    assert own["adapter"]["architecture"] == adapter["architecture"]
    lanes = own["adapter"]["subgroup_size"]
    lanes = lanes if lanes == 4 else 0
    shared = {
        "kernel": "matmul_quad",
        "before": "",
        "subgroup": lanes,
        "arithmetic": "f32",
        "us": 9.5,
        "default_us": 10.5,
    }
    tiling = {"wide": 4, "splits": 1, "ahead": 0, "arithmetic": "f32"}
    shapes = [
        ("plain", "u4m", 576, 960), ("residual", "u4m", 576, 576), ("swiglu", "u4m", 576, 3072),
        ("residual", "u4m", 1536, 576), ("plain", "u8", 576, 49152),
    ]  # fmt: skip
    own["choices"] = [
        {**shared, "after": after, "format": kind, "k": k, "n": n,
         "spread": {**tiling, "per": PER.get(after, 6)}}
        for after, kind, k, n in shapes
    ]  # fmt: skip
    return json.dumps(document)


def test_a_page_tunes_keeps_and_the_next_uses_it(
    browser: Browser, server_url: str, site: Site, oracle: dict[str, Any]
) -> None:
    expected = oracle["short"]
    scenario = Scenario(expected["prompt"], raw=True, tokens=8, ban_eos=True, tune=True, tune_ms=4000)
    ids = expected["ban_eog"]["ids"][:8]
    with PageRunner(browser, server_url, AdapterProfile.SOFTWARE) as runner:
        record = runner.run(scenario)
        kept = runner.tuning()
        outcome = runner.tuned()["outcome"]
    assert record["token_ids"] == ids
    assert record["scenario"]["tune"] is True
    assert outcome["products"] == 5
    assert 0 <= outcome["faster"] <= outcome["measured"] <= 5
    assert kept is not None
    assert len(json.loads(kept)["adapters"][0]["choices"]) == outcome["faster"] == len(record["launch"]["tuned"])

    plain = Scenario(expected["prompt"], raw=True, tokens=8, ban_eos=True, top_logits=8)
    without = Scenario(expected["prompt"], raw=True, tokens=8, ban_eos=True, launch={"tuned": "false"})
    with PageRunner(browser, server_url, AdapterProfile.SOFTWARE, tuning=other_choices(kept, record)) as runner:
        used, unused = runner.run(plain), runner.run(without)
        assert runner.tuned()["notices"] == []
    assert sorted((row["after"], row["per"]) for row in used["launch"]["tuned"]) == [
        ("plain", 6), ("plain", 6), ("residual", 6), ("residual", 6), ("swiglu", 4),
    ]  # fmt: skip
    assert unused["launch"]["tuned"] == []
    assert used["token_ids"] == unused["token_ids"] == ids
    for token, stored in zip(used["tokens"], expected["ban_eog"]["top5_logits"], strict=False):
        measured = dict(map(tuple, token["top_logits"]))
        assert max(abs(measured[index] - logit) for index, logit in stored) <= 0.02
