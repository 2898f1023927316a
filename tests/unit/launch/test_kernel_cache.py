"""The kernel cache: variants per node, their workspaces, and what may be given up when."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from functools import wraps
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import BudgetExceeded, DeviceLost, OutOfMemory, ShaderError, UsageError
from stepwell.gpu.device import Layout
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.fake_objects import FakePipeline
from stepwell.launch.kernel_cache import KernelCache, Shape, Use
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.policies.bucket import Bucket
from stepwell.memory.pool import BufferPool
from stepwell.memory.recovery import make_room, retrying
from stepwell.step.recorder import Variant
from stepwell.step.shapes import WIDTHS, Shapes

LENGTHS = tuple(range(2, 26))  # 24 shapes of an attention, in chunks
PER_CHUNK = 4096  # bytes of its workspace
ORDERS: dict[str, Callable[[], list[int]]] = {
    "ascending": lambda: list(LENGTHS),
    "descending": lambda: list(reversed(LENGTHS)),
    "shuffled": lambda: random.Random(7).sample(LENGTHS, len(LENGTHS)),
}
Test = Callable[..., Coroutine[Any, Any, None]]


def kernel(number: int) -> Variant:
    """Some kernel; each number is another pipeline."""
    return Variant("argmax", (("stage", "all"), ("ban", ()), ("size", number), ("parts", 1), ("threads", 16)))


class Device(FakeDevice):
    """Refuses to compile the labels in ``broken``; compiles nothing before ``gate`` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def create_pipeline(self, code: str, layout: Layout, label: str = "") -> int:
        await self.gate.wait()
        if label in self.broken:
            raise ShaderError(f"{label} is broken")
        return await super().create_pipeline(code, layout, label)


async def turns() -> None:
    """Let everything run that does not wait for the device."""
    for _ in range(5):
        await asyncio.sleep(0)


class Rig:
    """A cache on a fake device, driven as a session drives it; ``attention`` is the graph's node with a workspace."""

    def __init__(self, bound: int = 4, policy: str = "disabled") -> None:
        self.device = Device()
        self.pool = BufferPool(self.device, policy)
        self.cache = KernelCache(self.device, self.pool, immediates=False, variants_per_node=bound)
        self.session = self.pool.new_session()

    async def step(self, *uses: Use) -> None:
        """A step that launches ``uses``; its workspaces were leased before."""
        await self.cache.ensure(uses)
        self.cache.use(uses)
        for _, _, variant in uses:
            assert self.pipeline_lives(self.cache[variant].pipeline)
        self.pool.flush()

    async def attention(self, width: int, chunks: int) -> Buffer:
        self.pool.begin_run(self.session)
        shape = (width, chunks)
        buffer = self.cache.workspace("attention", shape, "partials", PER_CHUNK * chunks)
        await self.step(("attention", shape, kernel(1000 + width)), ("norm", (width,), kernel(1)))
        self.pool.check(buffer)
        return buffer

    def shapes(self, node: str) -> int:
        return self.cache.report()[node]["shapes"]

    def pipeline_lives(self, handle: int) -> bool:
        try:
            return self.device.get(handle, FakePipeline, "test").handle == handle
        except UsageError:
            return False

    def compiled(self) -> list[str]:
        return [entry[2] for entry in self.device.log if entry[0] == "create_pipeline"]

    @property
    def pipelines(self) -> int:
        return self.device.table_sizes()["pipelines"]

    @property
    def ledger_bytes(self) -> int:
        """What the pool's books say of workspaces that are leased."""
        return self.pool.report().by_role[Role.WORKSPACE].in_use_bytes


def asynchronous(test: Test) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


# ---- shape classes --------------------------------------------------------------------------------------------------


