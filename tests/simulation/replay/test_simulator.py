"""The simulator against figures that were measured or worked out elsewhere, and against a live pool.

Literal values: microsoft/onnxruntime issue 32017 (44, 54, 54, 54 creates per token) and an independent simulation of
ONNX Runtime's pool for the other ranges.  Byte figures: MiB.
"""

from collections.abc import Sequence
from functools import cache
from itertools import islice

import pytest

from stepwell.errors import BadRequest, BadTrace, PolicyError
from stepwell.memory.buffer import Role
from stepwell.memory.policies import make_policy
from stepwell.memory.policies.base import Request
from stepwell.replay.kv_shapes import PHI4_MINI, DecodeShape
from stepwell.replay.simulator import Replay, served, simulate
from stepwell.replay.simulator_report import PolicyFigures, figures, kv_boundaries
from stepwell.replay.traces import ACQUIRE, FLUSH, NO_REQUEST, RELEASE, RUN, Cause, Event, check_events
from stepwell.replay.workloads import WORKLOADS, growing, workload_events

MIB, GIB = 1 << 20, 1 << 30
BUDGET = 3 * GIB // 2

# S, its size class in MiB, creates per token with and without an upload that flushes between the steps (era B)
ORT_STAIRCASE = [
    (400, 1, 14, 10),
    (800, 2, 34, 30),
    (1500, 4, 44, 40),
    (3000, 8, 54, 50),
    (5000, 12, 54, 50),
    (7000, 16, 54, 50),
    (10_000, 25, 49, 45),
    (14_000, 32, 42, 38),
    (20_000, 42.1875, 62, 60),
    (25_000, 56.25, 58, 54),
    (30_000, 64, 58, 54),
    (50_000, 128, 58, 54),
    (70_000, 160, 58, 54),
    (90_000, None, 64, 64),
]
NO_UPLOAD = DecodeShape(layers=32, kv_every=1, hidden_bytes=6144, upload=False)


@cache
def replayed(
    workload: str, policy: str, budget_bytes: int | None = None, last: int | None = None
) -> tuple[PolicyFigures, Replay]:
    """A workload from its first S on; each is replayed once for all tests."""
    replay = simulate(workload_events(workload, None, last), make_policy(policy), budget_bytes)
    return figures(replay, [] if workload == "static" else kv_boundaries()), replay


def creates(shape: DecodeShape, first: int, tokens: int, policy: str = "bucket", **options: str) -> list[int]:
    replay = simulate(growing(shape, first, first + tokens), make_policy(policy, **options))
    return [token.creates for token in replay.tokens]


# ---- ONNX Runtime's staircase ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("era", ["A", "B", "C"])
@pytest.mark.parametrize(("positions", "class_mib", "misses", "_"), ORT_STAIRCASE)
def test_bucket_creates_per_token(era: str, positions: int, class_mib: float | None, misses: int, _: int) -> None:
    replay = simulate(growing(PHI4_MINI, positions, positions + 6), make_policy("bucket", era=era))
    steady = replay.tokens[2:]
    assert [token.creates for token in steady] == [misses] * 4
    for token in steady:
        exact = 2048 * token.position * misses
        assert token.created_bytes == (exact if class_mib is None else class_mib * MIB * misses)


@pytest.mark.parametrize(("positions", "_", "misses", "without_upload"), ORT_STAIRCASE)
def test_bucket_without_a_flush_between_steps(positions: int, _: object, misses: int, without_upload: int) -> None:
    """Era B fills up from what waits at the first flush inside the step; A and C gain nothing."""
    assert creates(NO_UPLOAD, positions, 6, era="B")[2:] == [without_upload] * 4
    assert creates(NO_UPLOAD, positions, 6, era="A")[2:] == [misses] * 4
    assert creates(NO_UPLOAD, positions, 6, era="C")[2:] == [misses] * 4


@pytest.mark.parametrize(
    ("last", "before", "after"),
    [
        (512, 14, 34),
        (1024, 34, 44),
        (2048, 44, 54),
        (4096, 54, 54),
        (6144, 54, 54),
        (8192, 54, 49),
        (12_800, 49, 42),
        (16_384, 42, 62),
        (21_600, 62, 58),
        (28_800, 58, 58),
        (32_768, 58, 58),
        (65_536, 58, 58),
        (81_920, 58, 64),
    ],
)
def test_bucket_steps_exactly_at_its_boundaries(last: int, before: int, after: int) -> None:
    """The token that enters a class and the one after it create all 64."""
    assert creates(PHI4_MINI, last - 6, 11)[2:] == [before] * 4 + [64, 64] + [after] * 3


