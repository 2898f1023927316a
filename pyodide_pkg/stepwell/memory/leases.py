"""Leases: who has which buffer.  The part of ``BufferPool`` that every acquire and release goes through."""

from collections.abc import Iterable, Iterator, Mapping

from stepwell.errors import BudgetExceeded, DeviceLost, PolicyError, PoolError, StaleBuffer
from stepwell.gpu.device import Device
from stepwell.memory.budget import Budget
from stepwell.memory.buffer import CHOSEN_ROLES, Buffer, Role, State, Zero
from stepwell.memory.class_stats import ClassStats, Eviction
from stepwell.memory.debug import Quarantine
from stepwell.memory.inventory import Inventory
from stepwell.memory.ledger import Figures
from stepwell.memory.policies import make_policy
from stepwell.memory.policies.base import Policy, Request, round_up
from stepwell.memory.policies.disabled import Disabled
from stepwell.memory.policies.lazy_release import LazyRelease
from stepwell.memory.policies.simple import Simple
from stepwell.memory.slots import Route, Slot
from stepwell.options import OptionValue

_HOST_ROLES = frozenset((Role.UNIFORM, Role.STAGING))
"""Written or mapped by the CPU: never while recorded work may use the buffer."""
_NEVER = Zero.NEVER
_EXACT_UNIT = 256  # bytes
_new = tuple.__new__  # half the cost of calling the NamedTuple


