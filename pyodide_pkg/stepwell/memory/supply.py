"""Where a pool's buffers come from and go to: the policies by role, the budget, and what is asked of all policies."""

from collections.abc import Mapping

from stepwell.errors import BudgetExceeded, PolicyError, PoolError
from stepwell.memory.budget import Budget
from stepwell.memory.buffer import CHOSEN_ROLES, Role
from stepwell.memory.class_stats import Eviction
from stepwell.memory.inventory import Inventory
from stepwell.memory.policies.base import Policy, Request, round_up
from stepwell.memory.policies.disabled import Disabled
from stepwell.memory.policies.lazy_release import LazyRelease
from stepwell.memory.policies.simple import Simple
from stepwell.memory.slots import Route, Slot


class Supply:
    """The ``policy`` of CHOSEN_ROLES, the ``fixed`` ones of other roles, and what ``budget`` allows to create.

    What the policies give up, ``inventory`` retires.
    """

    def __init__(self, inventory: Inventory, budget: Budget, policy: Policy, fixed: Mapping[Role, Policy]) -> None:
        self._inventory = inventory
        self.budget = budget
        self._fixed: Mapping[Role, Policy] = {
            Role.WEIGHTS: LazyRelease(),
            Role.UNIFORM: Simple(),
            Role.STAGING: Disabled(),
            Role.PINNED: LazyRelease(),
            **fixed,
        }
        self.routes: dict[Role, Route] = {}
        self._closed = False
        self.choose(policy)

    def choose(self, policy: Policy) -> None:
        """Serve CHOSEN_ROLES with ``policy`` from now on, within the limits that the device has now."""
        self.policy = policy
        policies = {**self._fixed, **dict.fromkeys(CHOSEN_ROLES, policy)}
        limits = self._inventory.limits
        self.routes.update({role: Route(policy, limits[role][0]) for role, policy in policies.items()})
        self._all = tuple(dict.fromkeys((policy, *policies.values())))

    def close(self) -> None:
        """Serve nothing more, and take nothing back."""
        self._closed = True
        self.routes.update({role: Route(route.policy, -1) for role, route in self.routes.items()})

    def fit(self, request: Request, size: int, policy: Policy, label: str) -> int:
        """The bytes to reserve where ``size``, the class of ``request``, cannot be: the device's limit is lower.

        Raises PoolError for a bad request, PolicyError for a class below it.
        """
        nbytes, role, _, _ = request
        where = f"acquire of {nbytes:,} B for {label or role}"
        if self._closed:
            raise PoolError(f"{where}: the pool is closed.")
        if nbytes <= 0:
            raise PoolError(f"{where}: ask for 1 B or more.")
        limit, name = self._inventory.limits[role]
        if nbytes > limit:
            raise PoolError(
                f"{where}; the device allows {limit:,} B ({name}). Use a smaller context or a quantised model."
            )
        if size < nbytes:
            raise PolicyError(f"{type(policy).__name__} reserves {size:,} B for a request of {nbytes:,} B.")
        # A KV tensor grows on: at the limit it has one last class, not a size of its own on every token.
        return limit if role is Role.KV else min(round_up(nbytes, 256), limit)

    def create(self, size: int, role: Role, label: str, session: int) -> Slot:
        """A new buffer; free ones are given up for it where the budget asks for that.  BudgetExceeded if it is hard."""
        if self.budget.limit is not None:
            self._meet_budget(self.budget.limit, size, role, label)
        return self._inventory.create(size, role, label, session)

    def excess(self, nbytes: int) -> int:
        """By how much the budget would be exceeded by ``nbytes`` more; 0 or less: they fit."""
        return self.budget.excess(self._inventory.held_bytes + nbytes)

    def reclaim(self, nbytes: int) -> int:
        """Have the policies give up free buffers of ``nbytes`` in total, or all there are; returns how many."""
        slots, count = self._inventory.slots, 0
        for policy in self._all:
            if nbytes <= 0:
                break
            given_up = policy.reclaim(nbytes)
            nbytes -= sum(slots[buffer_id].size for buffer_id in given_up if buffer_id in slots)
            count += len(given_up)
            self._inventory.retire(given_up, Eviction.BUDGET, policy)
        return count

    def flush(self) -> None:
        """Tell the policies that everything recorded was submitted."""
        for policy in self._all:
            given_up = policy.flush()
            if given_up:
                self._inventory.retire(given_up, Eviction.LIMIT, policy)

    def begin_run(self) -> None:
        """Tell the policies that a run begins."""
        for policy in self._all:
            given_up = policy.begin_run()
            if given_up:
                self._inventory.retire(given_up, Eviction.WINDOW, policy)

    def drain(self, cause: Eviction) -> None:
        """Have the policies give up every free buffer."""
        for policy in self._all:
            self._inventory.retire(policy.drain(), cause, policy)

    def forget(self) -> None:
        """Have the policies forget every buffer: they died with their device, or are destroyed by others."""
        for policy in self._all:
            policy.drain()

    def _meet_budget(self, limit: int, size: int, role: Role, label: str) -> None:
        """Give up free buffers for a new one.

        What the GPU may still be using makes room only later; a policy cannot know which that is, so it is asked again
        for as long as there are others.
        """
        while self.reclaim(self.excess(size)):
            if not self._inventory.has_idle():
                break
        if not self.budget.hard or self.excess(size) <= 0:
            return
        in_use, in_flight = self._inventory.ledger.in_use_bytes, self._inventory.in_flight.nbytes
        free = self._inventory.ledger.reserved_bytes - in_use
        raise BudgetExceeded(
            f"{size:,} B for {label or role} do not fit the budget of {limit:,} B: {in_use:,} B are in use, "
            f"{in_flight:,} B destroyed but in flight, {free:,} B free. Abandon the step and await make_room, raise "
            "the budget, or use a smaller context.",
            requested=size, budget=limit, in_use=in_use, in_flight=in_flight, free=free,
        )  # fmt: skip
