"""Passes and submits: what ends them, that a throw leaves everything usable, and that no switch changes a result."""

import asyncio
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from stepwell.errors import UsageError
from stepwell.gpu.device import Binding
from stepwell.launch.options import ABLATION, LaunchOptions, Params
from stepwell.memory.buffer import Buffer, Role, Zero
from stepwell.memory.pool import BufferPool
from stepwell.step.recorder import ByLength, Command, Launch, Recorder, Step
from tests.support.launch_lab import APPEND, LAST, MIX, ONE, SEED, SUM, WORDS, Lab, device, pattern, seeds, step_of

LIVE = LaunchOptions(replay=False)
PASS = ["begin_pass", "immediates", "dispatch"]


def lab(options: LaunchOptions = LIVE, count: int = 4) -> tuple[Lab, list[Buffer]]:
    made = Lab(options)
    asyncio.run(made.compile())
    return made, made.buffers(count)


def submit(made: Lab, step: Step) -> list[str]:
    made.happened()
    made.launcher.submit(step)
    return made.happened("destroy", "create_bind_group")


# ---- what ends a pass -----------------------------------------------------------------------------------------------


def test_launches_share_one_pass_until_the_step_ends() -> None:
    made, (a, b, c, _) = lab()
    trace = submit(made, seeds([a, b, c]))
    assert trace == [
        *("create_bind_group",) * 3, "begin_pass", "immediates", *("dispatch",) * 3, "end_pass", "submit",
    ]  # fmt: skip
    trace = submit(made, seeds([a, b, c]))
    assert trace == [*PASS, "dispatch", "dispatch", "end_pass", "submit"]
    assert [made.count(buffer) for buffer in (a, b, c)] == [2, 2, 2]
    assert (made.spent().passes, made.spent().encoders, made.spent().submits) == (2, 2, 2)


def test_without_a_shared_pass_every_launch_has_its_own() -> None:
    made, (a, b, _, _) = lab(LaunchOptions(replay=False, shared_pass=False))
    submit(made, seeds([a, b]))
    assert submit(made, seeds([a, b])) == [*PASS, "end_pass", *PASS, "end_pass", "submit"]
    assert (made.spent().passes, made.spent().submits) == (4, 2)


def test_a_copy_ends_the_pass_and_keeps_the_encoder() -> None:
    made, (a, b, c, d) = lab()
    rec = Recorder(5)
    rec.launch(SEED, (a,), ONE)
    rec.launch(SEED, (b,), ONE)
    rec.copy(a, 0, c, 0, 16)
    rec.copy_past(b, d, 4)
    rec.launch(SEED, (a,), ONE)
    step = rec.finish()
    submit(made, step)
    before = made.spent()
    assert submit(made, step) == [
        *PASS, "dispatch", "end_pass", "copy", "copy_past", *PASS, "end_pass", "submit",
    ]  # fmt: skip
    spent = made.spent(before)
    assert (spent.passes, spent.encoders, spent.submits, spent.copies) == (2, 1, 1, 2)
    # the copy saw the second launch of its source, not the third
    assert (made.count(c), made.count(a)) == (3, 4)
    assert made.content(d)[:20] == made.content(b)[:20]
    assert made.content(d)[20:] == bytes(4 * WORDS - 20)


@pytest.mark.parametrize("mode", [mode for mode in Params if mode is not Params.AUTO])
def test_a_host_write_in_mid_step_comes_after_what_was_recorded_before_it(mode: Params) -> None:
    made, (a, b, c, _) = lab(LaunchOptions(replay=False, params=mode))
    rec = Recorder(5)
    rec.launch(MIX, (a, b), ONE)
    rec.write(a, 0, range(1, WORDS + 1))
    rec.launch(MIX, (a, c), ONE)
    step = rec.finish()
    names = [name for name in submit(made, step) if name not in ("create_bind_group", "params", "immediates")]
    one = ["begin_pass", "dispatch", "end_pass", "submit"]
    assert names == [*one, "write", *one]
    assert made.content(b)[4:8] != made.content(c)[4:8], "one saw a before the write, the other after it"
    spent = made.spent()
    assert (spent.passes, spent.submits) == (2, 2)


def test_a_write_first_or_alone_costs_no_submit() -> None:
    made, (a, b, _, _) = lab()
    rec = Recorder()
    rec.write(a, 0, (7, 8))
    rec.write(b, 4, (9,))
    assert submit(made, rec.finish()) == ["write", "write"]
    assert made.content(a)[:8] == (7).to_bytes(4, "little") + (8).to_bytes(4, "little")
    rec.launch(SEED, (a,), ONE)
    submit(made, rec.finish())
    assert submit(made, rec.finish()) == ["write", "write", *PASS, "end_pass", "submit"]
    assert made.spent().submits == 2


