"""``BufferPool``: owns every GPU buffer.  The mechanism: a ``Policy`` decides, the pool acts and keeps the books.

What the pool guarantees, whatever the policy says:

* a buffer has one lease at a time, and a lease ends once (StaleBuffer otherwise);
* a buffer released since the last flush is not destroyed before the next one: recorded work may still use it;
* until that flush it goes to commands of the same session only, not to what the CPU writes, another session or a lease
  that is to be cleared (``State``): those get another buffer;
* no size exceeds what the device can bind.

Recording is what happens between an ``acquire`` and the next ``flush``.
"""

from collections.abc import Callable, Iterable
from functools import partial

from stepwell.errors import PoolError
from stepwell.gpu.device import Device
from stepwell.memory.budget import Budget
from stepwell.memory.buffer import Role
from stepwell.memory.class_stats import ClassRow, ClassStats, Eviction
from stepwell.memory.events import Observer
from stepwell.memory.inventory import USAGE
from stepwell.memory.leases import Leases
from stepwell.memory.ledger import MemoryReport
from stepwell.memory.policies import make_policy
from stepwell.memory.policies.base import Growing, Policy, Request
from stepwell.memory.slots import Route, Slot
from stepwell.memory.turn import PoolStep, Turn
from stepwell.options import OptionValue

__all__ = ["USAGE", "BufferPool"]


