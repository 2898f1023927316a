"""The bind-group cache: what is in a key, that nothing dead is ever hit, the bound, and who shares with whom."""

import asyncio
import warnings

import pytest

from stepwell.errors import BadRequest, UsageError
from stepwell.gpu.device import Binding
from stepwell.launch.bind_groups import BindGroupCache
from stepwell.launch.counters import Counters
from stepwell.launch.options import LaunchOptions, Params
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool
from stepwell.step.recorder import Launch, Recorder, Variant
from tests.support.launch_lab import APPEND, MIX, ONE, SEED, SUM, Lab, device, pattern, seeds, step_of

MODES = (Params.UNIFORM_POOL, Params.CALL_SITE, Params.IMMEDIATES)


def lab(mode: Params = Params.CALL_SITE, bound: int = 2048, count: int = 4) -> tuple[Lab, list[Buffer]]:
    made = Lab(LaunchOptions(params=mode, replay=False, bind_groups=bound))
    asyncio.run(made.compile())
    return made, made.buffers(count)


def groups(made: Lab, *launches: tuple[Variant, tuple[int | Binding, ...]]) -> tuple[int, int]:
    """(created, reused) of a step of these launches."""
    before = made.spent()
    made.launcher.submit(step_of(Launch(variant, buffers, ONE, "", ()) for variant, buffers in launches))
    spent = made.spent(before)
    assert spent.launches == len(launches)
    return spent.bind_groups_created, spent.bind_groups_reused


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_reused_over_steps_with_other_scalars(mode: Params) -> None:
    made, (a, b, c, _) = lab(mode)
    for position in range(5):
        before = made.spent()
        made.launcher.submit(seeds([a, b, c], position))
        spent = made.spent(before)
        assert (spent.bind_groups_created, spent.bind_groups_reused) == ((3, 0) if position == 0 else (0, 3))
    assert len(made.launcher.bind_groups) == 3
    assert made.device.table_sizes()["bind_groups"] == 3
    assert made.launcher.report()["identity_rate"] == 12 / 15
    assert made.launcher.report()["bind_groups"] == {"size": 3, "evicted": 0}


@pytest.mark.parametrize("mode", MODES)
def test_order_and_shader_are_in_the_key(mode: Params) -> None:
    made, (a, b, c, _) = lab(mode)
    assert groups(made, (MIX, (a.id, b.id))) == (1, 0)
    assert groups(made, (MIX, (b.id, a.id))) == (1, 0)
    assert groups(made, (SUM, (a.id, b.id))) == (1, 0), "the same layout, another shader"
    assert groups(made, (MIX, (a.id, c.id))) == (1, 0)
    assert groups(made, (MIX, (a.id, b.id))) == (0, 1)
    assert [made.count(buffer) for buffer in (a, b, c)] == [1, 3, 1]


@pytest.mark.parametrize("mode", MODES)
def test_offset_and_size_are_in_the_key(mode: Params) -> None:
    made = Lab(LaunchOptions(params=mode, replay=False))
    asyncio.run(made.compile())
    big = made.pool.acquire(1024, Role.ACTIVATION, "big", host=True)
    parts = [Binding(big.id), Binding(big.id, 256), Binding(big.id, 256, 256), Binding(big.id, 512, 256)]
    for part in parts:
        assert groups(made, (SEED, (part,))) == (1, 0), part
        assert groups(made, (SEED, (part,))) == (0, 1), part
    content = made.content(big)
    assert [content[at] for at in (0, 256, 512)] == [2, 4, 2], "each launch wrote its own part"


def test_the_parameter_slot_is_in_the_key() -> None:
    """Two launches of a kernel over the same buffers have different scalars at the same time."""
    made, (a, *_) = lab(Params.CALL_SITE)
    assert groups(made, (SEED, (a.id,)), (SEED, (a.id,))) == (2, 0)
    assert groups(made, (SEED, (a.id,)), (SEED, (a.id,))) == (0, 2)
    bound = {entry[3:] for entry in made.device.log if entry[0] == "create_bind_group"}
    assert {buffers[1] for buffers in bound} == {str(a.id)}
    without, (b, *_) = lab(Params.IMMEDIATES)
    assert groups(without, (SEED, (b.id,)), (SEED, (b.id,))) == (1, 1), "no slot: one group is enough"


