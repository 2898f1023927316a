"""Parameter slots and left-out uploads: a write is skipped only where the slot holds those very bytes."""

import asyncio
from array import array
from collections.abc import Sequence

import pytest

from stepwell.errors import DeviceLost
from stepwell.gpu.fake_device import FakeDevice
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions, Params
from stepwell.memory.buffer import Buffer, Role
from stepwell.step.recorder import Recorder, Step
from tests.support.launch_lab import LAST, MEANINGS, MIX, ONE, PICK, SEED, SUM, WORDS, Lab, pattern, seeds

SLOTS = (Params.UNIFORM_POOL, Params.CALL_SITE)
MODES = (*SLOTS, Params.IMMEDIATES)


def lab(
    mode: Params, *, skip: bool = True, count: int = 4, device: FakeDevice | None = None
) -> tuple[Lab, list[Buffer]]:
    made = Lab(LaunchOptions(params=mode, skip_uploads=skip), device_=device)
    asyncio.run(made.compile())
    return made, made.buffers(count)


def uploads(made: Lab, step: Step) -> tuple[int, int]:
    """(issued, skipped) by a step."""
    before = made.spent()
    made.launcher.submit(step)
    spent = made.spent(before)
    return spent.uploads, spent.uploads_skipped


def mixed(buffers: Sequence[Buffer], position: int, rows: int = 1, write: bool = False) -> Step:
    """Launches that read the position, nothing, the rows and the length; ``write``: with a host write in the middle."""
    a, b, c, d = buffers
    rec = Recorder(position, rows)
    rec.launch(SEED, (a,), ONE)
    rec.launch(MIX, (a, b), ONE)
    if write:
        rec.write(c, 128, (5,))
    rec.launch(LAST, (a, b, c), ONE)
    rec.launch(SUM, (c, d), ONE)
    return rec.finish()


# ---- when a write is left out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SLOTS)
def test_skipped_only_when_the_slot_holds_the_bytes(mode: Params) -> None:
    made, buffers = lab(mode)
    steps = [(3, 1), (3, 1), (4, 1), (4, 1), (3, 2), (3, 2), (4, 1)]
    counted = [uploads(made, mixed(buffers, *step)) for step in steps]
    assert counted == [
        (4, 0),
        (0, 4),  # the same scalars
        (2, 2),  # another position and length; the rows are the same, and MIX reads nothing
        (0, 4),
        (2, 2),  # another position and more rows: the length is still 5
        (0, 4),
        (2, 2),
    ]
    spent = made.spent()
    assert spent.upload_bytes == 16 * spent.uploads == 16 * 10
    off, others = lab(mode, skip=False)
    assert [uploads(off, mixed(others, *step)) for step in steps] == [(4, 0)] * 7
    for mine, other in zip(buffers, others, strict=True):
        assert made.content(mine) == off.content(other)


@pytest.mark.parametrize("skip", [True, False])
def test_immediates_are_set_once_per_pass(skip: bool) -> None:
    made, buffers = lab(Params.IMMEDIATES, skip=skip)
    for position in (3, 3):
        assert uploads(made, mixed(buffers, position)) == (0, 0)
        a, b, *_ = buffers
        rec = Recorder(position)
        rec.launch(SEED, (a,), ONE)
        rec.copy(a, 0, b, 0, 4)
        rec.launch(SEED, (a,), ONE)
        rec.launch(SEED, (a,), ONE)
        made.launcher.submit(rec.finish())
    spent = made.spent()
    assert spent.passes == 6
    assert spent.immediates == (6 if skip else 14), "once per pass, or once per launch"
    assert spent.immediates_bytes == 16 * spent.immediates


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_that_serves_twice_in_a_step(mode: Params) -> None:
    """A host write frees the batch's slots: what the step before left in one is not what this step put there."""
    made, buffers = lab(mode)
    off, others = lab(mode, skip=False)
    for position in (3, 3, 3, 4):
        for some, held in ((made, buffers), (off, others)):
            a, b, c, d = held
            rec = Recorder(position)
            rec.launch(SEED, (a,), ONE)  # position
            rec.write(d, 128, (5,))
            rec.launch(LAST, (a, b, c), ONE)  # rows
            rec.write(d, 128, (6,))
            rec.launch(SUM, (c, d), ONE)  # length
            some.launcher.submit(rec.finish())
    for mine, other in zip(buffers, others, strict=True):
        assert made.content(mine) == off.content(other)