def test_a_class_holds_its_steps_and_there_are_few() -> None:
    shapes = Shapes()
    widths = [shapes.width(rows) for rows in range(1, WIDTHS[-1] + 1)]
    assert all(width >= rows for rows, width in enumerate(widths, 1))
    assert widths == sorted(widths) and set(widths) == set(WIDTHS)
    assert [rows for rows, width in enumerate(widths, 1) if width == 1] == [1], "decode is alone in its class"
    chunks = [shapes.chunks(count) for count in range(1, 1025)]
    assert all(count <= found < 2 * count for count, found in enumerate(chunks, 1))
    assert len(set(chunks)) == 11
    exact = Shapes(ladder=False)
    assert [exact.width(n) for n in range(1, 300)] == [exact.chunks(n) for n in range(1, 300)] == list(range(1, 300))


# ---- the bound ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bound", [2, 4])
@asynchronous
async def test_24_shapes_stay_within_the_bound(order: str, bound: int) -> None:
    rig = Rig(bound)
    decode = await rig.attention(1, 8)
    decode_bytes = rig.cache.workspace_bytes
    most = 0
    for chunks in ORDERS[order]():
        await rig.attention(64, chunks)
        assert rig.shapes("attention") <= bound
        assert rig.cache.workspace_bytes == rig.ledger_bytes
        most = max(most, rig.pool.ledger.reserved_bytes)
    assert rig.cache.evictions == 24 - (bound - 1)
    assert rig.cache.report() == {
        "attention": {"shapes": bound, "evicted": rig.cache.evictions},
        "norm": {"shapes": 2, "evicted": 0},
    }
    largest = sorted(LENGTHS)[-(bound - 1) :]
    assert most <= decode_bytes + PER_CHUNK * sum(largest), "never more than one full set of variants"
    assert await rig.attention(1, 8) is decode, "the decode variant survived the prompts"
    assert len(rig.compiled()) == 3, "two widths of attention and the norm, each compiled once"


@pytest.mark.parametrize("order", ORDERS)
@asynchronous
async def test_without_a_bound_workspaces_pile_up_in_any_order(order: str) -> None:
    """The growth that bounding is for: one set of workspaces per shape ever seen, largest first or last alike."""
    rig = Rig(bound=0)
    held = 0
    for chunks in ORDERS[order]():
        await rig.attention(64, chunks)
        held += PER_CHUNK * chunks
        assert rig.ledger_bytes == rig.cache.workspace_bytes == held
    assert rig.cache.evictions == 0 and rig.shapes("attention") == 24


@pytest.mark.parametrize("order", ORDERS)
@asynchronous
async def test_with_the_default_policy_memory_does_not_follow_the_number_of_shapes(order: str) -> None:
    """Over five rounds of the 24 shapes the pool comes to rest: what a variant gives up, the next ones reuse."""
    rig = Rig(policy="adaptive")
    peaks = []
    for _ in range(5):
        rig.pool.ledger.reset_peaks()
        for chunks in ORDERS[order]():
            await rig.attention(64, chunks)
            await rig.attention(1, 8)
        peaks.append(rig.pool.report().by_role[Role.WORKSPACE].peak_reserved_bytes)
    everything = PER_CHUNK * sum(LENGTHS)
    assert set(peaks[1:]) == {max(peaks)}
    assert max(peaks) < everything / 2


@pytest.mark.parametrize("order", ORDERS)
@asynchronous
async def test_with_the_ladder_nothing_is_made_twice(order: str) -> None:
    """Bucketing first: 24 lengths are five classes of chunks, so a bound of five evicts nothing, ever."""
    rig = Rig(bound=6, policy="adaptive")
    shapes = Shapes()
    for _ in range(2):
        for chunks in ORDERS[order]():
            await rig.attention(shapes.width(50), shapes.chunks(chunks))
            await rig.attention(1, 32)
    assert rig.cache.evictions == 0
    assert rig.pool.ledger.created == rig.shapes("attention") == 6


