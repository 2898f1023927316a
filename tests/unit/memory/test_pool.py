"""BufferPool: leases, the flush, limits, the ledger, and what stays true under every policy."""

import asyncio
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import DeviceLost, OutOfMemory, PoolError
from stepwell.gpu.device import BufferUsage
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.fake_objects import FakeBuffer
from stepwell.gpu.program import Op
from stepwell.memory.buffer import CHOSEN_ROLES, Buffer, Role
from stepwell.memory.ledger import MOST_CLASSES
from stepwell.memory.policies import POLICIES
from stepwell.memory.policies.base import Request
from stepwell.memory.policies.bucket import Bucket
from stepwell.memory.policies.disabled import Disabled
from stepwell.memory.pool import USAGE, BufferPool

MIB = 1 << 20
ALL_POLICIES = pytest.mark.parametrize("policy", POLICIES)


def open_pool(policy: str = "adaptive", **limits: int) -> tuple[FakeDevice, BufferPool]:
    device = FakeDevice(limits=limits)
    return device, BufferPool(device, policy)


def live_buffers(device: FakeDevice) -> int:
    return device.table_sizes()["buffers"]


# ---- leases ---------------------------------------------------------------------------------------------------------


def test_usage_follows_the_role() -> None:
    device, pool = open_pool()
    for role in Role:
        pool.acquire(64, role, str(role))
    created = [(entry[4], int(entry[3])) for entry in device.log if entry[0] == "create_buffer"]
    assert created == [(str(role), int(USAGE[role])) for role in Role]
    assert USAGE[Role.KV] == BufferUsage.STORAGE | BufferUsage.COPY_SRC | BufferUsage.COPY_DST
    assert USAGE[Role.STAGING] == BufferUsage.MAP_READ | BufferUsage.COPY_DST
    assert USAGE[Role.UNIFORM] == BufferUsage.UNIFORM | BufferUsage.COPY_DST


def test_a_lease_says_what_was_asked_for() -> None:
    _, pool = open_pool("bucket")
    buffer = pool.acquire(100, Role.KV, "k0", site=3)
    assert (buffer.size, buffer.requested, buffer.role, buffer.label, buffer.site) == (128, 100, Role.KV, "k0", 3)
    with pytest.raises(AttributeError):
        buffer.size = 1  # type: ignore[misc]


@ALL_POLICIES
def test_a_lease_ends_once(policy: str) -> None:
    _, pool = open_pool(policy)
    buffer = pool.acquire(100, Role.ACTIVATION, "x")
    pool.check(buffer)
    pool.release(buffer)
    for call in (pool.release, pool.check):
        with pytest.raises(PoolError, match=r"released already|not of this pool"):
            call(buffer)
    pool.flush()
    with pytest.raises(PoolError, match=r"released already|not of this pool"):
        pool.release(buffer)
    again = pool.acquire(100, Role.ACTIVATION, "x")
    with pytest.raises(PoolError):
        pool.release(buffer)  # even if the memory is leased again, this lease has ended
    pool.release(again)


def test_foreign_buffers() -> None:
    _, ours = open_pool()
    _, theirs = open_pool()
    buffer = theirs.acquire(100, Role.KV, "k")
    with pytest.raises(PoolError, match=r"\(k, 256 B\) is not of this pool"):
        ours.release(buffer)
    mine = ours.acquire(100, Role.KV)
    copy = Buffer(mine.id, mine.size, mine.requested, mine.role)
    with pytest.raises(PoolError):
        ours.release(copy)  # a lease is an object, not a number


@ALL_POLICIES
def test_sizes_that_make_no_sense(policy: str) -> None:
    device, pool = open_pool(policy)
    for nbytes in (0, -16):
        with pytest.raises(PoolError, match="ask for 1 B or more"):
            pool.acquire(nbytes, Role.KV)
    assert live_buffers(device) == 0


