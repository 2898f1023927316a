"""Sequences that outgrow the original context, on FakeDevice: all of it is read once more, with other frequencies.

A sequence that was read with the new ones from the start is what they are compared with: in ``decode_lab`` every token
depends on all that went before it, and on the constants of the kernels.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from stepwell.decode.generation import Generation
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.sampling import Sampling
from stepwell.decode.session import DecodeSession
from stepwell.errors import ContextFull, DeviceLost
from stepwell.gpu.source import FileSource
from stepwell.launch.options import LaunchOptions
from stepwell.models.phi3 import Phi3
from stepwell.weights.gguf import read_gguf
from tests.support.decode_lab import CONTEXT, LAYERS, VOCAB, DecodeLab, ids, templates_rendered_once, tokens
from tests.support.tiny_llama import write_tiny_phi3

__all__ = ["templates_rendered_once"]  # a fixture for every test here

SWITCH = 70  # more than one step of a prompt
PROMPT = [7 * i % VOCAB for i in range(60)]
STEPS = 24


class Phi3Lab(DecodeLab):
    async def load(self, path: Path) -> "Phi3Lab":
        source = FileSource(path)
        self.model = await Phi3.load(await read_gguf(source), source, self.launcher)
        return self


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    factors = [1.0 + i for i in range(8)]
    write_tiny_phi3(
        path, n_layers=LAYERS, vocab=VOCAB, context=CONTEXT, original_context=SWITCH, short=factors, long=factors
    )
    return path


async def afresh(lab: Phi3Lab, kv: str, before: Sequence[int], count: int) -> list[int]:
    session = lab.session(kv)
    found = ids(await tokens(session, before, count))
    session.close()
    return found


@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("replay", [False, True])
def test_what_follows_is_as_if_all_had_been_a_prompt(model: Path, kv: str, depth: int, replay: bool) -> None:
    async def run() -> None:
        lab = await Phi3Lab(LaunchOptions(readback_depth=depth, replay=replay)).load(model)
        session = lab.session(kv)
        events = await tokens(session, PROMPT, STEPS)
        assert [event.index for event in events] == list(range(STEPS))
        assert [event.position for event in events] == [len(PROMPT) + i for i in range(STEPS)]
        made = ids(events)
        last = SWITCH + 1 - len(PROMPT)  # of the tokens that the first step above the switch has read
        assert await afresh(lab, kv, PROMPT + made[:last], STEPS - last) == made[last:]
        assert session.history == (*PROMPT, *made[:-1])
        assert [event.index for event in events if event.counters and event.counters.refused == "prefill"] == [0, last]
        session.close()
        lab.close()

    asyncio.run(run())


def test_the_frequencies_matter(model: Path) -> None:
    """The comparison above would be void if kernels of either table gave the same tokens."""

    async def run() -> None:
        lab = await Phi3Lab().load(model)
        by_short = await afresh(lab, "static", PROMPT, STEPS)
        lab.model.switch_position = 0
        by_long = await afresh(lab, "static", PROMPT, STEPS)
        assert by_short != by_long
        lab.model.switch_position = None
        assert (await afresh(lab, "static", PROMPT, STEPS))[: SWITCH - len(PROMPT)] != by_short[: SWITCH - len(PROMPT)]
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize("kv", KV_MODES)
def test_a_later_prompt_outgrows_it(model: Path, kv: str) -> None:
    async def run() -> None:
        lab = await Phi3Lab().load(model)
        session = lab.session(kv)
        made = ids(await tokens(session, PROMPT, 4))
        more = [3, 1, 4, 1, 5, 9, 2, 6, 5]
        everything = [*PROMPT, *made[:3], *more]
        assert len(everything) > SWITCH >= session.length
        progress: list[tuple[int, int]] = []
        async with aclosing(
            session.generate(more, Generation(max_tokens=5), lambda *now: progress.append(now))
        ) as all_:
            found = [event.id async for event in all_]
        assert progress[-1] == (len(everything), len(everything))
        assert found == await afresh(lab, kv, everything, 5)
        assert session.history == (*everything, *found[:-1])
        session.close()
        lab.close()

    asyncio.run(run())


def test_a_token_that_the_host_chooses(model: Path) -> None:
    async def run() -> None:
        lab = await Phi3Lab().load(model)
        session = lab.session()
        sampled = await tokens(session, PROMPT, STEPS, sampling=Sampling(temperature=0.0), top_logits=1)
        assert ids(sampled) == [event.top_logits[0][0] for event in sampled]
        assert session.length == len(PROMPT) + STEPS - 1
        session.close()
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize("context", [SWITCH - 2, SWITCH, SWITCH + 1])
def test_the_context_ends_near_it(model: Path, context: int) -> None:
    async def run() -> None:
        lab = await Phi3Lab().load(model)
        session = lab.session(context=context)
        events = await tokens(session, PROMPT, STEPS)
        assert len(events) == context - len(PROMPT) + 1
        assert session.length == context
        with pytest.raises(ContextFull, match=f"{context} are in the cache already; the context holds {context}"):
            await tokens(session, [1], 1)
        session.close()
        lab.close()

    asyncio.run(run())


def test_cancelled_in_between_it_goes_on_with_the_next_prompt(model: Path) -> None:
    async def run() -> None:
        lab = await Phi3Lab().load(model)
        session = lab.session()
        made = ids(await tokens(session, PROMPT, 4))
        before, more = [*PROMPT, *made[:3]], [2] * 20

        def cancel(done: int, total: int) -> None:
            session.cancel()

        async with aclosing(session.generate(more, Generation(max_tokens=5), cancel)) as events:
            assert [event async for event in events] == []
        assert session.cancelled
        read = list(session.history)  # one step of the prompt: the old positions, and some of the new
        assert before == read[: len(before)]
        found = ids(await tokens(session, [8, 9, 8, 9, 8, 9, 8], 5))
        assert found == await afresh(lab, "static", [*read, 8, 9, 8, 9, 8, 9, 8], 5)
        session.close()
        lab.close()

    asyncio.run(run())


def test_the_history_outlives_the_device(model: Path) -> None:
    async def run(dies_at: int) -> bool:
        lab = await Phi3Lab(dies_at=dies_at).load(model)
        session: DecodeSession = lab.session()
        made: list[int] = []
        try:
            async with aclosing(session.generate(PROMPT, Generation(max_tokens=STEPS))) as events:
                async for event in events:
                    made.append(event.id)  # noqa: PERF401 - what there is when it ends
        except DeviceLost:
            assert list(session.history[: len(PROMPT)]) == PROMPT[: len(session.history)]
            if made:
                assert session.history == (*PROMPT, *made[:-1])
                assert made == expected[: len(made)]
            return True
        return False

    async def all_tokens() -> list[int]:
        return await afresh(await Phi3Lab().load(model), "static", PROMPT, STEPS)

    expected = asyncio.run(all_tokens())
    first = 1  # submits of the loader
    while not asyncio.run(run(first)):
        first += 1
    lost = [asyncio.run(run(dies_at)) for dies_at in range(first, first + 40)]
    assert lost.count(True) > STEPS // 2