def test_bucket_averages_over_a_whole_class() -> None:
    """44.04 and 54.01: a class's own creates and the two tokens that enter it."""
    replay = simulate(growing(PHI4_MINI, 1024, 2600), make_policy("bucket"))
    first, second = figures(replay, kv_boundaries())["ranges"]
    assert (first["from"], first["to"], second["from"], second["to"]) == (1025, 2048, 2049, 2600)
    small_ones = 6  # intermediates of the very first token
    assert first["creates_per_token"] == pytest.approx((44 * 1024 + 2 * 20 + small_ones) / 1024)
    assert second["creates_per_token"] == pytest.approx((54 * 552 + 2 * 10) / 552)


def test_boundaries_are_those_of_the_table() -> None:
    expected = [512, 1024, 2048, 4096, 6144, 8192, 12_800, 16_384, 21_600, 28_800, 32_768, 65_536, 81_920]
    assert kv_boundaries() == expected


# ---- the peers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "each"), [("simple", 64), ("exact", 64), ("lazy_release", 256), ("disabled", 256)])
def test_policies_without_size_classes_create_everything(policy: str, each: int) -> None:
    """64 KV tensors, each of a size never seen before; without reuse also the 192 intermediates."""
    assert creates(PHI4_MINI, 2000, 8, policy)[2:] == [each] * 6


def test_exact_sizes_grow_without_bound() -> None:
    """`simple` from S = 1,024 to 1,124 keeps every set there was: 64 x 2,048 B x S each."""
    replay = simulate(growing(PHI4_MINI, 1024, 1124), make_policy("simple"))
    kv = sum(64 * 2048 * positions for positions in range(1024, 1125))
    assert replay.peak_reserved_bytes == pytest.approx(kv, rel=0.001)
    assert replay.peak_live_bytes == pytest.approx(64 * 2048 * (1123 + 1124), rel=0.001)


def test_powers_of_two_create_128_per_doubling() -> None:
    """0.13 per token from 1,024 to 2,048, all in two tokens."""
    made = creates(PHI4_MINI, 1024, 1024, "pow2")
    assert made[:2] == [64 + 6, 64], "six intermediates of up to 36 KiB share its smallest class of 64 KiB"
    assert set(made[2:]) == {0}


# ---- adaptive: what issue 3 demands ---------------------------------------------------------------------------------


def test_adaptive_on_kv64() -> None:
    found, replay = replayed("kv64", "adaptive")
    assert len(replay.tokens) == 7168
    assert found["creates_per_token"] <= 0.2
    assert found["max_creates_in_token"] <= 1
    assert max(token.kv_creates for token in replay.tokens[2:]) == 1
    assert found["max_mib_in_token"] <= 20
    assert found["peak_over_live"] <= 1.15
    assert found["mean_over_live"] <= 1.15
    assert found["misses_over_oracle"] <= 1.3
    assert replay.peak_live_bytes == pytest.approx(2 * GIB, rel=0.001)
    bucket_peak = 2.33 * GIB
    assert found["peak_reserved_bytes"] < bucket_peak
    assert [(row["from"], row["to"]) for row in found["ranges"]] == [
        (1025, 2048),
        (2049, 4096),
        (4097, 6144),
        (6145, 8192),
    ]
    assert replay.identity_rate > 0.99


def test_adaptive_on_sawtooth() -> None:
    found, replay = replayed("sawtooth", "adaptive")
    assert found["mean_reserved_bytes"] <= 0.6 * GIB
    assert found["creates_per_token"] <= 1
    assert len(replay.tokens) == 6 * 501


def test_adaptive_under_a_budget() -> None:
    """1.5 GiB hold the largest chat; the temporaries of its prefill have to make room for its KV."""
    unbounded, _ = replayed("sawtooth", "adaptive")
    found, replay = replayed("sawtooth", "adaptive", BUDGET)
    largest_class = max(token.created_bytes / max(1, token.creates) for token in replay.tokens)
    assert unbounded["peak_reserved_bytes"] > BUDGET
    assert found["peak_reserved_bytes"] <= BUDGET + largest_class
    assert found["evictions"]["budget"] > 0
    assert found["creates_per_token"] <= 1


