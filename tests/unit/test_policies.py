"""Every policy by the same rules, and what each one decides: ONNX Runtime's table to the byte, adaptive's creates."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import BadRequest
from stepwell.gpu.fake_device import FakeDevice
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.policies import POLICIES, make_policy
from stepwell.memory.policies.adaptive import PHASES, Adaptive, size_series
from stepwell.memory.policies.base import Policy, Request
from stepwell.memory.policies.bucket import ORT_LIMITS, Bucket
from stepwell.memory.pool import BufferPool

KIB, MIB = 1 << 10, 1 << 20
LARGE = {"maxBufferSize": 1 << 33, "maxStorageBufferBindingSize": 1 << 33}

# The 26 classes of onnxruntime/core/providers/webgpu/buffer_manager.cc, written out a second time on purpose.
ORT_TABLE = """
64:250 128:200 256:200 512:200 2048:230 4096:200 8192:50 16384:50 32768:50 65536:50 131072:50 262144:50 524288:50
1048576:50 2097152:30 4194304:20 8388608:10 12582912:10 16777216:10 26214400:15 33554432:22 44236800:2 58982400:6
67108864:6 134217728:6 167772160:6
"""


def request(nbytes: int, site: int = 0, role: Role = Role.KV) -> Request:
    return Request(nbytes, role, site)


class GrowingKv:
    """The decode loop with a growing KV cache: each step acquires all present tensors, then releases the past ones."""

    def __init__(self, policy: str | Policy, tensors: int, position_bytes: int, positions: int) -> None:
        self.pool = BufferPool(FakeDevice(limits=LARGE, log_limit=0), policy)
        self.tensors, self.position_bytes, self.positions = tensors, position_bytes, positions
        self.past = self._present()

    def _present(self) -> list[Buffer]:
        nbytes = self.position_bytes * self.positions
        return [self.pool.acquire(nbytes, Role.KV, site=site) for site in range(self.tensors)]

    def step(self) -> int:
        """One decode step; how many buffers it created."""
        before = self.pool.created
        self.pool.begin_run()
        self.positions += 1
        present = self._present()
        self.pool.flush()
        for buffer in reversed(self.past):
            self.pool.release(buffer)
        self.past = present
        return self.pool.created - before

    def steps(self, count: int) -> list[int]:
        return [self.step() for _ in range(count)]


# ---- rules for all policies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@given(nbytes=st.integers(1, 1 << 36), site=st.integers(0, 1 << 20))
@settings(max_examples=50, deadline=None)
def test_size_class_holds_the_request(name: str, nbytes: int, site: int) -> None:
    size = make_policy(name).size_class(request(nbytes, site))
    assert size >= nbytes
    assert size % 4 == 0


@pytest.mark.parametrize("name", POLICIES)
def test_table_row(name: str) -> None:
    assert "\n" not in POLICIES[name].summary
    assert 20 < len(POLICIES[name].summary) < 120
    assert make_policy(name) is not make_policy(name)


def test_unknown_name() -> None:
    with pytest.raises(BadRequest, match=r"'lru'.*adaptive, bucket, simple, exact, pow2, lazy_release, disabled"):
        make_policy("lru")


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "acquire", "acquire", "release", "release", "flush", "begin_run", "drain"]),
        st.one_of(st.integers(1, 5000), st.sampled_from([64, 4096, MIB, MIB + 1, 3 * MIB, 1 << 28])),
        st.integers(0, 70),
    ),
    max_size=80,
)


def replay(policy: Policy, steps: Sequence[Step]) -> Iterator[object]:
    """Run ``steps`` without a pool and yield every decision; raise if the policy gives out or up what it may not."""
    live: list[tuple[int, Request, int]] = []
    free: dict[int, int] = {}  # id → size
    created = 0
    for op, nbytes, site in steps:
        given_up: Sequence[int] = ()
        if op == "acquire":
            asked = request(nbytes, site, list(Role)[1 + site % 3])
            size = policy.size_class(asked)
            found = policy.acquire(asked, size)
            if found is None:
                found = created
                created += 1
            else:
                assert free.pop(found) == size, "only a free buffer of that size is handed out"
            live.append((found, asked, size))
            yield found
        elif op == "release" and live:
            buffer_id, asked, size = live.pop(site % len(live))
            free[buffer_id] = size
            given_up = policy.release(buffer_id, asked, size, False)
        elif op != "release":
            given_up = getattr(policy, op)()
        for buffer_id in given_up:
            del free[buffer_id]  # KeyError: given up twice, or while in use
        yield list(given_up)
    for buffer_id in policy.drain():
        del free[buffer_id]
    assert not free, "drain returns every buffer that is left"


@pytest.mark.parametrize("name", POLICIES)
@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_decisions_are_sound_and_repeatable(name: str, steps: list[Step]) -> None:
    assert list(replay(make_policy(name), steps)) == list(replay(make_policy(name), steps))


# ---- disabled, lazy_release, simple ---------------------------------------------------------------------------------


def test_disabled_and_lazy_release_never_reuse() -> None:
    for name, at_release, at_flush in (("disabled", [7], []), ("lazy_release", [], [7])):
        policy = make_policy(name)
        assert policy.size_class(request(17)) == 32
        assert list(policy.release(7, request(17), 32, False)) == at_release
        assert policy.acquire(request(17), 32) is None
        assert list(policy.flush()) == at_flush
        assert policy.acquire(request(17), 32) is None
        assert list(policy.drain()) == []


def test_simple_reuses_exact_sizes_after_the_flush() -> None:
    policy = make_policy("simple")
    for buffer_id in (1, 2):
        assert list(policy.release(buffer_id, request(32), 32, False)) == []
    assert policy.acquire(request(32), 32) is None
    assert list(policy.flush()) == []
    assert policy.acquire(request(48), 48) is None
    assert [policy.acquire(request(17), 32) for _ in range(3)] == [2, 1, None]


def test_simple_grows_without_bound() -> None:
    run = GrowingKv("simple", tensors=4, position_bytes=64, positions=10)
    assert run.steps(20) == [4] * 20
    assert run.pool.destroyed == 0
    assert run.pool.reserved_bytes == sum(4 * 64 * positions for positions in range(10, 31))


# ---- bucket ---------------------------------------------------------------------------------------------------------


def test_ort_table_exactly() -> None:
    assert dict(ORT_LIMITS) == {int(size): int(limit) for size, limit in (row.split(":") for row in ORT_TABLE.split())}
    assert len(ORT_LIMITS) == 26
    assert sum(ORT_LIMITS.values()) == 1823
    assert sum(size * limit for size, limit in ORT_LIMITS.items()) == 4_418_595_456


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (1, 64),
        (64, 64),
        (65, 128),
        (513, 2048),  # there is no 1024
        (4 * MIB, 4 * MIB),
        (4 * MIB + 1, 8 * MIB),
        (16 * MIB + 1, 25 * MIB),
        (167_772_160, 167_772_160),
        (167_772_161, 167_772_176),  # above the table: a multiple of 16
    ],
)
def test_ort_classes(nbytes: int, size: int) -> None:
    assert Bucket().size_class(request(nbytes)) == size


def test_bucket_matches_its_class_exactly_last_in_first_out() -> None:
    policy = Bucket()
    for buffer_id in (1, 2, 3):
        policy.release(buffer_id, request(16 * MIB), 16 * MIB, False)
    assert policy.acquire(request(12 * MIB), 12 * MIB) is None, "a larger free buffer does not serve"
    assert [policy.acquire(request(16 * MIB), 16 * MIB) for _ in range(4)] == [3, 2, 1, None]


def test_bucket_era_b_keeps_at_release_and_retries_at_flush() -> None:
    """Room at the release: kept and reusable at once.  No room: parked, and tested again at the flush in order."""
    policy = Bucket({256: 2})
    for buffer_id in (1, 2, 3, 4):
        assert list(policy.release(buffer_id, request(256), 256, False)) == []
    assert policy.acquire(request(256), 256) == 2
    assert list(policy.flush()) == [4], "3 was parked first and gets the room that 2 left"
    assert [policy.acquire(request(256), 256) for _ in range(3)] == [3, 1, None]


def test_bucket_never_keeps_what_is_above_the_table() -> None:
    policy = Bucket()
    size = policy.size_class(request(200 * MIB))
    assert list(policy.release(1, request(200 * MIB), size, False)) == []
    assert policy.acquire(request(200 * MIB), size) is None
    assert list(policy.flush()) == [1]


def test_bucket_with_the_callers_table() -> None:
    run = GrowingKv(Bucket({4096: 10, 8192: 4}), tensors=6, position_bytes=64, positions=32)
    assert run.steps(32)[2:] == [0] * 30, "10 kept for 6 tensors of up to 4,096 B"
    assert run.steps(64)[2:] == [2] * 62, "4 kept for 6 tensors of up to 8,192 B"
    for bad in ({0: 1}, {6: 1}, {64: -1}):
        with pytest.raises(BadRequest, match="limit table"):
            Bucket(bad)


def expected_misses(tensors: int, nbytes: int) -> int:
    """What ONNX Runtime's table predicts: the tensors of a step beyond the free buffers that their class keeps."""
    size = min((size for size in ORT_LIMITS if size >= nbytes), default=0)
    return max(0, tensors - ORT_LIMITS.get(size, 0))


