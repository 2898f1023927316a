"""The end of the context, in every KV mode: a prompt beyond it is an error, an answer that reaches it ends there."""

import asyncio
from pathlib import Path

import pytest

from stepwell.decode.kv_modes import KV_MODES
from stepwell.errors import BadRequest, ContextFull
from stepwell.launch.options import LaunchOptions
from tests.support.decode_lab import CONTEXT, DecodeLab, ids, templates_rendered_once, tokens, write_model

__all__ = ["templates_rendered_once"]

PROMPT = [7, 11, 13, 17, 19]
ROOM = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("replay", [False, True], ids=["live", "replayed"])
@pytest.mark.parametrize("kv", KV_MODES)
def test_an_answer_ends_with_the_context(model: Path, kv: str, replay: bool, depth: int) -> None:
    """The last token needs no position: ``context - prompt + 1`` of them, the same as with more room."""

    async def run() -> None:
        lab = await DecodeLab(LaunchOptions(readback_depth=depth, replay=replay)).load(model)
        free = lab.session(kv, CONTEXT)
        expected = ids(await tokens(free, PROMPT, 40))
        free.close()
        session = lab.session(kv, ROOM)
        events = await tokens(session, PROMPT, 40)
        assert ids(events) == expected[: ROOM - len(PROMPT) + 1]
        assert session.length == events[-1].position == ROOM
        assert not session.cancelled
        with pytest.raises(
            ContextFull, match=f"has 1 tokens, {ROOM} are in the cache already; the context holds {ROOM}"
        ):
            await tokens(session, [1], 1)
        session.close()
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize("kv", KV_MODES)
def test_a_prompt_beyond_the_context_changes_nothing(model: Path, kv: str) -> None:
    async def run() -> None:
        lab = await DecodeLab().load(model)
        session = lab.session(kv, ROOM)
        first = ids(await tokens(session, PROMPT, 3))
        before, created = lab.pool.ledger.in_use_bytes, lab.pool.ledger.created
        with pytest.raises(ContextFull, match=r"14 tokens, 7 are in the cache already; the context holds 20\. Shorten"):
            await tokens(session, list(range(14)), 3)
        assert (session.length, lab.pool.ledger.in_use_bytes, lab.pool.ledger.created) == (7, before, created)
        more = ids(await tokens(session, [first[-1], *range(12)], 3))  # exactly full: one token, of the last position
        assert len(more) == 1
        assert session.length == ROOM
        session.close()
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize("kv", KV_MODES)
def test_a_context_beyond_the_model_s_is_refused(model: Path, kv: str) -> None:
    async def run() -> None:
        lab = await DecodeLab().load(model)
        with pytest.raises(BadRequest, match=r"a context of 1,025 positions; this model has 1 to 1,024\."):
            lab.session(kv, CONTEXT + 1)
        assert lab.pool.ledger.reserved_by_role().get("kv", 0) == 0
        lab.close()

    asyncio.run(run())
