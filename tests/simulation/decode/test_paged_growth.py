"""A paged session on a GPU: what its launches bind as it grows, and that all of that was compiled before."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stepwell.decode.generation import Generation
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.session import DecodeSession
from stepwell.errors import BadRequest
from stepwell.gpu.fake_device import FAKE_INFO
from stepwell.launch.options import LaunchOptions, Switch
from tests.support.decode_lab import DecodeLab, ids, short_slabs, templates_rendered_once, tokens, write_model

__all__ = ["short_slabs", "templates_rendered_once"]  # fixtures for every test here

PROMPT = [5, 6, 7]
COUNT = 230  # tokens, so that the second group of slabs has three
PLACES = {8: [1, 2, 4, 5], 16: [1, 2, 4, 8, 12]}
"""By how many storage buffers a shader may have: those for slabs in a launch of attention."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def gpu(storage_buffers: int = 16, fused: Switch = Switch.AUTO) -> DecodeLab:
    limits = {**FAKE_INFO.limits, "maxStorageBuffersPerShaderStage": storage_buffers}
    return DecodeLab(LaunchOptions(fused=fused), info=replace(FAKE_INFO, is_fallback=False, limits=limits))


def places(lab: DecodeLab, kernel: str) -> list[int]:
    """For slabs, of the kernels that were compiled."""
    found = [dict(variant.constants)["slabs"] for variant in lab.launcher.kernels.variants if variant.kernel == kernel]
    return sorted(number for number in found if isinstance(number, int) and number)


async def prepared(lab: DecodeLab, session: DecodeSession, prompt: int, count: int) -> int:
    """How many kernels that took."""
    before = lab.device.compiled
    await session.prepare(Generation(max_tokens=count), prompt)
    return lab.device.compiled - before


@pytest.mark.parametrize("storage_buffers", PLACES)
@pytest.mark.parametrize("fused", [Switch.AUTO, Switch.OFF])
def test_nothing_is_compiled_when_a_slab_is_added(model: Path, storage_buffers: int, fused: Switch) -> None:
    """The tokens are those of static tensors; buffers are created when a slab is added."""

    async def run() -> None:
        lab = await gpu(storage_buffers, fused).load(model)
        session = lab.session("static", 512)
        expected = ids(await tokens(session, PROMPT, COUNT))
        session.close()
        lab.pool.trim()
        session = lab.session("paged", 512)
        await prepared(lab, session, len(PROMPT), COUNT)
        kernel = "attention_split" if fused is Switch.OFF else "attention_decode"
        assert places(lab, kernel) == PLACES[storage_buffers]
        assert places(lab, "attention_merge") == [max(PLACES[storage_buffers])]
        compiled = lab.device.compiled
        events = await tokens(session, PROMPT, COUNT)
        assert ids(events) == expected
        assert lab.device.compiled == compiled
        classes = [event.counters.kv_class_bytes for event in events if event.counters]
        grown = {events[i].position for i in range(1, COUNT) if classes[i] != classes[i - 1]}
        assert len(grown) > max(PLACES[storage_buffers]) + 2
        created = {e.position for e in events[3:] if e.counters and e.counters.buffers_created}
        # a step in flight, and the plan's check that reads back through buffers of its own, come a little later
        assert created <= {position + late for position in grown for late in (0, 1, 2)}
        session.close()
        lab.close()

    asyncio.run(run())


def test_later_prompts_find_the_slabs_that_there_are(model: Path) -> None:
    """Their first steps may go to a slab that was added for the answer before, the others have one of their own."""

    async def run() -> None:
        lab = await gpu().load(model)
        session = lab.session("paged", 512)
        found = []
        for prompt in (100, 30, 70, 1):
            found.append(await prepared(lab, session, prompt, 40))
            compiled = lab.device.compiled
            await tokens(session, [7] * prompt, 40)
            assert lab.device.compiled == compiled
        assert min(found[1:3]) > 0, "kernels for more slabs"
        session.close()
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize(("context", "count", "expected"), [(512, 1, [1]), (16, 500, [1, 2]), (512, 40, [1, 2, 4, 8])])
def test_no_more_than_the_answer_needs(model: Path, context: int, count: int, expected: list[int]) -> None:
    async def run() -> None:
        lab = await gpu().load(model)
        session = lab.session("paged", context)
        await prepared(lab, session, len(PROMPT), count)
        assert places(lab, "attention_decode") == expected
        assert places(lab, "attention_split") == [1], "of the prompt"
        session.close()
        lab.close()

    asyncio.run(run())


def test_a_cpu_adapter_needs_as_many_kernels_as_for_static_tensors(model: Path) -> None:
    async def run(kv: str) -> tuple[int, int]:
        lab = await DecodeLab().load(model)
        session = lab.session(kv, 512)
        before, compiled = await prepared(lab, session, len(PROMPT), COUNT), lab.device.compiled
        await tokens(session, PROMPT, COUNT)
        return before, lab.device.compiled - compiled

    assert asyncio.run(run("paged")) == asyncio.run(run("static"))


@pytest.mark.parametrize("kv", KV_MODES)
def test_a_prompt_without_tokens_is_refused_when_it_is_read(model: Path, kv: str) -> None:
    async def run() -> None:
        lab = await gpu().load(model)
        session = lab.session(kv, 512)
        await session.prepare(Generation(), 0)
        with pytest.raises(BadRequest, match="the prompt has no tokens"):
            await tokens(session, [], 3)
        session.close()
        lab.close()

    asyncio.run(run())
