"""BufferPool: the states of a buffer, zeroing, the budget, pins, debug mode, growth ahead, observers, class rows."""

import asyncio
from array import array

import pytest

from stepwell.errors import BadRequest, BudgetExceeded, PoolError, StaleBuffer
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.fake_objects import FakeBuffer
from stepwell.gpu.program import Op
from stepwell.launch.launcher import Launcher
from stepwell.memory.buffer import Buffer, Role, State, Zero
from stepwell.memory.debug import POISON
from stepwell.memory.events import EventLog
from stepwell.memory.policies.bucket import Bucket
from stepwell.memory.pool import BufferPool
from stepwell.memory.recovery import retrying
from stepwell.step.recorder import Recorder
from tests.support.policy_lab import KIB, MIB, GrowingKv


def contents(pool: BufferPool, buffer: Buffer) -> bytes:
    device = pool.device
    assert isinstance(device, FakeDevice)
    return device.get(buffer.id, FakeBuffer, "test").get(0, buffer.size)


def submit_clears(pool: BufferPool) -> None:
    """What the launcher does at the head of a program."""
    program = array("I")
    for buffer, nbytes in pool.inventory.take_clears().items():
        program.extend((Op.CLEAR, buffer, 0, nbytes))
    program.append(Op.SUBMIT)
    pool.device.submit(program)
    pool.flush()


# ---- states ---------------------------------------------------------------------------------------------------------


def test_a_buffer_goes_through_its_states() -> None:
    pool = BufferPool(FakeDevice(), Bucket({4096: 1}))
    first, second = (pool.acquire(4096, Role.KV) for _ in range(2))
    assert pool.inventory.state(first.id) is State.LIVE
    pool.release(first)
    pool.release(second)
    assert [pool.inventory.state(buffer.id) for buffer in (first, second)] == [State.FREE_RECORDED] * 2
    pool.flush()
    assert pool.inventory.state(first.id) is State.FREE_SUBMITTED
    assert pool.inventory.state(second.id) is State.DESTROYED, "one is kept"
    assert pool.inventory.in_flight.nbytes == 4096, "its bytes count until the GPU is done"
    pool.inventory.note_complete(pool.inventory.serial)
    assert pool.inventory.state(first.id) is State.FREE_COMPLETE
    assert pool.inventory.in_flight.nbytes == 0
    assert pool.acquire(4096, Role.KV).id == first.id
    assert pool.inventory.state(first.id) is State.LIVE


def test_completion_of_an_older_submit_is_not_that_of_a_newer() -> None:
    pool = BufferPool(FakeDevice(), "bucket")
    buffer = pool.acquire(4096, Role.KV)
    pool.flush()
    older = pool.inventory.serial
    pool.release(buffer)
    pool.acquire(64, Role.KV)
    pool.flush()
    pool.inventory.note_complete(older)
    assert pool.inventory.state(buffer.id) is State.FREE_SUBMITTED
    pool.inventory.note_complete(pool.inventory.serial)
    assert pool.inventory.state(buffer.id) is State.FREE_COMPLETE


def test_an_empty_flush_after_completion_is_complete() -> None:
    pool = BufferPool(FakeDevice(), "disabled")
    buffer = pool.acquire(4096, Role.KV)
    pool.flush()
    pool.inventory.note_complete(pool.inventory.serial)
    pool.release(buffer)
    pool.flush()  # nothing was recorded since
    assert pool.inventory.state(buffer.id) is State.DESTROYED
    assert pool.inventory.in_flight.nbytes == 0


