"""Whoever submits on a pool takes turns: a step keeps what it has released and has yet to submit."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.kv_pattern import KVPattern
from stepwell.errors import BadFile, OutOfMemory, PoolError, UsageError
from stepwell.gpu.device import DeviceInfo
from stepwell.gpu.fake_device import FAKE_INFO, FakeDevice
from stepwell.gpu.source import FileSource
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.memory.buffer import Role
from stepwell.memory.events import EventLog
from stepwell.memory.pool import BufferPool
from stepwell.memory.recovery import make_room, retrying
from stepwell.models.config import DecoderConfig
from stepwell.models.llama import DecoderModel
from stepwell.profiling.plain_read import time_plain_read
from stepwell.step.recorder import Recorder
from stepwell.tuning.autotune import Autotuner
from stepwell.weights.gguf import read_gguf
from tests.support import tuning_lab
from tests.support.decode_lab import DecodeDevice, DecodeLab, ids, templates_rendered_once, tokens, write_model
from tests.support.pattern_lab import kernels

__all__ = ["templates_rendered_once"]

NBYTES = 4096
TURNS = 200  # of the event loop that the step waits in its middle
CLOCKED = DeviceInfo("acme", "cpu", "", True, tuning_lab.LIMITS, FAKE_INFO.features | {"timestamp-query"}, 0, 0, 64)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


async def turns(count: int = TURNS) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Sequence:
    """A hand-made session: each step copies its past to a new buffer, lets go of the past, and waits before it submits.

    ``waiting`` is set while it does.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.pool = launcher, launcher.pool
        self.number = self.pool.new_session()
        self.waiting = asyncio.Event()
        self.held = self.pool.acquire(NBYTES, Role.KV, "past", host=True)
        launcher.write(self.held, b"\x07" * NBYTES)
        self.staging = self.pool.acquire(NBYTES, Role.STAGING, "readback")

    async def step(self) -> bytes:
        async with self.pool.step(self.number):
            rec = Recorder()
            past, self.held = self.held, self.pool.acquire(NBYTES, Role.KV, "present")
            rec.copy(past, 0, self.held, 0, NBYTES)
            self.pool.release(past)
            self.waiting.set()
            await turns()
            rec.copy(self.held, 0, self.staging, 0, NBYTES)
            self.launcher.submit(rec.finish())
        return await self.launcher.read(self.staging, NBYTES)

    def close(self) -> None:
        for buffer in (self.held, self.staging):
            self.pool.release(buffer)


async def peek(launcher: Launcher, file: Path) -> None:
    buffer = launcher.pool.acquire(64, Role.WEIGHTS)
    assert await launcher.peek(buffer, 64) == bytes(64)
    launcher.pool.release(buffer)


async def kv_pattern(launcher: Launcher, file: Path) -> None:
    pattern = KVPattern("kv16", launcher, kv="grow", start=3, tokens=3)
    await pattern.prepare()
    assert [event.position async for event in pattern.run()] == [3, 4, 5]
    pattern.close()


async def load(launcher: Launcher, file: Path) -> None:
    source = FileSource(file)
    (await DecoderModel.load(await read_gguf(source), source, launcher)).close()


async def load_in_vain(launcher: Launcher, file: Path) -> None:
    """What was acquired for it is given back, and a flush is to destroy it."""
    source = FileSource(file)
    gguf = await read_gguf(source)
    file.with_suffix(".cut").write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(BadFile, match="end outside it"):
        await DecoderModel.load(gguf, FileSource(file.with_suffix(".cut")), launcher)


async def make(launcher: Launcher, file: Path) -> None:
    config = DecoderConfig.from_gguf(await read_gguf(FileSource(file)))
    (await DecoderModel.synthetic(config, "Q4_0", launcher)).close()


async def tune(launcher: Launcher, file: Path) -> None:
    source = FileSource(file)
    model = await DecoderModel.load(await read_gguf(source), source, launcher)
    tuner = Autotuner(model, launcher, 1e9)
    outcome = await tuner.run()
    assert outcome.complete and any(outcome.measured.values()), "some were compared with the rule's choice"
    tuner.close()
    model.close()


