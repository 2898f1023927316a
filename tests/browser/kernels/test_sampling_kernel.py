"""sample.wgsl in Chromium against the definition in float64: what is kept, and what is drawn of it.

Distances are whole numbers and equal the reference's; so does the cut of the top k.  Weights are f32: exp(x) to
3 + 2|x| ulps (WGSL), sums of some thousand terms, and fixed point to 2^-19 of the near end of a bin.  Together less
than 2e-5 of a sum: so near to a draw or to the end of the nucleus the neighbour is as good.
"""

from base64 import b64decode
from dataclasses import asdict
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest

from stepwell.decode.sampling import Sampling, choose
from stepwell.kernels.sampling import BINS, smallest_of
from stepwell.kernels.tuning import Tuning
from tests.browser.conftest import Lab, encode
from tests.browser.kernels.test_kernels import TUNINGS
from tests.reference import sampling as reference

pytestmark = pytest.mark.browser
SHARES_A_PAGE = True
TOLERANCE = 2e-5

SOURCE = """
from base64 import b64decode, b64encode
from stepwell import BufferPool, Role, open_device
from stepwell.kernels.sampling import Cuts, SampleOps
from stepwell.kernels.tuning import Tuning
from stepwell.launch.launcher import Launcher
from stepwell.step.recorder import Recorder

async def run(launcher, tuning, case):
    device, pool, size = launcher.device, launcher.pool, case["size"]
    ops = SampleOps(Tuning(**tuning))
    sizes = {"logits": 4 * size, "settings": 16, "work": ops.work_bytes(), "distances": 4 * size, "token": 4}
    held = [pool.acquire(nbytes, Role.WORKSPACE, name) for name, nbytes in sizes.items()]
    logits, settings, work, distances, token = held
    for buffer in held:
        device.write_buffer(buffer.id, 0, b"\\xa5" * buffer.size)
    device.write_buffer(logits.id, 0, b64decode(case["logits"]))
    device.write_buffer(settings.id, 0, b64decode(case["settings"]))
    tokens = []
    for draw in case["draws"]:
        rec = Recorder(draw=draw)
        ops.sample(rec, *held, size=size, ban=tuple(case["ban"]), cuts=Cuts(*case["cuts"]))
        staging = pool.acquire(4, Role.STAGING)
        rec.copy_out(token, 0, 4)
        step = rec.finish(staging)
        await launcher.prepare(step)
        launcher.submit(step)
        tokens.append((staging, launcher.read(staging, 4)))
    ids = []
    for staging, token in tokens:
        ids.append(int.from_bytes(await token, "little"))
        pool.release(staging)
    outcome = {"ids": ids}
    for name, buffer in (("work", work), ("distances", distances)):
        outcome[name] = b64encode(await launcher.peek(buffer, sizes[name])).decode()
    for buffer in held:
        pool.release(buffer)
    pool.flush()
    return outcome

async def main(args):
    device = await open_device()
    launcher = Launcher(device, BufferPool(device, "disabled"))
    try:
        return [await run(launcher, args["tunings"][case["tuning"]], case) for case in args["cases"]]
    finally:
        device.close()
"""
PLANS = {
    "cpu": TUNINGS["quad"],
    "gpu": Tuning(**{**asdict(TUNINGS["split"]), "sample_parts": 13, "sample_threads": 32}),
}


