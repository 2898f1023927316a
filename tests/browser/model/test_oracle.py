"""SmolLM2-135M-Instruct, real weights, against float64 logits: every KV mode, policy and kernel path.

Logits are f32 sums of up to 1,536 products through 30 layers; the reference is float64.  The bound of 0.02 is the
issue's; the largest difference is printed (``-rP`` shows it) and stands in docs/launch.md.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from harness.site.build import Site
from stepwell.decode.kv_modes import KV_MODES
from stepwell.memory.policies import POLICIES
from tests.browser.conftest import Lab
from tests.support.covering import FULL, cover
from tests.support.paths import DATA as DATA_FOLDER

pytestmark = pytest.mark.browser
LOGIT_TOLERANCE = 0.02
HALF_TOLERANCE = 0.08  # with K and V rounded to f16, or a prompt's products in f16: the issue's, too
DATA = json.loads((DATA_FOLDER / "smollm2-oracle.json").read_text("utf-8"))
PROMPTS: dict[str, Any] = DATA["prompts"]
ASKED: dict[str, Any] = {**PROMPTS, "short": DATA["short"]}
"""``short`` has 5 tokens, for tests of what follows the prompt: to read one of 37 takes longer than 12 steps."""
REAL = [("grow", "bucket"), ("donate", "adaptive")]
MODES = {"free_run": {"ignore_eos": True}, "natural": {}, "ban_eog": {"ban_eos": True}}

OPEN = """
import json, sys
from js import makeTokenizer
from stepwell.page.frontend import Frontend

async def main(args):
    sys.lab_messages = []
    sys.lab_frontend = Frontend(lambda text: sys.lab_messages.append(json.loads(text)), "{}", makeTokenizer)
    await sys.lab_frontend.open()
    sys.lab_frontend._engines._bound = args["engines"]  # no path is compiled twice
    await sys.lab_frontend.load_url(json.dumps({"name": "smollm2", "url": args["url"]}))
    return [m for m in sys.lab_messages if m["type"] in ("model", "error")]
"""
RUN = """
import json, sys

async def main(args):
    sys.lab_messages.clear()
    await sys.lab_frontend.run(json.dumps(args))
    return next(m for m in sys.lab_messages if m["type"] in ("done", "error"))
"""


SHORT_SLABS = """
from stepwell.decode import paged_kv

async def main(args):
    paged_kv.SHORT, paged_kv.PAGE = args["short"], args["page"]