@ALL_POLICIES
def test_limits_of_the_device(policy: str) -> None:
    device, pool = open_pool(policy, maxBufferSize=3 * MIB, maxStorageBufferBindingSize=2 * MIB + 512)
    for role in CHOSEN_ROLES:
        with pytest.raises(PoolError, match=r"2,097,665 B for k0; .* 2,097,664 B \(maxStorageBufferBindingSize\)"):
            pool.acquire(2 * MIB + 513, role, "k0")
    with pytest.raises(PoolError, match=r"65,540 B .* 65,536 B \(maxUniformBufferBindingSize\)"):
        pool.acquire(65_540, Role.UNIFORM)
    with pytest.raises(PoolError, match=r"3,145,732 B .* 3,145,728 B \(maxBufferSize\)"):
        pool.acquire(3 * MIB + 4, Role.STAGING)
    assert live_buffers(device) == 0
    # no class is rounded past the limit: then a multiple of 256, and at the limit the limit itself
    largest = pool.acquire(2 * MIB + 511, Role.KV)
    assert largest.size == 2 * MIB + 512
    assert pool.acquire(2 * MIB + 2, Role.KV).size <= 2 * MIB + 512
    assert pool.acquire(3 * MIB, Role.STAGING).size == 3 * MIB


def test_rounding_past_the_limit_is_exact_and_pooled() -> None:
    _, pool = open_pool("adaptive", maxStorageBufferBindingSize=100 * MIB)
    nbytes = 98 * MIB + 1
    first = pool.acquire(nbytes, Role.ACTIVATION)
    assert first.size == 98 * MIB + 256
    pool.release(first)
    assert pool.acquire(nbytes, Role.ACTIVATION).id == first.id


def test_kv_has_one_last_class_at_the_limit() -> None:
    """Growing on below the limit costs no buffer per token."""
    _, pool = open_pool("adaptive", maxStorageBufferBindingSize=100 * MIB)
    for nbytes in range(90 * MIB, 98 * MIB, MIB):
        pool.begin_run()
        buffer = pool.acquire(nbytes, Role.KV)
        assert buffer.size == 100 * MIB
        pool.release(buffer)
    assert pool.ledger.created == 1


# ---- the flush ------------------------------------------------------------------------------------------------------


@ALL_POLICIES
@pytest.mark.parametrize("role", [role for role in Role if role not in (Role.UNIFORM, Role.STAGING)])
def test_released_buffers_live_until_the_flush(policy: str, role: Role) -> None:
    """A program recorded before the release still runs; whatever destroys comes after the flush."""
    device, pool = open_pool(policy)
    buffers = [pool.acquire(5 * MIB, role, site=site) for site in range(30)]
    program = array("I")
    for buffer in buffers:
        program.extend((Op.CLEAR, buffer.id, 0, 4))
    program.append(Op.SUBMIT)
    for buffer in reversed(buffers):
        pool.release(buffer)
    pool.trim()
    assert live_buffers(device) == 30
    device.submit(program)
    pool.flush()
    assert live_buffers(device) == 0, "trim's decision is carried out by the flush"
    assert pool.ledger.reserved_bytes == device.buffer_bytes == 0


def test_reuse_before_the_flush_follows_the_policy() -> None:
    reused = {}
    for policy in POLICIES:
        _, pool = open_pool(policy)
        first = pool.acquire(100, Role.ACTIVATION)
        pool.release(first)
        second = pool.acquire(100, Role.ACTIVATION)
        pool.release(second)
        pool.flush()
        reused[policy] = (second.id == first.id, pool.acquire(100, Role.ACTIVATION).id in (first.id, second.id))
    assert reused == {
        "adaptive": (True, True),
        "bucket": (True, True),
        "simple": (False, True),
        "exact": (True, True),
        "pow2": (True, True),
        "lazy_release": (False, False),
        "disabled": (False, False),
    }