def test_adaptive_on_static_shapes() -> None:
    found, replay = replayed("static", "adaptive")
    exact, _ = replayed("static", "exact")
    assert replay.tokens[0].creates > 0
    assert [token.creates for token in replay.tokens[1:]] == [0] * 7
    assert found["peak_reserved_bytes"] <= 1.25 * exact["peak_reserved_bytes"]


def test_adaptive_on_kv16() -> None:
    """No worse than bucket in any figure: the same classes, and all that a run needs is kept."""
    found, _ = replayed("kv16", "adaptive", last=4500)
    bucket, _ = replayed("kv16", "bucket", last=4500)
    assert found["creates_per_token"] < bucket["creates_per_token"] / 50
    assert found["max_creates_in_token"] == bucket["max_creates_in_token"] == 16
    assert found["max_mib_in_token"] == bucket["max_mib_in_token"]
    assert found["mib_per_token"] < bucket["mib_per_token"]
    assert found["peak_reserved_bytes"] < bucket["peak_reserved_bytes"]
    assert found["mean_over_live"] < bucket["mean_over_live"]
    for own, theirs in zip(found["ranges"][1:], bucket["ranges"][1:], strict=True):
        assert own["creates_per_token"] < theirs["creates_per_token"] == pytest.approx(6.03, abs=0.03)
    assert found["ranges"][0]["creates_per_token"] == bucket["ranges"][0]["creates_per_token"] < 0.04


# ---- the workloads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_well_formed_and_repeatable(name: str) -> None:
    events = list(islice(workload_events(name), 20_000))
    assert list(check_events(events)) == events == list(islice(workload_events(name), 20_000))


def test_a_decode_step_of_kv64() -> None:
    """Its shape, counted: 192 intermediates, 64 KV tensors, 24 submits of 16 dispatches, upload, end and download."""
    step = list(growing(PHI4_MINI, 2000, 2001))[64:]
    assert step[:2] == [(RUN, 2001, NO_REQUEST), (FLUSH, Cause.UPLOAD, NO_REQUEST)]
    acquired = [request for op, _, request in step if op == ACQUIRE]
    assert sorted(request.nbytes for request in acquired if request.role is Role.KV) == [2048 * 2001] * 64
    assert {request.site for request in acquired if request.role is Role.KV} == set(range(64))
    small = [request.nbytes for request in acquired if request.role is Role.ACTIVATION]
    assert small == [6144, 12_288, 18_432, 24_576, 30_720, 36_864] * 32
    causes = [value for op, value, _ in step if op == FLUSH]
    assert causes == [Cause.UPLOAD] + [Cause.DISPATCHES] * 24 + [Cause.RUN_END, Cause.DOWNLOAD]
    assert step[-64:] == [(RELEASE, lease, NO_REQUEST) for lease in range(64)], "the past, after the run"


def test_kv16_has_16_tensors() -> None:
    step = list(workload_events("kv16", 2000, 2001))[16:]
    assert sum(op == ACQUIRE and request.role is Role.KV for op, _, request in step) == 16


def test_sawtooth_ends_with_nothing_live() -> None:
    live: set[int] = set()
    positions = []
    for op, value, _ in workload_events("sawtooth", 300, 1000):
        if op == ACQUIRE:
            live.add(value)
        elif op == RELEASE:
            live.remove(value)
        elif op == RUN:
            positions.append(value)
    assert not live
    assert (min(positions), max(positions)) == (300, 1000)


@pytest.mark.parametrize(("first", "last"), [(0, 5), (5, 4), (-1, None), (9000, None)])
def test_empty_ranges_are_refused(first: int | None, last: int | None) -> None:
    with pytest.raises(BadRequest, match="need 1 <= from <= to"):
        workload_events("kv64", first, last)
    with pytest.raises(BadRequest, match=r"'kv32'.*kv64, kv16, sawtooth, static"):
        workload_events("kv32")


# ---- the books ------------------------------------------------------------------------------------------------------