"""


@pytest.fixture(scope="module")
def model(lab: Lab, site: Site, server_url: str) -> Iterator[Lab]:
    entry = site.model("smollm2")
    assert entry is not None, "the demo model is part of the set-up: make setup fetches it"
    assert entry["sha256"] == DATA["sha256"]
    (message,) = lab.run(OPEN, url=f"{server_url.rstrip('/')}/{entry['file']}", engines=2 + len(PATHS))
    assert message["type"] == "model", message
    assert message["model"]["tensor_types"] == {"F32": 61, "Q4_1": 210, "Q8_0": 1}
    yield lab
    lab.run("import sys\nasync def main(args):\n    sys.lab_frontend.close()")


def run(model: Lab, prompt: str, **request: Any) -> dict[str, Any]:
    message = model.run(RUN, prompt=ASKED[prompt]["prompt"], raw=True, **request)
    assert message["type"] == "done", message
    record: dict[str, Any] = message["record"]
    assert record["prompt_ids"] == ASKED[prompt]["prompt_ids"]
    return record


def tolerance_of(record: dict[str, Any]) -> float:
    """On a GPU with shader-f16 the prompt is read in f16."""
    return HALF_TOLERANCE if record["launch"]["kernels"]["f16"] else LOGIT_TOLERANCE


def check(record: dict[str, Any], prompt: str, mode: str, tokens: int) -> float:
    """The record's ids equal the oracle's; returns the largest difference of a stored logit."""
    expected = PROMPTS[prompt][mode]
    assert record["token_ids"] == expected["ids"][:tokens]
    assert len(record["tokens"]) == min(tokens, len(expected["top5_logits"]))
    worst = largest_difference(record, expected)
    assert worst <= tolerance_of(record)
    return worst


# the story has no end within 64 tokens: what is done about ends changes nothing
@pytest.mark.parametrize(
    ("prompt", "mode"), [(p, m) for p in PROMPTS for m in MODES if FULL or p == "france" or m == "free_run"]
)
def test_ids_and_logits(model: Lab, prompt: str, mode: str) -> None:
    """Each prompt and mode, KV modes in turn; logits of every step read back."""
    kv = "static" if prompt == "france" else "grow"
    tokens = 64 if mode == "free_run" else 16
    record = run(model, prompt, tokens=tokens, kv=kv, policy="adaptive", top_logits=8, **MODES[mode])
    worst = check(record, prompt, mode, tokens)
    natural_end = mode == "natural" and prompt == "france"
    assert record["finish_reason"] == ("stop" if natural_end else "length")
    print(f"{prompt} {mode} {kv}: largest logit difference {worst:.2e}")


@pytest.mark.parametrize(("kv", "policy"), cover({"kv": KV_MODES, "policy": POLICIES}) if FULL else REAL)
def test_ids_under_policies(model: Lab, kv: str, policy: str) -> None:
    """64 ids chosen on the GPU: under ONNX Runtime's policy, and where tensors move to larger ones.

    A policy chooses buffers and does no arithmetic: tests/browser/model/test_policies_browser.py has all of them.
    """
    record = run(model, "france", tokens=64, kv=kv, policy=policy, ban_eos=True)
    assert record["token_ids"] == PROMPTS["france"]["ban_eog"]["ids"][:64]


def path(kernels: str, fused: bool, subgroups: bool, dot4: bool = False) -> tuple[dict[str, str], int]:
    parts = 2 if kernels == "split" else 1
    switches = {"fused": fused, "subgroups": subgroups, "dot4": dot4, "f16": False}
    options = {"kernels": kernels, **{name: "on" if wanted else "off" for name, wanted in switches.items()}}
    return options, (5 if fused else 9) * 30 + 3 + parts  # layers, embedding, rotation or norm, output, choice


def path_name(kernels: str, fused: bool, subgroups: bool, dot4: bool) -> str:
    return ", ".join([kernels, *["fused"] * fused, *["subgroups"] * subgroups, *["dot4"] * dot4])


def is_path(kernels: str, fused: bool, subgroups: bool, dot4: bool) -> bool:
    return (not dot4 or (fused and subgroups)) and (fused or not subgroups or kernels == "quad")


def quad_cases(*, full: bool) -> list[tuple[str, str]]:
    """(path, KV mode): every two of a switch and a KV mode."""
    choices = cover({"kernels": ["quad"], **SWITCHES, "kv": list(KV_MODES)}, lambda *, kv, **c: is_path(**c), full=full)
    return [(path_name(*choice), kv) for *choice, kv in choices]


HARDWARE = os.environ.get("STEPWELL_PROFILE") == "hardware"
SWITCHES: dict[str, list[Any]] = {"fused": [False, True], "subgroups": [False, True], "dot4": [False, True]}
PATHS = {path_name(*c): path(*c) for c in cover({"kernels": ["quad", "split"], **SWITCHES}, is_path, full=True)}
"""The launch options, and the launches of a decode step that chooses its token."""
# a CPU is slow with split kernels: one KV mode there, and every switch off and on
SPLIT = [name for name in PATHS if name.startswith("split")] if FULL else ["split", "split, fused, subgroups, dot4"]
CASES = [*quad_cases(full=FULL), *((name, "static") for name in SPLIT)]
if HARDWARE:
    CASES = [(name, kv) for name in PATHS for kv in KV_MODES]


@pytest.fixture(scope="module")
def lanes(model: Lab) -> int:
    """Of this adapter's subgroups, if they all have one size."""
    source = "async def main(args):\n    info = (await open_device()).info\n    return "
    found = model.run(f"from stepwell import open_device\n{source}info.subgroup_size, info.subgroup_max_size")
    return int(found[0]) if found[0] == found[1] else 0


def options_of(name: str, lanes: int) -> dict[str, str]:
    """Skips what this adapter cannot do; that it says so is tested without a browser."""
    options, _ = PATHS[name]
    quads = options["kernels"] == "quad" and lanes == 4
    if options["subgroups"] == "on" and not (quads or (options["fused"] == "on" and 4 <= lanes <= 64)):
        pytest.skip(f"no kernel of this path uses subgroups of {lanes} lanes")
    return options