@ALL_POLICIES
def test_fixed_roles(policy: str) -> None:
    """Uniforms wait for the flush before the next lease, weights and staging are never leased twice."""
    device, pool = open_pool(policy)
    for role, reused in ((Role.UNIFORM, True), (Role.WEIGHTS, False), (Role.STAGING, False)):
        first = pool.acquire(1000, role)
        assert first.size == 1008
        pool.release(first)
        second = pool.acquire(1000, role)
        assert second.id != first.id
        pool.release(second)
        pool.flush()
        third = pool.acquire(1000, role)
        assert (third.id in (first.id, second.id)) == reused
    assert live_buffers(device) == 4  # two uniforms, and the third weights and staging


# ---- policies, trim, close ------------------------------------------------------------------------------------------


def test_set_policy_keeps_leases_and_destroys_what_is_free() -> None:
    device, pool = open_pool("bucket")
    held, free = (pool.acquire(4096, Role.KV) for _ in range(2))
    pool.release(free)
    pool.flush()
    weights = pool.acquire(4096, Role.WEIGHTS)
    pool.set_policy("adaptive")
    assert live_buffers(device) == 2
    pool.check(held)
    pool.check(weights)
    pool.release(held)  # leased under the old policy: not mixed into the new one
    assert pool.acquire(4096, Role.KV).id != held.id
    pool.flush()
    assert live_buffers(device) == 2
    assert pool.ledger.reserved_bytes == device.buffer_bytes


def test_set_policy_before_the_flush() -> None:
    device, pool = open_pool("adaptive")
    pool.release(pool.acquire(4096, Role.KV))
    pool.set_policy(Bucket({4096: 1}))
    assert live_buffers(device) == 1
    pool.set_policy(pool.policy)  # the same again: nothing happens
    pool.flush()
    assert live_buffers(device) == 0


def test_trim_destroys_what_is_free() -> None:
    device, pool = open_pool()
    held, free = pool.acquire(4096, Role.KV), pool.acquire(4096, Role.UNIFORM)
    pool.release(free)
    pool.flush()
    pool.trim()
    assert live_buffers(device) == 1
    pool.check(held)


@ALL_POLICIES
def test_close_destroys_everything_once(policy: str) -> None:
    device, pool = open_pool(policy)
    device.create_buffer(64, BufferUsage.COPY_DST, "not the pool's")
    leases = [pool.acquire(4096, role) for role in Role for _ in range(2)]
    for buffer in leases[::2]:
        pool.release(buffer)
    pool.close()
    pool.close()
    report = pool.report()
    assert live_buffers(device) == 1
    assert (report.reserved_bytes, report.in_use_bytes, report.requested_bytes) == (0, 0, 0)
    assert report.created == report.destroyed == 2 * len(Role)
    pool.flush()
    pool.begin_run()
    with pytest.raises(PoolError, match="closed"):
        pool.acquire(64, Role.KV)
    with pytest.raises(PoolError):
        pool.release(leases[1])


def test_close_after_the_device_was_lost() -> None:
    device, pool = open_pool()
    held = [pool.acquire(4096, Role.KV) for _ in range(3)]
    device.lose()
    with pytest.raises(DeviceLost):
        pool.acquire(4096, Role.KV)
    pool.release(held[0])
    pool.close()
    assert pool.ledger.reserved_bytes == pool.ledger.in_use_bytes == 0


def test_out_of_memory_leaks_nothing() -> None:
    """The error comes late; the lease it belongs to can be given back like any other."""

    async def run(index: int) -> None:
        device, pool = open_pool("bucket")
        leases = []
        for i in range(4):
            if i == index:
                device.fail_next_create = OutOfMemory
            leases.append(pool.acquire(4096, Role.KV))
        with pytest.raises(OutOfMemory):
            await device.wait()
        for buffer in leases:
            pool.release(buffer)
        pool.close()
        assert live_buffers(device) == 0

    for index in range(4):
        asyncio.run(run(index))


class Broken(Disabled):
    """Hands out, or gives up, the buffers it is told to."""

    def __init__(self) -> None:
        self.hand_out: int | None = None
        self.give_up: Sequence[int] = ()

    def acquire(self, request: Request, size: int) -> int | None:
        return self.hand_out

    def flush(self) -> Sequence[int]:
        return self.give_up