@asynchronous
async def test_the_least_recently_used_goes_first() -> None:
    rig = Rig(bound=3)
    for width in (4, 5, 6):
        await rig.step(("n", (width,), kernel(width)))
    await rig.step(("n", (4,), kernel(4)))
    first, second, third = (rig.cache[kernel(width)].pipeline for width in (4, 5, 6))
    await rig.step(("n", (7,), kernel(7)))
    assert [rig.pipeline_lives(handle) for handle in (first, second, third)] == [True, False, True]
    with pytest.raises(UsageError, match="not compiled yet"):
        rig.cache[kernel(5)]
    await rig.step(("n", (5,), kernel(5)))
    assert rig.compiled().count(str(kernel(5))) == 2
    assert not rig.pipeline_lives(third)
    assert rig.cache.evictions == 2


@asynchronous
async def test_a_busy_node_does_not_push_out_another_ones_variant() -> None:
    rig = Rig(bound=2)
    await rig.step(("quiet", (4,), kernel(4)))
    for width in range(5, 20):
        await rig.step(("busy", (width,), kernel(width)))
    assert rig.cache.report() == {"quiet": {"shapes": 1, "evicted": 0}, "busy": {"shapes": 2, "evicted": 13}}
    assert rig.cache.missing([("quiet", (4,), kernel(4))]) == []


@asynchronous
async def test_only_the_latest_decode_variant_is_exempt() -> None:
    """One-token variants of growing length are variants like others, but for the one that decode is at."""
    rig = Rig(bound=2)
    for chunks in (1, 2, 4, 8):
        await rig.attention(1, chunks)
    latest = await rig.attention(1, 8)
    for chunks in LENGTHS:
        await rig.attention(16, chunks)
    assert await rig.attention(1, 8) is latest
    assert rig.shapes("attention") == 2
    rig.cache.clear()
    await rig.attention(1, 4)
    lost = await rig.attention(1, 8)
    await rig.attention(1, 4)
    await rig.attention(16, 2)
    with pytest.raises(Exception, match=r"released|not of this pool"):
        rig.pool.check(lost)


@asynchronous
async def test_a_bound_of_one_is_one() -> None:
    rig = Rig(bound=1)
    for width in (1, 4, 1, 16):
        await rig.step(("n", (width,), kernel(width)))
        assert rig.shapes("n") == 1
    assert rig.pipelines == 1


def test_a_bound_is_not_negative() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="-1 variants per node"):
        KernelCache(rig.device, rig.pool, immediates=False, variants_per_node=-1)


# ---- in use ---------------------------------------------------------------------------------------------------------


@asynchronous
async def test_what_the_present_step_uses_stays() -> None:
    rig = Rig(bound=2)
    uses = [("n", (width,), kernel(width)) for width in range(4, 10)]
    buffers = [rig.cache.workspace("n", shape, "w", 256) for _, shape, _ in uses]
    await rig.step(*uses)
    for buffer in buffers:
        rig.pool.check(buffer)
    assert rig.shapes("n") == 6
    await rig.step(uses[0])
    assert rig.shapes("n") == 2 and rig.cache.evictions == 4


@asynchronous
async def test_what_a_waiting_step_uses_stays() -> None:
    """A step is recorded, and waits for a kernel; other steps and their many shapes come in between."""
    rig = Rig(bound=2)
    await rig.step(("n", (4,), kernel(4)), *(("m", (width,), kernel(width)) for width in range(30, 40)))
    mine = rig.cache.workspace("n", (4,), "w", 256)
    rig.device.gate.clear()
    waiting = asyncio.ensure_future(rig.cache.ensure([("n", (4,), kernel(4)), ("n", (4,), kernel(5))]))
    await turns()
    for width in range(30, 40):
        rig.cache.use([("n", (width,), kernel(width))])
    rig.pool.check(mine)
    rig.device.gate.set()
    await waiting
    assert rig.cache.workspace("n", (4,), "w", 256) is mine
    assert rig.pipeline_lives(rig.cache[kernel(4)].pipeline) and rig.pipeline_lives(rig.cache[kernel(5)].pipeline)


