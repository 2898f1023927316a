"""Plans: which traces are refused, that a replay is the live step, and that nothing is destroyed under a plan."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from stepwell.errors import DeviceLost, PoolError, StaleBuffer, UsageError
from stepwell.gpu.device import Binding, BindingType, Layout
from stepwell.launch.compiler import Kernel
from stepwell.launch.options import LaunchOptions, Params
from stepwell.launch.plan import DEFAULT_PLANS, Plan
from stepwell.launch.verify import verify
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool
from stepwell.step.recorder import (
    ByLength,
    Command,
    Copy,
    CopyOut,
    CopyPast,
    Launch,
    Recorder,
    Step,
    Variant,
    Write,
)
from tests.support.launch_lab import APPEND, LAST, MIX, ONE, SEED, SUM, WORDS, Lab, device, pattern, seeds, step_of

MODES = (Params.UNIFORM_POOL, Params.CALL_SITE, Params.IMMEDIATES)
SIZE = 4 * WORDS


def lab(options: LaunchOptions | None = None, count: int = 4, *, plain: bool = False) -> tuple[Lab, list[Buffer]]:
    """``plain``: its pool reuses at once; a debugging one keeps what is released aside."""
    own = device()
    made = Lab(options, device_=own, pool=BufferPool(own, "exact", debug=not plain))
    asyncio.run(made.compile())
    return made, made.buffers(count)


def launch(variant: Variant, *buffers: int | Binding, grid: tuple[int, int, int] | ByLength = ONE) -> Launch:
    return Launch(variant, buffers, grid, "", ())


# ---- what is refused ------------------------------------------------------------------------------------------------

a_, b_, big_ = 0, 1, 2  # places in the buffers that a rule gets: 256 B, 256 B, 1,024 B
Rule = Callable[[Sequence[int]], Command]
REFUSED: dict[str, tuple[Rule, str]] = {
    "a binding that begins outside": (lambda h: launch(SEED, Binding(h[big_], 1024)), r"1,024 \+ 0 B of buffer"),
    "a binding that ends outside": (lambda h: launch(SEED, Binding(h[big_], 512, 768)), r"512 \+ 768 B of buffer"),
    "a binding that is not aligned": (lambda h: launch(SEED, Binding(h[big_], 4)), "multiples of 256"),
    "a buffer that is gone": (lambda h: launch(SEED, 1_000_000), "which has 0 B"),
    "too few buffers": (lambda h: launch(MIX, h[a_]), "binds 2 buffers, 1 are given"),
    "too many buffers": (lambda h: launch(SEED, h[a_], h[b_]), "binds 1 buffers, 2 are given"),
    "read and written": (lambda h: launch(MIX, h[a_], h[a_]), "written at binding 1 and used at binding 0"),
    "read and written in other parts": (
        lambda h: launch(MIX, Binding(h[big_], 0, 256), Binding(h[big_], 256, 256)), "written at binding 1",
    ),
    "written twice": (
        lambda h: launch(APPEND, Binding(h[big_], 0, 512), Binding(h[big_], 256)), "written at binding 0",
    ),
    "a grid of nothing": (lambda h: launch(SEED, h[a_], grid=(0, 1, 1)), r"grid \(0, 1, 1\)"),
    "a grid that is too wide": (lambda h: launch(SEED, h[a_], grid=(65_536, 1, 1)), "1 to 65,535"),
    "a grid that is too high": (lambda h: launch(SEED, h[a_], grid=(1, 1, 65_536)), "1 to 65,535"),
    "a grid that will be too wide": (lambda h: launch(SEED, h[a_], grid=ByLength(1, 1, 1)), r"grid \(70000, 1, 1\)"),
    "a bound that is too wide": (
        lambda h: launch(SEED, h[a_], grid=ByLength(1, 1, 1, 65_536)), r"grid \(65536, 1, 1\)",
    ),
    "a copy that ends outside its source": (lambda h: Copy(h[a_], 8, h[big_], 0, 256), r"8 \+ 256 B of buffer"),
    "a copy that ends outside its target": (lambda h: Copy(h[big_], 0, h[a_], 4, 256), r"4 \+ 256 B of buffer"),
    "a copy of odd bytes": (lambda h: Copy(h[a_], 0, h[b_], 0, 6), "multiples of 4"),
    "a copy at an odd place": (lambda h: Copy(h[a_], 2, h[b_], 0, 4), "multiples of 4"),
    "a copy into itself": (lambda h: Copy(h[big_], 0, h[big_], 512, 4), "copied into itself"),
    "a past of nothing": (lambda h: CopyPast(h[a_], h[b_], 0), "0 B per position"),
    "a past of odd bytes": (lambda h: CopyPast(h[a_], h[b_], 6), "6 B per position"),
    "a past into itself": (lambda h: CopyPast(h[a_], h[a_], 4), "copied into itself"),
    "a past of a buffer that is gone": (lambda h: CopyPast(1_000_000, h[a_], 4), "position 3 is beyond 0"),
    "a past that does not fit any more": (lambda h: CopyPast(h[a_], h[b_], 128), "position 3 is beyond 2"),
    "out of what is too small": (lambda h: CopyOut(h[a_], 4, 256), r"4 \+ 256 B of buffer"),
    "out into what is too small": (lambda h: CopyOut(h[big_], 0, 512), r"0 \+ 512 B of buffer"),
    "a host write": (lambda h: Write(h[a_], 0, (1,)), "cannot be part of a plan"),
}  # fmt: skip


def rig() -> tuple[Lab, list[int], Buffer]:
    made, (a, b) = lab(count=2)
    big = made.pool.acquire(1024, Role.ACTIVATION, "big", host=True)
    return made, [a.id, b.id, big.id], made.staging()


@pytest.mark.parametrize("rule", REFUSED)
def test_what_breaks_a_rule_is_no_plan(rule: str) -> None:
    make, words = REFUSED[rule]
    made, handles, staging = rig()
    sound = launch(SEED, handles[a_])
    step = step_of([sound, make(handles), sound], 3, staging=staging.id)
    with pytest.raises(UsageError, match=words) as caught:
        verify(step, made.launcher, 70_000)
    if "beyond" not in words:
        assert str(caught.value).startswith(f"command 1 of the step, {type(make(handles)).__name__}: ")
    assert verify(step_of([sound], 3, staging=staging.id), made.launcher, 70_000) == 69_999


@pytest.mark.parametrize("mode", MODES)
def test_sound_traces_pass(mode: Params) -> None:
    made, (a, b, c, d) = lab(LaunchOptions(params=mode))
    big = made.pool.acquire(1024, Role.ACTIVATION, "big", host=True)
    for good in (
        launch(SEED, a.id),
        launch(SUM, a.id, b.id, grid=ByLength(2, 65_535, 65_535)),
        launch(SUM, a.id, b.id, grid=ByLength(1, 1, 1, 65_535)),  # bounded where the length goes beyond
        launch(MIX, Binding(big.id, 512), b.id),
        launch(APPEND, Binding(big.id, 0, 256), Binding(big.id, 256)),
        launch(LAST, a.id, a.id, b.id),
        Copy(a.id, 0, b.id, 0, SIZE),
    ):
        assert verify(step_of([good], 3), made.launcher, 131_070) == 131_069
    past = [CopyPast(a.id, big.id, 16), CopyPast(c.id, d.id, 8)]
    assert verify(step_of(past, 3), made.launcher, 131_070) == SIZE // 16, "so many positions can be copied"
    assert verify(step_of(past, 3), made.launcher, 10) == 9


def test_out_without_a_staging_buffer() -> None:
    made, handles, _ = rig()
    with pytest.raises(UsageError, match="has no staging buffer"):
        verify(step_of([CopyOut(handles[a_], 0, 4)]), made.launcher, 10)


def test_sizes_of_bindings_are_limited() -> None:
    own = device(limits={"maxUniformBufferBindingSize": 512, "maxStorageBufferBindingSize": 1024})
    made = Lab(device_=own)
    asyncio.run(made.compile())
    large = made.pool.acquire(1024, Role.ACTIVATION, "large", host=True)
    assert verify(step_of([launch(SEED, large.id)]), made.launcher, 10) == 9
    kernel = made.launcher.kernels[SEED]
    uniform = Layout((BindingType.UNIFORM,), 1, 16)  # no kernel of ours binds one beside the step block
    binds_one: Any = {SEED: Kernel(kernel.pipeline, uniform, kernel.fields)}
    with pytest.raises(UsageError, match=r"0 \+ 1,024 B .* bound as uniform: .* at most 512 B"):
        verify(step_of([launch(SEED, large.id)]), replace(made.launcher.context, kernels=binds_one), 10)
    own.info.limits["maxStorageBufferBindingSize"] = 768  # type: ignore[index]
    with pytest.raises(UsageError, match=r"bound as storage: .* at most 768 B"):
        verify(step_of([launch(SEED, large.id)]), made.launcher, 10)


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_refused_was_issued_all_the_same_and_counted(cached: bool) -> None:
    made, (a, b, *_) = lab(LaunchOptions(bind_group_cache=cached))
    step = step_of([launch(SEED, a.id), Write(b.id, 0, (7,)), launch(MIX, b.id, a.id)], 3)
    groups = made.device.table_sizes()["bind_groups"]
    assert made.launcher.record(step, "key", 1, [a], 100) is None
    assert made.count(a) == 2
    assert made.content(b)[0] == 7
    (reason,) = made.launcher.report()["plans"]["refused"]
    assert reason.startswith("unsound: command 1 of the step, Write: what the host writes")
    assert (made.launcher.plans.recorded, len(made.launcher.plans)) == (0, 0)
    made.pool.release(a)  # not pinned
    sizes = made.device.table_sizes()
    assert (sizes["plans"], sizes["bind_groups"]) == (0, 2 if cached else groups)


@pytest.mark.filterwarnings("ignore:a step of")
def test_a_step_whose_bind_groups_do_not_fit_is_no_plan() -> None:
    made, buffers = lab(LaunchOptions(bind_groups=3))
    assert made.launcher.record(seeds(buffers, 3), "key", 1, (), 100) is None
    assert [made.count(buffer) for buffer in buffers] == [1] * 4
    assert list(made.launcher.plans.refused) == [
        "unsound: the step has 4 bind groups, the cache holds 3. Set bind_groups higher."
    ]
    assert made.launcher.record(seeds(buffers[:3], 3), "key", 1, (), 100) is not None


# ---- a replay is the live step --------------------------------------------------------------------------------------


def work(buffers: Sequence[Buffer], position: int, staging: Buffer) -> Step:
    a, b, c, d = buffers
    rec = Recorder(position)
    rec.launch(SEED, (a,), ONE)
    rec.launch(MIX, (a, b), ONE)
    rec.copy_past(a, c, 4)
    rec.launch(APPEND, (c, d), ONE)
    rec.launch(SUM, (c, d), ByLength(4, 1, 1))
    rec.copy(d, 0, b, 128, 64)
    rec.launch(LAST, (d, c, a), ONE)
    rec.copy_out(b, 0, SIZE)
    return rec.finish(staging)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "changes", [{}, {"shared_pass": False}, {"bind_group_cache": False}, {"skip_uploads": False}, {"submit_every": 2}]
)
def test_a_replay_is_the_live_step_at_every_position(mode: Params, changes: dict[str, int | bool]) -> None:
    options = LaunchOptions.from_dict({"params": mode.value, **changes})
    made, buffers = lab(options)
    live, others = lab(options)
    mine, its = made.staging(), live.staging()
    asyncio.run(walk(made, live, buffers, others, mine, its))
    spent, theirs = made.spent(), live.spent()
    assert (spent.launches, spent.passes, spent.copies) == (theirs.launches, theirs.passes, theirs.copies)
    assert (spent.submits, spent.immediates) == (theirs.submits, theirs.immediates)
    assert spent.replayed == 59
    assert spent.bind_groups_created == 5


async def walk(
    made: Lab, live: Lab, buffers: Sequence[Buffer], others: Sequence[Buffer], mine: Buffer, its: Buffer
) -> None:
    plan = made.launcher.record(work(buffers, 3, mine), "key", 1, buffers, 100)
    live.launcher.submit(work(others, 3, its))
    assert plan is not None
    assert plan.last_position == 64
    for position in [*range(4, 62), 5]:
        made.launcher.replay(plan, position, 1, mine)
        live.launcher.submit(work(others, position, its))
        assert await made.launcher.read(mine, SIZE) == await live.launcher.read(its, SIZE)
        for one, other in zip(buffers, others, strict=True):
            assert made.content(one) == live.content(other), position


def test_a_replay_is_one_call() -> None:
    made, buffers = lab()
    staging = made.staging()
    plan = made.launcher.record(work(buffers, 3, staging), "key", 1, (), 60)
    assert plan is not None
    before = len(made.device.log)
    made.launcher.replay(plan, 9, 1, staging, 7)
    calls = [entry for entry in made.device.log[before:] if entry[0] in ("replay", "write_buffer", "create_bind_group")]
    assert calls == [("replay", str(plan.handle), "9", "1", "10", "7", str(staging.id))]


# ---- nothing is destroyed under a plan ------------------------------------------------------------------------------


def recorded(made: Lab, buffers: Sequence[Buffer], key: str = "key", owner: int = 1) -> Plan:
    plan = made.launcher.record(seeds(buffers, 3), key, owner, (), 100)
    assert plan is not None
    return plan


def gone(made: Lab, *, invalidated: int = 1) -> None:
    """The plan is not there any more: it was dropped first (the device would have complained), then taken apart."""
    assert made.launcher.plans.get("key") is None
    assert made.launcher.plans.invalidated == invalidated
    assert made.device.table_sizes()["plans"] == 0


def test_before_a_buffer_goes() -> None:
    made, (a, b, c, d) = lab(plain=True)
    recorded(made, [a, b])
    for unused in (c, d):
        made.pool.release(unused)
    made.pool.trim()
    made.pool.flush()
    assert made.launcher.plans.get("key") is not None, "others may go"
    made.pool.release(b)
    made.pool.flush()
    assert made.launcher.plans.get("key") is not None, "free, but there"
    made.pool.trim()
    gone(made)


@pytest.mark.parametrize("mode", [Params.UNIFORM_POOL, Params.CALL_SITE])
@pytest.mark.parametrize("variant", [SEED, MIX])
def test_before_the_buffer_of_its_parameters_goes(mode: Params, variant: Variant) -> None:
    """MIX has a slot, too, although it reads none of the scalars."""
    made, (a, b, *_) = lab(LaunchOptions(params=mode), plain=True)
    step = step_of([launch(variant, *((a.id,) if variant is SEED else (a.id, b.id)))], 3)
    assert made.launcher.record(step, "key", 1, (), 100) is not None
    assert made.launcher.parameters is not None
    made.launcher.parameters.clear()
    made.pool.trim()
    made.pool.flush()
    assert made.pool.report().by_role[Role.UNIFORM].reserved_bytes == 0
    gone(made)


def test_a_buffer_that_is_released_is_not_replayed_over_in_debug() -> None:
    made, (a, b, *_) = lab()
    plan = recorded(made, [a, b])
    staging = made.staging()
    made.launcher.replay(plan, 4, 1, staging)
    made.pool.release(b)
    with pytest.raises(StaleBuffer, match="uses buffer"):
        made.launcher.replay(plan, 5, 1, staging)


def test_before_a_pipeline_goes() -> None:
    made, (a, *_) = lab()
    made.launcher.kernels.bound = 1

    async def run() -> None:
        for rows in (1, 4):
            rec = Recorder(3, rows)
            rec.launch(pattern("seed", rows), (a,), ONE, "node")
            step = rec.finish()
            await made.launcher.prepare(step)
            if rows == 1:
                assert made.launcher.record(step, "key", 1, (), 100) is not None

    asyncio.run(run())
    assert made.launcher.kernels.evictions == 1
    gone(made)


def test_before_a_workspace_goes() -> None:
    made, (a, *_) = lab()
    workspace = made.launcher.kernels.workspace("node", (1,), "partials", SIZE)
    recorded(made, [a, workspace])
    made.launcher.kernels.release_workspaces()
    gone(made)


@pytest.mark.filterwarnings("ignore:a step of")
def test_before_a_bind_group_goes() -> None:
    made, (a, b, c, d) = lab(LaunchOptions(bind_groups=3))
    recorded(made, [a, b])
    made.launcher.submit(seeds([c]))
    assert made.launcher.plans.get("key") is not None
    made.launcher.submit(seeds([d]))
    gone(made)


def test_when_a_run_or_the_launcher_ends() -> None:
    made, (a, b, *_) = lab()
    recorded(made, [a, b])
    made.launcher.release_run()
    gone(made, invalidated=0)
    recorded(made, [a, b])
    made.launcher.close()
    gone(made, invalidated=0)
    made.pool.close()
    assert made.device.table_sizes() == dict.fromkeys(("buffers", "pipelines", "bind_groups", "plans"), 0)


def test_pins_last_as_long_as_the_plan() -> None:
    made, (a, b, c, d) = lab()
    in_use = made.pool.ledger.in_use_bytes
    first = made.launcher.record(seeds([a, b]), "one", 1, [a, b], 100)
    second = made.launcher.record(seeds([b, c]), "two", 1, [b, c], 100)
    assert first is not None and second is not None
    assert made.pool.report().by_role[Role.PINNED].in_use_bytes == 3 * SIZE
    with pytest.raises(PoolError, match="pinned 2 times"):
        made.pool.release(b)
    made.launcher.plans.discard(first)
    with pytest.raises(PoolError, match="pinned 1 times"):
        made.pool.release(b)
    made.pool.release(a)
    made.launcher.plans.discard(second)
    for buffer in (b, c, d):
        made.pool.release(buffer)
    assert made.pool.report().by_role[Role.PINNED].in_use_bytes == 0
    assert made.pool.ledger.in_use_bytes == in_use - 4 * SIZE


def test_groups_of_its_own_go_with_it() -> None:
    made, (a, b, *_) = lab(LaunchOptions(bind_group_cache=False))
    plan = recorded(made, [a, b])
    assert made.device.table_sizes()["bind_groups"] == 2
    made.launcher.replay(plan, 4, 1, made.staging())
    made.launcher.plans.discard(plan)
    assert made.device.table_sizes()["bind_groups"] == made.device.table_sizes()["plans"] == 0
    assert made.count(a) == 2


# ---- which plans there are ------------------------------------------------------------------------------------------


def test_the_least_recently_used_plan_makes_room() -> None:
    made, (a, *_) = lab()
    for number in range(DEFAULT_PLANS):
        recorded(made, [a], f"plan {number}")
    assert made.launcher.plans.get("plan 0") is not None
    recorded(made, [a], "one more")
    assert made.launcher.plans.get("plan 1") is None
    assert made.launcher.plans.get("plan 0") is not None
    assert len(made.launcher.plans) == made.device.table_sizes()["plans"] == DEFAULT_PLANS
    assert (made.launcher.plans.recorded, made.launcher.plans.invalidated) == (DEFAULT_PLANS + 1, 0)


def test_a_session_ends_with_its_own_plans_only() -> None:
    made, (a, *_) = lab()
    recorded(made, [a], "one", owner=1)
    recorded(made, [a], "two", owner=2)
    made.launcher.plans.forget(1)
    assert made.launcher.plans.get("one") is None
    assert made.launcher.plans.get("two") is not None


def test_a_key_is_new_once() -> None:
    made, _ = lab()
    plans = made.launcher.plans
    assert [plans.sightings(key, 1) for key in ("a", "b", "a", "b", "b")] == [0, 0, 1, 1, 2]
    for number in range(63):
        assert plans.sightings(str(number), 1) == 0
    assert plans.sightings("b", 1) == 3
    assert plans.sightings("a", 1) == 0, "so long ago that it does not count"
    assert plans.sightings("a", 2) == 0, "another session's"
    plans.forget(1)
    assert (plans.sightings("a", 2), plans.sightings("b", 1)) == (1, 0)


def test_each_session_has_room_for_its_plans() -> None:
    made, (a, *_) = lab()
    for number in range(DEFAULT_PLANS + 1):
        for owner in (1, 2):
            recorded(made, [a], f"plan {number} of {owner}", owner=owner)
    plans = made.launcher.plans
    assert len(plans) == 2 * DEFAULT_PLANS
    for owner in (1, 2):
        assert plans.get(f"plan 0 of {owner}") is None
        assert plans.get(f"plan 1 of {owner}") is not None


def test_two_launchers_on_one_pool() -> None:
    first, (a, b, *_) = lab(plain=True)
    second = Lab(device_=first.device, pool=first.pool)
    asyncio.run(second.compile())
    recorded(first, [a, b])
    recorded(second, [b])
    first.pool.release(b)
    first.pool.trim()
    first.pool.flush()
    for made in (first, second):
        assert made.launcher.plans.get("key") is None
        assert made.launcher.plans.invalidated == 1
    hooks = len(first.pool.inventory.before_destroy)
    recorded(first, [a])
    recorded(second, [a])
    first.launcher.close()
    assert len(first.pool.inventory.before_destroy) == hooks - 1
    plan = second.launcher.plans.get("key")
    assert plan is not None, "the other one's stays"
    before = second.count(a)
    second.launcher.replay(plan, 4, 1, second.staging())
    assert second.count(a) == before + 1
    second.launcher.close()
    assert first.device.table_sizes()["plans"] == 0


def test_after_a_loss() -> None:
    made, (a, b, *_) = lab()
    staging = made.staging()
    plan = made.launcher.record(seeds([a, b]), "key", 1, [a], 100)
    assert plan is not None
    made.device.lose()
    with pytest.raises(DeviceLost):
        made.launcher.replay(plan, 4, 1, staging)
    made.pool.note_lost()
    made.launcher.plans.discard(plan)  # its pins died too
    made.launcher.close()
    assert (len(made.launcher.plans), made.pool.ledger.in_use_bytes) == (0, 0)
