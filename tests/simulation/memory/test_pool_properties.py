"""What stays true in a pool whatever happens, under every policy: random traces of everything one can do to it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import BudgetExceeded, PoolError
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.fake_objects import FakeBuffer
from stepwell.memory.buffer import Buffer, Role, State, Zero
from stepwell.memory.policies import POLICIES, make_policy
from stepwell.memory.policies.base import Policy
from stepwell.memory.pool import BufferPool
from tests.support.policy_lab import KIB, LARGE, MIB

MAKERS: dict[str, Callable[[], Policy]] = {
    **{name: lambda name=name: make_policy(name) for name in POLICIES},
    "bucket A": lambda: make_policy("bucket", era="A"),
    "bucket C": lambda: make_policy("bucket", era="C"),
    "adaptive, window 1": lambda: make_policy("adaptive", window=1, stagger=False),
}
SIZES = st.one_of(st.integers(1, 20_000), st.sampled_from([4 * KIB, MIB, MIB + 1, 3 * MIB, 5 * MIB, 5 * MIB + 64]))
ROLES = st.sampled_from([Role.KV, Role.KV, Role.KV, Role.ACTIVATION, Role.ACTIVATION, *Role])
ACQUIRE = st.tuples(
    st.just("acquire"), SIZES, ROLES, st.integers(0, 9), st.sampled_from([Zero.NEVER, Zero.NEVER, *Zero]),
    st.sampled_from([0, 0, 0, 1]), st.sampled_from([False, False, True]),
)  # fmt: skip
OTHER = st.tuples(
    st.sampled_from(
        ["release"] * 6 + ["flush"] * 2 + ["begin_run"] * 3
        + ["complete", "trim", "clears", "budget", "policy", "pin", "unpin", "grow", "reclaim"]
    ),
    st.integers(0, 1 << 20),
)  # fmt: skip
TRACES = st.lists(st.one_of(ACQUIRE, ACQUIRE, OTHER, OTHER), max_size=50)


@dataclass
class World:
    """A pool and what its caller knows about it."""

    pool: BufferPool
    device: FakeDevice
    debug: bool = False
    leases: list[Buffer] = field(default_factory=list)
    released: dict[int, int] = field(default_factory=dict)  # since the last flush: id → session
    sessions: dict[int, int] = field(default_factory=dict)
    pinned: list[Buffer] = field(default_factory=list)
    names: dict[int, int] = field(default_factory=dict)  # ids as this world's own numbers
    decisions: list[object] = field(default_factory=list)

    def acquire(self, nbytes: int, role: Role, site: int, zero: Zero, session: int, host: bool) -> None:
        created = self.pool.ledger.created
        try:
            buffer = self.pool.acquire(nbytes, role, "x", site, zero=zero, session=session, host=host)
        except BudgetExceeded as error:
            assert self.pool.budget.hard
            assert self.pool.inventory.held_bytes + error.requested > error.budget
            self.decisions.append("budget")
            return
        assert buffer.size >= nbytes
        assert buffer.id not in {lease.id for lease in self.leases}, "handed out twice"
        if buffer.id in self.released:
            assert self.pool.ledger.created == created
            assert not host and role not in (Role.UNIFORM, Role.STAGING), "the CPU would overtake recorded commands"
            assert zero is Zero.NEVER, "the clear would run before the recorded commands"
            assert session == self.released[buffer.id], "another session may record elsewhere"
            del self.released[buffer.id]
        if self.pool.ledger.created > created:
            self.check_budget()
        self.leases.append(buffer)
        self.sessions[buffer.id] = session
        self.decisions.append(self.names.setdefault(buffer.id, len(self.names)))

    def check_budget(self) -> None:
        """Over the budget is only what is in use, what the GPU is not done with, and what is in quarantine."""
        if self.pool.budget.excess(self.pool.inventory.held_bytes) > 0 and not self.debug:
            assert not self.pool.budget.hard
            states = {self.pool.inventory.state(buffer) for buffer in self.pool.inventory.slots}
            assert State.FREE_COMPLETE not in states, "a free buffer could have made way"

    def release(self, number: int) -> None:
        free_to_go = [lease for lease in self.leases if lease not in self.pinned]
        if free_to_go:
            buffer = free_to_go[number % len(free_to_go)]
            self.leases.remove(buffer)
            self.pool.release(buffer)
            self.released[buffer.id] = self.sessions[buffer.id]

    def other(self, op: str, number: int) -> None:
        if op in ("release", "pin", "unpin"):
            self.change_lease(op, number)
        else:
            self.change_pool(op, number)

    def change_lease(self, op: str, number: int) -> None:
        if op == "release":
            self.release(number)
        elif op == "pin" and self.leases:
            self.pinned.append(self.leases[number % len(self.leases)])
            self.pool.pin(self.pinned[-1])
        elif op == "unpin" and self.pinned:
            self.pool.unpin(self.pinned.pop(number % len(self.pinned)))

    def change_pool(self, op: str, number: int) -> None:
        pool = self.pool
        match op:
            case "flush" | "begin_run":
                self.released.clear()
                getattr(pool, op)()
            case "complete":
                pool.inventory.note_complete(pool.inventory.serial)
            case "trim":
                pool.trim()
            case "clears":
                clears = pool.inventory.take_clears()
                for buffer, nbytes in clears.items():
                    assert 0 < nbytes <= self.device.get(buffer, FakeBuffer, "clear").size
                self.decisions.append(sorted((self.names.get(buffer, -1), nbytes) for buffer, nbytes in clears.items()))
            case "budget":
                pool.set_budget([None, 4 * MIB, 16 * MIB][number % 3], hard=number % 3 > 0 and number % 2 == 0)
            case "policy":
                pool.set_policy(list(MAKERS.values())[number % len(MAKERS)]())
            case "grow":
                self.decisions.append(pool.prepare_growth(number + 1, range(number % 4), runs=3))
            case _:
                pool.reclaim(number)

    def check(self) -> None:
        pool, report = self.pool, self.pool.report()
        assert report.reserved_bytes == self.device.buffer_bytes == report.bytes_created - report.bytes_destroyed
        assert report.created - report.destroyed == self.device.table_sizes()["buffers"] == len(pool.inventory.slots)
        assert report.in_use_bytes == sum(lease.size for lease in self.leases)
        assert report.requested_bytes == sum(lease.requested for lease in self.leases)
        assert report.peak_reserved_bytes >= report.reserved_bytes
        for name in ("reserved_bytes", "in_use_bytes", "requested_bytes"):
            assert sum(getattr(row, name) for row in report.by_role.values()) == getattr(report, name)
        for role, row in report.by_role.items():
            assert row.reserved_bytes == report.allocated_by_role[role] - report.freed_by_role[role]
        rows = pool.classes()
        assert sum(row["live"] for row in rows) == len(self.leases)
        assert sum((row["live"] + row["free"]) * row["size"] for row in rows) == report.reserved_bytes
        assert sum(row["hits"] for row in rows) == report.hits
        assert sum(row["misses"] for row in rows) == report.misses
        assert sum(sum(row["evictions"].values()) for row in rows) == report.destroyed
        assert 0 <= pool.inventory.in_flight.nbytes <= report.bytes_destroyed
        for buffer in self.released:
            self.device.get(buffer, FakeBuffer, "released since the flush, so it exists")
        for lease in self.leases:
            pool.check(lease)
            assert pool.inventory.state(lease.id) is State.LIVE


def open_world(name: str, debug: bool) -> World:
    device = FakeDevice(limits={**LARGE, "maxUniformBufferBindingSize": 1 << 30}, log_limit=0)
    return World(BufferPool(device, MAKERS[name](), debug=debug), device, debug)


def play(world: World, trace: list[tuple[object, ...]]) -> list[object]:
    for op, *arguments in trace:
        if op == "acquire":
            world.acquire(*arguments)  # type: ignore[arg-type]
        else:
            world.other(op, *arguments)  # type: ignore[arg-type]
        world.check()
    decisions = list(world.decisions)
    for buffer in world.pinned:
        world.pool.unpin(buffer)
    for buffer in world.leases:
        world.pool.release(buffer)
    world.leases.clear()
    world.pool.flush()
    world.pool.trim()
    world.pool.flush()
    world.released.clear()
    world.check()
    assert world.device.table_sizes()["buffers"] == 0, "nothing leaks"
    world.pool.close()
    return decisions


@given(name=st.sampled_from(list(MAKERS)), debug=st.sampled_from([False, False, False, True]), trace=TRACES)
@settings(max_examples=800, deadline=None)
def test_whatever_happens(name: str, debug: bool, trace: list[tuple[object, ...]]) -> None:
    play(open_world(name, debug), trace)


@given(name=st.sampled_from(list(MAKERS)), trace=TRACES)
@settings(max_examples=100, deadline=None)
def test_equal_traces_get_equal_decisions(name: str, trace: list[tuple[object, ...]]) -> None:
    assert play(open_world(name, False), trace) == play(open_world(name, False), trace)


@given(trace=TRACES)
@settings(max_examples=100, deadline=None)
def test_errors_change_nothing(trace: list[tuple[object, ...]]) -> None:
    """Requests that are refused leave the books as they were."""
    world = open_world("adaptive", False)
    for op, *arguments in trace:
        if op == "acquire":
            world.acquire(*arguments)  # type: ignore[arg-type]
        for nbytes in (0, -5, 1 << 40):
            before = world.pool.report()
            try:
                world.pool.acquire(nbytes, Role.KV)
            except PoolError:
                assert world.pool.report() == before
            else:
                raise AssertionError("a request that makes no sense was served")
    world.check()