async def read_plainly(launcher: Launcher, file: Path) -> None:
    launcher.device.set_profile(passes=True)
    assert await time_plain_read(launcher, 0.0) is not None
    launcher.device.set_profile()


async def another(launcher: Launcher, file: Path) -> None:
    other = Sequence(launcher)
    assert await other.step() == b"\x07" * NBYTES
    other.close()


async def recover(launcher: Launcher, file: Path) -> None:
    failures = [OutOfMemory("injected")]

    async def step() -> bytes:
        if failures:
            raise failures.pop()
        return b""

    await retrying(launcher.pool, step)
    await make_room(launcher.pool, 64)


async def flush(launcher: Launcher, file: Path) -> None:
    """What closes something: nobody can wait in there."""
    launcher.pool.release(launcher.pool.acquire(NBYTES, Role.KV, host=True))
    launcher.pool.flush()
    launcher.pool.trim()


OUTSIDERS = (peek, kv_pattern, load, load_in_vain, make, tune, read_plainly, another, recover, flush)


def device_for(outsider: Callable[..., object], file: Path) -> tuple[FakeDevice, Path]:
    """A device on which what the outsider does makes sense, and the model for it."""
    if outsider is tune:
        model = tuning_lab.write_model(file.with_name("tuned.gguf"))
        return tuning_lab.TimedDevice(lambda key, spread: 10.0 * spread.wide), model
    return FakeDevice(CLOCKED, log_limit=0, kernels=kernels("kv16")), file


@pytest.mark.parametrize("policy", ["adaptive", "exact", "disabled"])
@pytest.mark.parametrize("outsider", OUTSIDERS)
def test_a_step_keeps_what_it_has_released(
    file: Path, policy: str, outsider: Callable[[Launcher, Path], Awaitable[None]]
) -> None:
    device, model = device_for(outsider, file)

    async def run() -> None:
        pool = BufferPool(device, policy)
        launcher = Launcher(device, pool)
        sequence = Sequence(launcher)

        async def meddle() -> None:
            await sequence.waiting.wait()
            await outsider(launcher, model)
            mine = [pool.acquire(NBYTES, Role.KV, host=True) for _ in range(3)]
            for buffer in mine:
                launcher.write(buffer, b"\xff" * NBYTES)
            for buffer in mine:
                pool.release(buffer)

        for _ in range(2):
            sequence.waiting.clear()
            data, _ = await asyncio.gather(sequence.step(), meddle())
            assert data == b"\x07" * NBYTES
        sequence.close()
        launcher.close()
        pool.close()
        assert device.table_sizes() == dict.fromkeys(("buffers", "pipelines", "bind_groups", "plans"), 0)

    asyncio.run(run())


def test_all_at_once(file: Path) -> None:
    """Sessions of every KV mode, a workload, loads, looks and the tuner on one pool: each gets what it gets alone."""

    async def alone(kv: str) -> list[int]:
        lab = await DecodeLab(LaunchOptions()).load(file)
        session = lab.session(kv)
        found = ids(await tokens(session, [7, 8, 9], 20))
        session.close()
        lab.close()
        return found

    expected = [asyncio.run(alone(kv)) for kv in KV_MODES]
    device = DecodeDevice(kernels=kernels("kv16"))

    async def run() -> None:
        lab = await DecodeLab(device=device).load(file)
        device.turns = 3
        sessions = [lab.session(kv) for kv in KV_MODES]
        tuner = Autotuner(lab.model, lab.launcher, 200.0)
        others = [outsider(lab.another(), file) for outsider in (peek, kv_pattern, load, make, another, flush) * 3]
        found = await asyncio.gather(*(tokens(session, [7, 8, 9], 20) for session in sessions), tuner.run(), *others)
        assert [ids(events) for events in found[: len(sessions)]] == expected
        tuner.close()
        for session in sessions:
            session.close()

    asyncio.run(run())


