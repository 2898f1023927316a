"""The contract of a pool policy: what every one must keep to, whatever it decides.

``CONTRACT`` is a list of checks; each takes a function that makes a new policy, and raises AssertionError.
"""

from collections.abc import Callable, Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.memory.buffer import Role
from stepwell.memory.policies.base import Policy, Request
from tests.support.policy_lab import MIB, GrowingKv, request

Make = Callable[[], Policy]
Step = tuple[str, int, int]
OPERATIONS = ["acquire", "acquire", "acquire", "release", "release", "flush", "begin_run", "reclaim", "drain"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(OPERATIONS),
        st.one_of(st.integers(1, 5000), st.sampled_from([64, 4096, MIB, MIB + 1, 3 * MIB, 1 << 28])),
        st.integers(0, 70),
    ),
    max_size=60,
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
                assert found in free, "only a free buffer is handed out, and once"
                assert free[found] >= size, "only one that is large enough"
                size = free.pop(found)
            live.append((found, asked, size))
            yield found
        elif op == "release" and live:
            buffer_id, asked, size = live.pop(site % len(live))
            free[buffer_id] = size
            given_up = policy.release(buffer_id, asked, size, bool(nbytes % 2))
        elif op == "reclaim":
            given_up = policy.reclaim(nbytes)
        elif op != "release":
            given_up = getattr(policy, op)()
        for buffer_id in given_up:
            assert buffer_id in free, "given up twice, or while in use"
            del free[buffer_id]
        yield list(given_up)
    for buffer_id in policy.drain():
        assert buffer_id in free, "drained twice, or while in use"
        del free[buffer_id]
    assert not free, "drain returns every buffer that is left"


def sizes_hold_their_requests(make: Make) -> None:
    @given(nbytes=st.integers(1, 1 << 36), site=st.integers(0, 1 << 20), role=st.sampled_from(list(Role)))
    @settings(max_examples=40, deadline=None)
    def check(nbytes: int, site: int, role: Role) -> None:
        size = make().size_class(request(nbytes, site, role))
        assert size >= nbytes, "a class holds its request"
        assert size % 4 == 0, "WebGPU wants multiples of 4 bytes"

    check()


def decisions_are_sound_and_repeatable(make: Make) -> None:
    @given(steps=STEPS)
    @settings(max_examples=150, deadline=None)
    def check(steps: list[Step]) -> None:
        assert list(replay(make(), steps)) == list(replay(make(), steps)), "equal requests get equal decisions"

    check()


def reclaim_gives_up_everything_when_asked_for_everything(make: Make) -> None:
    policy = make()
    sizes = {}
    for buffer_id in range(12):
        asked = request(MIB << buffer_id % 3, buffer_id)
        size = policy.size_class(asked)
        assert policy.acquire(asked, size) is None
        sizes[buffer_id] = (asked, size)
    gone = set[int]()
    for buffer_id, (asked, size) in sizes.items():
        gone |= set(policy.release(buffer_id, asked, size, False))
    gone |= set(policy.flush())
    reclaimed = set(policy.reclaim(1 << 50))
    assert not reclaimed & gone, "given up twice"
    assert reclaimed | gone == set(sizes), "under pressure nothing that is free is held back"
    assert not list(policy.drain())


def a_pool_keeps_its_books_with_it(make: Make) -> None:
    run = GrowingKv(make(), tensors=6, position_bytes=700, positions=1490)
    pool = run.pool
    for _ in range(60):
        run.step()
        assert pool.ledger.reserved_bytes == pool.ledger.bytes_created - pool.ledger.bytes_destroyed
        assert pool.ledger.in_use_bytes <= pool.ledger.reserved_bytes
    for buffer in run.past:
        pool.release(buffer)
    pool.flush()
    pool.trim()
    pool.flush()
    assert pool.ledger.reserved_bytes == 0, "a trimmed pool is empty"


CONTRACT = [
    sizes_hold_their_requests,
    decisions_are_sound_and_repeatable,
    reclaim_gives_up_everything_when_asked_for_everything,
    a_pool_keeps_its_books_with_it,
]