def test_before_the_submit_a_buffer_serves_only_commands_of_its_session() -> None:
    """Not what the CPU writes, not another session, not a lease that is to be cleared: those get another buffer."""
    pool = BufferPool(FakeDevice(), "bucket")
    first = pool.acquire(4096, Role.ACTIVATION)
    pool.release(first)
    same = pool.acquire(4096, Role.ACTIVATION)
    assert same.id == first.id
    pool.release(same)
    others = [
        pool.acquire(4096, Role.ACTIVATION, host=True),
        pool.acquire(4096, Role.ACTIVATION, session=1),
        pool.acquire(4096, Role.ACTIVATION, zero=Zero.ALWAYS),
    ]
    assert first.id not in {buffer.id for buffer in others}
    assert pool.inventory.take_clears() == {}, "new buffers are zero"
    pool.flush()
    assert pool.acquire(4096, Role.ACTIVATION, host=True).id == first.id, "after the submit it serves again"


def test_uniforms_are_guarded_whatever_their_policy_does() -> None:
    pool = BufferPool(FakeDevice(), fixed={Role.UNIFORM: Bucket()})  # one that reuses at once
    first = pool.acquire(64, Role.UNIFORM)
    pool.release(first)
    assert pool.acquire(64, Role.UNIFORM).id != first.id
    pool.flush()
    assert pool.acquire(64, Role.UNIFORM).id == first.id


def test_stale_leases_are_typed_errors() -> None:
    pool = BufferPool(FakeDevice(), "bucket")
    buffer = pool.acquire(4096, Role.KV, "k.0")
    pool.release(buffer)
    for call in (pool.release, pool.check, pool.pin, pool.unpin):
        with pytest.raises(StaleBuffer, match=r"\(k\.0, 4,096 B\) was released already"):
            call(buffer)
    with pytest.raises(StaleBuffer, match="not of this pool"):
        BufferPool(FakeDevice()).check(buffer)


# ---- zeroing --------------------------------------------------------------------------------------------------------


def dirty(pool: BufferPool, buffer: Buffer) -> None:
    pool.device.write_buffer(buffer.id, 0, b"\xff" * buffer.size)


@pytest.mark.parametrize(
    ("zero", "requested", "cleared"),
    [
        (Zero.NEVER, 3000, 0),
        (Zero.IF_DIRTY, 3000, 1000),  # only what the lease before may have written
        (Zero.IF_DIRTY, 500, 500),
        (Zero.ALWAYS, 3000, 3000),
        (Zero.ALWAYS, 501, 504),
    ],
)
def test_zeroing_a_reused_buffer(zero: Zero, requested: int, cleared: int) -> None:
    pool = BufferPool(FakeDevice(), Bucket({4096: 8}))
    buffer = pool.acquire(1000, Role.ACTIVATION)
    pool.device.write_buffer(buffer.id, 0, b"\xff" * 1000)
    pool.release(buffer)
    pool.flush()
    again = pool.acquire(requested, Role.ACTIVATION, zero=zero)
    assert again.id == buffer.id
    submit_clears(pool)
    report = pool.report()
    assert (report.bytes_cleared, report.cleared) == (cleared, 1 if cleared else 0)
    assert contents(pool, again)[: min(cleared, 1000)] == bytes(min(cleared, 1000))
    assert contents(pool, again)[cleared:1000] == b"\xff" * (1000 - cleared)


@pytest.mark.parametrize("zero", Zero)
def test_a_new_buffer_needs_no_clear(zero: Zero) -> None:
    pool = BufferPool(FakeDevice())
    buffer = pool.acquire(4096, Role.KV, zero=zero)
    assert pool.inventory.take_clears() == {}
    assert contents(pool, buffer) == bytes(buffer.size)


def test_what_was_cleared_is_dirty_again_after_the_next_lease() -> None:
    pool = BufferPool(FakeDevice(), Bucket({4096: 8}))
    sizes = []
    for nbytes in (1000, 2000, 800, 4000):
        buffer = pool.acquire(nbytes, Role.ACTIVATION, zero=Zero.IF_DIRTY)
        sizes.append(sum(pool.inventory.take_clears().values()))
        pool.release(buffer)
        pool.flush()
    assert sizes == [0, 1000, 800, 2000], "2,000 were written, 800 of them cleared and written again"


