"""K and V stored as f16: half the bytes in every KV mode, under every policy and by every kernel path."""

import asyncio
from pathlib import Path

import pytest

from stepwell.decode.kv_cache import StaticKV
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.stepper import Stepper
from stepwell.errors import BadRequest
from stepwell.launch.options import LaunchOptions
from stepwell.memory.buffer import Role
from stepwell.memory.policies import POLICIES
from stepwell.step.recorder import Launch
from tests.support.decode_lab import (
    KV_WIDTH,
    LAYERS,
    DecodeLab,
    ids,
    short_slabs,
    templates_rendered_once,
    tokens,
    write_model,
)

__all__ = ["short_slabs", "templates_rendered_once"]
PROMPT, COUNT, CONTEXT = [5, 6, 7], 90, 128
PATHS = {
    "as the adapter likes it": {},
    "fused": {"fused": "on"},
    "as a GPU": {"kernels": "split", "fused": "on"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf")


def requested(lab: DecodeLab) -> int:
    """Bytes of K and V that were asked for and are in use."""
    return sum(lease.requested for lease in lab.pool.inventory.leases() if lease.role is Role.KV)


@pytest.mark.parametrize("kv", KV_MODES)
def test_half_the_bytes_in_every_mode(model: Path, kv: str) -> None:
    """And the same of what is copied: with half of a row lost the tokens would be others than those of ``static``."""

    async def run() -> None:
        lab = await DecodeLab(policy="exact").load(model)
        found = {}
        for kv_type in ("f32", "f16"):
            session = lab.session(kv, CONTEXT, kv_type=kv_type)
            assert session.position_bytes == 2 * KV_WIDTH // (1 if kv_type == "f32" else 2)
            events = await tokens(session, PROMPT, COUNT)
            copied = sum(event.counters.copies for event in events if event.counters)
            last = events[-1].counters
            assert last is not None
            found[kv_type] = (requested(lab), last.kv_class_bytes, copied, ids(events))
            session.close()
        whole, half = found["f32"], found["f16"]
        assert half[:2] == (whole[0] // 2, whole[1] // 2)
        assert half[2] == whole[2]
        assert requested(lab) == 0
        static = lab.session("static", CONTEXT, kv_type="f16")
        assert half[0] >= 2 * LAYERS * (KV_WIDTH // 2) * (len(PROMPT) + COUNT - 1)
        assert half[3] == ids(await tokens(static, PROMPT, COUNT))
        assert half[3] != whole[3], "kernels of another type"
        static.close()
        lab.close()

    asyncio.run(run())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_tokens_under_every_policy(model: Path, policy: str) -> None:
    async def run() -> list[list[int]]:
        lab = await DecodeLab(policy=policy).load(model)
        found = []
        for kv in ("static", "grow"):
            session = lab.session(kv, CONTEXT, kv_type="f16")
            found.append(ids(await tokens(session, PROMPT, 40)))
            session.close()
        lab.close()
        return found

    static, grown = asyncio.run(run())
    assert static == grown


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kv", ["static", "paged"])
def test_both_types_side_by_side(model: Path, path: str, kv: str) -> None:
    """Two sequences over one model by one launcher, a type each: neither runs a kernel of the other's."""

    async def run() -> None:
        lab = await DecodeLab(LaunchOptions.from_dict(PATHS[path])).load(model)
        alone = {}
        for kv_type in ("f32", "f16"):
            session = lab.session(kv, CONTEXT, kv_type=kv_type)
            alone[kv_type] = ids(await tokens(session, PROMPT, 20))
            session.close()
        sessions = [lab.session(kv, CONTEXT, kv_type=kv_type) for kv_type in alone]
        together = await asyncio.gather(*(tokens(session, PROMPT, 20) for session in sessions))
        assert [ids(events) for events in together] == list(alone.values())
        for session in sessions:
            session.close()
        lab.close()

    asyncio.run(run())


def test_kernels_that_touch_k_and_v_know_their_type(model: Path) -> None:
    async def run() -> None:
        lab = await DecodeLab(LaunchOptions.from_dict(PATHS["fused"])).load(model)
        cache = StaticKV(lab.pool, lab.model.kv_shape(lab.launcher, "f16"), CONTEXT)
        stepper = Stepper(lab.model, lab.launcher, cache, lab.pool.new_session(), CONTEXT)
        for rows, names in ((1, {"matvec", "attention_decode"}), (3, {"rope_append", "attention_split"})):
            (step,) = stepper.dry_runs(rows, 8, 8)
            launches = [command for command in step.commands if isinstance(command, Launch)]
            knowing = {launch.variant.kernel for launch in launches if ("half", True) in launch.variant.constants}
            assert knowing - {"attention_merge"} == names
            assert not any(("half", False) in launch.variant.constants for launch in launches)
        stepper.close()
        cache.close()
        lab.close()

    asyncio.run(run())


def test_an_unknown_type_is_refused(model: Path) -> None:
    async def run() -> None:
        lab = await DecodeLab().load(model)
        with pytest.raises(BadRequest, match=r"no type 'q8'.*f32, f16"):
            lab.session(kv_type="q8")
        assert requested(lab) == 0
        lab.close()

    asyncio.run(run())