@pytest.mark.parametrize(
    ("positions", "misses"),
    [
        (400, 14),
        (800, 34),
        (1500, 44),
        (3000, 54),
        (5000, 54),
        (7000, 54),
        (10_000, 49),
        (14_000, 42),
        (20_000, 62),
        (25_000, 58),
        (30_000, 58),
        (50_000, 58),
        (70_000, 58),
        (90_000, 64),
    ],
)
def test_bucket_creates_per_token_of_phi4_mini(positions: int, misses: int) -> None:
    """64 KV tensors of 2,048 B per position: microsoft/onnxruntime issue 32017 measured 44, 54, 54, 54."""
    run = GrowingKv("bucket", tensors=64, position_bytes=2048, positions=positions)
    assert run.steps(6)[2:] == [misses] * 4
    assert expected_misses(64, 2048 * positions) == misses


def test_bucket_over_a_crossing() -> None:
    """The step that enters a class and the one after it create everything."""
    run = GrowingKv("bucket", tensors=64, position_bytes=2048, positions=2040)
    assert run.steps(14) == [64] + [44] * 7 + [64, 64] + [54] * 4


@pytest.mark.parametrize("positions", [100, 341, 342, 700, 1400, 2800, 5500, 8192])
def test_bucket_creates_per_token_of_smollm2(positions: int) -> None:
    """60 KV tensors of 768 B per position."""
    run = GrowingKv("bucket", tensors=60, position_bytes=768, positions=positions)
    nbytes = 768 * (positions + 4)
    assert run.steps(6)[4:] == [expected_misses(60, nbytes)] * 2