@pytest.mark.parametrize(("name", "kv"), CASES)
def test_every_kernel_path_in_every_kv_mode(model: Lab, lanes: int, name: str, kv: str) -> None:
    """Every two of an adapter's kernels, a switch and a KV mode.

    Of steps of one row it takes four to see a plan recorded, compared and replayed.
    """
    options = options_of(name, lanes)
    prompt = "france" if kv == "static" and (HARDWARE or FULL or name.startswith("quad")) else "short"
    tokens = 3 if kv in ("grow", "donate") else 4
    record = run(model, prompt, tokens=tokens, kv=kv, ban_eos=True, top_logits=8, launch=options)
    expected = ASKED[prompt]["ban_eog"]
    assert record["token_ids"] == expected["ids"][:tokens]
    assert record["launch"]["kernels"] == {
        "kernels": options["kernels"],
        "fused": options["fused"] == "on",
        "subgroups": lanes if options["subgroups"] == "on" else 0,
        "dot4": options["dot4"] == "on",
        "f16": False,
    }
    worst = largest_difference(record, expected)
    assert worst <= LOGIT_TOLERANCE
    print(f"{name}, {kv}: largest logit difference {worst:.2e}")


def test_prompts_in_f16(model: Lab) -> None:
    """The same ids, and logits that show that it was f16; refused with the reason where there is none."""
    asked = {"tokens": 2, "kv": "static", "ban_eos": True, "top_logits": 8, "launch": {"kernels": "split", "f16": "on"}}
    message = model.run(RUN, prompt=ASKED["france"]["prompt"], raw=True, **asked)
    source = "async def main(args):\n    return sorted((await open_device()).info.features)"
    if "shader-f16" not in model.run(f"from stepwell import open_device\n{source}"):
        assert message["type"] == "error", message
        assert "f16 is on, but this device does not have shader-f16: leave it at auto or off." in json.dumps(message)
        return
    record, expected = message["record"], ASKED["france"]["ban_eog"]
    assert record["launch"]["kernels"]["f16"]
    assert record["token_ids"] == expected["ids"][:2]
    worst = largest_difference(record, expected)
    print(f"largest logit difference {worst:.2e}")
    assert LOGIT_TOLERANCE / 100 < worst <= HALF_TOLERANCE


@pytest.mark.parametrize(
    ("name", "kv", "tokens"),
    [
        ("quad", "paged", 4),
        ("quad, subgroups", "grow", 24),
        ("quad, fused, subgroups", "donate", 6),
        ("split", "static", 2),
    ],
)
def test_k_and_v_stored_as_f16(model: Lab, lanes: int, name: str, kv: str, tokens: int) -> None:
    """The same ids; each kernel that touches K and V, and half of their bytes."""
    options = options_of(name, lanes)
    asked = {"tokens": tokens, "kv": kv, "kv_type": "f16", "ban_eos": True, "top_logits": 8, "launch": options}
    prompt = "france" if HARDWARE or name.startswith("quad") else "short"
    record = run(model, prompt, policy="exact", **asked)
    expected = ASKED[prompt]["ban_eog"]
    assert record["token_ids"] == expected["ids"][:tokens]
    assert record["scenario"]["kv_type"] == "f16"
    worst = largest_difference(record, expected)
    print(f"{name}, {kv} f16: largest logit difference {worst:.2e}")
    assert LOGIT_TOLERANCE / 100 < worst <= HALF_TOLERANCE
    if kv == "grow":
        assert record["tokens"][-1]["kv_class_bytes"] == 2 * 3 * 64 * record["tokens"][-1]["position"]


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("quad, fused, subgroups, dot4", "donate"),
        *([("quad, fused, subgroups", "static"), ("quad, fused", "grow")] if FULL else []),
    ],
)
def test_ids_chosen_on_the_gpu_of_other_paths(model: Lab, lanes: int, name: str, kv: str) -> None:
    """The adapter's own path chooses 64 above; of others some replayed steps show the same.

    Without integers: test_architectures.py, 64 ids of every architecture.
    """
    record = run(model, "short", tokens=6, kv=kv, ban_eos=True, launch=options_of(name, lanes))
    assert record["token_ids"] == ASKED["short"]["ban_eog"]["ids"][:6]
    live = [token for token in record["tokens"][1:] if token["refused"] != "recorded"]
    assert {token["launches"] for token in live} == {PATHS[name][1]}


@pytest.mark.parametrize(("name", "tokens"), [("", 64), *([("quad, fused, subgroups", 14)] if FULL else [])])
def test_pages_over_several_slabs(model: Lab, lanes: int, name: str, tokens: int) -> None:
    """Stored logits, with slabs as small as if a short sequence were a long one.

    With fused kernels: test_architectures.py, every architecture.
    """
    options = options_of(name, lanes) if name else {}
    model.run(SHORT_SLABS, short=40, page=4)
    try:
        record = run(model, "france", tokens=tokens, kv="paged", top_logits=8, ban_eos=True, launch=options)
    finally:
        model.run(SHORT_SLABS, short=1000, page=16)
    expected = PROMPTS["france"]["ban_eog"]
    assert record["token_ids"] == expected["ids"][:tokens]
    worst = largest_difference(record, expected)
    assert worst <= tolerance_of(record)
    launches = [token["launches"] for token in record["tokens"][1:] if token["refused"] != "recorded"]
    slabs = 1 + (launches[-1] - launches[0]) // 30  # on a CPU adapter attention has a launch for each
    print(f"{name}: largest logit difference {worst:.2e} with up to {slabs} slabs")
    assert slabs > 3 or not record["environment"]["adapter"]["is_software"]


