"""What the host does for a token: lines of the package, without those of the device, which is a fake."""

import asyncio
from pathlib import Path
from statistics import median

import pytest

from stepwell.decode.generation import Generation
from stepwell.launch.options import LaunchOptions
from tests.support.counted import lines_counted
from tests.support.decode_lab import DecodeLab, templates_rendered_once
from tests.support.tiny_llama import write_tiny_llama

__all__ = ["templates_rendered_once"]  # a fixture for every test here

OFF = LaunchOptions.from_dict({
    "shared_pass": False, "bind_group_cache": False, "skip_uploads": False, "replay": False, "params": "uniform_pool",
})  # fmt: skip
ARMS = {"replay": LaunchOptions(), "live": LaunchOptions(replay=False), "nothing on": OFF}


def of_the_host(file: str) -> bool:
    return "/stepwell/" in file and "/stepwell/gpu/" not in file


async def lines_per_token(path: Path, options: LaunchOptions) -> float:
    """The median token's, in steady state."""
    lab = await DecodeLab(options).load(path)
    session = lab.session()
    found = []
    with lines_counted(of_the_host) as lines:
        before = 0
        async for _ in session.generate([5, 6, 7], Generation(max_tokens=24)):
            before, spent = lines(), lines() - before
            found.append(spent)
    session.close()
    lab.close()
    return median(found[8:])


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, float]]:
    """Of each arm, for models of 2 and of 6 layers."""
    folder = tmp_path_factory.mktemp("models")
    paths = [folder / f"{layers}.gguf" for layers in (2, 6)]
    for path, layers in zip(paths, (2, 6), strict=True):
        write_tiny_llama(path, n_layers=layers, n_heads=4, n_kv_heads=2, head_dim=16, vocab=320)
    shallow, deep = (
        {arm: asyncio.run(lines_per_token(path, options)) for arm, options in ARMS.items()} for path in paths
    )
    found = {arm: (shallow[arm], deep[arm]) for arm in ARMS}
    print(found)
    return found


def test_a_replayed_step_costs_the_same_for_every_model(costs: dict[str, tuple[float, float]]) -> None:
    shallow, deep = costs["replay"]
    assert shallow == deep
    assert 100 < deep < 750, "500 lines, when this was written"


def test_each_switch_saves_work_at_every_launch(costs: dict[str, tuple[float, float]]) -> None:
    launches = 4 * 9  # of the layers that one model has more
    per_launch = {arm: (deep - shallow) / launches for arm, (shallow, deep) in costs.items()}
    assert per_launch["replay"] == 0
    assert 0 < per_launch["live"] < 110, "73 lines, when this was written"
    assert per_launch["live"] < per_launch["nothing on"] < 150, "97 lines"
