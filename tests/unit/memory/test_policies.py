"""Every policy by the same contract; the table of policies and its options; the simple policies and the peers."""

from collections.abc import Callable

import pytest

from stepwell.errors import BadRequest
from stepwell.memory.buffer import Role
from stepwell.memory.policies import POLICIES, make_policy
from stepwell.memory.policies.base import Policy
from stepwell.options import OptionKind, parse_limits
from tests.support.policy_contract import CONTRACT
from tests.support.policy_lab import KIB, MIB, GrowingKv, request

VARIANTS: dict[str, Callable[[], Policy]] = {
    **{name: lambda name=name: make_policy(name) for name in POLICIES},
    **{f"bucket era {era}": lambda era=era: make_policy("bucket", era=era) for era in "AC"},
    "adaptive without stagger": lambda: make_policy("adaptive", stagger=False, growth=1.5, window=2),
}


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", VARIANTS)
def test_contract(name: str, check: Callable[[Callable[[], Policy]], None]) -> None:
    check(VARIANTS[name])


# ---- the table and its options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_table_row(name: str) -> None:
    assert "\n" not in POLICIES[name].summary
    assert 20 < len(POLICIES[name].summary) < 120
    assert make_policy(name) is not make_policy(name)
    defaults = {option.name: option.default for option in POLICIES[name].options}
    assert type(make_policy(name, **defaults)) is type(make_policy(name)), "the defaults are valid and accepted"


def test_unknown_name() -> None:
    with pytest.raises(BadRequest, match=r"'lru'.*adaptive, bucket, simple, exact, pow2, lazy_release, disabled"):
        make_policy("lru")


def test_options_are_read_as_in_a_form() -> None:
    kv = request(3 * MIB)
    assert make_policy("adaptive", stagger="false", growth="2").size_class(kv) == 4 * MIB
    assert make_policy("bucket", limits="4 MiB:64, 6291456:2").size_class(request(4 * MIB + 1)) == 6 * MIB
    assert make_policy("exact", cap="3").target(64, Role.KV) == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adaptive", {"window": 0}, "option window: 0; it must be a whole number from 1 to 256"),
        ("adaptive", {"window": True}, "option window"),
        ("adaptive", {"window": "many"}, "option window"),
        ("adaptive", {"window": 2.5}, "option window"),
        ("adaptive", {"growth": 3.0}, "option growth: 3.0; it must be a number from 0 to 2"),
        ("adaptive", {"stagger": "maybe"}, "must be true or false"),
        ("bucket", {"era": "D"}, "must be one of A, B, C"),
        ("bucket", {"limits": "4 MiB"}, "must be a table such as"),
        ("bucket", {"limits": {}}, "must be a table"),
        ("bucket", {"limits": "4 furlongs:3"}, "must be a table"),
        ("bucket", {"limits": {6: 1}}, "limit table: 6 B keeps 1"),
        ("simple", {"cap": 3}, "no option 'cap'. It has none"),
        ("exact", {"size": 3}, "no option 'size'. It has cap, largest_bytes"),
    ],
)
def test_bad_options(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        make_policy(name, **options)  # type: ignore[arg-type]


def test_limit_tables() -> None:
    assert parse_limits("64:1,  1.5KiB : 2 ,1 GiB:0") == {64: 1, 1536: 2, 1 << 30: 0}
    assert OptionKind.LIMITS in {option.kind for option in POLICIES["bucket"].options}


# ---- disabled, lazy_release, simple ---------------------------------------------------------------------------------


def test_disabled_and_lazy_release_never_reuse() -> None:
    for name, at_release, at_flush in (("disabled", [7], []), ("lazy_release", [], [7])):
        policy = make_policy(name)
        assert policy.size_class(request(17)) == 32
        assert list(policy.release(7, request(17), 32, False)) == at_release
        assert policy.acquire(request(17), 32) is None
        assert list(policy.flush()) == at_flush
        assert policy.acquire(request(17), 32) is None
        assert list(policy.drain()) == []


def test_simple_reuses_exact_sizes_after_the_flush() -> None:
    policy = make_policy("simple")
    for buffer_id in (1, 2):
        assert list(policy.release(buffer_id, request(32), 32, False)) == []
    assert policy.acquire(request(32), 32) is None
    assert list(policy.flush()) == []
    assert policy.acquire(request(48), 48) is None
    assert [policy.acquire(request(17), 32) for _ in range(3)] == [2, 1, None]


def test_simple_grows_without_bound() -> None:
    run = GrowingKv("simple", tensors=4, position_bytes=64, positions=10)
    assert run.steps(20) == [4] * 20
    assert run.pool.ledger.destroyed == 0
    assert run.pool.ledger.reserved_bytes == sum(4 * 64 * positions for positions in range(10, 31))


# ---- the peers ------------------------------------------------------------------------------------------------------


def test_exact_keeps_a_count_per_size_and_nothing_large() -> None:
    policy = make_policy("exact", cap=2, largest_bytes=MIB)
    assert policy.size_class(request(1001)) == 1004
    assert [list(policy.release(i, request(1001), 1004, True)) for i in (1, 2, 3)] == [[], [], [3]]
    assert [policy.acquire(request(1001), 1004) for _ in range(3)] == [2, 1, None], "at once, the latest first"
    assert list(policy.release(4, request(2 * MIB), 2 * MIB, False)) == [4]


def test_exact_never_serves_a_growing_cache() -> None:
    assert GrowingKv("exact", tensors=4, position_bytes=64, positions=10).steps(20) == [4] * 20


def test_pow2_classes_are_never_given_up() -> None:
    policy = make_policy("pow2")
    for nbytes, size in ((1, 64 * KIB), (64 * KIB + 1, 128 * KIB), (3 * MIB, 4 * MIB), (4 * MIB, 4 * MIB)):
        assert policy.size_class(request(nbytes)) == size
    run = GrowingKv("pow2", tensors=8, position_bytes=2048, positions=1000)
    creates = run.steps(4000)
    assert sum(creates[2:]) == 2 * 8 * 3, "two sets per doubling, from 2 MiB to 16 MiB"
    assert run.pool.ledger.destroyed == 0
    assert run.pool.ledger.peak_reserved_bytes > 1.8 * 2 * run.pool.ledger.in_use_bytes - 16 * MIB