class BufferPool(Leases):
    """``policy``: a name in POLICIES or a Policy object of the caller's.  ``debug``: see ``debug.py``.

    ``budget_bytes`` limits reserved bytes and those of destroyed buffers that the GPU may still be using: before a
    buffer is created, free ones are given up for it.  If that is not enough, a ``hard`` budget raises BudgetExceeded
    (``make_room`` waits for the GPU; ``retrying`` does both), a soft one is exceeded by what is in use.
    """

    def __init__(
        self,
        device: Device,
        policy: str | Policy = "adaptive",
        budget_bytes: int | None = None,
        hard: bool = False,
        debug: bool = False,
    ) -> None:
        super().__init__(device, policy, Budget(budget_bytes, hard), debug)
        self._turn = Turn()
        self.inventory.on_lost = self._forget

    @property
    def device(self) -> Device:
        return self.inventory.device

    @property
    def before_destroy(self) -> list[Callable[[int], None]]:
        """Callables that are told a buffer's id before it is destroyed: whoever recorded its use forgets that."""
        return self.inventory.before_destroy

    def size_of(self, buffer_id: int) -> int:
        """Bytes of a buffer that exists; 0 of one that does not."""
        slot = self._slots.get(buffer_id)
        return slot.size if slot is not None else 0

    # ---- time passes ------------------------------------------------------------------------------------------------

    @property
    def serial(self) -> int:
        """The number of the last flush: remember it before a wait, give it to ``note_complete`` after it."""
        return self.inventory.serial

    @property
    def run(self) -> int:
        """The number of the run, from 1."""
        return self.inventory.run

    @property
    def generation(self) -> int:
        """How many devices were lost."""
        return self.inventory.generation

    def step(self, session: int | None = None) -> PoolStep:
        """A step from its first acquire to its submit, as an ``async with``: one at a time on this pool.

        A decode step of ``session`` begins as with ``begin_run``; None is for commands that are no decode step, as
        those of weights.  ``as`` gives the time in ms when its turn came.  PoolError within a step of the same task.
        """
        return PoolStep(self._turn, partial(self.begin_run, session) if session is not None else _nothing)

    @property
    def busy(self) -> bool:
        """Whether a step of another task is under way: then nothing may be submitted but by that task."""
        return self._turn.is_others

    def flush(self) -> None:
        """Nothing recorded is unsubmitted any more: carry out what waited for that.

        While a step of another task is under way, that is not so, and its flush will do it: then this does nothing.
        """
        if self._turn.is_others:
            return
        self.inventory.flush(self._recording)
        self._recording = False
        if self._parked:
            parked, self._parked = self._parked, []
            for slot in parked:
                self._give_back(slot)
        for policy in self._policies:
            given_up = policy.flush()
            if given_up:
                self._retire(given_up, Eviction.LIMIT, policy)
        if self._quarantine is not None:
            self._quarantine.flush(self.device, self.run)
        for observer in self.inventory.observers:
            observer.flushed(self.serial)

    def new_session(self) -> int:
        """A number for ``begin_run``: what its leases write, no other session sees.  Leases are its own from now on."""
        self._sessions += 1
        self._session = self._sessions
        return self._sessions

    def begin_run(self, session: int = 0) -> None:
        """A decode step of ``session`` begins: flush, then the policies' windows turn over.

        For callers that share the pool with nobody; others use ``step``.  PoolError while another task's is under way.
        """
        if self._turn.is_others:
            raise PoolError("a step of another task is under way: begin yours with `async with pool.step(session)`.")
        self.flush()
        self._session = session
        self.inventory.run += 1
        self.budget.note_run()
        if self._quarantine is not None:
            self._quarantine.begin_run(self.run, self._give_back)
        for policy in self._policies:
            given_up = policy.begin_run()
            if given_up:
                self._retire(given_up, Eviction.WINDOW, policy)
        for observer in self.inventory.observers:
            observer.run_began(self.run)

    def note_complete(self, serial: int) -> None:
        """The GPU has finished everything submitted up to the flush ``serial``: a read or a wait has returned."""
        self.inventory.note_complete(serial)

    def take_clears(self) -> dict[int, int]:
        """Id → bytes (multiples of 4) to zero from the buffer's start, before anything else of the next program."""
        return self.inventory.take_clears()

    # ---- pressure and faults (see recovery.py) ----------------------------------------------------------------------

    def set_budget(self, budget_bytes: int | None, hard: bool = False) -> None:
        """Another budget from now on; free buffers beyond it are given up."""
        self.budget = Budget(budget_bytes, hard)
        self.reclaim(self.excess(0), Eviction.BUDGET)

    def give_up_free(self, cause: Eviction) -> None:
        """Destroy every free buffer; those released since the last flush at the next one."""
        for policy in self._policies:
            self._retire(policy.drain(), cause, policy)
        if self._quarantine is not None:
            self._retire(self._quarantine.drain(), cause)

    def trim(self) -> None:
        """``give_up_free`` because the caller wants the memory back."""
        self.give_up_free(Eviction.TRIM)

    def note_lost(self) -> None:
        """The device is gone, and every buffer with it: forget them all.  What the policies learned stays."""
        self.inventory.note_lost()

    def rebuild(self, device: Device) -> None:
        """Go on with another device: the books are empty, the high-water marks are there, old leases are dead."""
        self.inventory.note_lost()
        self.inventory.attach(device)
        self._set_routes()

    # ---- policies and what to know about them -----------------------------------------------------------------------

    def set_policy(self, policy: str | Policy, **options: OptionValue) -> None:
        """Serve from now on with another policy.  The old one's free buffers are destroyed, leased ones at release."""
        new = make_policy(policy, **options) if isinstance(policy, str) else policy
        if new is self.policy:
            return
        self.chosen = (policy, options) if isinstance(policy, str) else None
        old, self.policy = self.policy, new
        self._set_routes()
        self._retire(old.drain(), Eviction.POLICY, old)

    def prepare_growth(self, nbytes: int, sites: Iterable[int], runs: int, at_most: int | None = None) -> int:
        """Create some of the KV buffers of ``nbytes`` that ``sites`` will ask for in ``runs`` runs; returns how many.

        Called once a run, it makes ``at_most`` at a time, or by default so many that most are there in time: one where
        sites cross one by one.  The next program clears them, so that no token pays for their first use; what would
        exceed the budget is not created.  For the policies that plan (``adaptive``).
        """
        policy = self.policy
        if not isinstance(policy, Growing):
            return 0
        made = 0
        plan = policy.plan_growth([Request(nbytes, Role.KV, site) for site in sites])
        if at_most is None:
            at_most = -(-2 * len(plan) // runs)
        for _, size in plan[:at_most]:
            size = min(size, self.inventory.limits[Role.KV][0])
            if self.excess(size) > 0:
                break
            slot = self.inventory.create(size, Role.KV, "ahead", self._session, missed=False)
            self.inventory.touch(slot, size)
            policy.adopt(slot.id, size, runs)
            made += 1
        return made

    def report(self) -> MemoryReport:
        return self.ledger.report(self.inventory.requested())

    def observe(self, observer: Observer) -> None:
        self.inventory.observers = (*self.inventory.observers, observer)

    def unobserve(self, observer: Observer) -> None:
        self.inventory.observers = tuple(other for other in self.inventory.observers if other is not observer)

    def classes(self) -> list[ClassRow]:
        """Per role and size: buffers now, counters since ``ledger.reset_peaks``; the most bytes first."""
        rows = [stats.row(self.target(stats)) for stats in self.ledger.classes.values()]
        return sorted(rows, key=lambda row: -row["size"] * (row["live"] + row["free"]))

    def target(self, stats: ClassStats) -> int | None:
        """How many free buffers of a class its policy would keep now; None: no limit."""
        return self._routes[stats.role].policy.target(stats.size, stats.role)

    def close(self) -> None:
        """Destroy everything, leased buffers too.  Safe to call twice, and after the device was lost."""
        self._closed = True
        self._routes = {role: Route(route.policy, -1) for role, route in self._routes.items()}
        self._forget()
        self.inventory.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _give_back(self, slot: Slot) -> None:
        """Hand a buffer that was kept aside to its policy, if that still serves."""
        route = slot.route
        if route is not self._routes[slot.request.role]:
            self._retire((slot.id,), Eviction.POLICY)
        else:
            self._retire(route.release(slot.id, slot.request, slot.size, False), Eviction.LIMIT)

    def _forget(self) -> None:
        """No buffer is kept aside or free any more."""
        for policy in self._policies:
            policy.drain()
        if self._quarantine is not None:
            self._quarantine.drain()
        self._parked.clear()
        self._recording = False


def _nothing() -> None:
    """How a step begins that is no run."""
