"""The growing-KV workload on the real device: buffers really created, results really read, the counts of the table."""

import pytest

from tests.browser.conftest import Lab
from tests.support.covering import FULL

pytestmark = pytest.mark.browser
SHARES_A_PAGE = True

SOURCE = """
from stepwell.decode.kv_pattern import KVPattern
from stepwell.gpu import open_device
from stepwell.launch.launcher import Launcher
from stepwell.memory.pool import BufferPool

async def main(args):
    device = await open_device()
    launcher = Launcher(device, BufferPool(device, args["policy"]))
    runs = []
    for start in args["starts"]:
        pattern = KVPattern(args["workload"], launcher, kv=args["kv"], start=start, tokens=args["tokens"])
        await pattern.prepare()
        events = [event async for event in pattern.run()]
        pattern.close()
        launcher.bind_groups.clear()
        launcher.pool.trim()
        launcher.pool.flush()
        runs.append({
            "positions": [event.position for event in events],
            "created": [event.counters.buffers_created for event in events],
            "classes": sorted({event.counters.kv_class_bytes for event in events}),
            "ids": [event.id for event in events],
            "ms": [event.timing.ms for event in events],
        })
    left = launcher.pool.report().reserved_bytes
    launcher.close()
    launcher.pool.close()
    device.close()
    return {"runs": runs, "left": left}
"""
CREATES = {2000: 44, 2100: 54, 6200: 54, **({4200: 54} if FULL else {})}  # of 4, 8 and 16 MiB; and 12
CROSSING = 2044  # a few tokens below ONNX Runtime's 4 MiB


def test_bucket_creates_what_issue_32017_counts(lab: Lab) -> None:
    result = lab.run(SOURCE, workload="kv64", kv="grow", policy="bucket", starts=list(CREATES), tokens=4)
    assert [run["created"][2:] for run in result["runs"]] == [[n, n] for n in CREATES.values()]
    assert [run["classes"] for run in result["runs"]] == [[-(-start // 2048) << 22] for start in CREATES]
    assert result["left"] == 0


def test_adaptive_crosses_with_at_most_one_buffer_per_token_and_every_arm_computes_the_same(lab: Lab) -> None:
    arms = {"adaptive": "grow", "bucket": "grow", "static": "static"}
    runs = {}
    for arm, kv in arms.items():
        policy = "adaptive" if arm == "static" else arm
        result = lab.run(SOURCE, workload="kv64", kv=kv, policy=policy, starts=[CROSSING], tokens=9)
        assert result["left"] == 0
        (runs[arm],) = result["runs"]
    assert runs["adaptive"]["ids"] == runs["bucket"]["ids"] == runs["static"]["ids"]
    assert len(set(runs["adaptive"]["ids"])) == 9
    assert max(runs["adaptive"]["created"][3:]) <= 1
    assert runs["bucket"]["created"][2:] == [44, 44, 44, 64, 64, 54, 54]
    assert runs["static"]["created"][3:] == [0] * 6


def test_kv16_has_no_staircase(lab: Lab) -> None:
    result = lab.run(SOURCE, workload="kv16", kv="grow", policy="bucket", starts=[2000, 2100], tokens=4)
    assert [run["created"][2:] for run in result["runs"]] == [[0, 0], [6, 6]]