@pytest.mark.parametrize("mode", SLOTS)
def test_no_results_differ_over_a_random_walk(mode: Params) -> None:
    made, buffers = lab(mode)
    off, others = lab(mode, skip=False)
    skipped = 0
    for turn in range(60):
        position, rows, write = turn * 7 % 5, 1 + turn % 3 // 2, turn % 4 == 1
        skipped += uploads(made, mixed(buffers, position, rows, write))[1]
        uploads(off, mixed(others, position, rows, write))
        for mine, other in zip(buffers, others, strict=True):
            assert made.content(mine) == off.content(other), turn
    assert skipped > 50


def drawn(buffers: Sequence[Buffer], position: int, draw: int) -> Step:
    """Launches that read the position, nothing, and the draw."""
    a, b, c, d = buffers
    rec = Recorder(position, draw=draw)
    rec.launch(SEED, (a,), ONE)
    rec.launch(MIX, (a, b), ONE)
    rec.launch(PICK, (c, b, d), ONE)
    return rec.finish()


@pytest.mark.parametrize("mode", SLOTS)
def test_a_draw_is_written_for_those_that_read_it(mode: Params) -> None:
    made, buffers = lab(mode)
    steps = [(3, 7), (3, 7), (3, 0xFFFFFF), (4, 0xFFFFFF), (4, 0), (4, 0)]
    assert [uploads(made, drawn(buffers, *step)) for step in steps] == [(3, 0), (0, 3), (1, 2), (1, 2), (1, 2), (0, 3)]
    greedy, others = lab(mode)
    assert uploads(greedy, mixed(others, 3)) == (4, 0)
    step = mixed(others, 3)._replace(draw=5)
    assert uploads(greedy, step) == (0, 4), "none of them reads it"


@pytest.mark.parametrize("mode", MODES)
def test_a_draw_reaches_live_and_replayed_steps(mode: Params) -> None:
    made, buffers = lab(mode)
    off, others = lab(mode, skip=False)
    staging = made.staging()
    plan = made.launcher.record(drawn(buffers, 3, 11), "key", 1, (), 100)
    off.launcher.submit(drawn(others, 3, 11))
    assert plan is not None
    results = set()
    for turn, draw in enumerate((11, 12, 12, 0, 0xFFFFFF, 11)):
        if turn % 2:
            made.launcher.replay(plan, 4, 1, staging, draw)
        else:
            made.launcher.submit(drawn(buffers, 4, draw))
        off.launcher.submit(drawn(others, 4, draw))
        for mine, other in zip(buffers, others, strict=True):
            assert made.content(mine) == off.content(other), (turn, draw)
        results.add(made.content(buffers[3]))
    assert len(results) == 6, "each launch folds in what was there before"
    twins = [lab(mode) for _ in range(2)]
    for draw, (twin, held) in enumerate(twins):
        twin.launcher.submit(drawn(held, 3, draw))
    one, other = (twin.content(held[3]) for twin, held in twins)
    assert one != other, "the draw alone makes a difference"


# ---- doubt ----------------------------------------------------------------------------------------------------------


class Failing(FakeDevice):
    """Its submit number ``fails_at`` (from now) throws: before anything happened, or when all of it has."""

    def __init__(self) -> None:
        super().__init__(kernels=MEANINGS)
        self.fails_at, self.after = -1, False

    def submit(self, program: "array[int]") -> None:
        self.fails_at -= 1
        if self.fails_at == -1 and not self.after:
            raise RuntimeError("no")
        super().submit(program)
        if self.fails_at == -1:
            raise RuntimeError("no")


@pytest.mark.parametrize("mode", SLOTS)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("positions", [(3, 4, 3), (4, 3, 4)])
def test_a_submit_that_throws_leaves_the_shadow_in_doubt(
    mode: Params, after: bool, number: int, positions: tuple[int, ...]
) -> None:
    """Its writes may have happened or not: neither the old bytes nor the new ones are relied on."""
    made, buffers = lab(mode, device=Failing())
    assert isinstance(made.device, Failing)
    twin, others = lab(mode, skip=False)
    for some, held in ((made, buffers), (twin, others)):
        some.launcher.submit(mixed(held, 3, write=True))
    made.device.fails_at, made.device.after = number, after
    with pytest.raises(RuntimeError, match="no"):
        made.launcher.submit(mixed(buffers, 4, write=True))
    # as if nothing had happened to the tensors
    for mine, other in zip(buffers, others, strict=True):
        made.launcher.write(mine, twin.content(other))
    for position in positions:
        for some, held in ((made, buffers), (twin, others)):
            some.launcher.submit(mixed(held, position, write=True))
        for mine, other in zip(buffers, others, strict=True):
            assert made.content(mine) == twin.content(other), position