def test_a_readback_ends_the_pass_and_follows_the_submit() -> None:
    made, (a, *_) = lab()
    staging = made.staging()

    async def run() -> bytes:
        rec = Recorder()
        rec.launch(SEED, (a,), ONE)
        rec.copy_out(a, 0, 4 * WORDS)
        made.launcher.submit(rec.finish(staging))
        return await made.launcher.read(staging, 4 * WORDS)

    made.happened()
    data = asyncio.run(run())
    assert made.happened("read_buffer") == [*PASS, "end_pass", "copy_out", "submit", "read_buffer"]
    assert data == made.content(a)
    assert made.count(a) == 1


def test_several_readbacks_before_one_sync_all_complete() -> None:
    """Each brings what its step left, whatever comes after it; and one that nobody awaits is nobody's error."""
    made, (a, *_) = lab()
    ring = [made.staging() for _ in range(5)]

    async def run() -> list[bytes]:
        reads = []
        for position, staging in enumerate(ring):
            rec = Recorder(position)
            rec.launch(SEED, (a,), ONE)
            rec.copy_out(a, 0, 8)
            made.launcher.submit(rec.finish(staging))
            reads.append(made.launcher.read(staging, 8))
        await made.launcher.wait()
        return [await read for read in reads[:4]]

    data = asyncio.run(run())
    assert [int.from_bytes(some[:4], "little") for some in data] == [1, 2, 3, 4]
    assert len({some[4:] for some in data}) == 4
    spent = made.spent()
    assert (spent.readbacks, spent.readback_bytes) == (5, 40)
    assert spent.syncs == 4 + 1, "a wait, and the reads that were awaited"


def test_a_buffer_is_destroyed_after_the_submit_that_uses_it() -> None:
    made, (a, *_) = lab()
    temporary = made.pool.acquire(4 * WORDS, Role.ACTIVATION, "temporary")
    rec = Recorder()
    rec.launch(SEED, (temporary,), ONE)
    rec.launch(MIX, (temporary, a), ONE)
    step = rec.finish()
    made.launcher.submit(step)
    made.happened()
    made.launcher.submit(step)
    made.pool.release(temporary)
    made.pool.trim()
    assert made.happened("destroy")[-1] == "submit", "a free buffer that was just used waits for the flush"
    made.pool.begin_run()
    made.pool.begin_run()  # out of debug's quarantine
    made.pool.trim()
    made.pool.flush()
    names = made.happened("destroy")
    assert "destroy" in names
    assert made.count(a) == 2


def test_close_leaves_nothing_behind() -> None:
    made, (a, b, *_) = lab(LaunchOptions(params=Params.CALL_SITE))
    submit(made, seeds([a, b]))
    made.happened()
    made.launcher.close()
    names = made.happened("destroy")
    assert names and set(names) == {"destroy"}, "nothing was unsubmitted"
    made.pool.close()
    assert made.device.table_sizes() == dict.fromkeys(("buffers", "pipelines", "bind_groups", "plans"), 0)


# ---- clears ---------------------------------------------------------------------------------------------------------


def reused(made: Lab) -> Buffer:
    """A buffer that held something, and of which zeros are asked now."""
    first = made.pool.acquire(4096, Role.KV)
    made.device.write_buffer(first.id, 0, b"\xff" * 4096)
    made.pool.release(first)
    made.pool.flush()
    again = made.pool.acquire(4096, Role.KV, zero=Zero.ALWAYS)
    assert again.id == first.id
    return again


def plain_lab() -> tuple[Lab, list[Buffer]]:
    """Its pool reuses at once; a debugging one keeps what is released aside."""
    own = device()
    made = Lab(device_=own, pool=BufferPool(own, "exact"))
    asyncio.run(made.compile())
    return made, made.buffers(3)


def test_a_clear_comes_before_the_step() -> None:
    made, (a, *_) = plain_lab()
    buffer = reused(made)
    made.launcher.submit(seeds([a, buffer]))
    assert made.content(buffer)[8:] == bytes(4088)
    assert made.count(buffer) == 1


