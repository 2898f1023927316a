"""The lower bound is exact, and the clairvoyant policy reaches it: no policy with the same classes creates less."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.memory.buffer import Role
from stepwell.memory.policies import POLICIES, make_policy
from stepwell.memory.policies.base import Request
from stepwell.replay.oracle import Clairvoyant, least_creates
from stepwell.replay.simulator import simulate
from stepwell.replay.traces import ACQUIRE, FLUSH, NO_REQUEST, RELEASE, RUN, Cause, Event
from stepwell.replay.workloads import workload_events

SIZES = (100, 200, 300)


@st.composite
def traces(draw: st.DrawFn, length: int = 60) -> list[Event]:
    """Few sizes, so that buffers are reused; activations only, so that all policies see the same classes."""
    events: list[Event] = [(RUN, 1, NO_REQUEST)]
    live: list[int] = []
    leases = 0
    for op in draw(
        st.lists(st.sampled_from([ACQUIRE, ACQUIRE, ACQUIRE, RELEASE, RELEASE, FLUSH, RUN]), max_size=length)
    ):
        if op == ACQUIRE:
            size = draw(st.sampled_from(SIZES))
            events.append((ACQUIRE, leases, Request(size, Role.ACTIVATION, leases % 3)))
            live.append(leases)
            leases += 1
        elif op == RELEASE and live:
            events.append((RELEASE, live.pop(draw(st.integers(0, len(live) - 1))), NO_REQUEST))
        elif op == FLUSH:
            events.append((FLUSH, Cause.SUBMIT, NO_REQUEST))
        elif op == RUN:
            events.append((RUN, 1, NO_REQUEST))
    return events


def exact(request: Request) -> int:
    return request.nbytes


def fewest_by_search(events: Sequence[Event]) -> int:
    """The fewest creates of any way to serve the trace, by trying all of them: per size, reuse a free one or create.

    A state is the number of free buffers of each size; giving one up never saves a create, so it is not tried.
    """
    needs = [(op, value, request.nbytes) for op, value, request in events if op in (ACQUIRE, RELEASE)]
    size_of = {value: nbytes for op, value, nbytes in needs if op == ACQUIRE}

    @cache
    def search(index: int, free: tuple[int, ...]) -> int:
        if index == len(needs):
            return 0
        op, value, _ = needs[index]
        kind = SIZES.index(size_of[value])
        change = 1 if op == RELEASE else -1
        after = (*free[:kind], free[kind] + change, *free[kind + 1 :])
        if op == RELEASE:
            return search(index + 1, after)
        create = 1 + search(index + 1, free)
        return min(create, search(index + 1, after)) if free[kind] else create

    return search(0, (0,) * len(SIZES))


@given(events=traces(length=24))
@settings(max_examples=150, deadline=None)
def test_the_bound_is_the_fewest_creates_there_are(events: list[Event]) -> None:
    assert least_creates(events, exact) == fewest_by_search(events)


@given(events=traces())
@settings(max_examples=200, deadline=None)
def test_the_clairvoyant_policy_reaches_the_bound(events: list[Event]) -> None:
    replay = simulate(events, Clairvoyant(events, exact))
    assert replay.misses == least_creates(events, exact) == replay.oracle_misses


@pytest.mark.parametrize("name", POLICIES)
@given(events=traces())
@settings(max_examples=60, deadline=None)
def test_no_policy_creates_less(name: str, events: list[Event]) -> None:
    policy = make_policy(name)
    replay = simulate(events, policy)
    assert replay.misses >= replay.oracle_misses == least_creates(events, make_policy(name).size_class)


@given(events=traces(), budget=st.integers(100, 3000))
@settings(max_examples=200, deadline=None)
def test_clairvoyant_under_a_budget(events: list[Event], budget: int) -> None:
    """It goes over the budget only for what is live, or was used since the last download."""
    replay = simulate(events, Clairvoyant(events, exact), budget)
    assert replay.misses >= replay.oracle_misses
    assert simulate(events, Clairvoyant(events, exact), budget) == replay, "equal inputs, equal decisions"
    if budget >= simulate(events, Clairvoyant(events, exact)).peak_reserved_bytes:
        assert replay.misses == replay.oracle_misses
        assert replay.peak_reserved_bytes <= budget


def leases(text: str) -> list[Event]:
    """``a0 b1 -0``: acquire 100 B as lease 0, 200 B as lease 1, release lease 0; ``|``: a run begins."""
    events: list[Event] = []
    for word in text.split():
        if word == "|":
            events += [(FLUSH, Cause.DOWNLOAD, NO_REQUEST), (RUN, 1, NO_REQUEST)]
        elif word[0] == "-":
            events.append((RELEASE, int(word[1:]), NO_REQUEST))
        else:
            events.append((ACQUIRE, int(word[1:]), Request(SIZES["abc".index(word[0])], Role.ACTIVATION, 0)))
    return events


def test_it_gives_up_what_is_needed_last() -> None:
    """600 B hold a, b and c; d needs room.  c is needed last, so c goes; a policy that drops a creates once more."""
    events = leases("| a0 b1 c2 -0 -1 -2 | c3 -3 | a4 -4 b5 -5 a6 -6 b7 -7 c8 -8")
    assert simulate(events, Clairvoyant(events, exact)).misses == 3
    tight = simulate(events, Clairvoyant(events, exact), 600)
    assert (tight.misses, tight.evictions) == (3, {"limit": 3}), "given up after their last use"
    events = leases("| a0 b1 -0 -1 | c2 -2 | a3 -3 b4 -4")
    replay = simulate(events, Clairvoyant(events, exact), 500)
    assert replay.misses == 4, "b makes room for c, a stays"
    assert replay.evictions["budget"] == 1
    assert replay.peak_reserved_bytes == 400


def test_it_keeps_nothing_that_is_not_needed_again() -> None:
    events = leases("| a0 a1 -0 -1 | a2 -2 | b3 -3")
    replay = simulate(events, Clairvoyant(events, exact))
    assert [token.reserved_bytes for token in replay.tokens] == [200, 100, 200]


def test_growing_kv_has_two_buffers_per_class() -> None:
    """Past and present of each of the 64 tensors, and six intermediates: what crossing one class costs at least."""
    events = list(workload_events("kv64", 2000, 2040))
    pow2 = make_policy("pow2").size_class
    assert least_creates(events, pow2) == 128 + 6
    assert least_creates(events, exact) == 41 * 64 + 6