@asynchronous
async def test_a_kernel_that_is_evicted_while_a_step_waits_for_another_is_compiled_again() -> None:
    rig = Rig(bound=1)
    await rig.step(("m", (4,), kernel(4)))
    await rig.cache.ensure([kernel(6)])
    rig.device.gate.clear()
    waiting = asyncio.ensure_future(rig.cache.ensure([("n", (4,), kernel(4)), ("n", (4,), kernel(5))]))
    await turns()
    await rig.step(("m", (6,), kernel(6)))
    assert rig.cache.missing([kernel(4)]) == [kernel(4)]
    rig.device.gate.set()
    await waiting
    assert rig.pipeline_lives(rig.cache[kernel(4)].pipeline) and rig.pipeline_lives(rig.cache[kernel(5)].pipeline)


# ---- pipelines ------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_shared_pipeline_goes_with_its_last_user() -> None:
    rig = Rig(bound=1)
    shared = kernel(99)
    await rig.step(("a", (4,), shared), ("b", (4,), shared), ("b", (4,), kernel(1)))
    assert len(rig.cache) == rig.pipelines == 2
    handle = rig.cache[shared].pipeline
    await rig.step(("a", (5,), shared))
    await rig.step(("a", (6,), kernel(2)))
    assert rig.pipeline_lives(handle), "b still uses it"
    await rig.step(("b", (5,), kernel(3)))
    assert not rig.pipeline_lives(handle)
    assert [rig.compiled().count(str(kernel(n))) for n in (1, 2, 3, 99)] == [1, 1, 1, 1]
    assert len(rig.cache) == rig.pipelines == 2


@asynchronous
async def test_bare_variants_are_kept() -> None:
    rig = Rig(bound=1)
    variants = [kernel(n) for n in range(10)]
    for variant in variants:
        assert rig.cache.missing([variant]) == [variant]
        await rig.cache.ensure([variant])
    assert rig.cache.missing(variants) == []
    assert len(rig.cache) == rig.pipelines == 10
    assert rig.cache.report() == {}


@asynchronous
async def test_who_asks_at_the_same_time_shares_the_compilation() -> None:
    rig = Rig()
    progress: list[tuple[int, int]] = []
    await asyncio.gather(
        rig.cache.ensure([("a", (1,), kernel(1)), ("a", (1,), kernel(2))], lambda *at: progress.append(at)),
        rig.cache.ensure([("b", (1,), kernel(2)), ("b", (1,), kernel(3))]),
    )
    assert sorted(rig.compiled()) == [str(kernel(n)) for n in (1, 2, 3)]
    assert progress == [(1, 2), (2, 2)]
    assert {node: row["shapes"] for node, row in rig.cache.report().items()} == {"a": 1, "b": 1}


@asynchronous
async def test_who_is_cancelled_takes_nobody_along() -> None:
    rig = Rig()
    rig.device.gate.clear()
    first = asyncio.ensure_future(rig.cache.ensure([("a", (1,), kernel(1))]))
    second = asyncio.ensure_future(rig.cache.ensure([("b", (1,), kernel(1))]))
    await turns()
    first.cancel()
    await turns()
    rig.device.gate.set()
    await second
    assert first.cancelled() and rig.compiled() == [str(kernel(1))]
    assert rig.cache.report()["b"]["shapes"] == 1
    rig.cache.clear()
    assert rig.pipelines == 0