TOGETHER = """
import asyncio, sys
from contextlib import aclosing
from stepwell.decode.generation import Generation
from stepwell.decode.session import DecodeSession
from stepwell.launch.options import LaunchOptions

async def main(args):
    model, launcher = sys.lab_frontend._model.model, sys.lab_frontend._engines.get(LaunchOptions())

    async def answer(prompt, kv):
        session = DecodeSession(model, launcher, kv=kv, context=len(prompt) + args["tokens"])
        try:
            async with aclosing(session.generate(prompt, Generation(max_tokens=args["tokens"]))) as events:
                return [event async for event in events]
        finally:
            session.close()

    before, weights = launcher.counters.copy(), launcher.pool.ledger.reserved_by_role()["weights"]
    found = await asyncio.gather(*(answer(*sequence) for sequence in args["sequences"]))
    assert launcher.pool.ledger.reserved_by_role()["weights"] == weights
    launches = sum(event.counters.launches for events in found for event in events)
    return [[event.id for event in events] for events in found], launches, launcher.counters.since(before).launches
"""


def test_sequences_that_share_the_weights(model: Lab) -> None:
    """Two at once, in different KV modes: each gets the oracle's ids, and its tokens count its own launches."""
    sequences = [(PROMPTS["france"]["prompt_ids"], "static"), (PROMPTS["story"]["prompt_ids"], "donate")]
    found, counted, issued = model.run(TOGETHER, sequences=sequences, tokens=12)
    assert found == [PROMPTS[name]["free_run"]["ids"][:12] for name in ("france", "story")]
    assert counted == issued


def largest_difference(record: dict[str, Any], expected: dict[str, Any]) -> float:
    """Of a stored logit, over the steps that the record has."""
    worst = 0.0
    for token, stored in zip(record["tokens"], expected["top5_logits"], strict=False):
        measured = dict(map(tuple, token["top_logits"]))
        worst = max(worst, *(abs(measured[index] - logit) for index, logit in stored))
    return worst


def test_sampling_is_seeded(model: Lab) -> None:
    options = {"tokens": 8, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "kv": "static"}
    first = run(model, "short", seed=1, **options)
    again = run(model, "short", seed=1, **options)
    other = run(model, "short", seed=2, **options)
    assert first["token_ids"] == again["token_ids"]
    assert first["token_ids"] != other["token_ids"]


@pytest.mark.parametrize(
    ("depths", "options"),
    [
        ((0, 4), {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 1, "ban_eos": True}),
        ((4,), {"temperature": 1.2, "seed": 2, "ignore_eos": True}),
        ((1,), {"temperature": 0.7, "top_p": 0.8, "seed": 3, "ignore_eos": True}),
    ],
    ids=["k and p", "all", "p"],
)
def test_the_gpu_draws_what_the_host_draws(model: Lab, depths: tuple[int, ...], options: dict[str, Any]) -> None:
    """The host gets the logits where their largest are asked for; on the GPU steps are replayed, and run ahead."""
    host = run(model, "short", tokens=12, kv="static", top_logits=1, **options)
    assert {token["readback_bytes"] for token in host["tokens"][2:]} == {4 * 49_152}
    for depth in depths:
        gpu = run(model, "short", tokens=12, kv="static", launch={"readback_depth": depth}, **options)
        assert gpu["token_ids"] == host["token_ids"]
        assert {token["readback_bytes"] for token in gpu["tokens"][2:]} == {4}
        assert [token["replayed"] for token in gpu["tokens"][2:]] == [1] * 10
    greedy = [max(token["top_logits"], key=lambda pair: pair[1])[0] for token in host["tokens"]]
    assert greedy != host["token_ids"]


def test_stop_string_and_chat_template(model: Lab) -> None:
    """The question alone, through the chat template, gives the oracle's prompt; a stop string cuts the text exactly."""
    message = model.run(RUN, prompt="What is the capital of France?", tokens=64, stop=["is Par"])
    record = message["record"]
    assert record["prompt_ids"] == PROMPTS["france"]["prompt_ids"]
    assert record["text"] == "The capital of France "
    assert record["finish_reason"] == "stop_string"
