"""The simulator: a trace replayed through a policy without a GPU, and its cost in buffers and in memory.

The simulator stands where the pool and the device would: it names buffers, checks what the policy hands out and gives
up, and keeps the books.  Only the roles that the chosen policy serves take part (KV, activations, workspaces).

*Reserved* bytes are those of leased and free buffers, and of destroyed ones that the GPU may still be using: a buffer
released since the last download counts until the next one, until the next run begins, or until a flush when nothing was
recorded.  *Live* bytes are those that the program asked for and has not released: their ratio includes the padding of
the size classes.  A *token* is a run.  Buffers acquired before the first run are set-up: they count in totals and
peaks, and in no token.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from stepwell.errors import BadRequest, PolicyError
from stepwell.memory.buffer import CHOSEN_ROLES, Role
from stepwell.memory.policies.base import Policy, Request
from stepwell.replay.traces import ACQUIRE, FLUSH, RELEASE, Cause, Event

WARM_UP_TOKENS = 2
"""Tokens at the start that fill the pool with the past's and the present's buffers: none of them is the worst token."""


class Token(NamedTuple):
    """One run: its position S, the buffers it created, and the most bytes that were reserved and live in it."""

    position: int
    creates: int
    kv_creates: int
    created_bytes: int
    reserved_bytes: int
    live_bytes: int


@dataclass(slots=True)
class Replay:
    """The result of a trace replayed through a policy."""

    tokens: list[Token]
    acquires: int
    misses: int  # buffers created, set-up included
    oracle_misses: int  # the fewest that its size classes allow (see oracle.py)
    peak_reserved_bytes: int
    peak_live_bytes: int
    evictions: dict[str, int]  # buffers destroyed, by cause
    identity_rate: float  # acquires that got a buffer which their site had in one of its last two acquires

    @property
    def misses_over_oracle(self) -> float:
        """``misses`` as a multiple of ``oracle_misses``."""
        return self.misses / self.oracle_misses if self.oracle_misses else 1.0


def served(events: Iterable[Event]) -> Iterator[Event]:
    """The ``events`` without the leases of roles that have a policy of their own, whichever one is chosen."""
    others: set[int] = set()
    for event in events:
        op, value, request = event
        if op == ACQUIRE and request.role not in CHOSEN_ROLES:
            others.add(value)
        elif op == RELEASE and value in others:
            others.remove(value)
        else:
            yield event


class _Pool:
    """The pool's mechanism over numbers: which buffers exist, who has them, and what the GPU may still use."""

    def __init__(self, policy: Policy, budget_bytes: int | None) -> None:
        self._policy = policy
        self._budget_bytes = budget_bytes
        self._sizes: dict[int, int] = {}  # of the buffers that exist, by id
        self._free: set[int] = set()
        self._leases: dict[int, tuple[int, Request, int]] = {}  # lease → buffer id, request, size class
        self._used: set[int] = set()  # released since the last download: not gone at once when destroyed
        self._recorded = False  # there is recorded work that was not submitted
        self._working = False  # there is work since the last download
        self._dying_bytes = 0  # destroyed, but the GPU may still use them
        self._overlap: dict[int, list[int]] = {}  # size class → leases now and at most
        self._sites: dict[Role, dict[int, tuple[int, int]]] = {role: {} for role in CHOSEN_ROLES}
        self._next_id = 1
        self._live_bytes = 0
        self.reserved_bytes = 0
        self.peak_reserved_bytes = self.peak_live_bytes = 0  # of the token
        self.acquires = self.creates = self.kv_creates = self.created_bytes = self.same = 0
        self.evictions: Counter[str] = Counter()

    def acquire(self, lease: int, request: Request) -> None:
        policy = self._policy
        size = policy.size_class(request)
        self._recorded = self._working = True
        buffer_id = policy.acquire(request, size)
        if buffer_id is None:
            buffer_id = self._create(size, request)
        elif buffer_id not in self._free or self._sizes[buffer_id] < size:
            raise PolicyError(
                f"{type(policy).__name__} handed out buffer {buffer_id} for {size:,} B: not free, or smaller."
            )
        else:
            self._free.remove(buffer_id)
        self._leases[lease] = (buffer_id, request, size)
        self.acquires += 1
        overlap = self._overlap.get(size)
        if overlap is None:
            self._overlap[size] = [1, 1]
        else:
            overlap[0] += 1
            if overlap[0] > overlap[1]:
                overlap[1] = overlap[0]
        nbytes, role, site, _ = request
        sites = self._sites[role]
        last, before = sites.get(site, (0, 0))
        if buffer_id in (last, before):
            self.same += 1
        sites[site] = (buffer_id, last)
        self._live_bytes += nbytes
        if self._live_bytes > self.peak_live_bytes:
            self.peak_live_bytes = self._live_bytes

    def release(self, lease: int) -> None:
        buffer_id, request, size = self._leases.pop(lease)
        self._overlap[size][0] -= 1
        self._live_bytes -= request.nbytes
        self._free.add(buffer_id)
        self._used.add(buffer_id)
        ids = self._policy.release(buffer_id, request, self._sizes[buffer_id], self._recorded)
        if ids:
            self._destroy(ids, "limit")

    def flush(self, cause: int) -> None:
        self._recorded = False
        if not self._working:
            self._wait()
        self._destroy(self._policy.flush(), "limit")
        if cause == Cause.DOWNLOAD:
            self._wait()

    def begin_run(self) -> None:
        self._wait()
        self._destroy(self._policy.begin_run(), "window")

    def start_token(self) -> None:
        """Begin the peaks of the token that starts."""
        self.peak_reserved_bytes, self.peak_live_bytes = self.reserved_bytes, self._live_bytes

    def oracle_misses(self) -> int:
        return sum(most for _, most in self._overlap.values())

    def _create(self, size: int, request: Request) -> int:
        if self._budget_bytes is not None:
            self._meet_budget(self._budget_bytes - size)
        buffer_id, self._next_id = self._next_id, self._next_id + 1
        self._sizes[buffer_id] = size
        self.creates += 1
        self.created_bytes += size
        if request.role is Role.KV:
            self.kv_creates += 1
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        return buffer_id

    def _meet_budget(self, limit: int) -> None:
        """Make room as the pool does: a buffer that the GPU may still use leaves later, so others are asked for too."""
        while self.reserved_bytes > limit:
            given_up = self._policy.reclaim(self.reserved_bytes - limit)
            self._destroy(given_up, "budget")
            if not given_up or self._free <= self._used:
                break

    def _destroy(self, buffer_ids: Iterable[int], cause: str) -> None:
        for buffer_id in buffer_ids:
            if buffer_id not in self._free:
                raise PolicyError(f"{type(self._policy).__name__} gave up buffer {buffer_id}, which is not free.")
            self._free.remove(buffer_id)
            size = self._sizes.pop(buffer_id)
            self.evictions[cause] += 1
            if buffer_id in self._used:
                self._dying_bytes += size
            else:
                self.reserved_bytes -= size

    def _wait(self) -> None:
        """Note that the GPU is done: destroyed buffers are gone."""
        self.reserved_bytes -= self._dying_bytes
        self._dying_bytes = 0
        self._used.clear()
        self._working = False