@asynchronous
async def test_a_failed_compilation_leaves_nothing_behind() -> None:
    rig = Rig()
    await rig.attention(1, 2)
    before = (len(rig.cache), rig.pipelines, rig.cache.workspace_bytes, rig.ledger_bytes)
    rig.device.broken = {str(kernel(7))}
    uses = [("attention", (4, 2), kernel(7)), ("norm", (1,), kernel(1))]
    for _ in range(2):
        rig.cache.workspace("attention", (4, 2), "partials", 256)
        with pytest.raises(ShaderError, match="is broken"):
            await rig.cache.ensure(uses)
        rig.pool.flush()
        assert (len(rig.cache), rig.pipelines, rig.cache.workspace_bytes, rig.ledger_bytes) == before
        assert rig.shapes("attention") == 1
        assert rig.cache.missing(uses) == [kernel(7)]
    rig.device.broken = set()
    rig.cache.workspace("attention", (4, 2), "partials", 256)
    await rig.step(*uses)
    assert rig.shapes("attention") == 2


@asynchronous
async def test_what_compiled_beside_a_failure_is_kept_and_bounded() -> None:
    rig = Rig(bound=1)
    rig.device.broken = {str(kernel(7))}
    with pytest.raises(ShaderError):
        await rig.cache.ensure([("a", (4,), kernel(1)), ("b", (4,), kernel(7))])
    assert len(rig.cache) == rig.pipelines == 1
    await rig.step(("a", (5,), kernel(2)))
    await rig.step(("a", (6,), kernel(3)))
    assert len(rig.cache) == rig.pipelines == 1


def test_a_use_must_be_compiled() -> None:
    rig = Rig()
    with pytest.raises(UsageError, match="not compiled yet"):
        rig.cache.use([("a", (1,), kernel(1))])


# ---- workspaces -----------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_workspace_stays_the_same_and_does_not_grow() -> None:
    rig = Rig()
    first = rig.cache.workspace("a", (1, 2), "w", 512)
    assert rig.cache.workspace("a", (1, 2), "w", 512) is first is rig.cache.workspace("a", (1, 2), "w", 4)
    others = {rig.cache.workspace(node, shape, label, 512).id for node, shape, label in OTHER_KEYS}
    assert len(others - {first.id}) == 3
    with pytest.raises(UsageError, match=r"'w' of a \(1, 2\) has 512 B, 516 B are asked for"):
        rig.cache.workspace("a", (1, 2), "w", 516)
    assert rig.cache.workspace_bytes == rig.ledger_bytes == 4 * 512


OTHER_KEYS: tuple[tuple[str, Shape, str], ...] = (("b", (1, 2), "w"), ("a", (1, 3), "w"), ("a", (1, 2), "v"))


@asynchronous
async def test_an_evicted_workspace_serves_the_variant_that_comes() -> None:
    rig = Rig(bound=1, policy="bucket")
    for chunks in (2, 2, 3, 4):
        rig.pool.begin_run(rig.session)
        rig.cache.workspace("a", (4, chunks), "w", 1000)
        await rig.step(("a", (4, chunks), kernel(1)))
    assert rig.pool.ledger.created == 1


@asynchronous
async def test_no_session_sees_what_another_left_in_a_workspace() -> None:
    """Workspaces serve all sessions in turn: what follows one is cleared, even for the session that leased it first."""
    device = Device()
    pool = BufferPool(device, Bucket({4096: 8}))
    cache = KernelCache(device, pool, immediates=False, variants_per_node=4)
    first, second = pool.new_session(), pool.new_session()
    pool.begin_run(first)
    workspace = cache.workspace("a", (1,), "w", 4000)
    pool.begin_run(second)  # … which writes it
    cache.clear()
    pool.begin_run(first)
    pool.inventory.take_clears()
    assert pool.acquire(4000, Role.ACTIVATION).id == workspace.id
    assert pool.inventory.take_clears() == {workspace.id: 4000}


