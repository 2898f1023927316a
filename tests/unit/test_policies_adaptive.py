"""``adaptive``: size classes and their phases, high-water marks, borrowing, pressure, growth ahead."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from stepwell.errors import BadRequest
from stepwell.memory.buffer import Role
from stepwell.memory.policies.adaptive import Adaptive
from stepwell.memory.policies.size_classes import PHASES, even_series, phase_of, staggered_series
from tests.policy_lab import KIB, MIB, GrowingKv, request


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
    for bad in ({"window": 0}, {"window": 257}, {"growth": 1.0}, {"growth": 2.5}):
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


def test_without_stagger_all_sites_share_their_classes() -> None:
    policy = Adaptive(stagger=False, growth=1.5)
    assert {policy.size_class(request(3 * MIB, site)) for site in range(64)} == {int(3.375 * MIB)}


@pytest.mark.parametrize(("tensors", "position_bytes"), [(64, 2048), (60, 768), (16, 2048)])
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
    past_and_present = 2 * run.pool.in_use_bytes
    assert run.pool.peak_reserved_bytes <= 1.2 * past_and_present


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
    assert run.pool.destroyed == 0


def test_adaptive_crossing_a_power_of_two() -> None:
    """Below 1 MiB all tensors cross together: one set for the present, one for the past, then nothing."""
    run = GrowingKv("adaptive", tensors=60, position_bytes=8, positions=2045)
    assert run.steps(12) == [60, 0, 0, 60, 60] + [0] * 7


def test_adaptive_drops_the_class_that_kv_has_left() -> None:
    run = GrowingKv("adaptive", tensors=60, position_bytes=8, positions=2045)
    run.steps(5)
    small, large = 60 * 16 * KIB, 60 * 32 * KIB
    assert run.pool.reserved_bytes == 2 * large + 60 * 16 * KIB
    run.step()
    assert run.pool.reserved_bytes == 2 * large, f"{small:,} B of the old class are gone after two runs without demand"


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
