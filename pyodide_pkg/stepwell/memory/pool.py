"""``BufferPool``: owns every GPU buffer.  The mechanism: a ``Policy`` decides, the pool acts and keeps the books.

What the pool guarantees, whatever the policy says:

* a buffer has one lease at a time, and a lease ends once (StaleBuffer otherwise);
* a buffer released since the last flush is not destroyed before the next one: recorded work may still use it;
* until that flush it goes to commands of the same session only, not to what the CPU writes, another session or a lease
  that is to be cleared (``State``): those get another buffer;
* no size exceeds what the device can bind;
* one step at a time is recorded and submitted (``step``).

Recording is what happens between an ``acquire`` and the next ``flush``.
"""

from asyncio import current_task
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from stepwell.errors import PolicyError, PoolError
from stepwell.gpu.device import Device
from stepwell.memory.budget import Budget
from stepwell.memory.buffer import Buffer, Role, Zero
from stepwell.memory.class_stats import ClassRow, ClassStats, Eviction
from stepwell.memory.debug import Quarantine
from stepwell.memory.events import Observer
from stepwell.memory.inventory import USAGE, Inventory
from stepwell.memory.ledger import MemoryReport
from stepwell.memory.policies import make_policy
from stepwell.memory.policies.base import Growing, Policy, Request, round_up
from stepwell.memory.slots import Slot
from stepwell.memory.supply import Supply
from stepwell.memory.turn import PoolStep, Turn
from stepwell.options import OptionValue

__all__ = ["USAGE", "BufferPool"]

_HOST_ROLES = frozenset((Role.UNIFORM, Role.STAGING))
"""Written or mapped by the CPU: never while recorded work may use the buffer."""
_NEVER = Zero.NEVER
_EXACT_UNIT = 256  # bytes
_new = tuple.__new__  # half the cost of calling the NamedTuple