# ---- nothing dead is hit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_destroyed_and_made_again_never_hits(mode: Params) -> None:
    own = device()
    made = Lab(LaunchOptions(params=mode, replay=False), device_=own, pool=BufferPool(own, "exact"))
    asyncio.run(made.compile())
    seen = set()
    for turn in range(4):
        buffer = made.pool.acquire(256, Role.ACTIVATION, "again", host=True)
        assert buffer.id not in seen
        seen.add(buffer.id)
        assert groups(made, (SEED, (buffer.id,))) == (1, 0), turn
        assert made.count(buffer) == 1, "it was the new one that was bound"
        made.pool.release(buffer)
        made.pool.trim()
        made.pool.flush()
    assert len(made.launcher.bind_groups) == 4, "the dead ones leave by least recent use"


@pytest.mark.parametrize("mode", [Params.UNIFORM_POOL, Params.CALL_SITE])
def test_a_replaced_parameter_buffer_never_hits(mode: Params) -> None:
    made, (a, b, *_) = lab(mode)
    parameters = made.launcher.parameters
    assert parameters is not None
    made.launcher.submit(seeds([a, b], 1))
    for turn in range(1, 4):
        parameters.clear()
        made.launcher.shadow.clear()
        if turn == 2:  # the old one is really gone
            made.pool.trim()
            made.pool.begin_run()
            made.pool.begin_run()
        before = made.spent()
        made.launcher.submit(seeds([a, b], 1 + turn))
        assert made.spent(before).bind_groups_created == 2
        assert made.count(a) == 1 + turn
    twin, (p, q, *_) = lab(mode)
    for position in range(1, 5):
        twin.launcher.submit(seeds([p, q], position))
    assert (made.content(a), made.content(b)) == (twin.content(p), twin.content(q))


@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_compiled_again_never_hits(mode: Params) -> None:
    made, (a, *_) = lab(mode)

    async def run() -> list[int]:
        created = []
        for rows in (1, 4, 16, 1, 4, 16):
            rec = Recorder(0, rows)
            rec.launch(pattern("seed", rows), (a,), ONE, "node")
            step = rec.finish()
            before = made.spent()
            await made.launcher.prepare(step)
            made.launcher.submit(step)
            created.append(made.spent(before).bind_groups_created)
        return created

    made.launcher.kernels.bound = 1
    assert asyncio.run(run()) == [1] * 6
    assert made.launcher.kernels.evictions == 5
    assert made.count(a) == 6


# ---- the bound ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:a step of")
def test_the_least_recently_used_one_makes_room() -> None:
    made, (a, b, c, _) = lab(Params.IMMEDIATES, bound=2)
    assert groups(made, (SEED, (a.id,))) == (1, 0)
    assert groups(made, (SEED, (b.id,))) == (1, 0)
    assert groups(made, (SEED, (a.id,))) == (0, 1)  # a is the younger one now
    made.happened()
    assert groups(made, (SEED, (c.id,))) == (1, 0)  # b goes
    assert made.happened("destroy").count("destroy") == 1
    assert groups(made, (SEED, (a.id,))) == (0, 1)
    assert groups(made, (SEED, (b.id,))) == (1, 0)  # c goes
    assert groups(made, (SEED, (a.id,))) == (0, 1)
    assert groups(made, (SEED, (c.id,))) == (1, 0)
    assert made.spent().bind_groups_evicted == 3
    assert made.launcher.report()["bind_groups"] == {"size": 2, "evicted": 3}
    assert made.device.table_sizes()["bind_groups"] == 2