@asynchronous
async def test_a_step_that_ran_out_of_memory_gets_other_workspaces() -> None:
    rig = Rig()
    idle = await rig.attention(64, 8)
    await rig.cache.ensure([kernel(1001)])
    announced: list[frozenset[int]] = []
    rig.cache.on_evict.append(lambda pipelines, buffers: announced.append(buffers))
    leased: list[Buffer] = []

    async def attempt() -> None:
        if not leased:
            rig.device.fail_next_create = OutOfMemory
        try:
            leased.append(await rig.attention(1, 2))
            await rig.device.wait()
        except BaseException:
            rig.cache.release_workspaces()
            raise

    compiled = rig.compiled()
    await retrying(rig.pool, attempt)
    doubtful, good = leased
    assert doubtful.id != good.id
    assert announced == [frozenset({idle.id, doubtful.id})]
    assert rig.cache.workspace_bytes == rig.ledger_bytes == rig.pool.ledger.reserved_bytes == good.size
    assert rig.compiled() == compiled, "the pipelines stayed"


@asynchronous
async def test_a_workspace_that_does_not_fit_leaves_nothing_behind() -> None:
    rig = Rig(bound=2)
    await rig.attention(64, 4)
    rig.pool.set_budget(5 * PER_CHUNK, hard=True)
    with pytest.raises(BudgetExceeded):
        rig.cache.workspace("attention", (64, 5), "partials", 5 * PER_CHUNK)
    assert rig.shapes("attention") == 1
    rig.cache.release_workspaces()
    await make_room(rig.pool, 5 * PER_CHUNK)
    await rig.attention(64, 5)
    assert rig.cache.workspace_bytes == rig.ledger_bytes == 5 * PER_CHUNK


# ---- giving back ----------------------------------------------------------------------------------------------------


def watch(rig: Rig, leased: dict[int, Buffer]) -> list[tuple[int, int]]:
    """Checks in on_evict that what is about to go is still there; the list gets (pipelines, buffers) of each call."""
    calls: list[tuple[int, int]] = []

    def about_to_go(pipelines: frozenset[int], buffers: frozenset[int]) -> None:
        assert all(rig.pipeline_lives(handle) for handle in pipelines)
        for buffer in buffers:
            rig.pool.check(leased[buffer])
        calls.append((len(pipelines), len(buffers)))

    rig.cache.on_evict.append(about_to_go)
    return calls


@asynchronous
async def test_who_holds_on_is_told_before_anything_goes() -> None:
    rig = Rig(bound=2)
    leased: dict[int, Buffer] = {}
    calls = watch(rig, leased)
    for chunks in (1, 2, 3, 4):
        buffer = await rig.attention(64, chunks)
        leased[buffer.id] = buffer
    assert calls == [(0, 1), (0, 1)], "their pipeline is shared with those that stay"
    for width in (4, 16):
        buffer = await rig.attention(width, 1)
        leased[buffer.id] = buffer
    assert calls[2:] == [(0, 1), (0, 1), (1, 0)], "nothing of width 64 is left"
    rig.cache.release_workspaces()
    assert calls[5:] == [(0, 2)]
    rig.cache.clear()
    assert calls[6:] == [(len(rig.compiled()) - 1, 0)]
    rig.cache.clear()
    assert len(calls) == 7, "nothing is left to tell of"


@asynchronous
async def test_a_plan_lets_go_of_what_it_pinned() -> None:
    rig = Rig(bound=1)
    buffer = await rig.attention(64, 1)
    rig.pool.pin(buffer)
    plan = {buffer.id}

    def invalidate(_: frozenset[int], buffers: frozenset[int]) -> None:
        if plan & buffers:
            plan.clear()
            rig.pool.unpin(buffer)

    rig.cache.on_evict.append(invalidate)
    await rig.attention(64, 2)
    assert not plan and rig.cache.evictions == 1
    assert rig.ledger_bytes == rig.cache.workspace_bytes == 2 * PER_CHUNK


@asynchronous
async def test_whoever_refuses_keeps_everything() -> None:
    """An error of a callback comes before anything was given up."""
    rig = Rig(bound=1)
    buffer = await rig.attention(64, 1)

    def refuse(_: frozenset[int], __: frozenset[int]) -> None:
        raise RuntimeError("not now")

    rig.cache.on_evict.append(refuse)
    with pytest.raises(RuntimeError, match="not now"):
        rig.cache.workspace("attention", (64, 2), "partials", 256)
    rig.pool.check(buffer)
    assert rig.shapes("attention") == 1 and rig.cache.evictions == 0


