"""Plans: a decode step recorded once and replayed by one call, for as long as all that it refers to is there.

A plan is found by its key, which names every buffer that may differ from step to step.  It is dropped *before* a
buffer, a pipeline or a bind group that it refers to is destroyed; what its owner keeps for it is pinned until then.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stepwell.errors import DeviceLost
from stepwell.gpu.device import Binding, Device
from stepwell.launch.counters import Counters
from stepwell.memory.buffer import Buffer
from stepwell.memory.pool import BufferPool

DEFAULT_PLANS = 8
"""Plans per session by default."""
_SEEN = 8  # keys remembered per plan


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A recorded step.  ``counts``: those of a replay; ``last_position``: the last that its copies have room for."""

    handle: int  # of Device.create_plan
    key: Hashable
    owner: int  # the session
    device: Device
    buffers: frozenset[int]
    pipelines: frozenset[int]
    groups: frozenset[int]
    pinned: Sequence[Buffer]
    own_groups: Sequence[int]  # bind groups that no cache holds
    slots: frozenset[Binding]  # parameters that it writes
    counts: Counters
    last_position: int


class Plans:
    """At most ``bound`` plans per session; the least recently used one of its own makes room.

    A growing cache with K steps in flight needs K + 2 plans, or each is evicted before its turn comes.
    """

    def __init__(self, pool: BufferPool, bound: int = DEFAULT_PLANS) -> None:
        self._pool = pool
        self._bound = bound
        self._plans: dict[Hashable, Plan] = {}  # oldest use first
        self._seen: dict[int, dict[Hashable, int]] = {}  # by session; the latest last
        self._dead: list[Plan] = []  # to be taken apart when no step is being issued
        self.recorded = self.replayed = self.invalidated = 0
        self.refused: Counter[str] = Counter()
        pool.inventory.before_destroy.append(self.drop_buffer)

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[Plan]:
        """The plans that can be replayed."""
        return iter(self._plans.values())

    def get(self, key: Hashable) -> Plan | None:
        """The plan of ``key``, if there is one; dropped plans are taken apart first."""
        if self._dead:
            self.sweep()
        plan = self._plans.pop(key, None)
        if plan is not None:
            self._plans[key] = plan
        return plan

    def sightings(self, key: Hashable, owner: int) -> int:
        """Times that ``owner`` had ``key`` before, as far back as ``_SEEN`` keys per plan."""
        seen = self._seen.setdefault(owner, {})
        before = seen.pop(key, 0)
        seen[key] = before + 1
        if len(seen) > _SEEN * self._bound:
            seen.pop(next(iter(seen)))
        return before

    def add(self, plan: Plan) -> None:
        """Keep ``plan``; the least recently used one of its owner makes room."""
        self._plans[plan.key] = plan
        self.recorded += 1
        own = [other for other in self._plans.values() if other.owner == plan.owner]
        if len(own) > self._bound:
            self._drop(lambda other: other is own[0])
        self.sweep()

    # ---- capture safety ---------------------------------------------------------------------------------------------

    def drop_buffer(self, buffer: int) -> None:
        """Drop the plans of ``buffer``, which is about to be destroyed."""
        if self._plans:
            self.invalidated += self._drop(lambda plan: buffer in plan.buffers)

    def drop_group(self, group: int) -> None:
        """Drop the plans of ``group``, a bind group that is about to be destroyed."""
        if self._plans:
            self.invalidated += self._drop(lambda plan: group in plan.groups)

    def drop_variant(self, pipelines: Iterable[int], buffers: Iterable[int]) -> None:
        """Drop the plans of ``pipelines`` and workspaces ``buffers``, which are about to be destroyed."""
        gone, freed = frozenset(pipelines), frozenset(buffers)
        self.invalidated += self._drop(
            lambda plan: not (gone.isdisjoint(plan.pipelines) and freed.isdisjoint(plan.buffers))
        )

    def discard(self, plan: Plan) -> None:
        """Drop ``plan``, which cannot be trusted."""
        self.invalidated += self._drop(lambda other: other is plan)
        self.sweep()

    def forget(self, owner: int) -> None:
        """Drop the plans of ``owner``, a session that ends."""
        self._drop(lambda plan: plan.owner == owner)
        self._seen.pop(owner, None)
        self.sweep()

    def clear(self) -> None:
        """Drop every plan."""
        self._drop(lambda _: True)
        self._seen.clear()
        self.sweep()

    def close(self) -> None:
        """Drop every plan and watch the pool no longer."""
        self.clear()
        self._pool.inventory.before_destroy.remove(self.drop_buffer)

    def sweep(self) -> None:
        """Take dropped plans apart: their pins, and the device's copies."""
        dead, self._dead = self._dead, []
        for plan in dead:
            for buffer in plan.pinned:
                if buffer.generation == self._pool.inventory.generation:
                    self._pool.unpin(buffer)
        try:
            for plan in dead:
                for handle in (plan.handle, *plan.own_groups):
                    plan.device.destroy(handle)
        except DeviceLost:
            return  # they died with it

    def _drop(self, condemned: Callable[[Plan], bool]) -> int:
        gone = [plan for plan in self._plans.values() if condemned(plan)]
        for plan in gone:
            del self._plans[plan.key]
        self._dead += gone
        return len(gone)