@pytest.mark.parametrize("zero", Zero)
def test_across_sessions_everything_ever_written_is_cleared(zero: Zero) -> None:
    """Also the tail beyond the request, which a whole binding shows."""
    pool = BufferPool(FakeDevice(), Bucket({4096: 8}))
    buffer = pool.acquire(4096, Role.ACTIVATION, session=1)
    dirty(pool, buffer)
    pool.release(buffer)
    pool.flush()
    other = pool.acquire(100, Role.ACTIVATION, zero=zero, session=2)
    assert other.id == buffer.id
    submit_clears(pool)
    assert contents(pool, other) == bytes(4096)
    pool.release(other)
    pool.flush()
    pool.acquire(100, Role.ACTIVATION, session=2)
    assert pool.inventory.take_clears() == {}, "the same session again"


def test_sessions_of_runs() -> None:
    """A run's leases are its session's; those between a session's opening and its first run too."""
    pool = BufferPool(FakeDevice(), Bucket({4096: 8}))
    for expected in (0, 4000, 4000):
        pool.flush()
        session = pool.new_session()
        first = pool.acquire(4000, Role.KV)
        assert sum(pool.inventory.take_clears().values()) == expected
        pool.release(first)
        for _ in range(3):
            pool.begin_run(session)
            pool.release(pool.acquire(4000, Role.KV))
            assert pool.inventory.take_clears() == {}, "within the session nothing is cleared"
    assert pool.ledger.created == 1
    assert pool.report().cleared == 2


def test_the_launcher_clears_before_everything_else() -> None:
    async def run() -> None:
        device = FakeDevice()
        pool = BufferPool(device, "bucket")
        launcher = Launcher(device, pool)
        old = pool.acquire(64, Role.ACTIVATION)
        dirty(pool, old)
        pool.release(old)
        pool.flush()
        zeroed, copied = pool.acquire(64, Role.ACTIVATION, zero=Zero.ALWAYS), pool.acquire(64, Role.STAGING)
        rec = Recorder()
        rec.copy(zeroed, 0, copied, 0, 64)
        launcher.submit(rec.finish())
        assert await launcher.read(copied, 64) == bytes(64)
        assert pool.inventory.completed == pool.inventory.serial, "a read completes what was submitted before it"

    asyncio.run(run())


def test_what_the_cpu_writes_is_never_cleared_behind_its_back() -> None:
    """A clear runs with the program, after the write: such a lease gets a new buffer instead."""
    pool = BufferPool(FakeDevice(), "bucket")
    pool.release(pool.acquire(64, Role.ACTIVATION, session=1))
    pool.flush()
    buffer = pool.acquire(64, Role.ACTIVATION, host=True, session=2)
    pool.device.write_buffer(buffer.id, 0, b"abcd")
    submit_clears(pool)
    assert contents(pool, buffer)[:4] == b"abcd"


# ---- the budget -----------------------------------------------------------------------------------------------------


def test_free_buffers_make_way_for_new_ones() -> None:
    pool = BufferPool(FakeDevice(), "simple", budget_bytes=10 * MIB)
    for _ in range(2):
        pool.release(pool.acquire(4 * MIB, Role.KV))
        pool.flush()
        pool.inventory.note_complete(pool.inventory.serial)
    held = pool.acquire(5 * MIB, Role.KV)
    pool.acquire(3 * MIB, Role.KV)
    assert pool.ledger.reserved_bytes <= 10 * MIB
    assert pool.classes()[0]["evictions"] == {}
    assert {cause for row in pool.classes() for cause in row["evictions"]} == {"budget"}
    pool.check(held)


