"""The kernel that only reads, and the timing of passes one by one, on the real device."""

from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from stepwell.profiling.plain_read import LOADS, THREADS, UNIT_BYTES
from tests.browser.conftest import Lab

pytestmark = pytest.mark.browser
SHARES_A_PAGE = True

READ = """
import base64
from stepwell import BufferPool, Role, open_device
from stepwell.kernels.ops import Matrix, Ops
from stepwell.launch.selection import tuning_for
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.step.recorder import Recorder
from stepwell.profiling.plain_read import CPU_BYTES, record_empty, record_read, time_plain_read

async def main(args):
    device = await open_device()
    pool = BufferPool(device)
    launcher = Launcher(device, pool, LaunchOptions(shared_pass=False, replay=False))
    nbytes, sums_bytes = args["nbytes"], args["sums_bytes"]
    words = pool.acquire(nbytes, Role.WEIGHTS, "words")
    sums = pool.acquire(sums_bytes, Role.WEIGHTS, "sums")
    staging = pool.acquire(nbytes + sums_bytes, Role.STAGING)
    rec = Recorder()
    Ops(tuning_for(device.info)).noise(rec, Matrix("F32", nbytes // 4 // 4096, 4096, words, None), 1.0)
    record_read(rec, words, sums, nbytes)
    rec.copy(words, 0, staging, 0, nbytes)
    rec.copy(sums, 0, staging, nbytes, sums_bytes)
    record_empty(rec, sums, 3)
    step = rec.finish()
    await launcher.prepare(step)
    device.set_profile(passes=True)
    launcher.submit(step)
    read = await launcher.read(staging, nbytes + sums_bytes)
    passes = (await device.take_profile()).passes_us
    after = await launcher.peek(sums, 8)
    plain = await time_plain_read(launcher, 0.0)
    device.set_profile()
    for buffer in (words, sums, staging):
        pool.release(buffer)
    launcher.close()
    pool.close()
    left = device.table_sizes()["buffers"]
    device.close()
    return {"words": base64.b64encode(read).decode(), "after": list(after), "passes": passes, "left": left,
            "plain": [plain.nbytes, plain.us, plain.gb_s], "size": CPU_BYTES}
"""


def test_a_plain_read_sums_all_there_is(lab: Lab) -> None:
    nbytes = 2 * UNIT_BYTES
    sums_bytes = nbytes // LOADS // 4
    result: dict[str, Any] = lab.run(READ, nbytes=nbytes, sums_bytes=sums_bytes)
    got = np.frombuffer(b64decode(result["words"]), dtype=np.uint32)
    words, sums = got[: nbytes // 4], got[nbytes // 4 :]
    expected = words.reshape(2, LOADS, THREADS, 4).sum(axis=(1, 3), dtype=np.uint32)
    assert len(set(words.tolist())) > 0.9 * 2**15  # it read something
    np.testing.assert_array_equal(sums.reshape(2, THREADS), expected)
    # the launches without loads wrote one word
    assert result["after"] == [0] * 4 + list(sums[1:2].tobytes())
    assert len(result["passes"]) == 1 + 1 + 3
    size, us, gb_s = result["plain"]
    assert size == result["size"] and us > 0
    assert gb_s == pytest.approx(size / us / 1e3)
    assert result["left"] == 0