def test_the_end_of_a_run_leaves_a_step_its_plan(file: Path) -> None:
    """A step that becomes a plan is done twice, and the plan must be there for the second time."""

    async def run() -> None:
        lab = await DecodeLab(LaunchOptions(), device=DecodeDevice()).load(file)
        lab.device.turns = 3
        session = lab.session()

        async def end_runs() -> None:
            for _ in range(100):
                lab.launcher.release_run()
                await asyncio.sleep(0)

        found, _ = await asyncio.gather(tokens(session, [7, 8, 9], 20), end_runs())
        assert lab.launcher.plans.recorded > 1
        assert ids(found) == ids(await tokens(lab.session(), [7, 8, 9], 20))

    asyncio.run(run())


def test_a_step_within_a_step_is_an_error_and_the_pool_goes_on() -> None:
    async def run() -> None:
        pool = BufferPool(FakeDevice())
        launcher = Launcher(pool.device, pool)
        buffer = pool.acquire(64, Role.KV)
        async with pool.step(pool.new_session()):
            nested = (pool.step(), launcher.peek(buffer, 64), launcher.issue(Recorder().finish()), make_room(pool, 1))
            for inner in nested:
                with pytest.raises(PoolError, match="a step within a step"):
                    await (inner if asyncio.iscoroutine(inner) else inner.__aenter__())
            assert await launcher.peek(buffer, 64, in_step=True) == bytes(64)
        async with asyncio.timeout(1):
            assert await launcher.peek(buffer, 64) == bytes(64)

    asyncio.run(run())


def test_a_look_gives_its_turn_back_before_it_is_read() -> None:
    async def run() -> None:
        device = DecodeDevice()
        device.turns = TURNS
        pool = BufferPool(device)
        look = asyncio.create_task(Launcher(device, pool).peek(pool.acquire(64, Role.KV), 64))
        await turns(10)
        async with pool.step():
            assert not look.done()
        assert await look == bytes(64)

    asyncio.run(run())


def test_what_does_not_wait_for_its_turn_is_an_error() -> None:
    """A submit or a run in the middle of another task's step; acquire, release and flush are harmless there."""

    async def run() -> None:
        pool = BufferPool(FakeDevice(), "disabled")
        launcher = Launcher(pool.device, pool)
        sequence = Sequence(launcher)
        task = asyncio.create_task(sequence.step())
        await sequence.waiting.wait()
        assert pool.busy
        with pytest.raises(UsageError, match="a step of another task is under way"):
            launcher.submit(Recorder().finish())
        run_before = pool.inventory.run
        with pytest.raises(PoolError, match="a step of another task is under way"):
            pool.begin_run()
        assert pool.inventory.run == run_before
        mine = pool.acquire(64, Role.KV)
        pool.release(mine)
        pool.flush()
        assert pool.inventory.state(mine.id).startswith("free"), "destroyed only by the flush of the step"
        assert await task == b"\x07" * NBYTES
        assert not pool.busy
        assert pool.inventory.state(mine.id) == "destroyed"

    asyncio.run(run())


class Unwilling(EventLog):
    """Fails when the first run begins."""

    def run_began(self, run: int) -> None:
        if run == 1:
            raise OutOfMemory("injected")


def test_a_turn_is_given_back_whatever_happens() -> None:
    async def run() -> None:
        pool = BufferPool(FakeDevice())
        with pytest.raises(ZeroDivisionError):
            async with pool.step():
                raise ZeroDivisionError
        pool.observe(Unwilling())  # the beginning of a run fails
        with pytest.raises(OutOfMemory):
            async with pool.step(0):
                raise AssertionError("not reached")
        task = asyncio.create_task(Sequence(Launcher(pool.device, pool)).step())
        await turns(10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(1), pool.step():
            pool.flush()
        assert not pool.busy

    asyncio.run(run())