class Leases(Figures):
    """Acquire and release, over the inventory and the policies; what ``BufferPool`` promises of them is kept here."""

    def __init__(self, device: Device, policy: str | Policy, budget: Budget, debug: bool) -> None:
        self.inventory = inventory = Inventory(device)
        self.ledger = inventory.ledger
        self.policy = make_policy(policy) if isinstance(policy, str) else policy
        # the policy's name and options, where it has a name
        self.chosen: tuple[str, Mapping[str, OptionValue]] | None = (policy, {}) if isinstance(policy, str) else None
        self.budget = budget
        self._fixed: dict[Role, Policy] = {
            Role.WEIGHTS: LazyRelease(),
            Role.UNIFORM: Simple(),
            Role.STAGING: Disabled(),
            Role.PINNED: LazyRelease(),
        }
        self._routes: dict[Role, Route]
        self._policies: tuple[Policy, ...]
        self._slots = inventory.slots
        self._parked: list[Slot] = []  # passed over by a lease that could not take them before the flush
        self._quarantine = Quarantine() if debug else None
        self._session = self._sessions = 0  # of the run, and how many there were
        self._recording = False
        self._closed = False
        self._set_routes()

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
        """
        if session is None:
            session = self._session
        route = self._routes[role]
        request = _new(Request, (nbytes, role, site, exact))
        size_class, take = route.size_class, route.acquire  # a call through a local is cheaper
        size = round_up(nbytes, _EXACT_UNIT) if exact else size_class(request)
        if size > route.limit or nbytes <= 0 or size < nbytes:
            size = self._fit(request, size, route.policy, label)
        buffer_id = take(request, size)
        inventory = self.inventory
        ledger = self.ledger
        if buffer_id is None:
            slot = self._create(size, role, label, session)
        else:
            slot = self._slots.get(buffer_id) or _MISSING
            if slot.size < size or slot.lease is not None or slot.condemned:
                raise self._bad_hand_out(route.policy, buffer_id, size)
            ordinary = zero is _NEVER and session == slot.session
            if (slot.used_until > inventory.serial or not ordinary) and self._must_wait(slot, role, ordinary, host):
                slot.request, slot.route = request, route
                self._parked.append(slot)
                slot = self._create(size, role, label, session)
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
            slot = self._slot_of(buffer)
            raise PoolError(f"{_name(buffer)} is pinned {slot.pins} times: unpin it before the release.")
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
            self._retire((buffer_id,), Eviction.POLICY)
        elif slot.suspect:
            self._retire((buffer_id,), Eviction.OOM)
        elif self._quarantine is not None:
            self._quarantine.add(slot)
        else:
            give_back = route.release
            given_up = give_back(buffer_id, slot.request, reserved, self._recording)
            if given_up:
                self._retire(given_up, Eviction.LIMIT)

    def check(self, buffer: Buffer) -> None:
        """StaleBuffer unless ``buffer`` is a lease of this pool that has not ended; DeviceLost if its device died."""
        self._slot_of(buffer)

    @property
    def debug(self) -> bool:
        """Whether released buffers are overwritten and quarantined, and the launcher checks what steps use."""
        return self._quarantine is not None

    def check_live(self, buffer_ids: Iterable[int]) -> None:
        """StaleBuffer if one of them is not leased: a step that is about to be submitted uses it after its release."""
        for buffer_id in buffer_ids:
            slot = self._slots.get(buffer_id)
            if slot is None or slot.lease is None:
                raise StaleBuffer(
                    f"the step uses buffer {buffer_id}, which is {self.state(buffer_id)}. Release a buffer only after "
                    "the step that uses it was submitted."
                )

    def state(self, buffer_id: int) -> State:
        """Where a buffer is; one that the pool does not know is DESTROYED."""
        return self.inventory.state(buffer_id)

    def largest(self, role: Role) -> int:
        """Bytes that a buffer can have at most."""
        return self.inventory.limits[role][0]

    def leases(self) -> Iterator[Buffer]:
        """Everything that is leased."""
        return (slot.lease for slot in self._slots.values() if slot.lease is not None)

    def pin(self, buffer: Buffer) -> None:
        """A recorded plan refers to the buffer: it cannot be released until it is unpinned as often."""
        slot = self._slot_of(buffer)
        slot.pins += 1
        if slot.pins == 1:
            self.inventory.move(slot, Role.PINNED)

    def unpin(self, buffer: Buffer) -> None:
        slot = self._slot_of(buffer)
        if not slot.pins:
            raise PoolError(f"{_name(buffer)} is not pinned.")
        slot.pins -= 1
        if not slot.pins:
            self.inventory.move(slot, buffer.role)

    # ---- the budget -------------------------------------------------------------------------------------------------

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of destroyed buffers that the GPU may still be using."""
        return self.inventory.in_flight.nbytes

    def excess(self, nbytes: int) -> int:
        """By how much the budget would be exceeded by ``nbytes`` more; 0 or less: they fit."""
        return self.budget.excess(self.ledger.reserved_bytes + self.in_flight_bytes + nbytes)

    def reclaim(self, nbytes: int, cause: Eviction) -> int:
        """Give up free buffers of ``nbytes`` in total, as far as there are any; returns how many."""
        count = 0
        for policy in self._policies:
            if nbytes <= 0:
                break
            given_up = policy.reclaim(nbytes)
            nbytes -= sum(self._slots[buffer_id].size for buffer_id in given_up if buffer_id in self._slots)
            count += len(given_up)
            self._retire(given_up, cause, policy)
        return count

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _fit(self, request: Request, size: int, policy: Policy, label: str) -> int:
        """The size to reserve where the class is not what to reserve: the limit is lower, or the request is bad."""
        nbytes, role, _, _ = request
        where = f"acquire of {nbytes:,} B for {label or role}"
        if self._closed:
            raise PoolError(f"{where}: the pool is closed.")
        if nbytes <= 0:
            raise PoolError(f"{where}: ask for 1 B or more.")
        limit, name = self.inventory.limits[role]
        if nbytes > limit:
            raise PoolError(
                f"{where}; the device allows {limit:,} B ({name}). Use a smaller context or a quantised model."
            )
        if size < nbytes:
            raise PolicyError(f"{type(policy).__name__} reserves {size:,} B for a request of {nbytes:,} B.")
        # A KV tensor grows on: at the limit it has one last class, not a size of its own on every token.
        return limit if role is Role.KV else min(round_up(nbytes, 256), limit)

    def _create(self, size: int, role: Role, label: str, session: int) -> Slot:
        if self.budget.limit is not None:
            self._meet_budget(self.budget.limit, size, role, label)
        return self.inventory.create(size, role, label, session)

    def _meet_budget(self, limit: int, size: int, role: Role, label: str) -> None:
        """Give up free buffers for a new one.

        What the GPU may still be using makes room only later; a policy cannot know which that is, so it is asked again
        for as long as there are others.
        """
        while (excess := self.excess(size)) > 0 and self.reclaim(excess, Eviction.BUDGET):
            if not self.inventory.has_idle():
                break
        if not self.budget.hard or self.excess(size) <= 0:
            return
        in_use, in_flight = self.in_use_bytes, self.in_flight_bytes
        free = self.reserved_bytes - in_use
        raise BudgetExceeded(
            f"{size:,} B for {label or role} do not fit the budget of {limit:,} B: {in_use:,} B are in use, "
            f"{in_flight:,} B destroyed but in flight, {free:,} B free. Abandon the step and await make_room, raise "
            "the budget, or use a smaller context.",
            requested=size, budget=limit, in_use=in_use, in_flight=in_flight, free=free,
        )  # fmt: skip

    def _bad_hand_out(self, policy: Policy, buffer_id: int, size: int) -> PolicyError:
        slot = self._slots.get(buffer_id)
        state = f"{slot.size:,} B, {self.state(buffer_id)}" if slot is not None else "unknown"
        return PolicyError(f"{type(policy).__name__} handed out buffer {buffer_id} ({state}) for {size:,} B.")

    def _must_wait(self, slot: Slot, role: Role, ordinary: bool, host: bool) -> bool:
        """Whether a lease may not have this free buffer before the flush.

        What recorded commands may use, neither the CPU nor another session nor a clear may touch.  What the CPU writes
        cannot be cleared either: the write would come before the clear.
        """
        return host or role in _HOST_ROLES or (not ordinary and slot.used_until > self.inventory.serial)

    def _slot_of(self, buffer: Buffer) -> Slot:
        """The buffer behind a lease that has not ended; StaleBuffer or DeviceLost."""
        slot = self._slots.get(buffer.id)
        if slot is not None and slot.lease is buffer:
            return slot
        if buffer.generation != self.inventory.generation:
            raise DeviceLost(f"{_name(buffer)} died with its device. Rebuild the session and prefill again.")
        if slot is not None:
            raise StaleBuffer(f"{_name(buffer)} was released already. Release each buffer once, then leave it alone.")
        raise StaleBuffer(f"{_name(buffer)} is not of this pool: it was released and destroyed, or is another pool's.")

    def _set_routes(self) -> None:
        """Roles to policies: the chosen one and the fixed ones."""
        policies = {**self._fixed, **dict.fromkeys(CHOSEN_ROLES, self.policy)}
        limits = self.inventory.limits
        self._routes = {role: Route(policy, limits[role][0]) for role, policy in policies.items()}
        self._policies = tuple(dict.fromkeys((self.policy, *policies.values())))

    def _retire(self, buffer_ids: Iterable[int], cause: Eviction, policy: Policy | None = None) -> None:
        self.inventory.retire(buffer_ids, cause, policy or self.policy)


_MISSING = Slot(0, -1, Role.WORKSPACE, ClassStats(Role.WORKSPACE, 0), 0, 0)  # too small for any request


def _name(buffer: Buffer) -> str:
    return f"buffer {buffer.id} ({buffer.label or buffer.role}, {buffer.size:,} B)"
