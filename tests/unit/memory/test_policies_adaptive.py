"""``adaptive``: size classes and their phases, high-water marks, borrowing, pressure, growth ahead."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from stepwell.errors import BadRequest
from stepwell.memory.buffer import Role
from stepwell.memory.policies.adaptive import FEW_TENSORS, Adaptive
from stepwell.memory.policies.bucket import Bucket
from stepwell.memory.policies.size_classes import PHASES, even_series, phase_of, staggered_series
from tests.support.policy_lab import KIB, MIB, GrowingKv, request


def test_kv_classes() -> None:
    policy = Adaptive()
    for nbytes, size in ((1, 256), (256, 256), (257, 512), (5000, 8192), (512 * KIB, 512 * KIB), (MIB, MIB)):
        assert policy.size_class(request(nbytes)) == size
    series = [staggered_series(1.25, phase) for phase in range(PHASES)]
    for sizes in series:
        large = [size for size in sizes if size > MIB]
        assert sizes == sorted(set(sizes))
        assert all(size % 256 == 0 for size in sizes)
        assert all(after <= 2 * before for before, after in pairwise(sizes)), "at most half of a buffer is unused"
        assert all(1.24 < after / before < 1.26 for before, after in pairwise(large))
    assert policy.size_class(request(1 << 40)) == 1 << 40
    assert len({sizes[20] for sizes in series}) == PHASES, "each phase has classes of its own"
    assert policy.size_class(request(3 * MIB, site=6)) == policy.size_class(request(3 * MIB, site=6 + PHASES))
    for bad in ({"window": 0}, {"window": 257}, {"growth": 1.0}, {"growth": -1.0}, {"growth": 2.5}):
        with pytest.raises(BadRequest, match=r"adaptive: a (window|growth) of"):
            Adaptive(**bad)  # type: ignore[arg-type]


def test_classes_of_other_roles_are_shared_by_all_sites() -> None:
    sizes = even_series()
    assert sizes[:10] == [256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072]
    assert all(after / before <= 1.25 for before, after in pairwise(sizes) if before >= 1024)
    assert all(size % 256 == 0 for size in sizes)
    policy = Adaptive()
    assert {policy.size_class(request(30 * MIB, site, Role.ACTIVATION)) for site in range(99)} == {32 * MIB}


@pytest.mark.parametrize("sites", [8, 16, 60, 64, 80, 128])
def test_phases_of_any_number_of_sites_are_spread(sites: int) -> None:
    phases = sorted(phase_of(site) for site in range(sites))
    gaps = [after - before for before, after in pairwise([*phases, phases[0] + PHASES])]
    assert min(gaps) == PHASES // (1 << (sites - 1).bit_length())
    assert max(gaps) <= 2 * min(gaps)


def test_a_few_tensors_share_the_classes_of_bucket() -> None:
    """Known after the first run, forgotten when more tensors come; a growth that was asked for is kept to."""
    policy, asked = Adaptive(), Adaptive(growth=1.25)
    for site in range(FEW_TENSORS):
        for each in (policy, asked):
            each.acquire(request(3 * MIB, site), each.size_class(request(3 * MIB, site)))
    staggered = [policy.size_class(request(9 * MIB, site)) for site in range(FEW_TENSORS)]
    assert len(set(staggered)) == FEW_TENSORS
    policy.begin_run()
    asked.begin_run()
    for nbytes in (100, 3 * MIB, 9 * MIB, 13 * MIB, 17 * MIB, 160 * MIB):
        sizes = {policy.size_class(request(nbytes, site)) for site in range(FEW_TENSORS)}
        assert sizes == {Bucket().size_class(request(nbytes))}
    assert 200 * MIB <= policy.size_class(request(200 * MIB)) <= 250 * MIB
    assert [asked.size_class(request(9 * MIB, site)) for site in range(FEW_TENSORS)] == staggered
    policy.size_class(request(9 * MIB, FEW_TENSORS))
    policy.begin_run()
    assert [policy.size_class(request(9 * MIB, site)) for site in range(FEW_TENSORS)] == staggered


def test_without_stagger_all_sites_share_their_classes() -> None:
    policy = Adaptive(stagger=False, growth=1.5)
    assert {policy.size_class(request(3 * MIB, site)) for site in range(64)} == {int(3.375 * MIB)}


@pytest.mark.parametrize(("tensors", "position_bytes"), [(64, 2048), (60, 768), (24, 2048)])
def test_adaptive_growing_kv(tensors: int, position_bytes: int) -> None:
    """No creates in the steady state; at and above 1 MiB at most one per step while the sites outgrow their classes.

    At 1 MiB a tensor grows by a smaller fraction per token than the phases are apart (1.25 ** (1 / 64) - 1 = 0.35 %)
    from 287 positions on, so crossings of two sites never fall on one token if they take at most two tokens each:
    from 574 positions on.
    """
    start = max(600, -(-MIB // position_bytes))
    run = GrowingKv("adaptive", tensors, position_bytes, start)
    run.steps(4)
    creates = run.steps(start)
    assert max(creates) <= 1
    classes_per_doubling = 3.11  # log(2) / log(1.25); each costs a tensor two buffers, for past and present
    assert sum(creates) == pytest.approx(2 * classes_per_doubling * tensors, rel=0.05)
    past_and_present = 2 * run.pool.ledger.in_use_bytes
    assert run.pool.ledger.peak_reserved_bytes <= 1.2 * past_and_present


def test_adaptive_leaves_the_powers_of_two_one_by_one() -> None:
    """From 0.6 to 1.2 MiB the sites cross at most two per token, also where the geometric classes begin."""
    run = GrowingKv("adaptive", tensors=64, position_bytes=2048, positions=300)
    run.steps(4)
    assert max(run.steps(310)) == 2


@pytest.mark.parametrize("positions", [300, 1100, 2100, 5000])
def test_adaptive_steady_state_creates_nothing(positions: int) -> None:
    run = GrowingKv("adaptive", tensors=60, position_bytes=8, positions=positions)
    run.steps(3)
    assert run.steps(20) == [0] * 20
    assert run.pool.ledger.destroyed == 0


def test_adaptive_crossing_a_power_of_two() -> None:
    """Below 1 MiB all tensors cross together: one set for the present, one for the past, then nothing."""
    run = GrowingKv("adaptive", tensors=60, position_bytes=8, positions=2045)
    assert run.steps(12) == [60, 0, 0, 60, 60] + [0] * 7


def test_adaptive_drops_the_class_that_kv_has_left() -> None:
    run = GrowingKv("adaptive", tensors=60, position_bytes=8, positions=2045)
    run.steps(5)
    small, large = 60 * 16 * KIB, 60 * 32 * KIB
    assert run.pool.ledger.reserved_bytes == 2 * large + 60 * 16 * KIB
    run.step()
    assert run.pool.ledger.reserved_bytes == 2 * large, (
        f"{small:,} B of the old class are gone after two runs without demand"
    )


def window_of(marks: Sequence[int], window: int) -> list[int]:
    """Free buffers that ``Adaptive`` keeps of one class after runs that need ``marks`` buffers at once."""
    policy = Adaptive(window)
    asked = request(4096, role=Role.ACTIVATION)
    free, next_id, kept = [], 0, []
    for mark in marks:
        held = []
        for _ in range(mark):
            found = policy.acquire(asked, 4096)
            if found is None:
                found, next_id = next_id, next_id + 1
            else:
                free.remove(found)
            held.append(found)
        for buffer_id in held:
            assert list(policy.release(buffer_id, asked, 4096, False)) == []
            free.append(buffer_id)
        for buffer_id in policy.begin_run():
            free.remove(buffer_id)
        kept.append(len(free))
    return kept


def test_adaptive_keeps_the_largest_mark_of_the_window() -> None:
    assert window_of([5, 2, 2, 2, 2], window=3) == [5, 5, 5, 2, 2]
    assert window_of([1, 9, 0, 0, 0, 0], window=2) == [1, 9, 9, 0, 0, 0]
    assert window_of([64] + [1] * 8, window=8) == [64] * 8 + [1]


def test_adaptive_counts_late_releases_in_their_own_window() -> None:
    """Releases of older leases bring the count below zero; acquires after them need no free buffer of their own."""
    policy = Adaptive()
    asked = request(4096)
    for _ in range(4):
        assert policy.acquire(asked, 4096) is None
    policy.begin_run()
    for buffer_id in range(4):
        policy.release(buffer_id, asked, 4096, False)
    assert [policy.acquire(asked, 4096) for _ in range(4)] == [3, 2, 1, 0]
    assert list(policy.begin_run()) == []


def test_adaptive_gives_up_the_least_recently_used() -> None:
    policy = Adaptive(window=1)
    asked = request(4096)
    policy.acquire(asked, 4096)
    for buffer_id in (1, 2, 3):
        policy.release(buffer_id, asked, 4096, False)
    assert list(policy.begin_run()) == [1, 2]
    assert policy.acquire(asked, 4096) == 3


# ---- the two acceptance tests of microsoft/onnxruntime issue 32017 --------------------------------------------------


def test_a_burst_of_64_equal_buffers_inside_one_run() -> None:
    """The mark is that of the run, not a rate across runs: from the third token on nothing is created."""
    run = GrowingKv(Adaptive(stagger=False), tensors=64, position_bytes=2048, positions=1700)
    assert run.steps(100)[2:] == [0] * 98
    assert run.pool.ledger.created == 128, "past and present"
    assert GrowingKv("bucket", tensors=64, position_bytes=2048, positions=1700).steps(100)[2:] == [44] * 98


@pytest.mark.parametrize("stagger", [True, False])
def test_a_working_set_that_migrates_and_never_returns(stagger: bool) -> None:
    """From 4 to 8, 12 and 16 MiB per tensor: what the set has left is gone within two runs."""
    policy = Adaptive(stagger=stagger)
    run = GrowingKv(policy, tensors=64, position_bytes=2048, positions=2040)
    pool = run.pool
    for positions in (2040, 4090, 6140, 8180):
        run.positions = positions
        run.steps(4)
        rows = [row for row in pool.classes() if row["role"] == "kv" and row["live"] + row["free"]]
        assert min(row["size"] for row in rows) >= 2048 * positions, f"no class below {positions} positions is left"
        assert 128 <= sum(row["live"] + row["free"] for row in rows) <= 130, "two of a tensor that is crossing"
        assert pool.ledger.reserved_bytes <= 1.26 * 2 * pool.ledger.in_use_bytes
    assert 4 * 128 <= pool.ledger.misses <= 4 * 128 + 8


# ---- regret, borrowing, pressure ------------------------------------------------------------------------------------


ALTERNATING = {False: request(MIB, role=Role.ACTIVATION), True: request(5 * MIB, role=Role.ACTIVATION)}


def alternate(policy: Adaptive, period: int, runs: int) -> list[int]:
    """Two working sets in turn, ``period`` runs each; the creates of every run."""
    asked = ALTERNATING
    sizes = {key: policy.size_class(value) for key, value in asked.items()}
    free: set[int] = set()
    next_id, creates = 0, []
    for run in range(runs):
        free -= set(policy.begin_run())
        which = run // period % 2 == 1
        held, made = [], 0
        for _ in range(4):
            found = policy.acquire(asked[which], sizes[which])
            if found is None:
                found, next_id, made = next_id, next_id + 1, made + 1
            free.discard(found)
            held.append(found)
        for buffer_id in held:
            policy.release(buffer_id, asked[which], sizes[which], False)
        free.update(held)
        creates.append(made)
    return creates


def runs_kept(policy: Adaptive) -> int:
    """How many runs can begin without demand until the policy keeps nothing of the classes of ``alternate``."""
    runs = 0
    while any(policy.target(policy.size_class(asked), asked.role) for asked in ALTERNATING.values()):
        policy.begin_run()
        runs += 1
    return runs


def test_a_window_that_was_too_short_grows() -> None:
    """Two models in turn, 20 runs each: with a window of 8 all is created anew, until the window has learned."""
    creates = alternate(Adaptive(window=8), period=20, runs=400)
    assert sum(creates[:80]) > 8
    assert sum(creates[120:]) == 0


def test_regret_fades() -> None:
    learned, faded, fresh = (Adaptive(window=2) for _ in range(3))
    for policy in (learned, faded):
        alternate(policy, period=5, runs=40)
    assert runs_kept(learned) > 8
    for policy in (faded, fresh):
        alternate(policy, period=1, runs=2000)
    assert runs_kept(faded) == runs_kept(fresh) == 2 + 1, "the window, and the last run itself"


def test_regret_keeps_the_classes_of_alternating_caches() -> None:
    """Three chats in turn on one pool: dropping what the last runs did not use would be wrong, and is unlearned."""
    runs = [
        GrowingKv(Adaptive(growth=1.25), tensors=8, position_bytes=2048, positions=start) for start in (600, 1000, 2000)
    ]
    pool = runs[0].pool
    for run in runs[1:]:
        for buffer in run.past:
            run.pool.release(buffer)
        run.pool, run.past = pool, []
    creates = [run.step() for _ in range(60) for run in runs]
    assert sum(creates[-90:]) <= 4 * 30 * 8 * 0.35 / 8 + 30, "little more than the crossings"
    assert max(creates[-90:]) <= 3


def test_borrowing_takes_only_what_nobody_uses() -> None:
    policy = Adaptive()
    large, small = request(5000, role=Role.ACTIVATION), request(4096, role=Role.ACTIVATION)
    assert policy.acquire(large, 5120) is None
    policy.release(1, large, 5120, False)
    assert policy.acquire(small, 4096) is None, "in use in this run"
    policy.begin_run()
    policy.release(2, small, 4096, False)
    assert policy.acquire(request(4000, role=Role.ACTIVATION), 4096) == 2
    assert policy.acquire(small, 4096) is None, "in use in the last run"
    policy.begin_run()
    policy.begin_run()
    assert policy.acquire(request(4000, role=Role.ACTIVATION), 4096) is None, "more than a quarter would be unused"
    assert policy.acquire(small, 4096) == 1, "idle, and at most 1.25 times the request"
    policy.release(1, small, 5120, False)
    assert policy.target(5120, Role.ACTIVATION) == 1
    for _ in range(20):
        policy.begin_run()
    assert policy.target(5120, Role.ACTIVATION) == 0, "borrowing is no demand for the larger class"


def test_pressure_takes_the_unused_then_the_cheapest() -> None:
    policy = Adaptive()
    sizes = {1: 32 * MIB, 2: 5 * MIB, 3: 64 * KIB, 4: 6 * MIB}

    def use(buffer_id: int) -> None:
        asked = request(sizes[buffer_id], role=Role.ACTIVATION)
        policy.acquire(asked, sizes[buffer_id])
        policy.release(buffer_id, asked, sizes[buffer_id], False)

    for buffer_id in sizes:
        use(buffer_id)
    for _ in range(3):
        policy.begin_run()
    for buffer_id in (1, 2, 3):
        use(buffer_id)
    assert list(policy.reclaim(1)) == [4], "unused in the last runs"
    policy.begin_run()
    assert list(policy.reclaim(1)) == [1], "per byte the large one costs least to create again"
    assert list(policy.reclaim(5 * MIB + 1)) == [2, 3]
    assert list(policy.reclaim(1)) == []


def test_what_was_reclaimed_raises_the_bar() -> None:
    """GreedyDual-Size: a victim's credit is the floor for what is used from then on, so old entries go first."""
    policy = Adaptive()
    old, new = request(16 * MIB, role=Role.ACTIVATION), request(64 * MIB, role=Role.ACTIVATION)
    for buffer_id, asked in ((1, old), (2, request(8 * MIB, role=Role.ACTIVATION))):
        policy.acquire(asked, asked.nbytes)
        policy.release(buffer_id, asked, asked.nbytes, False)
    policy.begin_run()
    assert list(policy.reclaim(1)) == [1]
    policy.acquire(new, new.nbytes)
    policy.release(3, new, new.nbytes, False)
    policy.begin_run()
    assert list(policy.reclaim(1)) == [2], "cheaper per byte would be 3, but it is newer than the last victim"
