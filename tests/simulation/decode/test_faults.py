"""Memory that runs out and devices that die, at every point of a decode: nothing leaks, and the result or the error is
right."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stepwell.decode.generation import Generation
from stepwell.decode.kv_cache import GrowKV
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.session import DecodeSession
from stepwell.decode.timing import TokenEvent
from stepwell.errors import BudgetExceeded, DeviceLost, OutOfMemory, PoolError
from stepwell.gpu.device import BufferUsage
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.fake_objects import FakeBuffer
from stepwell.gpu.source import FileSource
from stepwell.kernels.kv import KVShape
from stepwell.launch.launcher import Launcher
from stepwell.memory.buffer import Buffer, Role, State, Zero
from stepwell.memory.class_stats import Eviction
from stepwell.memory.events import EventLog
from stepwell.memory.pool import BufferPool
from stepwell.memory.recovery import fence, holders, make_room, retrying
from stepwell.models.llama import DecoderModel
from stepwell.step.recorder import Recorder
from stepwell.weights.gguf import read_gguf
from tests.support.tiny_llama import write_tiny_llama

MIB = 1 << 20
WIDTH = 256  # bytes per position of a K or V tensor
LAYERS = 3
FIRST, LAST = 1, 12  # positions of the decode


class FaultyDevice(FakeDevice):
    """Runs out of memory at the creates, and dies at the submits, whose numbers are given (from 0)."""

    def __init__(self, out_of_memory: Sequence[int] = (), dies_at: int = -1, **options: Any) -> None:
        super().__init__(log_limit=0, **options)
        self.out_of_memory, self.dies_at = frozenset(out_of_memory), dies_at
        self.creates = self.submits = 0

    def create_buffer(self, size: int, usage: BufferUsage, label: str = "") -> int:
        if self.creates in self.out_of_memory:
            self.fail_next_create = OutOfMemory
        self.creates += 1
        return super().create_buffer(size, usage, label)

    def submit(self, program: Any) -> None:
        super().submit(program)
        self._submitted()

    def replay(self, *scalars: int) -> None:
        super().replay(*scalars)
        self._submitted()

    def _submitted(self) -> None:
        if self.submits == self.dies_at:
            self.lose()
        self.submits += 1


class Decode:
    """A decode with a growing KV cache whose result can be checked: row p of every tensor is p + 1 in each word.

    It has what a session has: a growing cache, a step that commits only when its result is back, and its history.
    """

    def __init__(self, device: FaultyDevice, pool: BufferPool) -> None:
        self.pool = pool
        self.launcher = Launcher(device, pool)
        self.history: list[int] = []
        self.open()

    def open(self) -> None:
        self.cache = GrowKV(self.pool, KVShape(LAYERS, WIDTH), 64)
        self.tensors: list[Buffer] = []  # of the committed positions
        self.row = self.pool.acquire(WIDTH, Role.ACTIVATION, "row", host=True)
        self.staging = self.pool.acquire(WIDTH, Role.STAGING, "readback")

    async def step(self, word: int) -> None:
        pool, rec = self.pool, Recorder(self.cache.length)
        pool.begin_run()
        temporary: Buffer | None = None
        try:
            rec.write(self.row, 0, [word] * (WIDTH // 4))
            tensors = [tensor for pair in self.cache.extend(1) for tensor in pair.buffers]
            self.cache.record_copies(rec)
            temporary = pool.acquire(WIDTH, Role.ACTIVATION, "temporary")
            for tensor in tensors:
                rec.copy(self.row, 0, tensor, self.cache.length * WIDTH, WIDTH)
            rec.copy(tensors[-1], self.cache.length * WIDTH, temporary, 0, WIDTH)
            rec.copy(temporary, 0, self.staging, 0, WIDTH)
            self.launcher.submit(rec.finish())
            data = await self.launcher.read(self.staging, WIDTH)
        except BaseException:
            self.cache.abandon()
            if temporary is not None:
                pool.release(temporary)
            raise
        pool.release(temporary)
        self.cache.commit()
        self.tensors = tensors
        assert data == word.to_bytes(4, "little") * (WIDTH // 4)

    async def run(self, first: int = FIRST, last: int = LAST) -> None:
        for word in range(first, last + 1):
            await retrying(self.pool, lambda word=word: self.step(word))  # type: ignore[misc]
            self.history.append(word)

    def check(self, device: FakeDevice) -> None:
        expected = b"".join(word.to_bytes(4, "little") * (WIDTH // 4) for word in self.history)
        assert self.cache.length == len(self.history)
        assert len(self.tensors) == 2 * LAYERS
        for tensor in self.tensors:
            assert device.get(tensor.id, FakeBuffer, "test").get(0, len(expected)) == expected

    def close(self) -> None:
        self.cache.close()
        for buffer in (self.row, self.staging):
            self.pool.release(buffer)


def creates_of_a_clean_decode(policy: str) -> int:
    device = FaultyDevice()
    asyncio.run(Decode(device, BufferPool(device, policy)).run())
    return device.creates


SPANS = {policy: range(creates_of_a_clean_decode(policy)) for policy in ("adaptive", "bucket", "disabled")}


@pytest.mark.parametrize("policy", SPANS)
@pytest.mark.parametrize("debug", [False, True])
def test_out_of_memory_once_at_every_create(policy: str, debug: bool) -> None:
    """The step is run again, on less memory, and everything is right in the end."""

    async def run(index: int) -> None:
        device = FaultyDevice([index])
        pool = BufferPool(device, policy, debug=debug)
        decode = Decode(device, pool)
        await decode.run()
        decode.check(device)
        decode.close()
        pool.flush()
        pool.trim()
        pool.flush()
        assert device.table_sizes()["buffers"] == 0
        assert pool.ledger.reserved_bytes == pool.ledger.in_use_bytes == 0
        assert pool.budget.failed_at is not None, "the budget has shrunk"

    for index in SPANS[policy]:
        asyncio.run(run(index))


@pytest.mark.parametrize("policy", ["adaptive", "bucket", "disabled"])
def test_out_of_memory_for_good_says_who_holds_what(policy: str) -> None:
    async def run(index: int) -> None:
        device = FaultyDevice(range(index, 10_000))
        pool = BufferPool(device, policy)
        decode = Decode(device, pool)
        with pytest.raises(OutOfMemory, match=r"In use [\d,.]+ \w+, free .*Held by: .*kv .* in 6 buffers \("):
            await decode.run()
        assert len(decode.history) >= 1
        decode.check(device)  # what was committed is still right
        decode.close()
        pool.close()
        assert device.table_sizes()["buffers"] == 0

    for index in (15, 16, 20):
        asyncio.run(run(index))


def test_buffers_of_the_failed_step_are_not_pooled() -> None:
    """They may have no memory behind them."""

    async def run() -> None:
        device = FaultyDevice([1])
        pool = BufferPool(device)
        kept = pool.acquire(4096, Role.KV)
        pool.flush()
        await fence(pool)
        doubtful = pool.acquire(4096, Role.KV)
        with pytest.raises(OutOfMemory):
            await device.wait()
        await retrying(pool, raises_once(OutOfMemory("injected")))
        for buffer in (kept, doubtful):
            pool.release(buffer)
        pool.flush()
        assert pool.inventory.state(doubtful.id) is State.DESTROYED
        assert pool.acquire(4096, Role.KV).id == kept.id
        evictions = {cause for row in pool.classes() for cause in row["evictions"]}
        assert evictions == {Eviction.OOM}

    asyncio.run(run())


def raises_once(error: Exception) -> Any:
    errors = [error]

    async def step() -> str:
        if errors:
            raise errors.pop()
        return "done"

    return step


def test_retrying_runs_a_step_twice_at_most() -> None:
    async def run() -> None:
        pool = BufferPool(FakeDevice())
        assert await retrying(pool, raises_once(OutOfMemory("x"))) == "done"
        with pytest.raises(PoolError):
            await retrying(pool, raises_once(PoolError("another error is the caller's")))

        async def never() -> None:
            raise OutOfMemory("x")

        with pytest.raises(OutOfMemory, match=r"failed again .* nothing is leased"):
            await retrying(pool, never)

    asyncio.run(run())


def test_the_budget_shrinks_and_recovers() -> None:
    async def run() -> None:
        pool = BufferPool(FakeDevice(), budget_bytes=100 * MIB)
        for site in range(10):
            pool.acquire(5 * MIB, Role.KV, site=site)
        reserved = pool.ledger.reserved_bytes
        await retrying(pool, raises_once(OutOfMemory("x")))
        assert pool.budget.limit == int(0.7 * reserved)
        limits = set()
        for _ in range(25_000):
            pool.begin_run()
            limits.add(pool.budget.limit)
        assert pool.budget.limit == 100 * MIB
        assert pool.budget.failed_at is None
        steps = sorted(limit for limit in limits if limit is not None)
        assert all(after <= 1.06 * before for before, after in pairwise(steps[:-1]))

    asyncio.run(run())


def test_a_budget_without_limit_returns_to_none() -> None:
    async def run() -> None:
        pool = BufferPool(FakeDevice())
        pool.acquire(5 * MIB, Role.KV)
        await retrying(pool, raises_once(OutOfMemory("x")))
        assert pool.budget.limit is not None
        for _ in range(9000):
            pool.begin_run()
        assert pool.budget.limit is None

    asyncio.run(run())


def test_sizes_are_checked_before_memory() -> None:
    pool = BufferPool(FakeDevice(), budget_bytes=MIB, hard=True)
    with pytest.raises(PoolError, match="maxStorageBufferBindingSize") as caught:
        pool.acquire(1 << 30, Role.KV)
    assert not isinstance(caught.value, BudgetExceeded)


def test_holders() -> None:
    pool = BufferPool(FakeDevice(), "bucket")
    assert "nothing is leased" in holders(pool)
    for layer in range(3):
        pool.acquire(4 * MIB, Role.KV, f"k.{layer}")
        pool.acquire(MIB, Role.KV, f"v.{layer}")
    pool.acquire(2 * MIB, Role.WEIGHTS, "embedding")
    pool.acquire(100, Role.UNIFORM)
    assert holders(pool) == (
        "In use 17.0 MiB, free 0 B. Held by: kv 15.0 MiB in 6 buffers (k 12.0 MiB, v 3.0 MiB); "
        "weights 2.0 MiB in 1 buffers (embedding 2.0 MiB); uniform 112 B in 1 buffers (unnamed 112 B)."
    )


# ---- loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["adaptive", "bucket", "simple"])
def test_device_loss_at_every_flush_and_a_rebuild(policy: str) -> None:
    """A typed error, empty books, dead leases; then another device, and the history prefilled again."""

    async def run(dies_at: int) -> None:
        device = FaultyDevice(dies_at=dies_at)
        pool = BufferPool(device, policy)
        log = EventLog()
        pool.observe(log)
        decode = Decode(device, pool)
        held = [decode.row, *decode.tensors]
        with pytest.raises(DeviceLost):
            await decode.run()
        assert decode.history == list(range(1, dies_at + 1)), "the step that died is not committed"
        assert (pool.ledger.reserved_bytes, pool.ledger.in_use_bytes, pool.inventory.in_flight.nbytes) == (0, 0, 0)
        assert pool.inventory.generation == 1
        for buffer in held:
            with pytest.raises(DeviceLost, match="died with its device"):
                pool.check(buffer)
        decode.close()  # harmless
        with pytest.raises(DeviceLost):
            pool.acquire(64, Role.KV)
        assert next(event.detail for event in log.events if event.action == "failed") == "lost"

        second = FaultyDevice()
        pool.rebuild(second)
        again = Decode(second, pool)
        await again.run(1, len(decode.history) + 3)
        again.check(second)
        again.close()
        pool.close()
        assert second.table_sizes()["buffers"] == 0

    for dies_at in range(LAST - FIRST + 1):
        asyncio.run(run(dies_at))


def test_high_water_marks_survive_a_loss() -> None:
    """After the rebuild the first runs create the working set, and nothing of it is given up."""
    device = FakeDevice()
    pool = BufferPool(device, "adaptive")

    def run() -> None:
        pool.begin_run()
        for buffer in [pool.acquire(5000, Role.ACTIVATION, site=site) for site in range(7)]:
            pool.release(buffer)

    for _ in range(3):
        run()
    target = next(row["target"] for row in pool.classes() if row["role"] == "activation")
    assert target == 7
    device.lose()
    with pytest.raises(DeviceLost):
        pool.acquire(64 * MIB, Role.KV)
    pool.rebuild(FakeDevice())
    assert pool.policy.target(5120, Role.ACTIVATION) == 7
    pool.begin_run()
    pool.release(pool.acquire(5000, Role.ACTIVATION))
    for _ in range(3):
        run()
    created = pool.ledger.created
    run()
    assert pool.ledger.created == created


def test_loss_while_destroying() -> None:
    device = FakeDevice()
    pool = BufferPool(device, "disabled")
    buffers = [pool.acquire(4096, Role.KV) for _ in range(4)]
    for buffer in buffers[:3]:
        pool.release(buffer)
    device.lose()
    with pytest.raises(DeviceLost):
        pool.flush()
    assert pool.ledger.reserved_bytes == 0
    pool.release(buffers[3])  # died with its device
    pool.flush()
    pool.close()


@pytest.mark.parametrize("policy", ["adaptive", "bucket", "simple", "pow2", "exact"])
def test_after_a_loss_no_policy_hands_out_a_dead_buffer(policy: str) -> None:
    device = FakeDevice()
    pool = BufferPool(device, policy, debug=policy == "pow2")
    for nbytes in (4096, 8192):
        pool.release(pool.acquire(nbytes, Role.KV))
    pool.flush()
    device.lose()
    for nbytes in (64 << 10, 4096, 8192, 4096):  # the first finds the loss; the others were free
        with pytest.raises(DeviceLost):
            pool.acquire(nbytes, Role.KV)
    pool.note_lost()
    assert pool.inventory.generation == 1, "one loss"
    second = FakeDevice()
    pool.rebuild(second)
    buffer = pool.acquire(4096, Role.KV)
    assert second.get(buffer.id, FakeBuffer, "test").size == buffer.size
    assert pool.inventory.generation == 1


def test_a_rebuild_without_a_noticed_loss() -> None:
    """The caller saw the loss first: the old leases die all the same."""
    pool = BufferPool(FakeDevice())
    buffer = pool.acquire(4096, Role.KV)
    pool.rebuild(FakeDevice())
    with pytest.raises(DeviceLost, match="died with its device"):
        pool.check(buffer)
    assert (pool.ledger.reserved_bytes, pool.ledger.in_use_bytes, pool.inventory.generation) == (0, 0, 1)


def test_loss_at_a_fence() -> None:
    async def run() -> None:
        device = FakeDevice()
        pool = BufferPool(device)
        pool.acquire(4096, Role.KV)
        device.lose()
        with pytest.raises(DeviceLost):
            await make_room(pool, 4096)
        assert (pool.inventory.generation, pool.ledger.reserved_bytes) == (1, 0)
        with pytest.raises(DeviceLost):
            await retrying(pool, raises_once(OutOfMemory("reported before the loss")))

    asyncio.run(run())


def test_zeroing_survives_a_failed_step() -> None:
    """A clear that was asked for by a step that never ran is still owed, or the buffer is gone."""
    device = FakeDevice()
    pool = BufferPool(device, "bucket")
    pool.release(pool.acquire(4096, Role.KV))
    pool.flush()
    buffer = pool.acquire(4096, Role.KV, zero=Zero.ALWAYS)
    pool.release(buffer)
    assert pool.inventory.take_clears() == {buffer.id: 4096}
    pool.acquire(4096, Role.KV, zero=Zero.NEVER)
    pool.flush()
    pool.trim()
    assert pool.inventory.take_clears() == {}


# ---- a real session -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    write_tiny_llama(path, n_layers=2, hidden=64, n_heads=9, n_kv_heads=3, head_dim=64, ffn=96, vocab=320, context=64)
    return path


class Rig:
    """A loaded model on a device whose faults are counted from after the load."""

    def __init__(self, device: FaultyDevice, policy: str = "adaptive") -> None:
        self.device, self.pool = device, BufferPool(device, policy)
        self.launcher = Launcher(device, self.pool)

    async def load(self, path: Path) -> None:
        source = FileSource(path)
        self.model = await DecoderModel.load(await read_gguf(source), source, self.launcher)

    async def decode(self, kv: str, tokens: int = 6) -> list[TokenEvent]:
        session = DecodeSession(self.model, self.launcher, kv=kv, context=32)
        try:
            return [event async for event in session.generate([1, 2, 3], Generation(max_tokens=tokens))]
        finally:
            session.close()


@pytest.mark.parametrize("kv", KV_MODES)
def test_out_of_memory_at_every_create_of_a_session(small_model: Path, kv: str) -> None:
    async def creates() -> tuple[int, int]:
        rig = Rig(FaultyDevice())
        await rig.load(small_model)
        loaded = rig.device.creates
        await rig.decode(kv)
        return loaded, rig.device.creates

    async def run(index: int) -> None:
        rig = Rig(FaultyDevice([index]))
        await rig.load(small_model)
        before = rig.pool.ledger.in_use_bytes
        events = await rig.decode(kv)
        assert [event.position for event in events] == [3, 4, 5, 6, 7, 8]
        rig.pool.flush()
        assert rig.pool.ledger.in_use_bytes - rig.launcher.kernels.workspace_bytes == before
        rig.launcher.close()
        rig.model.close()
        rig.pool.close()
        assert rig.device.table_sizes()["buffers"] == 0

    first, last = asyncio.run(creates())
    assert last - first > 12
    for index in range(first, last):
        asyncio.run(run(index))


@pytest.mark.parametrize("kv", KV_MODES)
def test_device_loss_at_every_submit_of_a_session(small_model: Path, kv: str) -> None:
    async def submits() -> int:
        rig = Rig(FaultyDevice())
        await rig.load(small_model)
        return rig.device.submits

    async def run(dies_at: int) -> None:
        rig = Rig(FaultyDevice(dies_at=dies_at))
        await rig.load(small_model)
        session = DecodeSession(rig.model, rig.launcher, kv=kv, context=32)
        events: list[TokenEvent] = []
        with pytest.raises(DeviceLost):
            async for event in session.generate([1, 2, 3], Generation(max_tokens=6)):
                events.append(event)  # noqa: PERF401  (what came before the loss counts)
        assert (rig.pool.ledger.reserved_bytes, rig.pool.ledger.in_use_bytes) == (0, 0)
        # what was committed, and no more: the last token was chosen but not yet fed
        chosen = [event.id for event in events]
        assert list(session.history) == ([1, 2, 3, *chosen[:-1]] if events else [])
        session.close()
        rig.model.close()
        # the same pool, another device: load again and prefill the history
        rig.device = FaultyDevice()
        rig.pool.rebuild(rig.device)
        rig.launcher = Launcher(rig.device, rig.pool)
        await rig.load(small_model)
        again = DecodeSession(rig.model, rig.launcher, kv=kv, context=32)
        resumed = [1, 2, 3, *chosen]
        left = 6 - len(events)
        positions = [event.position async for event in again.generate(resumed, Generation(max_tokens=left))]
        assert positions == list(range(len(resumed), len(resumed) + left))
        again.close()
        rig.model.close()
        rig.pool.close()
        assert rig.device.table_sizes()["buffers"] == 0

    first = asyncio.run(submits())
    for dies_at in range(first, first + 6):
        asyncio.run(run(dies_at))
