"""One loaded model, steps by several kernel paths: a launcher says which, the weights are the same ones."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepwell.decode.generation import Generation
from stepwell.decode.kv_modes import KV_MODES
from stepwell.errors import BadRequest
from stepwell.gpu.fake_device import FAKE_INFO
from stepwell.kernels.tuning import SHADER_F16
from stepwell.launch.options import LaunchOptions, Switch
from stepwell.memory.buffer import Role
from tests.support.decode_lab import LAYERS, VOCAB, DecodeLab, templates_rendered_once, tokens, write_model
from tests.support.tiny_llama import write_tiny_llama

__all__ = ["templates_rendered_once"]

NO_MORE = {"subgroups": 0, "dot4": False, "f16": False}
PATHS: dict[str, tuple[dict[str, str], int, dict[str, Any]]] = {
    "as the adapter likes it": ({}, 9 * LAYERS + 4, {"kernels": "quad", "fused": False, **NO_MORE}),
    "fused": ({"fused": "on"}, 5 * LAYERS + 4, {"kernels": "quad", "fused": True, **NO_MORE}),
    "split": ({"kernels": "split"}, 9 * LAYERS + 5, {"kernels": "split", "fused": False, **NO_MORE}),
    "as a GPU": (
        {"kernels": "split", "fused": "on"},
        5 * LAYERS + 5,
        {"kernels": "split", "fused": True, **NO_MORE},
    ),
}
"""The options, the launches of a decode step, and what they came to."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_one_model_serves_every_path(model: Path) -> None:
    """In turns, in every KV mode; nothing of the weights is made twice, and steps are prepared and replayed."""

    async def run() -> None:
        lab = await DecodeLab().load(model)
        weights = lab.pool.ledger.reserved_by_role()[Role.WEIGHTS.value]
        launchers = {name: lab.another(LaunchOptions.from_dict(options)) for name, (options, _, _) in PATHS.items()}
        for _ in range(2):
            for name, (_, launches, kernels) in PATHS.items():
                for kv in KV_MODES:
                    session = lab.session(kv, launcher=launchers[name])
                    events = await tokens(session, [5, 6, 7], 10)
                    assert session.kernels == kernels
                    assert {e.counters.launches for e in events if e.counters and not e.counters.refused} == {launches}
                    session.close()
        assert lab.pool.ledger.reserved_by_role()[Role.WEIGHTS.value] == weights
        for launcher in launchers.values():
            launcher.close()
        lab.close()

    asyncio.run(run())


def test_heads_that_are_no_whole_octets(tmp_path: Path) -> None:
    """``auto`` goes without fused steps, ``on`` is an error."""
    write_tiny_llama(tmp_path / "odd.gguf", n_heads=8, n_kv_heads=8, head_dim=12, hidden=96)

    async def run() -> None:
        lab = await DecodeLab(info=replace(FAKE_INFO, is_fallback=False)).load(tmp_path / "odd.gguf")
        session = lab.session()
        assert session.kernels == {"kernels": "split", "fused": False, **NO_MORE}
        session.close()
        wanted = lab.another(LaunchOptions(fused=Switch.ON))
        with pytest.raises(BadRequest, match="fused is on, but heads have 12 values, and its kernels take eight"):
            lab.session(launcher=wanted)
        wanted.close()
        lab.close()

    asyncio.run(run())


def test_rows_that_no_workgroup_can_hold(model: Path) -> None:
    """``auto`` goes without, ``on`` is an error with the numbers and leaves nothing behind."""
    info = replace(FAKE_INFO, is_fallback=False, limits={**FAKE_INFO.limits, "maxComputeWorkgroupStorageSize": 8192})

    async def run() -> None:
        lab = await DecodeLab(info=info).load(model)
        session = lab.session()
        assert session.kernels == {"kernels": "split", "fused": False, **NO_MORE}
        session.close()
        before = lab.pool.ledger.in_use_bytes
        wanted = lab.another(LaunchOptions(fused=Switch.ON))
        with pytest.raises(BadRequest, match=r"fused is on, but a row of 64 values takes 8,448 B .* gives it 8,192 B"):
            lab.session(launcher=wanted)
        assert lab.pool.ledger.in_use_bytes == before
        wanted.close()
        lab.close()

    asyncio.run(run())


def test_a_prompt_in_f16_takes_a_launch_more_per_product(model: Path) -> None:
    """Where it is long enough; a device that has no shader-f16 would refuse the shaders."""
    info = replace(FAKE_INFO, is_fallback=False, features=FAKE_INFO.features | {SHADER_F16})

    async def run() -> None:
        lab = await DecodeLab(info=info).load(model)
        launches = {}
        for arm in ("auto", "off"):
            launcher = lab.another(LaunchOptions.from_dict({"f16": arm}))
            session = lab.session(launcher=launcher)
            assert session.kernels["f16"] is (arm == "auto")
            for prompt in (range(1, 21), range(1, 4)):
                events = await tokens(session, list(prompt), 3)
                assert all(event.counters is not None for event in events)
                launches[arm, len(prompt)] = [event.counters.launches for event in events if event.counters]
            session.close()
            launcher.close()
        (first, *others), (first_off, *others_off) = launches["auto", 20], launches["off", 20]
        assert (first - first_off, others) == (4 * LAYERS, others_off)
        assert launches["auto", 3] == launches["off", 3]
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize(("is_gpu", "partials_bytes", "parts"), [
    (True, 1 << 27, [256, 512, 600]),
    (True, 1 << 19, [128, 256, 384, 512, 600]),
    (True, 1, [64, 128, 192, 256, 320, 384, 448, 512, 576, 600]),
    (False, 1 << 27, [64, 128, 192, 256, 320, 384, 448, 512, 576, 600]),
])  # fmt: skip
def test_gpus_read_a_prompt_in_larger_steps_unless_attention_then_takes_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gpu: bool, partials_bytes: int, parts: list[int]
) -> None:
    monkeypatch.setattr("stepwell.models.steps.PARTIALS_BYTES", partials_bytes)
    shape = {"n_layers": LAYERS, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "vocab": VOCAB, "context": 700}
    write_tiny_llama(tmp_path / "long.gguf", **shape)
    told: list[tuple[int, int]] = []

    async def run() -> None:
        lab = await DecodeLab(info=replace(FAKE_INFO, is_fallback=not is_gpu)).load(tmp_path / "long.gguf")
        session = lab.session(context=700)
        generation = Generation(max_tokens=1)
        await session.prepare(generation, 600)
        compiled = len(lab.launcher.kernels)
        async for _ in session.generate([1] * 600, generation, lambda done, total: told.append((done, total))):
            pass
        assert len(lab.launcher.kernels) == compiled
        session.close()
        lab.close()

    asyncio.run(run())
    assert told == [(done, 600) for done in parts]
