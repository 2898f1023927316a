"""``bucket``: ONNX Runtime's table to the byte, its eras, and what it costs a growing KV cache."""

import pytest

from stepwell.errors import BadRequest
from stepwell.memory.policies.bucket import ORT_LIMITS, Bucket
from tests.policy_lab import MIB, GrowingKv, request

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
