"""``bucket``: ONNX Runtime's table to the byte, its eras, and what it costs a growing KV cache."""

import pytest

from stepwell.errors import BadRequest
from stepwell.memory.policies.bucket import ORT_LIMITS, Bucket
from tests.support.policy_lab import MIB, GrowingKv, request

# The 26 classes of onnxruntime/core/providers/webgpu/buffer_manager.cc, written out a second time on purpose.
ORT_TABLE = """
64:250 128:200 256:200 512:200 2048:230 4096:200 8192:50 16384:50 32768:50 65536:50 131072:50 262144:50 524288:50
1048576:50 2097152:30 4194304:20 8388608:10 12582912:10 16777216:10 26214400:15 33554432:22 44236800:2 58982400:6
67108864:6 134217728:6 167772160:6
"""


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


# ---- what ONNX Runtime does to Phi-4-mini: 64 KV tensors of 2,048 B per position ------------------------------------

# The largest present length S of each class, and the creates per token there: 44, 54, 54, 54 of them were measured in
# microsoft/onnxruntime issue 32017.  tests/simulation/replay/test_simulator.py has the flush points of its decode loop.
STAIRCASE = [
    *((512, 14), (1024, 34), (2048, 44), (4096, 54), (6144, 54), (8192, 54), (12800, 49), (16384, 42), (21600, 62)),
    *((28800, 58), (32768, 58), (65536, 58), (81920, 58), (90000, 64)),
]


@pytest.mark.parametrize("era", ["A", "B", "C"])
def test_creates_per_token_of_phi4_mini_on_a_pool(era: str) -> None:
    for positions, misses in STAIRCASE:
        run = GrowingKv(Bucket(era=era), tensors=64, position_bytes=2048, positions=positions - 6)
        assert run.steps(6)[2:] == [misses] * 4, positions


@pytest.mark.parametrize(
    ("era", "recorded", "reused"),
    [("A", True, False), ("A", False, False), ("B", True, True), ("B", False, True), ("C", True, False),
     ("C", False, True)],
)  # fmt: skip
def test_when_a_released_buffer_serves_again(era: str, recorded: bool, reused: bool) -> None:
    policy = Bucket(era=era)
    assert list(policy.release(1, request(4096), 4096, recorded)) == []
    assert policy.acquire(request(4096), 4096) == (1 if reused else None)
    if not reused:
        assert list(policy.flush()) == []
        assert policy.acquire(request(4096), 4096) == 1, "after the flush in any case"


@pytest.mark.parametrize(("era", "at_release", "at_flush"), [("A", [], [3]), ("B", [], [3]), ("C", [3], [])])
def test_when_the_overflow_is_given_up(era: str, at_release: list[int], at_flush: list[int]) -> None:
    policy = Bucket({4096: 2}, era)
    given_up = [list(policy.release(i, request(4096), 4096, False)) for i in (1, 2, 3)]
    assert given_up[2] == at_release
    assert list(policy.flush()) == at_flush


def test_eras_are_checked() -> None:
    with pytest.raises(BadRequest, match="era 'D'"):
        Bucket(era="D")


# ---- on a pool ------------------------------------------------------------------------------------------------------


def expected_misses(tensors: int, nbytes: int) -> int:
    """What ONNX Runtime's table predicts: the tensors of a step beyond the free buffers that their class keeps."""
    size = min((size for size in ORT_LIMITS if size >= nbytes), default=0)
    return max(0, tensors - ORT_LIMITS.get(size, 0))


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