@pytest.mark.parametrize(("positions", "misses"), [(1500, 0), (3000, 6), (7000, 6), (10_000, 1)])
def test_bucket_control_with_16_tensors(positions: int, misses: int) -> None:
    """With few KV tensors there is no staircase to see (the Qwen3.5-4B control of the same issue)."""
    run = GrowingKv("bucket", tensors=16, position_bytes=2048, positions=positions)
    assert run.steps(6)[2:] == [misses] * 4


# ---- adaptive -------------------------------------------------------------------------------------------------------


def test_adaptive_classes() -> None:
    policy = Adaptive()
    for nbytes, size in ((1, 256), (256, 256), (257, 512), (5000, 8192), (512 * KIB, 512 * KIB), (MIB, MIB)):
        assert policy.size_class(request(nbytes)) == size
    series = [size_series(phase) for phase in range(PHASES)]
    for sizes in series:
        large = [size for size in sizes if size > MIB]
        assert sizes == sorted(set(sizes))
        assert all(size % 256 == 0 for size in sizes)
        assert all(after <= 2 * before for before, after in pairwise(sizes)), "at most half of a buffer is unused"
        assert all(1.24 < after / before < 1.26 for before, after in pairwise(large))
    assert policy.size_class(request(1 << 40)) == 1 << 40
    assert len({sizes[20] for sizes in series}) == PHASES, "each phase has classes of its own"
    assert policy.size_class(request(3 * MIB, site=70)) == policy.size_class(request(3 * MIB, site=6))
    with pytest.raises(BadRequest, match="window of 0"):
        Adaptive(window=0)


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