@asynchronous
async def test_clear_gives_everything_back_and_the_cache_goes_on() -> None:
    rig = Rig()
    for width in WIDTHS:
        await rig.attention(width, width)
    await rig.cache.ensure([kernel(5)])
    rig.cache.clear()
    rig.pool.flush()
    assert rig.device.table_sizes()["pipelines"] == rig.device.table_sizes()["buffers"] == len(rig.cache) == 0
    assert rig.cache.workspace_bytes == rig.ledger_bytes == 0
    await rig.attention(1, 1)
    assert rig.shapes("attention") == 1


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "unnoticed"])
@asynchronous
async def test_nothing_outlives_the_device(noticed: bool) -> None:
    rig = Rig()
    await rig.attention(1, 2)
    uses = [("norm", (1,), kernel(1))]
    assert rig.cache.missing(uses) == []
    told: list[object] = []
    rig.cache.on_evict.append(lambda *what: told.append(what))
    rig.device.lose()
    if noticed:
        rig.pool.note_lost()
        assert len(rig.cache.missing(uses)) == 1
        assert rig.cache.workspace_bytes == len(rig.cache) == 0
        assert rig.cache.report() == {name: {"shapes": 0, "evicted": 0} for name in ("attention", "norm")}
        with pytest.raises(DeviceLost):
            await rig.cache.ensure(uses)
        with pytest.raises(DeviceLost):
            rig.cache.workspace("attention", (1, 2), "partials", 4)
    rig.cache.clear()
    rig.cache.clear()
    assert len(rig.cache) == rig.cache.workspace_bytes == 0
    assert bool(told) is not noticed
    rig.pool.close()


# ---- whatever comes -------------------------------------------------------------------------------------------------

USES = st.tuples(st.sampled_from("ab"), st.tuples(st.sampled_from((1, 4, 16)), st.integers(1, 3)), st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.lists(st.lists(USES, min_size=1, max_size=4), min_size=1, max_size=25))
def test_whatever_the_steps(bound: int, steps: list[list[tuple[str, tuple[int, int], int]]]) -> None:
    """Bounds, books and the device agree after every step, and a decode variant stays until another one comes."""

    async def run() -> None:
        rig = Rig(bound)
        decode: dict[str, tuple[Shape, Buffer]] = {}
        for step in steps:
            rig.pool.begin_run(rig.session)
            uses = [(node, shape, kernel(number)) for node, shape, number in step]
            buffers = {key: rig.cache.workspace(*key, "w", 256 * key[1][1]) for key in {use[:2] for use in uses}}
            before = set(decode) - {node for node, shape in buffers if shape[0] == 1}
            await rig.step(*uses)
            for node in before if bound > 1 else ():
                rig.pool.check(decode[node][1])
            for (node, shape), buffer in buffers.items():
                rig.pool.check(buffer)
                if shape[0] == 1:
                    decode[node] = (shape, buffer)
            check_books(rig, bound, uses)
            if len([key for key in buffers if key[1][0] == 1]) > len({k[0] for k in buffers if k[1][0] == 1}):
                decode.clear()  # two of one node in one step: either may be the latest

    asyncio.run(run())


def check_books(rig: Rig, bound: int, uses: Iterable[Use]) -> None:
    in_step = {node: {shape for other, shape, _ in uses if other == node} for node, _, _ in uses}
    for node, row in rig.cache.report().items():
        if bound and node in in_step:
            assert row["shapes"] <= max(bound + (bound > 1), len(in_step[node]) + (bound > 1))
    assert rig.pipelines == len(rig.cache)
    assert rig.ledger_bytes == rig.cache.workspace_bytes == rig.pool.ledger.reserved_bytes