def test_a_broken_policy_is_found_out() -> None:
    policy = Broken()
    pool = BufferPool(FakeDevice(), policy)
    held = pool.acquire(64, Role.KV)
    policy.hand_out = held.id
    with pytest.raises(PoolError, match=r"Broken handed out buffer \d+ \(64 B, live\)"):
        pool.acquire(64, Role.KV)
    pool.release(held)
    with pytest.raises(PoolError, match=r"Broken handed out buffer \d+ \(64 B, free_recorded\) for 128 B"):
        pool.acquire(128, Role.KV)
    policy.hand_out = None
    held = pool.acquire(64, Role.KV)
    policy.give_up = [held.id]
    with pytest.raises(PoolError, match=r"gave up buffer .* leased"):
        pool.flush()


# ---- the ledger -----------------------------------------------------------------------------------------------------


def test_report_by_role() -> None:
    _, pool = open_pool("bucket")
    weights = pool.acquire(1000, Role.WEIGHTS)
    kv = pool.acquire(100, Role.KV)
    pool.acquire(3000, Role.ACTIVATION)
    report = pool.report()
    assert report.reserved_bytes == report.in_use_bytes == 1008 + 128 + 4096
    assert report.requested_bytes == 1000 + 100 + 3000
    assert {name: row.reserved_bytes for name, row in report.by_role.items() if row.buffers} == {
        "weights": 1008,
        "kv": 128,
        "activation": 4096,
    }
    assert pool.ledger.reserved_by_role() == {"weights": 1008, "kv": 128, "activation": 4096}

    pool.release(kv)
    pool.acquire(120, Role.WORKSPACE)  # takes over the 128 B that KV left
    pool.release(weights)
    pool.flush()
    after = pool.report()
    assert (after.created, after.misses, after.hits, after.destroyed) == (3, 3, 1, 1)
    assert (after.bytes_created, after.bytes_destroyed) == (1008 + 128 + 4096, 1008)
    assert (after.reserved_bytes, after.peak_reserved_bytes) == (128 + 4096, 1008 + 128 + 4096)
    assert (after.peak_in_use_bytes, after.free_bytes) == (1008 + 128 + 4096, 0)
    kv_row, workspace = after.by_role["kv"], after.by_role["workspace"]
    assert (kv_row.buffers, kv_row.reserved_bytes, kv_row.peak_reserved_bytes) == (0, 0, 128)
    assert (workspace.buffers, workspace.in_use_bytes, workspace.requested_bytes) == (1, 128, 120)
    assert report.by_role["kv"].reserved_bytes == 128, "a report does not change afterwards"


def test_the_figures_of_the_ledger_are_those_of_the_report() -> None:
    _, pool = open_pool("bucket")
    for _ in range(3):
        pool.release(pool.acquire(5000, Role.KV))
        pool.acquire(300 * 1024, Role.ACTIVATION)
    report = pool.report()
    names = ("created", "destroyed", "hits", "misses", "bytes_created", "bytes_destroyed")
    names += ("reserved_bytes", "in_use_bytes", "peak_reserved_bytes")
    assert {name: getattr(pool.ledger, name) for name in names} == {name: getattr(report, name) for name in names}
    assert (report.hits, report.misses) == (2, 4)


def test_the_ledger_stays_bounded() -> None:
    """Sizes that never return do not pile up, and the totals know them still."""
    _, pool = open_pool("disabled")
    for nbytes in range(16, 16 * 6000, 16):
        pool.release(pool.acquire(nbytes, Role.KV))
        pool.flush()
    assert len(pool.ledger.classes) <= MOST_CLASSES
    assert pool.ledger.created == pool.ledger.destroyed == 5999
    assert pool.report().reserved_bytes == 0