class BufferPool:
    """Every buffer of one ``device``.  ``policy``: a name in POLICIES or a Policy of the caller's, for CHOSEN_ROLES.

    ``budget_bytes`` limits reserved bytes and those of destroyed buffers that the GPU may still be using: before a
    buffer is created, free ones are given up for it.  If that is not enough, a ``hard`` budget raises BudgetExceeded
    (``make_room`` waits for the GPU; ``retrying`` does both), a soft one is exceeded by what is in use.

    ``debug``: see ``debug.py``.  ``fixed``: policies for other roles, in place of those that ``Supply`` has.

    ``ledger`` has the counts and bytes of now, ``inventory`` the buffers that exist and how far the GPU has come.
    """

    def __init__(
        self,
        device: Device,
        policy: str | Policy = "adaptive",
        budget_bytes: int | None = None,
        hard: bool = False,
        debug: bool = False,
        fixed: Mapping[Role, Policy] = MappingProxyType({}),
    ) -> None:
        self.inventory = inventory = Inventory(device)
        self.ledger = inventory.ledger
        # the policy's name and options, where it has a name
        self.chosen: tuple[str, Mapping[str, OptionValue]] | None = (policy, {}) if isinstance(policy, str) else None
        chosen = make_policy(policy) if isinstance(policy, str) else policy
        self._supply = Supply(inventory, Budget(budget_bytes, hard), chosen, fixed)
        self._routes = self._supply.routes
        self._slots = inventory.slots
        self._parked: list[Slot] = []  # passed over by a lease that could not take them before the flush
        self._quarantine = Quarantine() if debug else None
        self._session = self._sessions = 0  # of the run, and how many there were
        self._turn = Turn()
        self._recording = False
        inventory.on_lost = self._forget

    @property
    def device(self) -> Device:
        """The device that the buffers are on."""
        return self.inventory.device

    @property
    def policy(self) -> Policy:
        """The policy that serves CHOSEN_ROLES."""
        return self._supply.policy

    @property
    def budget(self) -> Budget:
        """The limit in bytes, which ``set_budget`` sets and memory that runs out lowers."""
        return self._supply.budget

    @property
    def debug(self) -> bool:
        """Whether released buffers are overwritten and quarantined, and the launcher checks what steps use."""
        return self._quarantine is not None

    # ---- leases -----------------------------------------------------------------------------------------------------

    def acquire(
        self,
        nbytes: int,
        role: Role,
        label: str = "",
        site: int = 0,
        zero: Zero = Zero.NEVER,
        session: int | None = None,
        host: bool = False,
        exact: bool = False,
    ) -> Buffer:
        """Lease a buffer of at least ``nbytes``.  Only a new one is zero, unless ``zero`` asks for it.

        ``session``: whose it is (by default that of the run); a buffer that was another's is cleared in between.
        ``host``: the CPU will write the buffer.  ``exact``: the size was chosen with care, no class is to add to it.
        ``site``: the place in the program that asks.  PoolError for a size that no device limit allows and after
        ``close``, BudgetExceeded beyond a hard budget, and what the device raises.
        """
        if session is None:
            session = self._session
        route = self._routes[role]
        request = _new(Request, (nbytes, role, site, exact))
        size_class, take = route.size_class, route.acquire  # a call through a local is cheaper
        size = round_up(nbytes, _EXACT_UNIT) if exact else size_class(request)
        if size > route.limit or nbytes <= 0 or size < nbytes:
            size = self._supply.fit(request, size, route.policy, label)
        buffer_id = take(request, size)
        inventory = self.inventory
        ledger = self.ledger
        if buffer_id is None:
            slot = self._supply.create(size, role, label, session)
        else:
            slot = self._slots.get(buffer_id) or _MISSING
            if slot.size < size or slot.lease is not None or slot.condemned:
                raise self._bad_hand_out(route.policy, buffer_id, size)
            ordinary = zero is _NEVER and session == slot.session
            if (slot.used_until > inventory.serial or not ordinary) and self._must_wait(slot, role, ordinary, host):
                slot.request, slot.route = request, route
                self._parked.append(slot)
                slot = self._supply.create(size, role, label, session)
            else:
                if slot.role is not role:
                    inventory.move(slot, role)
                if not ordinary:
                    inventory.clear(slot, nbytes, zero, session)
                ledger.hits += 1
                slot.stats.hits += 1
                if slot.size > size:
                    slot.stats.borrows += 1
        self._recording = True
        reserved = slot.size
        buffer = _new(Buffer, (slot.id, reserved, nbytes, role, label, site, inventory.generation))
        slot.lease, slot.request, slot.route = buffer, request, route
        stats = slot.stats
        stats.live = live = stats.live + 1
        if live > stats.high_water:
            stats.high_water = live
        ledger.in_use_bytes = in_use = ledger.in_use_bytes + reserved
        if in_use > ledger.peak_in_use_bytes:
            ledger.peak_in_use_bytes = in_use
        for observer in inventory.observers:
            observer.acquired(buffer)
        return buffer

    def release(self, buffer: Buffer) -> None:
        """End the lease.  The buffer goes back to its policy, and is destroyed at the next flush at the earliest.

        A lease that died with its device is released without effect.
        """
        buffer_id, reserved, requested, role, _, _, generation = buffer
        slot = self._slots.get(buffer_id)
        inventory = self.inventory
        if slot is None or slot.lease is not buffer or slot.pins:
            if generation != inventory.generation:
                return
            slot = inventory.slot_of(buffer)
            raise PoolError(f"{buffer.name} is pinned {slot.pins} times: unpin it before the release.")
        slot.lease = None
        slot.used_until = inventory.serial + 1
        if requested > slot.dirty_bytes:
            slot.dirty_bytes = requested
        slot.stats.live -= 1
        self.ledger.in_use_bytes -= reserved
        for observer in inventory.observers:
            observer.released(buffer)
        route = slot.route
        if route is not self._routes[role]:
            self._retire(slot, Eviction.POLICY)
        elif slot.suspect:
            self._retire(slot, Eviction.OOM)
        elif self._quarantine is not None:
            self._quarantine.add(slot)
        else:
            give_back = route.release
            given_up = give_back(buffer_id, slot.request, reserved, self._recording)
            if given_up:
                inventory.retire(given_up, Eviction.LIMIT, route.policy)

    def check(self, buffer: Buffer) -> None:
        """Raise StaleBuffer unless ``buffer`` is a lease that has not ended; DeviceLost if its device died."""
        self.inventory.slot_of(buffer)

    def pin(self, buffer: Buffer) -> None:
        """Forbid the release of ``buffer``, to which a recorded plan refers, until it is unpinned as often."""
        slot = self.inventory.slot_of(buffer)
        slot.pins += 1
        if slot.pins == 1:
            self.inventory.move(slot, Role.PINNED)

    def unpin(self, buffer: Buffer) -> None:
        """Take one pin of ``buffer`` back; PoolError if it has none."""
        slot = self.inventory.slot_of(buffer)
        if not slot.pins:
            raise PoolError(f"{buffer.name} is not pinned.")
        slot.pins -= 1
        if not slot.pins:
            self.inventory.move(slot, buffer.role)

    # ---- time passes ------------------------------------------------------------------------------------------------

    def new_session(self) -> int:
        """A number for ``step``: what its leases write, no other session sees.  Leases are its own from now on."""
        self._sessions += 1
        self._session = self._sessions
        return self._sessions

    def step(self, session: int | None = None) -> PoolStep:
        """A step from its first acquire to its submit, as an ``async with``: one at a time on this pool.

        A decode step of ``session`` begins as with ``begin_run``; None is for commands that are no decode step, as
        those of weights.  ``as`` gives the time in ms when its turn came.  PoolError within a step of the same task.
        """
        return PoolStep(self._turn, self._begin_run, session)

    @property
    def busy(self) -> bool:
        """Whether a step of another task is under way: then nothing may be submitted but by that task."""
        return self._turn.is_others

    def flush(self) -> None:
        """Carry out what waited until everything recorded was submitted, which is now.

        While a step of another task is under way, that is not so: then this does nothing, and its flush does it.
        """
        task = self._turn.task
        if task is None or task is current_task():  # is_others, without a call: every step comes by here
            self._flush()

    def begin_run(self, session: int = 0) -> None:
        """Begin a decode step of ``session``: flush, then the policies' windows turn over.

        For callers that share the pool with nobody; others use ``step``.  PoolError while another task's is under way.
        """
        if self._turn.is_others:
            raise PoolError("a step of another task is under way: begin yours with `async with pool.step(session)`.")
        self._begin_run(session)

    # ---- pressure and faults (see recovery.py) ----------------------------------------------------------------------

    def set_budget(self, budget_bytes: int | None, hard: bool = False) -> None:
        """Set another budget from now on; free buffers beyond it are given up."""
        self._supply.budget = Budget(budget_bytes, hard)
        self.reclaim(self._supply.excess(0))

    def reclaim(self, nbytes: int) -> int:
        """Give up free buffers of ``nbytes`` in total, or all there are, for want of room; returns how many."""
        return self._supply.reclaim(nbytes)

    def trim(self, cause: Eviction = Eviction.TRIM) -> None:
        """Destroy every free buffer; those released since the last flush at the next one."""
        self._supply.drain(cause)
        if self._quarantine is not None:
            self.inventory.retire(self._quarantine.drain(), cause, self.policy)

    def note_lost(self) -> None:
        """Forget every buffer: the device is gone, and they with it.  What the policies learned stays."""
        self.inventory.note_lost()

    def rebuild(self, device: Device) -> None:
        """Go on with another ``device``: the books are empty, the high-water marks are there, old leases are dead."""
        self.inventory.note_lost()
        self.inventory.attach(device)
        self._supply.choose(self.policy)

    def close(self) -> None:
        """Destroy everything, leased buffers too.  Safe to call twice, and after the device was lost."""
        self._supply.close()
        self._forget()
        self.inventory.close()

    # ---- policies and what to know about them -----------------------------------------------------------------------

    def set_policy(self, policy: str | Policy, **options: OptionValue) -> None:
        """Serve from now on with another policy.  The old one's free buffers are destroyed, leased ones at release."""
        new, old = make_policy(policy, **options) if isinstance(policy, str) else policy, self.policy
        if new is old:
            return
        self.chosen = (policy, options) if isinstance(policy, str) else None
        self._supply.choose(new)
        self.inventory.retire(old.drain(), Eviction.POLICY, old)

    def prepare_growth(self, nbytes: int, sites: Iterable[int], runs: int, at_most: int | None = None) -> int:
        """Create some of the KV buffers of ``nbytes`` that ``sites`` will ask for in ``runs`` runs; returns how many.

        Called once a run, it makes ``at_most`` at a time, or by default enough for most to be there in time: one where
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
            if self._supply.excess(size) > 0:
                break
            slot = self.inventory.create(size, Role.KV, "ahead", self._session, missed=False)
            self.inventory.touch(slot, size)
            policy.adopt(slot.id, size, runs)
            made += 1
        return made

    def report(self) -> MemoryReport:
        """A snapshot of the ledger, with what the leases of now asked for."""
        return self.ledger.report(self.inventory.requested())

    def classes(self) -> list[ClassRow]:
        """Per role and size: buffers now, counters since ``ledger.reset_peaks``; the most bytes first."""
        rows = [stats.row(self.target(stats)) for stats in self.ledger.classes.values()]
        return sorted(rows, key=lambda row: -row["size"] * (row["live"] + row["free"]))

    def target(self, stats: ClassStats) -> int | None:
        """How many free buffers of the class ``stats`` its policy would keep now; None: no limit."""
        return self._routes[stats.role].policy.target(stats.size, stats.role)

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` of every event from now on."""
        self.inventory.observers = (*self.inventory.observers, observer)

    def unobserve(self, observer: Observer) -> None:
        """Tell ``observer`` of nothing more."""
        self.inventory.observers = tuple(other for other in self.inventory.observers if other is not observer)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _begin_run(self, session: int) -> None:
        self._flush()
        self._session = session
        self.inventory.run += 1
        self._supply.budget.note_run()
        if self._quarantine is not None:
            self._quarantine.begin_run(self.inventory.run, self._give_back)
        self._supply.begin_run()
        for observer in self.inventory.observers:
            observer.run_began(self.inventory.run)

    def _flush(self) -> None:
        inventory = self.inventory
        inventory.flush(self._recording)
        self._recording = False
        if self._parked:
            parked, self._parked = self._parked, []
            for slot in parked:
                self._give_back(slot)
        self._supply.flush()
        if self._quarantine is not None:
            self._quarantine.flush(inventory.device, inventory.run)
        for observer in inventory.observers:
            observer.flushed(inventory.serial)

    def _bad_hand_out(self, policy: Policy, buffer_id: int, size: int) -> PolicyError:
        slot = self._slots.get(buffer_id)
        state = f"{slot.size:,} B, {self.inventory.state(buffer_id)}" if slot is not None else "unknown"
        return PolicyError(f"{type(policy).__name__} handed out buffer {buffer_id} ({state}) for {size:,} B.")

    def _must_wait(self, slot: Slot, role: Role, ordinary: bool, host: bool) -> bool:
        """Whether a lease may not have this free buffer before the flush.

        What recorded commands may use, neither the CPU nor another session nor a clear may touch.  What the CPU writes
        cannot be cleared either: the write would come before the clear.
        """
        return host or role in _HOST_ROLES or (not ordinary and slot.used_until > self.inventory.serial)

    def _give_back(self, slot: Slot) -> None:
        """Hand a buffer that was kept aside to its policy, if that still serves."""
        route = slot.route
        if route is not self._routes[slot.request.role]:
            self._retire(slot, Eviction.POLICY)
        else:
            given_up = route.release(slot.id, slot.request, slot.size, False)
            self.inventory.retire(given_up, Eviction.LIMIT, route.policy)

    def _retire(self, slot: Slot, cause: Eviction) -> None:
        self.inventory.retire((slot.id,), cause, self.policy)

    def _forget(self) -> None:
        """No buffer is kept aside or free any more."""
        self._supply.forget()
        if self._quarantine is not None:
            self._quarantine.drain()
        self._parked.clear()
        self._recording = False


_MISSING = Slot(0, -1, Role.WORKSPACE, ClassStats(Role.WORKSPACE, 0), 0, 0)  # too small for any request