def test_what_the_gpu_uses_makes_no_room_yet_so_others_make_way_too() -> None:
    """The policy offers its largest first, which is in flight; the idle one is given up as well."""
    pool = BufferPool(FakeDevice(), "simple", budget_bytes=10 * MIB)
    idle, busy = pool.acquire(2 * MIB, Role.KV), pool.acquire(3 * MIB, Role.KV)
    pool.release(idle)
    pool.flush()
    pool.inventory.note_complete(pool.inventory.serial)
    pool.acquire(64, Role.ACTIVATION)
    pool.release(busy)
    pool.flush()
    assert (pool.inventory.state(idle.id), pool.inventory.state(busy.id)) == (State.FREE_COMPLETE, State.FREE_SUBMITTED)
    pool.acquire(6 * MIB, Role.KV)
    assert (pool.inventory.state(idle.id), pool.inventory.state(busy.id)) == (State.DESTROYED, State.DESTROYED)
    assert pool.ledger.reserved_bytes + pool.inventory.in_flight.nbytes <= 10 * MIB


def test_a_soft_budget_is_exceeded_by_what_is_in_use() -> None:
    pool = BufferPool(FakeDevice(), "bucket", budget_bytes=10 * MIB)
    held = [pool.acquire(4 * MIB, Role.KV) for _ in range(4)]
    assert pool.ledger.in_use_bytes == pool.ledger.reserved_bytes == 16 * MIB
    for buffer in held:
        pool.release(buffer)
    pool.set_budget(10 * MIB)
    pool.flush()
    assert pool.ledger.reserved_bytes == 8 * MIB


def test_a_hard_budget_is_an_error_with_the_numbers() -> None:
    pool = BufferPool(FakeDevice(), "bucket", budget_bytes=10 * MIB, hard=True)
    pool.acquire(8 * MIB, Role.KV)
    with pytest.raises(BudgetExceeded, match=r"4,194,304 B for k\.7 do not fit the budget of 10,485,760 B") as caught:
        pool.acquire(3 * MIB, Role.KV, "k.7")
    error = caught.value
    assert (error.requested, error.budget, error.in_use, error.in_flight, error.free) == (
        4 * MIB, 10 * MIB, 8 * MIB, 0, 0,
    )  # fmt: skip
    assert pool.ledger.created == 1


def test_destroy_fence_create() -> None:
    """Bytes in flight count; make_room waits until they are gone; retrying does so by itself."""

    async def run() -> None:
        pool = BufferPool(FakeDevice(), "disabled", budget_bytes=10 * MIB, hard=True)

        async def step() -> Buffer:
            pool.begin_run()
            return pool.acquire(8 * MIB, Role.KV)

        first = await step()
        pool.flush()
        pool.release(first)
        pool.acquire(64, Role.KV)  # there is recorded work
        pool.flush()
        assert (pool.ledger.reserved_bytes, pool.inventory.in_flight.nbytes) == (64, 8 * MIB)
        with pytest.raises(BudgetExceeded, match="8,388,608 B destroyed but in flight"):
            await step()
        second = await retrying(pool, step)
        assert pool.inventory.in_flight.nbytes == 0
        with pytest.raises(BudgetExceeded):
            await retrying(pool, step)
        pool.check(second)

    asyncio.run(run())