@pytest.mark.parametrize("mode", SLOTS)
def test_slots_that_were_replaced_hold_nothing(mode: Params) -> None:
    made, buffers = lab(mode)
    assert uploads(made, mixed(buffers, 3)) == (4, 0)
    assert made.launcher.parameters is not None
    made.launcher.parameters.clear()
    assert uploads(made, mixed(buffers, 3)) == (4, 0)
    assert uploads(made, mixed(buffers, 3)) == (0, 4)


@pytest.mark.parametrize("mode", SLOTS)
def test_a_replay_in_between_is_not_forgotten(mode: Params) -> None:
    """The plan writes the same slots with other scalars."""
    made, buffers = lab(mode)
    off, others = lab(mode, skip=False)
    staging = made.staging()
    plan = made.launcher.record(mixed(buffers, 3), "key", 1, (), 100)
    off.launcher.submit(mixed(others, 3))
    assert plan is not None
    for replayed, live in ((7, 3), (3, 3), (8, 8), (9, 3)):
        made.launcher.replay(plan, replayed, 1, staging)
        off.launcher.submit(mixed(others, replayed))
        made.launcher.submit(mixed(buffers, live))
        off.launcher.submit(mixed(others, live))
        for mine, other in zip(buffers, others, strict=True):
            assert made.content(mine) == off.content(other), (replayed, live)


@pytest.mark.parametrize("mode", SLOTS)
def test_a_live_step_before_a_replay_does_not_matter(mode: Params) -> None:
    made, buffers = lab(mode)
    off, others = lab(mode, skip=False)
    staging = made.staging()
    plan = made.launcher.record(mixed(buffers, 3, rows=1), "key", 1, (), 100)
    off.launcher.submit(mixed(others, 3))
    assert plan is not None
    for position, rows in ((50, 4), (4, 1), (60, 9)):
        made.launcher.submit(mixed(buffers, position, rows))
        off.launcher.submit(mixed(others, position, rows))
        made.launcher.replay(plan, 4, 1, staging)
        off.launcher.submit(mixed(others, 4))
    for mine, other in zip(buffers, others, strict=True):
        assert made.content(mine) == off.content(other)


@pytest.mark.parametrize("mode", SLOTS)
def test_after_a_loss_everything_is_written_again(mode: Params) -> None:
    made, buffers = lab(mode)
    uploads(made, mixed(buffers, 3))
    made.device.lose()
    with pytest.raises(DeviceLost):
        made.launcher.submit(mixed(buffers, 3))
    made.pool.note_lost()
    made.launcher.close()
    second = FakeDevice(kernels=MEANINGS)
    made.pool.rebuild(second)
    again = Lab(made.launcher.options, device_=second, pool=made.pool)
    asyncio.run(again.compile())
    renewed = again.buffers(4)
    assert uploads(again, mixed(renewed, 3)) == (4, 0)
    assert uploads(again, mixed(renewed, 3)) == (0, 4)
    assert again.count(renewed[0]) == 2


# ---- tensor data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_tensor_data_is_always_written(mode: Params) -> None:
    """A kernel may have changed it since: token ids that are the same are written again."""
    made, (ids, b, *_) = lab(mode)
    data = array("I", [7] * WORDS).tobytes()
    contents = []
    for _ in range(3):
        before = made.spent()
        made.launcher.write(ids, data)
        rec = Recorder(3)
        rec.write(b, 0, (1, 2))
        rec.launch(MIX, (ids, b), ONE)
        rec.launch(SEED, (ids,), ONE)
        made.launcher.submit(rec.finish())
        spent = made.spent(before)
        contents.append(made.content(b)[:8])
        if spent.uploads_skipped or mode is Params.IMMEDIATES:
            assert (spent.uploads, spent.upload_bytes) == (2, len(data) + 8)
    assert len(set(contents)) == 1
    assert [entry[0] for entry in made.device.log].count("write_buffer") == 3
    assert [entry[0] for entry in made.device.log].count("write") == 3
    assert len(made.launcher.shadow) == (0 if mode is Params.IMMEDIATES else 2), "of slots alone"


# ---- slots ----------------------------------------------------------------------------------------------------------


def many(buffers: Sequence[Buffer], position: int, write_after: int = -1) -> Step:
    """Ten launches of five kernels; a host write after some of them."""
    rec = Recorder(position)
    for number in range(10):
        if number == write_after:
            rec.write(buffers[3], 128, (1,))
        rec.launch(pattern("seed", 1 + number % 5), (buffers[number % 3],), ONE)
    return rec.finish()