# ---- identity stability ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["adaptive", "bucket", "simple"])
def test_static_steps_get_the_same_buffers(policy: str) -> None:
    """Acquired in the same order and released in reverse, every site gets the same buffer in every run."""
    _, pool = open_pool(policy)
    sizes = [5000, 5000, 100, 3 * MIB, 5000, 3 * MIB, 100]
    seen = []
    for _ in range(6):
        pool.begin_run()
        leases = [pool.acquire(nbytes, Role.ACTIVATION, site=site) for site, nbytes in enumerate(sizes)]
        for buffer in reversed(leases):
            pool.release(buffer)
        seen.append([buffer.id for buffer in leases])
    assert seen == [seen[0]] * 6


@pytest.mark.parametrize("policy", ["adaptive", "bucket"])
@pytest.mark.parametrize(("position_bytes", "start"), [(8, 280), (400, 2700)])
def test_growing_kv_alternates_between_two_sets(policy: str, position_bytes: int, start: int) -> None:
    """Inside one size class, step r and step r + 2 see the same buffers at the same sites."""
    _, pool = open_pool(policy)
    past: list[Buffer] = []
    seen = []
    for positions in range(start, start + 12):
        pool.begin_run()
        present = [pool.acquire(position_bytes * positions, Role.KV, site=site) for site in range(24)]
        pool.flush()
        for buffer in reversed(past):
            pool.release(buffer)
        past = present
        seen.append([buffer.id for buffer in present])
    assert seen[2:] == seen[:-2]
    assert not set(seen[0]) & set(seen[1])
    assert pool.ledger.created == 48


# ---- under every policy, whatever happens ---------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("acquire"),
            st.sampled_from(list(Role)),
            st.one_of(st.integers(1, 9000), st.sampled_from([MIB, 3 * MIB + 1, 9 * MIB])),
        ),
        st.tuples(st.sampled_from(["release", "release"]), st.just(Role.KV), st.integers(0, 1000)),
        st.tuples(st.sampled_from(["flush", "begin_run", "trim", *POLICIES]), st.just(Role.KV), st.just(0)),
    ),
    max_size=80,
)


def check_books(device: FakeDevice, pool: BufferPool, leases: list[Buffer]) -> None:
    report = pool.report()
    assert len({buffer.id for buffer in leases}) == len(leases), "no buffer is leased twice"
    for buffer in leases:
        assert device.get(buffer.id, FakeBuffer, "a lease's buffer exists").size == buffer.size
    assert report.reserved_bytes == device.buffer_bytes
    assert report.reserved_bytes == report.bytes_created - report.bytes_destroyed
    assert report.created - report.destroyed == live_buffers(device)
    assert report.in_use_bytes == sum(buffer.size for buffer in leases) <= report.reserved_bytes
    assert report.requested_bytes == sum(buffer.requested for buffer in leases)
    assert report.peak_reserved_bytes >= report.reserved_bytes
    assert report.misses == report.created
    for name, total in (("reserved_bytes", report.reserved_bytes), ("in_use_bytes", report.in_use_bytes)):
        assert sum(getattr(row, name) for row in report.by_role.values()) == total
    assert sum(row.buffers for row in report.by_role.values()) == live_buffers(device)


@ALL_POLICIES
@given(operations=OPERATIONS)
@settings(max_examples=60, deadline=None)
def test_bytes_add_up_and_nothing_leaks(policy: str, operations: list[tuple[str, Role, int]]) -> None:
    device = FakeDevice(limits={"maxUniformBufferBindingSize": 1 << 27}, log_limit=0)
    pool = BufferPool(device, policy)
    leases: list[Buffer] = []
    acquired = 0
    for op, role, number in operations:
        if op == "acquire":
            buffer = pool.acquire(number, role, site=acquired)
            acquired += 1
            assert buffer.size >= number
            leases.append(buffer)
        elif op == "release" and leases:
            pool.release(leases.pop(number % len(leases)))
        elif op in POLICIES:
            pool.set_policy(op)
        elif op != "release":
            getattr(pool, op)()
        check_books(device, pool, leases)
    assert pool.ledger.hits + pool.ledger.misses == acquired
    pool.close()
    check_books(device, pool, [])
    assert live_buffers(device) == 0