class Case(NamedTuple):
    kind: str  # of the logits
    size: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    ban: tuple[int, ...] = ()
    tuning: str = "gpu"

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def draws(self) -> list[int]:
        count = 5 if self.size > 10_000 else 9
        random = np.random.default_rng(crc32(repr(self).encode()))
        return [0, 1, reference.DRAWS - 1, *random.integers(reference.DRAWS, size=count).tolist()]

    def logits(self) -> npt.NDArray[np.float32]:
        random = np.random.default_rng(crc32(f"{self.kind} {self.size}".encode()))
        values = random.normal(scale=3.0, size=self.size).astype(np.float32)
        if self.kind == "equal":
            values[:] = -1.5
        elif self.kind == "ties":
            values = np.round(values * 2) / 2
        elif self.kind == "huge":
            values[self.size // 3] = 3e38
        elif self.kind == "near":
            values = 20 + values * np.float32(1e-4)
        elif self.kind == "broken":
            values[::3], values[1::7], values[2::11] = np.nan, -np.inf, np.inf
        elif self.kind == "lost":
            values[:] = np.nan
        elif self.kind == "wide":
            values *= 1e37
        return values


SIZES = (1, 2, 63, 1000, 2049)
CASES = [
    *(Case("normal", size, 1.0, top_k, top_p) for size in SIZES for top_k, top_p in ((0, 1.0), (40, 0.9))),
    *(Case("normal", 3001, temperature, 5, tuning="cpu") for temperature in (1e-45, 0.01, 0.7, 1.3, 50.0, 1e300)),
    *(Case("normal", 3001, 0.8, top_k, tuning="cpu") for top_k in (2, 3, 3000, 3001, 1 << 40)),
    *(Case("normal", 3001, 0.8, 0, top_p, tuning="cpu") for top_p in (1e-50, 1e-6, 0.5, 0.999, 1 - 2e-9)),
    *(Case("normal", 3001, 1.5, 200, top_p) for top_p in (1e-6, 0.3, 0.95, 0.9999)),
    *(
        Case(kind, 1537, 0.9, top_k, top_p, tuning=tuning)
        for kind in ("equal", "ties", "huge", "near", "broken", "wide")
        for top_k, top_p in ((0, 1.0), (7, 1.0), (0, 0.6), (300, 0.8))
        for tuning in ("gpu", "cpu")
    ),
    *(Case("lost", 70, 1.0, *cuts, ban) for cuts in ((0, 1.0), (3, 0.5)) for ban in ((), (0, 1, 3))),
    *(Case("ties", 500, 1.0, top_k, top_p, (0, 7, 499)) for top_k, top_p in ((0, 1.0), (20, 1.0), (20, 0.5))),
    Case("normal", 49_152, 0.9, 40, 0.95),
    Case("normal", 49_152, 0.9, 40, 0.95, tuning="cpu"),
    Case("equal", 151_936, 1.0, 100_000, 0.75),
    Case("normal", 262_144, 2.0, 0, 0.9),
]


@pytest.fixture(scope="module")
def outcomes(lab: Lab) -> dict[Case, Any]:
    cases = [
        {
            "tuning": case.tuning,
            "size": case.size,
            "ban": case.ban,
            "draws": case.draws,
            "cuts": case.sampling.cuts,
            "settings": encode(case.sampling.settings),
            "logits": encode(case.logits().tobytes()),
        }
        for case in CASES
    ]
    results = lab.run(SOURCE, tunings={name: asdict(tuning) for name, tuning in PLANS.items()}, cases=cases)
    return dict(zip(CASES, results, strict=True))


def kept_on_gpu(case: Case, distance: reference.Ids, work: bytes) -> reference.Kept:
    """What is nearer than the cut that the GPU has found, and the first so many ids at it."""
    cut, ties = np.frombuffer(work, np.dtype([("cut", "<u4"), ("ties", "<f4")]), offset=len(work) - 8)[0]
    assert ties == int(ties)
    at_cut = np.flatnonzero((distance == cut) & (distance < reference.REACH))[: int(ties)]
    ids = np.sort(np.concatenate((np.flatnonzero(distance < min(cut, reference.REACH)), at_cut)))
    return reference.Kept(ids, reference.weigh(distance[ids]), 0.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sampling(outcomes: dict[Case, Any], case: Case) -> None:
    outcome = outcomes[case]
    distance = np.frombuffer(b64decode(outcome["distances"]), np.uint32).astype(np.int64)
    assert (distance == reference.distances(case.logits(), case.temperature, case.ban)).all()
    work = b64decode(outcome["work"])
    assert len(work) == 4 * (3 * PLANS[case.tuning].sample_parts + 4 * BINS + 6)
    kept, expected = kept_on_gpu(case, distance, work), reference.kept(distance, case.top_k, case.top_p)
    if case.kind == "lost":
        assert not len(kept.ids)
        assert set(outcome["ids"]) == {smallest_of(case.ban)}
        return
    if case.top_p == 1:
        assert kept.ids.tolist() == expected.ids.tolist()
    else:  # as small as holds the nucleus
        order = kept.ids[np.lexsort((kept.ids, distance[kept.ids]))]
        sums = np.cumsum(reference.weigh(distance[order])) / expected.all_weigh
        assert sums[-1] >= case.top_p - TOLERANCE
        assert len(sums) == 1 or sums[-2] < case.top_p + TOLERANCE
    for draw, index in zip(case.draws, outcome["ids"], strict=True):
        assert index in reference.drawn(kept, draw, TOLERANCE), draw


def test_the_host_draws_the_same(outcomes: dict[Case, Any]) -> None:
    """Of the same logits and draws, but where a boundary is nearer than the tolerance."""
    same = compared = 0
    for case, outcome in outcomes.items():
        if case.kind == "lost" or case.size > 50_000:
            continue
        logits = case.logits().tolist()
        host = [choose(logits, case.sampling, draw, case.ban) for draw in case.draws[:8]]
        compared += len(host)
        same += sum(one == other for one, other in zip(host, outcome["ids"], strict=False))
    assert compared > 500
    assert same >= 0.995 * compared, f"{same} of {compared}"