class Scripted:
    """A policy that gives out and gives up what it is told to, whether it may or not."""

    def __init__(self, hands_out: Sequence[int | None] = (), gives_up: Sequence[Sequence[int]] = ()) -> None:
        self._hands_out, self._gives_up = iter(hands_out), iter(gives_up)

    def size_class(self, request: Request) -> int:
        return request.nbytes

    def acquire(self, request: Request, size: int) -> int | None:
        return next(self._hands_out, None)

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        return next(self._gives_up, ())

    def flush(self) -> Sequence[int]:
        return ()

    def begin_run(self) -> Sequence[int]:
        return ()

    def reclaim(self, nbytes: int) -> Sequence[int]:
        return ()

    def drain(self) -> Sequence[int]:
        return ()

    def target(self, size: int, role: Role) -> int | None:
        return None


def lease(number: int, nbytes: int = 256, site: int = 0, role: Role = Role.ACTIVATION) -> Event:
    return (ACQUIRE, number, Request(nbytes, role, site))


def release(number: int) -> Event:
    return (RELEASE, number, NO_REQUEST)


START: Event = (RUN, 1, NO_REQUEST)
DOWNLOAD: Event = (FLUSH, Cause.DOWNLOAD, NO_REQUEST)
SUBMIT: Event = (FLUSH, Cause.SUBMIT, NO_REQUEST)


@pytest.mark.parametrize(
    ("policy", "events", "message"),
    [
        (Scripted([None, 1]), [lease(0), lease(1)], "handed out buffer 1 for 256 B"),
        (Scripted([7]), [lease(0)], "handed out buffer 7"),
        (Scripted([None, 1]), [lease(0), release(0), lease(1, 512)], "handed out buffer 1 for 512 B"),
        (Scripted([], [[2]]), [lease(0), lease(1), release(0)], "gave up buffer 2, which is not free"),
        (Scripted([], [[1, 1]]), [lease(0), release(0)], "gave up buffer 1, which is not free"),
    ],
)
def test_a_policy_that_breaks_the_rules_is_caught(policy: Scripted, events: list[Event], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        simulate(events, policy)


def test_destroyed_bytes_count_until_the_gpu_is_done() -> None:
    """Two buffers, one after the other, destroyed at once: both are there until the download, one after it."""
    one_after_the_other = [lease(0), release(0), SUBMIT, lease(1), release(1)]
    assert simulate([START, *one_after_the_other], make_policy("disabled")).peak_reserved_bytes == 512
    waited = [lease(0), release(0), DOWNLOAD, lease(1), release(1)]
    assert simulate([START, *waited], make_policy("disabled")).peak_reserved_bytes == 256
    idle = [lease(0), DOWNLOAD, release(0), SUBMIT, lease(1), release(1)]
    assert simulate([START, *idle], make_policy("disabled")).peak_reserved_bytes == 256


def test_tokens_evictions_and_identity() -> None:
    events: list[Event] = [lease(0, 100, 1)]
    events += [(RUN, 5, NO_REQUEST), lease(1, 100, 1), release(0), SUBMIT]
    events += [(RUN, 6, NO_REQUEST), lease(2, 100, 1), release(1), release(2)]
    replay = simulate(events, make_policy("simple"))
    assert [token.position for token in replay.tokens] == [5, 6]
    assert [token.creates for token in replay.tokens] == [1, 0]
    assert [token.created_bytes for token in replay.tokens] == [112, 0]
    assert [token.live_bytes for token in replay.tokens] == [200, 200]
    assert [token.reserved_bytes for token in replay.tokens] == [224, 224]
    assert (replay.misses, replay.oracle_misses, replay.acquires, replay.evictions) == (2, 2, 3, {})
    assert replay.identity_rate == pytest.approx(1 / 3), "the third acquire gets the first one's buffer"


def test_roles_with_policies_of_their_own_are_left_out() -> None:
    events = [lease(0, role=Role.WEIGHTS), lease(1), release(0), release(1), lease(2, role=Role.STAGING)]
    assert list(served(events)) == [lease(1), release(1)]


def test_a_budget_must_be_positive_and_a_trace_must_have_a_run() -> None:
    with pytest.raises(BadRequest, match="budget of 0 B"):
        simulate([], make_policy("simple"), 0)
    with pytest.raises(BadTrace, match="has no run"):
        figures(simulate([lease(0)], make_policy("simple")), [])
