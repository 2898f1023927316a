"""A growing cache with steps in flight on FakeDevice: its sets of tensors take turns, and so do its plans."""

import asyncio
from pathlib import Path

import pytest

from stepwell.decode.generation import Generation
from stepwell.launch.options import LaunchOptions
from tests.simulation.decode.test_session import open_rig
from tests.support.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_llama(path, context=1024)
    return path


@pytest.mark.parametrize("depth", [0, 1, 2, 4, 16])
def test_each_turn_is_recorded_once(model_path: Path, depth: int) -> None:
    """K + 2 plans, then nothing but replays without a new buffer or bind group, until the tensors outgrow a class."""
    prompt, tokens = 520, 480  # 128 B per position: the class ends at 1,024

    async def run() -> None:
        rig = await open_rig(model_path, launch=LaunchOptions(readback_depth=depth))
        session = rig.session("grow", 1024)
        events = [event async for event in session.generate([7] * prompt, Generation(max_tokens=tokens))]
        counters = [event.counters for event in events if event.counters is not None]
        assert len({step.kv_class_bytes for step in counters}) == 1
        refused = [step.refused for step in counters]
        assert refused.count("recorded") == depth + 2
        settled = 2 * (depth + 2) ** 2
        assert set(refused[settled:] or [None]) == {None}
        assert rig.launcher.plans.invalidated == 0
        steady = counters[-20:]
        assert {(step.replayed, step.bind_groups_created, step.buffers_created) for step in steady} == {(1, 0, 0)}
        session.close()
        assert rig.pool.report().by_role["kv"].in_use_bytes == 0

    asyncio.run(run())


def test_what_waits_for_its_turn_is_given_back(model_path: Path) -> None:
    """A generation that ends in the middle, with steps in flight: only the committed set is in use afterwards."""

    async def run() -> None:
        rig = await open_rig(model_path, launch=LaunchOptions(readback_depth=4))
        session = rig.session("grow", 1024)
        seen = 0
        async for _ in session.generate([7] * 20, Generation(max_tokens=50)):
            seen += 1
            if seen == 9:
                session.cancel()
        account = rig.pool.report().by_role["kv"]
        assert account.in_use_bytes == 4 * 4096  # K and V of two layers
        session.close()
        assert rig.pool.report().by_role["kv"].in_use_bytes == 0

    asyncio.run(run())
