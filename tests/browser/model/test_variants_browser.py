"""24 prompt lengths through one engine in Chromium: right results while variants come and go.

All orders and the exact bytes: ``tests/simulation/decode/test_variants.py``.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from stepwell.launch.options import VARIANTS_PER_NODE
from tests.browser.conftest import Lab, encode
from tests.support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.browser
SHARES_A_PAGE = True

LENGTHS = random.Random(7).sample([1 + round(30.4 * i) for i in range(24)], 24)  # of 1, 31, 62, … 700
TOKENS = 4

OPEN = """
import base64, sys
from types import SimpleNamespace
from stepwell import BufferPool, open_device
from stepwell.decode.generation import Generation
from stepwell.decode.session import DecodeSession
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.models.llama import DecoderModel
from stepwell.weights.gguf import read_gguf
from stepwell.gpu.source import BytesSource

async def main(args):
    device = await open_device()
    pool = BufferPool(device, "adaptive")
    loader = Launcher(device, pool)
    source = BytesSource(base64.b64decode(args["model"]), "tiny")
    model = await DecoderModel.load(await read_gguf(source), source, loader)

    def session(launcher):
        return DecodeSession(model, launcher, kv="static", context=768)

    async def answer(launcher, length):
        talk, generation = session(launcher), Generation(max_tokens=args["tokens"], digest=True)
        events = [event async for event in talk.generate([3 + i % 300 for i in range(length)], generation)]
        talk.close()
        return [[event.id for event in events], [event.digest for event in events]]

    sys.rig = SimpleNamespace(device=device, pool=pool, model=model, loader=loader, session=session, answer=answer)
"""
CLOSE = """
import sys

async def main(args):
    sys.rig.model.close()
    sys.rig.loader.close()
    sys.rig.pool.close()
    sizes = dict(sys.rig.device.table_sizes())
    sys.rig.device.close()
    return sizes
"""


@pytest.fixture(scope="module")
def rig(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_llama(path, context=1024)
    lab.run(OPEN, model=encode(path.read_bytes()), tokens=TOKENS)
    yield lab
    assert set(lab.run(CLOSE).values()) == {0}


@pytest.fixture(scope="module")
def bounded(rig: Lab) -> dict[str, Any]:
    """One engine with the default options answers every length.

    Another session is open all the while and says a word after each prompt, by the plan that it has from the start.
    """
    source = """
import sys
from contextlib import aclosing
from stepwell.decode.generation import Generation
from stepwell.launch.launcher import Launcher

def decode_variant(kernels):
    return sorted([node, str(shape), [kernels[variant].pipeline for variant in sorted(entry.pipelines, key=str)],
                   [buffer.id for buffer in entry.workspaces.values()]]
                  for node in kernels.report() for shape, entry in kernels.variants_of(node).items()
                  if shape[:1] == (1,))

async def main(args):
    rig = sys.rig
    launcher = Launcher(rig.device, rig.pool)
    kernels = launcher.kernels
    talk = rig.session(launcher)
    said, results, held, most = [], [], [], 0
    generation = Generation(max_tokens=4 + len(args["lengths"]), digest=True)
    async with aclosing(talk.generate([5, 6, 7], generation)) as events:
        for _ in range(4):
            said.append(await anext(events))
        decode = decode_variant(kernels)
        for length in args["lengths"]:
            results.append([length, await rig.answer(launcher, length)])
            said.append(await anext(events))
            assert decode_variant(kernels) == decode, length
            most = max(most, *(node["shapes"] for node in kernels.report().values()))
            held.append(rig.pool.report().by_role["workspace"].in_use_bytes)
            assert held[-1] == kernels.workspace_bytes
    talk.close()
    report = launcher.report()
    launcher.close()
    launcher = Launcher(rig.device, rig.pool)
    talk = rig.session(launcher)
    alone = [event async for event in talk.generate([5, 6, 7], generation)]
    talk.close()
    launcher.close()
    return {
        "results": results, "most": most, "held": held, "decode": decode, "report": report,
        "said": [[event.id, event.digest] for event in said], "alone": [[event.id, event.digest] for event in alone],
        "refused": [event.counters.refused for event in said],
    }
"""
    found: dict[str, Any] = rig.run(source, lengths=LENGTHS)
    return found


def test_results_are_those_of_fresh_engines(rig: Lab, bounded: dict[str, Any]) -> None:
    """Ids and logits, bit by bit."""
    source = """
import sys
from stepwell.launch.launcher import Launcher

async def main(args):
    results = []
    for length in args["lengths"]:
        launcher = Launcher(sys.rig.device, sys.rig.pool)
        results.append([length, await sys.rig.answer(launcher, length)])
        launcher.close()
    return results
"""
    lengths = [1, *LENGTHS[::3]]
    fresh = rig.run(source, lengths=lengths)
    results = dict(map(tuple, bounded["results"]))
    assert fresh == [[length, results[length]] for length in lengths]
    assert len({digest for _, digests in results.values() for digest in digests}) == len(LENGTHS) * TOKENS


def test_variants_come_and_go_and_decode_keeps_its_own(bounded: dict[str, Any]) -> None:
    found = bounded
    assert found["said"] == found["alone"]
    assert found["refused"] == ["prefill", "recorded", *[None] * (2 + len(LENGTHS))]
    assert found["most"] == VARIANTS_PER_NODE
    variants = found["report"]["variants"]
    assert variants["attention"]["evicted"] > 0
    assert {node: kept["shapes"] for node, kept in variants.items() if kept["shapes"] > VARIANTS_PER_NODE} == {}
    assert found["report"]["plans"]["invalidated"] == 0
    attention = [entry for entry in found["decode"] if entry[0] == "attention"]
    assert [(len(pipelines), len(workspaces)) for _, _, pipelines, workspaces in attention] == [(2, 2)]
    held = found["held"]
    # no more after all lengths than a few of them needed: the set of variants is what it is
    assert max(held[8:]) <= max(held[:8]) * 1.25
    print(f"{variants['attention']}; workspaces at most {max(held):,} B")


def test_without_bound_and_classes(rig: Lab, bounded: dict[str, Any]) -> None:
    """The switches off: the same results, and a set of workspaces for every shape ever seen."""
    source = """
import sys
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions

async def main(args):
    rig = sys.rig
    launcher = Launcher(rig.device, rig.pool, LaunchOptions(variants_per_node=0, width_ladder=False))
    results, held = [], []
    for length in args["lengths"]:
        results.append([length, await rig.answer(launcher, length)])
        held.append(rig.pool.report().by_role["workspace"].in_use_bytes)
    report = launcher.report()
    launcher.close()
    return [results, held, report]
"""
    results, held, report = rig.run(source, lengths=LENGTHS)
    assert results == bounded["results"]
    assert held == sorted(held)
    assert held[-1] == report["workspace_bytes"] > 10 * held[0]
    assert len(set(held)) > 20
    assert report["variants"]["attention"]["shapes"] > 20
    assert {node["evicted"] for node in report["variants"].values()} == {0}
    shapes = report["variants"]["attention"]["shapes"]
    print(f"workspaces without a bound: {held[-1]:,} B in {shapes} variants; {max(bounded['held']):,} B with it")
