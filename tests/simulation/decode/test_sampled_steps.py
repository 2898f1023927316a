"""Sampled tokens that the GPU chooses: the draws are the host's, and reach each step however it is issued."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from stepwell.decode.generation import Generation
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.sampling import Sampling
from stepwell.decode.timing import TokenEvent
from stepwell.errors import BadRequest
from stepwell.gpu.fake_device import FAKE_INFO
from stepwell.gpu.fake_objects import FakeBuffer
from stepwell.kernels.sampling import LARGEST_VOCABULARY, Cuts, SampleOps
from stepwell.launch.options import ABLATION, LaunchOptions
from stepwell.launch.selection import tuning_for
from stepwell.memory.buffer import Buffer, Role
from stepwell.step.recorder import Launch, Recorder
from tests.support.decode_lab import DecodeLab, ids, templates_rendered_once, tokens, write_model

__all__ = ["templates_rendered_once"]  # a fixture for every test here

PROMPT = [5, 6, 7]
COUNT = 40
SAMPLING = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf")


async def decode(model: Path, options: LaunchOptions, sampling: Sampling, kv: str = "static") -> list[TokenEvent]:
    lab = await DecodeLab(options).load(model)
    session = lab.session(kv)
    events = await tokens(session, PROMPT, COUNT, sampling=sampling)
    session.close()
    lab.close()
    return events


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """Without any switch."""
    return ids(asyncio.run(decode(model, ABLATION[0][1], SAMPLING)))


@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("params", ["uniform_pool", "call_site", "immediates"])
def test_the_same_ids_however_steps_are_issued(
    model: Path, expected: Sequence[int], kv: str, depth: int, replay: bool, params: str
) -> None:
    options = LaunchOptions.from_dict({"readback_depth": depth, "replay": replay, "params": params})
    events = asyncio.run(decode(model, options, SAMPLING, kv))
    assert ids(events) == expected
    counters = [event.counters for event in events if event.counters and event.counters.refused != "recorded"]
    assert {step.readback_bytes for step in counters} == {4}
    assert ("recorded" in {event.counters.refused for event in events if event.counters}) is replay
    if replay and kv == "static":
        assert sum(step.replayed for step in counters) == COUNT - 2
        if params == "immediates":
            assert {step.uploads for step in counters if step.replayed} == {0}, "no id, no parameter"


def test_the_seed_and_the_settings_count(model: Path, expected: Sequence[int]) -> None:
    found = {tuple(expected)}
    others = (
        Sampling(),
        Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=4),
        Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3),
        Sampling(temperature=0.9, top_k=41, top_p=0.95, seed=3),
        Sampling(temperature=0.9, top_k=40, top_p=0.94, seed=3),
    )
    for sampling in others:
        found.add(tuple(ids(asyncio.run(decode(model, LaunchOptions(), sampling)))))
    assert len(found) == 1 + len(others)
    assert ids(asyncio.run(decode(model, LaunchOptions(), SAMPLING))) == expected


def test_other_settings_take_no_other_kernels_and_no_other_plan(model: Path) -> None:
    """A temperature is a number in a buffer; only whether there are cuts is compiled in."""

    async def run() -> None:
        lab = await DecodeLab(LaunchOptions(readback_depth=2)).load(model)
        session = lab.session(context=512)
        answers = []
        for temperature, top_k, top_p in ((0.7, 5, 0.5), (0.8, 5, 0.5), (0.8, 6, 0.5), (0.8, 6, 0.6)):
            before = len(lab.launcher.kernels), lab.launcher.plans.recorded
            sampling = Sampling(temperature, top_k, top_p, seed=1)
            answers.append(ids(await tokens(session, PROMPT, 8, sampling=sampling)))
            after = len(lab.launcher.kernels), lab.launcher.plans.recorded
            assert after == before or len(answers) == 1
        await tokens(session, PROMPT, 8, sampling=Sampling(0.8, 6))
        assert len(lab.launcher.kernels) > before[0]
        session.close()
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize("kv", ["grow", "donate"])
def test_a_step_that_is_done_again_has_its_draw(model: Path, expected: Sequence[int], kv: str) -> None:
    async def run(create: int) -> str | None:
        lab = await DecodeLab(LaunchOptions(readback_depth=2)).load(model)
        session = lab.session(kv)
        lab.device.out_of_memory = frozenset({lab.device.creates + create})
        events = await tokens(session, PROMPT, COUNT, sampling=SAMPLING)
        assert ids(events) == expected, create
        return next((event.counters.refused for event in events if event.counters.refused == "retried"), None)

    outcomes = [asyncio.run(run(create)) for create in range(0, 60, 3)]
    assert "retried" in outcomes


def test_a_rehearsed_step_has_the_settings(model: Path) -> None:
    """It is what the kernels' times are measured of."""

    async def run() -> None:
        lab = await DecodeLab().load(model)
        session = lab.session()
        last = (await tokens(session, PROMPT, 4, sampling=SAMPLING))[-1].id
        async with aclosing(session.rehearse(last, Generation(sampling=SAMPLING), lab.another())) as steps:
            async for step in steps:
                settings = [lease for lease in lab.pool.inventory.leases() if lease.label == "sampling settings"]
                assert len(settings) == 2, "the session's and the rehearsal's"
                used = [lease.id for lease in settings if lease.id in step.buffers]
                assert [lab.device.get(handle, FakeBuffer, "test").get(0, 16) for handle in used] == [SAMPLING.settings]
                break
        session.close()

    asyncio.run(run())


def test_what_is_recorded() -> None:
    """A launch for each cut that there is."""
    ops = SampleOps(tuning_for(FAKE_INFO))
    buffer = Buffer(1, 64, 64, Role.ACTIVATION)
    stages = {}
    for cuts in (Cuts(False, False), Cuts(True, False), Cuts(False, True), Cuts(True, True)):
        rec = Recorder()
        ops.sample(rec, *[buffer] * 5, size=100, ban=(0, 1, 5), cuts=cuts)
        launches = [command for command in rec.finish().commands if isinstance(command, Launch)]
        stages[cuts] = [dict(launch.variant.constants)["stage"] for launch in launches]
        assert dict(launches[-1].variant.constants)["fallback"] == 2
    assert [len(found) for found in stages.values()] == [4, 5, 5, 6]
    assert stages[Cuts(True, True)] == ["tops", "distances", "top_k", "top_p", "sums", "pick"]
    with pytest.raises(BadRequest, match="a vocabulary of 524,289; sampling on the GPU takes up to 524,288"):
        ops.sample(Recorder(), *[buffer] * 5, size=LARGEST_VOCABULARY + 1, ban=(), cuts=Cuts(True, True))


def test_who_chooses() -> None:
    """The GPU, but where logits come back anyway; one candidate is left to argmax."""
    assert Generation(sampling=SAMPLING).readback.cuts == Cuts(True, True)
    assert Generation(sampling=Sampling(0.5)).readback.cuts == Cuts(False, False)
    assert Generation(sampling=SAMPLING, digest=True).readback.cuts == Cuts(True, True)
    for greedy in (Sampling(), Sampling(temperature=1.0, top_k=1)):
        assert Generation(sampling=greedy).readback == (True, (), False, None)
        assert Generation(sampling=greedy).settings == b""
    assert Generation(sampling=SAMPLING, top_logits=1).readback == (False, (), False, None)