def test_a_step_that_throws_loses_no_clear() -> None:
    made, (a, *_) = plain_lab()
    buffer = reused(made)
    with pytest.raises(UsageError):
        made.launcher.submit(step_of([Launch(MIX, (a.id,), ONE, "", ())]))
    made.launcher.submit(seeds([a]))
    assert made.content(buffer) == bytes(4096)


def test_a_plan_does_not_repeat_a_clear() -> None:
    """A buffer is cleared once, for the lease that asked; the plan may be replayed when it holds something."""
    made, (a, *_) = plain_lab()
    buffer = reused(made)
    staging = made.staging()
    plan = made.launcher.record(seeds([a]), "key", 1, (), 10)
    assert plan is not None
    assert made.content(buffer) == bytes(4096)
    made.device.write_buffer(buffer.id, 0, b"\x01" * 4096)
    made.launcher.replay(plan, 1, 1, staging)
    assert made.content(buffer) == b"\x01" * 4096


# ---- a launch that throws -------------------------------------------------------------------------------------------


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "too few buffers": (lambda a, b: Launch(MIX, (a.id,), ONE, "", ()), UsageError, "entries for a layout"),
    "too many buffers": (lambda a, b: Launch(SEED, (a.id, b.id), ONE, "", ()), UsageError, "entries for a layout"),
    "not compiled": (
        lambda a, b: Launch(pattern("seed", 29), (a.id,), ONE, "", ()), UsageError, "not compiled yet",
    ),
    "a failing bind group": (
        lambda a, b: Launch(SEED, (Binding(a.id, 4),), ONE, "", ()), UsageError, "minStorageBufferOffsetAlignment",
    ),
    "aliasing": (lambda a, b: Launch(MIX, (a.id, a.id), ONE, "", ()), UsageError, "Bind two buffers"),
    "a grid that is too large": (lambda a, b: Launch(SEED, (a.id,), (1 << 20, 1, 1), "", ()), UsageError, "grid"),
}  # fmt: skip


@pytest.mark.parametrize("mode", [mode for mode in Params if mode is not Params.AUTO])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("record", [False, True])
def test_a_launch_that_throws_leaves_the_launcher_usable(mode: Params, cached: bool, what: str, record: bool) -> None:
    options = LaunchOptions(params=mode, bind_group_cache=cached)
    made, (a, b, c, d) = lab(options)
    twin, (p, q, r, s) = lab(options)
    make, error, words = BAD[what]
    groups = made.device.table_sizes()["bind_groups"]
    bad = step_of([*seeds([c]).commands, make(a, b), *seeds([d]).commands], position=3)
    with pytest.raises(error, match=words):
        if record:
            made.launcher.record(bad, "key", 1, (), 100)
        else:
            made.launcher.submit(bad)
    assert [made.count(buffer) for buffer in (a, b, c, d)] == [0] * 4, "nothing of the step was submitted"
    assert len(made.launcher.plans) == 0
    if not cached:
        assert made.device.table_sizes()["bind_groups"] == groups
    for position in (3, 3, 4):
        for launcher, (w, x, y, z) in ((made, (a, b, c, d)), (twin, (p, q, r, s))):
            launcher.launcher.submit(work((w, x, y, z), position))
    for mine, other in zip((a, b, c, d), (p, q, r, s), strict=True):
        assert made.content(mine) == twin.content(other)


def work(buffers: Sequence[Buffer], position: int, rows: int = 1, staging: Buffer | None = None) -> Step:
    """A step with every kind of launch and a copy in its middle."""
    a, b, c, d = buffers
    rec = Recorder(position, rows)
    rec.launch(SEED, (a,), ONE)
    rec.launch(MIX, (a, b), ONE)
    rec.launch(SEED, (c,), (2, 1, 1))
    rec.copy(b, 0, d, 32, 64)
    rec.copy_past(a, b, 4)
    rec.launch(APPEND, (c, d), ONE)
    rec.launch(SUM, (c, d), ByLength(4, 1, 1))
    rec.launch(LAST, (d, c, a), ONE)
    rec.launch(MIX, (d, b), ONE)
    if staging is not None:
        rec.copy_out(d, 0, 4 * WORDS)
    return rec.finish(staging)