@pytest.mark.filterwarnings("ignore:a step of")
@pytest.mark.parametrize("bound", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_bound_below_one_step_is_slow_but_right(bound: int, mode: Params) -> None:
    """A group that the present step uses is destroyed after its submit, not before."""
    made, buffers = lab(mode, bound)
    for position in range(3):
        made.launcher.submit(seeds(buffers, position))
        assert len(made.launcher.bind_groups) == made.device.table_sizes()["bind_groups"] == bound
    assert [made.count(buffer) for buffer in buffers] == [3] * 4
    spent = made.spent()
    assert (spent.bind_groups_created, spent.bind_groups_evicted) == (12, 12 - bound), "a cyclic scan always misses"


def test_a_warning_once_when_two_steps_do_not_fit() -> None:
    made, (a, b, c, d) = lab(Params.IMMEDIATES, bound=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.launcher.submit(seeds([a, b, c]))
        rec = Recorder()
        for target in (b, c, d):
            rec.copy(a, 0, target, 0, 16)  # copies bind nothing
            rec.launch(SEED, (target,), ONE)
        made.launcher.submit(rec.finish())
    with pytest.warns(RuntimeWarning, match=r"a step of 4 launches and a cache of 7 .* Set bind_groups to 8 or more"):
        made.launcher.submit(seeds([a, b, c, d]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.launcher.submit(seeds([a, b, c, d]))
    off, (a, b, *_) = lab(Params.IMMEDIATES, bound=1)
    off.launcher.options = LaunchOptions(bind_group_cache=False, bind_groups=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        off.launcher.submit(seeds([a, b]))


def test_a_bound_of_nothing_is_refused() -> None:
    with pytest.raises(BadRequest, match="holds nothing"):
        BindGroupCache(0)


def test_without_the_cache_every_launch_makes_a_group_and_gives_it_back() -> None:
    made = Lab(LaunchOptions(bind_group_cache=False, replay=False))
    asyncio.run(made.compile())
    a, b = made.buffers(2)
    for _ in range(3):
        assert groups(made, (SEED, (a.id,)), (MIX, (a.id, b.id))) == (2, 0)
        assert made.device.table_sizes()["bind_groups"] == 0
    assert made.launcher.report()["identity_rate"] == 0.0
    assert (made.count(a), made.count(b)) == (3, 3)


# ---- sharing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_device", [True, False])
def test_two_launchers_with_one_cache_never_share_groups(same_device: bool) -> None:
    cache = BindGroupCache()
    options = LaunchOptions(params=Params.IMMEDIATES, replay=False)
    first = Lab(options, bind_groups=cache)
    own = first.device if same_device else device()
    second = Lab(options, device_=own, pool=first.pool if same_device else None, bind_groups=cache)
    assert first.launcher.bind_groups is second.launcher.bind_groups is cache
    for made in (first, second):
        asyncio.run(made.compile())
    a, b = first.buffers(1)[0], second.buffers(1)[0]
    if same_device:
        b = a
    for made, buffer in ((first, a), (second, b)):
        assert groups(made, (SEED, (buffer.id,))) == (1, 0)
        assert groups(made, (SEED, (buffer.id,))) == (0, 1)
    assert len(cache) == 2
    first.launcher.close()
    assert len(cache) == 1, "its own are gone"
    assert groups(second, (SEED, (b.id,))) == (0, 1), "the other one's are not"
    second.launcher.release_run()
    assert len(cache) == 0
    assert groups(second, (SEED, (b.id,))) == (1, 0)
    second.launcher.close()
    assert own.table_sizes()["bind_groups"] == first.device.table_sizes()["bind_groups"] == 0
    assert cache.on_evict == []


def test_a_full_cache_evicts_across_launchers_and_tells_both() -> None:
    """The other launcher's plan is dropped before the group that it refers to goes."""
    cache = BindGroupCache(4)
    options = LaunchOptions(params=Params.IMMEDIATES)
    first, second = Lab(options, bind_groups=cache), Lab(options, bind_groups=cache)
    for made in (first, second):
        asyncio.run(made.compile())
    buffers = first.buffers(2)
    staging = first.staging()
    plan = first.launcher.record(seeds(buffers), "key", 1, (), 100)
    assert plan is not None
    first.launcher.replay(plan, 1, 1, staging)
    second.launcher.submit(seeds(second.buffers(2)))
    assert first.launcher.plans.get("key") is plan, "four fit"
    second.launcher.submit(seeds(second.buffers(1)))
    assert first.launcher.plans.get("key") is None
    assert first.launcher.plans.invalidated == 1
    assert first.device.table_sizes()["plans"] == 0


def test_after_the_loss_of_a_device_its_groups_can_be_let_go() -> None:
    made, (a, b, *_) = lab()
    made.launcher.submit(seeds([a, b]))
    made.device.lose()
    made.launcher.release_run()
    assert len(made.launcher.bind_groups) == 0
    made.launcher.close()


def test_a_failing_creation_caches_nothing() -> None:
    made, (a, *_) = lab(Params.IMMEDIATES)
    pipeline = made.launcher.kernels[APPEND].pipeline
    counters = Counters()
    with pytest.raises(UsageError, match="entries for a layout of 2"):
        made.launcher.bind_groups.get(made.launcher, counters, pipeline, (a.id,))
    assert len(made.launcher.bind_groups) == 0
    assert counters == Counters()