@pytest.mark.parametrize(("options", "message"), [({"budget_bytes": 0}, "a budget of 0 B"), ({"hard": True}, "hard")])
def test_bad_budgets(options: dict[str, int], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        BufferPool(FakeDevice(), "bucket", **options)  # type: ignore[arg-type]


# ---- pins -----------------------------------------------------------------------------------------------------------


def test_a_pinned_buffer_cannot_be_released() -> None:
    pool = BufferPool(FakeDevice(), "bucket")
    buffer = pool.acquire(4000, Role.WORKSPACE, "scores")
    pool.pin(buffer)
    pool.pin(buffer)
    row = pool.report().by_role["pinned"]
    assert (row.reserved_bytes, row.in_use_bytes, row.requested_bytes, row.buffers) == (4096, 4096, 4000, 1)
    pool.unpin(buffer)
    with pytest.raises(PoolError, match="is pinned 1 times"):
        pool.release(buffer)
    pool.unpin(buffer)
    with pytest.raises(PoolError, match="is not pinned"):
        pool.unpin(buffer)
    pool.release(buffer)
    report = pool.report()
    assert report.by_role["pinned"].reserved_bytes == report.in_use_bytes == report.requested_bytes == 0
    assert report.by_role["workspace"].reserved_bytes == 4096


# ---- debug mode -----------------------------------------------------------------------------------------------------


def test_debug_mode_overwrites_and_quarantines() -> None:
    pool = BufferPool(FakeDevice(), "bucket", debug=True)
    buffer = pool.acquire(4096, Role.KV)
    pool.release(buffer)
    assert contents(pool, buffer) == bytes(4096), "not before the submit"
    pool.flush()
    assert contents(pool, buffer) == bytes([POISON]) * 4096
    seen = []
    for _ in range(3):
        pool.begin_run()
        lease = pool.acquire(4096, Role.KV)
        seen.append(lease.id == buffer.id)
        pool.release(lease)
    assert seen == [False, True, False]
    clean = pool.acquire(4096, Role.KV, zero=Zero.IF_DIRTY)
    submit_clears(pool)
    assert contents(pool, clean) == bytes(4096)


def test_debug_mode_finds_a_step_that_uses_a_released_buffer() -> None:
    def step(pool: BufferPool) -> None:
        launcher = Launcher(pool.device, pool)
        source, target = (pool.acquire(64, Role.ACTIVATION) for _ in range(2))
        rec = Recorder()
        rec.copy(source, 0, target, 0, 64)
        pool.release(source)
        launcher.submit(rec.finish())

    with pytest.raises(StaleBuffer, match=r"the step uses buffer \d+, which is free_recorded"):
        step(BufferPool(FakeDevice(), "bucket", debug=True))
    step(BufferPool(FakeDevice(), "bucket"))  # in order on the GPU, so it happens to be right: not checked otherwise


def test_debug_mode_leaks_nothing() -> None:
    for policy in ("adaptive", "bucket", "disabled"):
        pool = BufferPool(FakeDevice(), policy, debug=True)
        for _ in range(5):
            pool.begin_run()
            for role in Role:
                pool.release(pool.acquire(3 * MIB if role is Role.KV else 4096, role))
        pool.flush()
        pool.set_policy("simple")
        pool.trim()
        pool.flush()
        assert pool.ledger.reserved_bytes == 0
        pool.close()


# ---- growth ahead ---------------------------------------------------------------------------------------------------


class GrowingSession:
    """Eight growing tensors without stagger: all cross together, the worst case; ``ahead``: positions to look ahead."""

    def __init__(self, ahead: int) -> None:
        self.pool = BufferPool(FakeDevice(log_limit=0))
        self.pool.set_policy("adaptive", stagger=False, growth=1.5)
        self.ahead, self.positions = ahead, 1000
        self.past: list[Buffer] = []

    def step(self) -> tuple[int, int]:
        """One token; (misses, buffers created ahead)."""
        pool = self.pool
        misses = pool.ledger.misses
        pool.begin_run()
        self.positions += 1
        present = [pool.acquire(2048 * self.positions, Role.KV, site=site) for site in range(8)]
        submit_clears(pool)
        pool.inventory.note_complete(pool.inventory.serial)
        for buffer in reversed(self.past):
            pool.release(buffer)
        self.past = present
        made = 0
        if self.ahead:
            made = pool.prepare_growth(2048 * (self.positions + self.ahead), range(8), runs=self.ahead)
        return pool.ledger.misses - misses, made


def test_growth_ahead_takes_the_misses_from_the_tokens() -> None:
    plain = [GrowingSession(ahead=0)] * 1200
    assert max(session.step()[0] for session in plain[3:]) == 8
    session = GrowingSession(ahead=16)
    steps = [session.step() for _ in range(1200)]
    assert {misses for misses, _ in steps[3:]} == {0}
    assert max(made for _, made in steps) == 2, "16 buffers over 16 tokens, the more the more are missing"
    made = sum(made for _, made in steps)
    assert session.pool.ledger.created == session.pool.ledger.misses + made
    assert session.pool.report().cleared == made


def test_growth_ahead_of_sites_that_cross_one_by_one() -> None:
    """No token misses, and none makes more than one buffer."""
    run = GrowingKv("adaptive", tensors=64, position_bytes=2048, positions=1100)
    pool = run.pool
    made = []
    for _ in range(600):
        misses = pool.ledger.misses
        run.step()
        created_by_token = pool.ledger.misses - misses
        made.append((created_by_token, pool.prepare_growth(2048 * (run.positions + 16), range(64), runs=16)))
    assert {misses for misses, _ in made[4:]} == {0}
    assert {ahead for _, ahead in made[4:]} == {0, 1}
    assert pool.ledger.peak_reserved_bytes <= 1.15 * 2 * pool.ledger.in_use_bytes


def test_growth_ahead_that_is_not_used_is_given_up() -> None:
    pool = BufferPool(FakeDevice(log_limit=0))
    assert pool.prepare_growth(3 * MIB, range(4), runs=5, at_most=99) == 8
    assert pool.prepare_growth(3 * MIB, range(4), runs=5, at_most=99) == 0, "they are there already"
    for _ in range(5):
        pool.begin_run()
        assert pool.ledger.created - pool.ledger.destroyed == 8
    for _ in range(2):
        pool.begin_run()
    assert pool.ledger.created == pool.ledger.destroyed


def test_growth_ahead_respects_the_budget_and_the_policy() -> None:
    pool = BufferPool(FakeDevice(), budget_bytes=10 * MIB)
    assert pool.prepare_growth(3 * MIB, range(4), runs=5, at_most=99) == 3
    assert pool.ledger.reserved_bytes <= 10 * MIB
    assert BufferPool(FakeDevice(), "bucket").prepare_growth(3 * MIB, range(4), runs=5) == 0


# ---- what one sees --------------------------------------------------------------------------------------------------


def test_class_rows() -> None:
    pool = BufferPool(FakeDevice(), Bucket({4096: 1, 64 * KIB: 2}))
    for _ in range(3):
        held = [pool.acquire(4000, Role.KV) for _ in range(3)]
        for buffer in held:
            pool.release(buffer)
        pool.flush()
    row = next(row for row in pool.classes() if row["size"] == 4096)
    assert row == {
        "role": "kv", "size": 4096, "live": 0, "free": 1, "hits": 2, "misses": 7, "borrows": 0,
        "evictions": {"limit": 6}, "high_water": 3, "target": 1,
    }  # fmt: skip


def test_borrows_are_counted() -> None:
    pool = BufferPool(FakeDevice())
    large = pool.acquire(5000, Role.ACTIVATION)
    pool.release(large)
    for _ in range(3):
        pool.begin_run()
    small = pool.acquire(4096, Role.ACTIVATION)
    assert (small.id, small.size) == (large.id, 5120)
    assert [row["borrows"] for row in pool.classes()] == [1]


def test_observers_see_everything_and_cost_nothing_when_gone() -> None:
    pool = BufferPool(FakeDevice(), "disabled")
    log = EventLog(limit=6)
    pool.observe(log)
    pool.begin_run()
    pool.release(pool.acquire(60, Role.KV, "k"))
    pool.flush()
    actions = [event.action for event in log.events]
    assert actions == ["run_began", "created", "acquired", "released", "destroyed", "flushed"]
    assert [event.buffer for event in log.events if event.buffer] == [log.events[1].buffer] * 4
    assert log.events[2].requested == 60
    assert log.events[4].detail == "limit"
    pool.unobserve(log)
    pool.acquire(60, Role.KV)
    assert len(log.events) == 6