# ---- pacing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "submits"), [(-5, 1), (0, 1), (1, 10), (2, 5), (3, 4), (4, 3), (9, 2), (10, 1), (11, 1)]
)
@pytest.mark.parametrize("record", [False, True])
def test_submit_every_n_dispatches(every: int, submits: int, record: bool) -> None:
    made, (a, b, *_) = lab(LaunchOptions(submit_every=every))
    step = seeds([a, b] * 5)
    if record:
        plan = made.launcher.record(step, "key", 1, (), 100)
        assert plan is not None
        made.happened()
        made.launcher.replay(plan, 0, 1, made.staging())
        assert made.launcher.plans.replayed == 1
    else:
        submit(made, step)
        made.happened()
        made.launcher.submit(step)
    names = made.happened("read_buffer")
    assert names.count("submit") == names.count("begin_pass") == submits
    assert "read_buffer" not in names, "never a sync point"
    assert made.spent().submits == made.spent().passes == 2 * submits
    assert made.spent().syncs == 0
    assert (made.count(a), made.count(b)) == (10, 10)


@pytest.mark.parametrize("record", [False, True])
def test_submit_every_ms_of_encoding(monkeypatch: pytest.MonkeyPatch, record: bool) -> None:
    """A clock that goes on by one ms per look: three looks per interval."""
    clock = iter(range(100_000))
    monkeypatch.setattr("stepwell.launch.assembly.now_ms", lambda: float(next(clock)))
    made, (a, b, *_) = lab(LaunchOptions(submit_every_ms=3.0))
    step = seeds([a, b] * 5)
    if record:
        made.launcher.record(step, "key", 1, (), 100)
    else:
        made.launcher.submit(step)
    names = made.happened()
    assert names.count("submit") == 4  # after launches 3, 6, 9, and with the step
    assert names.count("dispatch") == 10
    assert made.spent().submits == 4


def test_the_clock_is_not_asked_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> float:
        raise AssertionError("asked")

    monkeypatch.setattr("stepwell.launch.assembly.now_ms", fails)
    made, (a, *_) = lab(LaunchOptions(submit_every=1))
    made.launcher.submit(seeds([a]))
    assert made.count(a) == 1


# ---- no switch changes a result -------------------------------------------------------------------------------------

SWITCHES = [
    LaunchOptions(
        shared_pass=shared, bind_group_cache=cached, skip_uploads=skip, submit_every=every, replay=replay, params=mode
    )
    for shared, cached, skip, every, replay, mode in product(
        *((False, True),) * 3, (0, 2), (False, True), (Params.UNIFORM_POOL, Params.CALL_SITE, Params.IMMEDIATES)
    )
]
STEPS = [(0, 3), (3, 1), (4, 1), (5, 1), (6, 2), (8, 1), (9, 1), (9, 1), (10, 1)]  # (position, rows)


def results(options: LaunchOptions) -> list[bytes]:
    """The same prompts and decode steps, with a host write in the middle of some; as plans where they may be."""
    made, buffers = lab(options)
    staging = made.staging()

    async def run() -> list[bytes]:
        read = []
        plan = None
        for position, rows in STEPS:
            made.pool.begin_run(1)
            made.launcher.write(buffers[0], position.to_bytes(4, "little") * 8)
            step = work(buffers, position, rows, staging)
            if rows > 1:  # what a plan cannot have
                commands = list(step.commands)
                commands.insert(4, write_of(buffers[2], position))
                step = step._replace(commands=tuple(commands))
            if options.replay and rows == 1 and plan is not None:
                made.launcher.replay(plan, position, rows, staging)
            elif options.replay and rows == 1:
                plan = made.launcher.record(step, "key", 1, buffers, 64)
                assert plan is not None, made.launcher.plans.refused
            else:
                made.launcher.submit(step)
            read.append(await made.launcher.read(staging, 4 * WORDS))
        return read

    read = asyncio.run(run())
    assert made.launcher.plans.replayed == (6 if options.replay else 0)
    return [*read, *(made.content(buffer) for buffer in buffers)]


def write_of(buffer: Buffer, position: int) -> Command:
    rec = Recorder()
    rec.write(buffer, 128, (position, 77))
    return rec.finish().commands[0]


def test_results_are_the_same_with_every_combination_of_switches() -> None:
    expected = results(ABLATION[0][1])
    assert expected[len(STEPS) - 1] == expected[-1], "what was read last is still there"
    assert len(set(expected)) == len(expected) - 1, "and every result is of its own step"
    assert len(SWITCHES) == 96
    for options in SWITCHES:
        assert results(options) == expected, options


@pytest.mark.parametrize("arm", [name for name, _ in ABLATION])
def test_the_arms_of_the_ablation_agree(arm: str) -> None:
    assert results(dict(ABLATION)[arm]) == results(LaunchOptions(submit_every=-1, submit_every_ms=0.001))