class Simulation:
    """A replay in progress through ``policy``: feed it the events in pieces, then take the result.

    Before ``budget_bytes`` would be exceeded, the policy's ``reclaim`` is asked.  BadRequest for a budget below 1 B.
    """

    def __init__(self, policy: Policy, budget_bytes: int | None = None) -> None:
        if budget_bytes is not None and budget_bytes <= 0:
            raise BadRequest(f"a budget of {budget_bytes:,} B; it must be 1 B or more.")
        self._pool = _Pool(policy, budget_bytes)
        self._tokens: list[Token] = []
        self._peak_reserved = self._peak_live = 0
        self._position: int | None = None
        self._before = (0, 0, 0)

    def feed(self, events: Iterable[Event]) -> None:
        """Replay the next ``events``; PolicyError where the policy breaks its contract."""
        pool = self._pool
        for op, value, request in events:
            if op == ACQUIRE:
                pool.acquire(value, request)
            elif op == RELEASE:
                pool.release(value)
            elif op == FLUSH:
                pool.flush(value)
            else:
                self._end_token()
                pool.begin_run()
                pool.start_token()
                self._position = value
                self._before = (pool.creates, pool.kv_creates, pool.created_bytes)

    def result(self) -> Replay:
        """The result.  No more events are fed afterwards."""
        self._end_token()
        pool = self._pool
        return Replay(
            tokens=self._tokens,
            acquires=pool.acquires,
            misses=pool.creates,
            oracle_misses=pool.oracle_misses(),
            peak_reserved_bytes=self._peak_reserved,
            peak_live_bytes=self._peak_live,
            evictions=dict(sorted(pool.evictions.items())),
            identity_rate=pool.same / pool.acquires if pool.acquires else 0.0,
        )

    def _end_token(self) -> None:
        pool, before = self._pool, self._before
        if self._position is not None:
            made = (pool.creates - before[0], pool.kv_creates - before[1], pool.created_bytes - before[2])
            self._tokens.append(Token(self._position, *made, pool.peak_reserved_bytes, pool.peak_live_bytes))
        self._peak_reserved = max(self._peak_reserved, pool.peak_reserved_bytes)
        self._peak_live = max(self._peak_live, pool.peak_live_bytes)


def simulate(events: Iterable[Event], policy: Policy, budget_bytes: int | None = None) -> Replay:
    """The result of all ``events`` replayed through a fresh ``policy``, with a budget or without."""
    simulation = Simulation(policy, budget_bytes)
    simulation.feed(events)
    return simulation.result()