@pytest.mark.parametrize(
    ("mode", "created"),
    [
        # the place in the batch is the key: wherever a flush falls, what follows it has other slots than before
        (Params.UNIFORM_POOL, [10, 8, 7, 5, 3, 0]),
        (Params.CALL_SITE, [10, 0, 0, 0, 0, 0]),
        (Params.IMMEDIATES, [10, 0, 0, 0, 0, 0]),
    ],
)
def test_an_extra_host_write_costs_bind_groups_by_batch_position_only(mode: Params, created: list[int]) -> None:
    made, buffers = lab(mode)
    asyncio.run(made.compile(*(pattern("seed", number) for number in range(1, 6))))
    found = []
    for position, write_after in enumerate((-1, 2, 3, 5, 7, -1)):
        before = made.spent()
        made.launcher.submit(many(buffers, position, write_after))
        spent = made.spent(before)
        found.append(spent.bind_groups_created)
        assert spent.bind_groups_created + spent.bind_groups_reused == 10
    assert found == created


@pytest.mark.parametrize(("mode", "skipped"), [(Params.UNIFORM_POOL, 0), (Params.CALL_SITE, 10)])
def test_an_extra_host_write_costs_uploads_by_batch_position_only(mode: Params, skipped: int) -> None:
    """The scalars stay the same; what differs is which slot a launch has."""
    made, buffers = lab(mode)
    a, b, c, d = buffers

    def step(write_after: int) -> Step:
        rec = Recorder(3)
        for number in range(10):
            if number == write_after:
                rec.write(d, 128, (1,))
            if number % 2:
                rec.launch(SEED, (a,), ONE)
            else:
                rec.launch(LAST, (a, b, c), ONE)
        return rec.finish()

    made.launcher.submit(step(-1))
    assert uploads(made, step(-1)) == (0, 10)
    issued, left_out = uploads(made, step(1))  # every later slot has the other kernel's scalars
    assert issued - 1 == 10 - left_out
    assert left_out == (10 if mode is Params.CALL_SITE else 1)
    assert left_out >= skipped


def test_slots_of_kernels_that_went_serve_others() -> None:
    """In call_site mode every compiled kernel takes slots: kernels that come and go may not take ever more."""
    made, (a, *_) = lab(Params.CALL_SITE)
    made.launcher.kernels.bound = 2

    async def run() -> None:
        for turn in range(400):
            rec = Recorder(turn, (1, 4, 16)[turn % 3])
            rec.launch(pattern("seed", 1 + turn % 3), (a,), ONE, "node")
            step = rec.finish()
            await made.launcher.prepare(step)
            made.launcher.submit(step)

    asyncio.run(run())
    assert made.launcher.kernels.evictions > 200
    assert made.count(a) == 400
    uniform = made.pool.report().by_role[Role.UNIFORM]
    assert uniform.in_use_bytes == 65_536, "one arena of 256 slots"


def test_more_slots_than_one_buffer_has() -> None:
    made, buffers = lab(Params.CALL_SITE)
    launches = [buffers[number % 4] for number in range(300)]  # 256 slots to a buffer
    for position in range(2):
        made.launcher.submit(seeds(launches, position))
    assert sum(made.count(buffer) for buffer in buffers) == 600
    assert made.pool.report().by_role[Role.UNIFORM].in_use_bytes == 2 * 65_536
    made.launcher.close()
    assert made.pool.report().by_role[Role.UNIFORM].in_use_bytes == 0


def test_two_launchers_have_slots_of_their_own() -> None:
    made, buffers = lab(Params.CALL_SITE)
    other = Launcher(made.device, made.pool, LaunchOptions(params=Params.CALL_SITE))
    asyncio.run(other.kernels.ensure((SEED, MIX, LAST, SUM)))
    twin, others = lab(Params.CALL_SITE, skip=False)
    for position in range(6):
        launcher = (made.launcher, other)[position % 2]
        launcher.submit(mixed(buffers, position // 4))
        twin.launcher.submit(mixed(others, position // 4))
    for mine, its in zip(buffers, others, strict=True):
        assert made.content(mine) == twin.content(its)
    assert other.counters.uploads_skipped > 0


def test_the_pool_of_uniforms_stays_as_large_as_the_largest_batch() -> None:
    made, buffers = lab(Params.UNIFORM_POOL)
    for position in range(20):
        made.launcher.submit(seeds(buffers * (1 + position % 3), position))
    slots = {entry[1:3] for entry in made.device.log if entry[0] == "params"}
    assert len(slots) == 12
