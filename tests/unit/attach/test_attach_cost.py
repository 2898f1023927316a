"""What a pair of createBuffer and destroy costs when the buffer is a reused one: what is run of the pool, counted.

``python -m harness attach-cost`` has the microseconds.
"""

import pytest

from stepwell.attach.keeper import Keeper
from stepwell.memory.policies import POLICIES, make_policy
from tests.support.counted import lines_run
from tests.unit.attach.test_attach_pool import node

_SLOW = ("simple", "lazy_release", "disabled")
KEEPING = [name for name, entry in POLICIES.items() if entry.attached and name not in _SLOW]  # within a few steps
BUFFERS = 32  # of a step

STEPS = """
import { Session } from "node:inspector/promises";

const session = new Session();
session.connect();
await session.post("Profiler.enable");
await session.post("Profiler.startPreciseCoverage", { callCount: true, detailed: true });

/** How often blocks of the pool's code were run since the last call. */
async function blocksRun() {
  const { result } = await session.post("Profiler.takePreciseCoverage");
  const ours = result.filter(({ url }) => url.includes("/stepwell/attach/js/"));
  const blocks = ours.flatMap(({ functions }) => functions.flatMap(({ ranges }) => ranges));
  return blocks.reduce((sum, { count }) => sum + count, 0);
}

async function perPair(policy, others) {
  const attachment = attach({ target: realm, timers, policy });
  const device = new realm.GPUDevice();
  const held = Array.from({ length: others }, () => device.createBuffer({ size: 1024, usage: DATA }));
  let past = [];
  let found = 0;
  for (let number = 0; number < 8; number += 1) {
    await blocksRun();
    const present = Array.from({ length: BUFFERS }, () => device.createBuffer({ size: 4096, usage: DATA }));
    for (const buffer of past) buffer.destroy();
    found = await blocksRun();
    device.queue.submit([]);
    await settle();
    past = present;
  }
  const { created } = attachment.stats().devices[0];
  for (const buffer of [...past, ...held]) buffer.destroy();
  attachment.detach();
  return [found / BUFFERS, created - others];
}

const found = {};
for (const policy of POLICIES) found[policy] = [await perPair(policy, 0), await perPair(policy, 500)];
print(found);
"""


def test_javascripts_pair_costs_the_same_whatever_the_pool_holds() -> None:
    found = node(STEPS.replace("BUFFERS", str(BUFFERS)).replace("POLICIES", repr(KEEPING)))
    print(found)
    for policy, (alone, among_many) in found.items():
        assert 5 < alone[0] < 60, policy
        assert among_many[0] < 2 * alone[0], "500 others would be seen"
        assert alone[1] == among_many[1] == 2 * BUFFERS, "two sets take turns"


@pytest.mark.parametrize("policy", KEEPING)
def test_pythons_pair_costs_the_same_whatever_the_pool_holds(policy: str) -> None:
    def pair_cost(others: int) -> int:
        keeper = Keeper(lambda: make_policy(policy))
        for _ in range(others):
            assert keeper.acquire(0x8C, 1024) == 0
            keeper.created(0x8C, 1024)
        assert keeper.acquire(0x8C, 4096) == 0
        buffer = keeper.created(0x8C, 4096)
        keeper.release(buffer)

        def pair() -> None:
            assert keeper.acquire(0x8C, 4096) == buffer
            keeper.release(buffer)

        return lines_run(pair)

    alone = pair_cost(0)
    print(alone)
    assert 10 < alone < 80
    assert pair_cost(500) == alone
