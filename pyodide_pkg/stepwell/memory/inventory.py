"""The buffers that exist: created, counted, zeroed and destroyed here, each when the GPU's queue allows it.

Time is counted in flushes (``serial``): a buffer released now may be used by recorded commands until the next one, and
by the GPU until it is done with what that flush submitted (``completed``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from stepwell.errors import DeviceLost, PolicyError, StaleBuffer
from stepwell.gpu.device import BufferUsage, Device
from stepwell.memory.buffer import Buffer, Role, State, Zero
from stepwell.memory.class_stats import Eviction
from stepwell.memory.events import Observer
from stepwell.memory.ledger import Ledger
from stepwell.memory.policies.base import round_up
from stepwell.memory.slots import InFlight, Slot

_STORAGE = BufferUsage.STORAGE | BufferUsage.COPY_SRC | BufferUsage.COPY_DST
USAGE: Mapping[Role, BufferUsage] = {
    Role.WEIGHTS: _STORAGE,
    Role.KV: _STORAGE,
    Role.ACTIVATION: _STORAGE,
    Role.WORKSPACE: _STORAGE,
    Role.UNIFORM: BufferUsage.UNIFORM | BufferUsage.COPY_DST,
    Role.STAGING: BufferUsage.MAP_READ | BufferUsage.COPY_DST,
    Role.PINNED: _STORAGE,
}
"""The usage of the buffers of each role."""
_BINDING_LIMIT = {Role.UNIFORM: "maxUniformBufferBindingSize", Role.STAGING: "maxBufferSize"}


class Inventory:
    """What exists on the device, and how far the GPU has come with it.  Knows the books, and no policy.

    ``serial``: the number of the last flush; remember it before a wait, give it to ``note_complete`` after it.
    ``generation``: how many devices were lost.  ``run``: the number of the run, from 1.  ``before_destroy``: callables
    that are given a buffer's id while it is still there, for those that recorded its use.
    """

    def __init__(self, device: Device) -> None:
        self.ledger = Ledger()
        self.slots: dict[int, Slot] = {}
        self.in_flight = InFlight()
        self.observers: tuple[Observer, ...] = ()
        self.generation = 0
        self.serial = 0
        self.completed = 0  # the GPU is done with what was submitted up to this flush
        self.run = 0
        self.lost = False
        self.on_lost: Callable[[], None] = lambda: None  # whoever keeps ids of buffers forgets them here
        self.before_destroy: list[Callable[[int], None]] = []
        self._condemned: list[tuple[Slot, Eviction]] = []
        self._clears: dict[int, int] = {}
        self.attach(device)

    def attach(self, device: Device) -> None:
        """Create on ``device`` from now on, within its limits (``limits``: bytes and the limit's name, by role)."""
        self.device, self.lost = device, False
        self.limits = {role: _role_limit(role, device.info.limits) for role in Role}

    def create(self, size: int, role: Role, label: str, session: int, missed: bool = True) -> Slot:
        """Create a buffer and enter it in the books; ``missed``: because no free one fitted."""
        try:
            buffer_id = self.device.create_buffer(size, USAGE[role], label)
        except DeviceLost:
            self.note_lost()
            raise
        stats = self.ledger.stats(role, size)
        self.ledger.note_created(stats, missed)
        slot = self.slots[buffer_id] = Slot(buffer_id, size, role, stats, self.serial + 1, session)
        for observer in self.observers:
            observer.created(buffer_id, size, role, label)
        return slot

    def retire(self, buffer_ids: Iterable[int], cause: Eviction, policy: object) -> None:
        """Destroy buffers that ``policy`` gave up: now, or at the flush if recorded work may use them."""
        for buffer_id in buffer_ids:
            slot = self.slots.get(buffer_id)
            if slot is None or slot.lease is not None or slot.condemned:
                state = "which is leased" if slot is not None and slot.lease is not None else "which it does not have"
                raise PolicyError(f"{type(policy).__name__} gave up buffer {buffer_id}, {state}.")
            if slot.used_until > self.serial:
                slot.condemned = True
                self._condemned.append((slot, cause))
            else:
                self.destroy(slot, cause)

    def destroy(self, slot: Slot, cause: Eviction) -> None:
        """Destroy a buffer now, and take it off the books."""
        for told in self.before_destroy:
            told(slot.id)
        try:
            self.device.destroy(slot.id)
        except DeviceLost:
            self.note_lost()
            raise
        del self.slots[slot.id]
        self._clears.pop(slot.id, None)
        self.ledger.note_destroyed(slot.stats, cause, self.run)
        if slot.used_until > self.completed:
            self.in_flight.add(slot.used_until, slot.size)
        for observer in self.observers:
            observer.destroyed(slot.id, slot.size, cause)

    def flush(self, recorded: bool) -> None:
        """Carry out what waited until everything recorded was submitted; ``recorded``: there was something."""
        self.serial += 1
        if not recorded and self.completed == self.serial - 1:
            self.note_complete(self.serial)
        condemned, self._condemned = self._condemned, []
        for slot, cause in condemned:
            self.destroy(slot, cause)

    def note_complete(self, serial: int) -> None:
        """Note that the GPU has done all that was submitted up to the flush ``serial``: a read or wait returned."""
        if serial > self.completed:
            self.completed = serial
            self.in_flight.settle(serial)

    def has_idle(self) -> bool:
        """Whether a free buffer exists that neither recorded nor submitted work uses."""
        return any(slot.lease is None and slot.used_until <= self.completed for slot in self.slots.values())

    def state(self, buffer_id: int) -> State:
        """Where a buffer is; an unknown one is DESTROYED."""
        slot = self.slots.get(buffer_id)
        if slot is None:
            return State.DESTROYED
        if slot.lease is not None:
            return State.LIVE
        if slot.used_until > self.serial:
            return State.FREE_RECORDED
        return State.FREE_SUBMITTED if slot.used_until > self.completed else State.FREE_COMPLETE

    def slot_of(self, buffer: Buffer) -> Slot:
        """The GPU buffer of a lease that has not ended; StaleBuffer if it has, DeviceLost if its device died."""
        slot = self.slots.get(buffer.id)
        if slot is not None and slot.lease is buffer:
            return slot
        if buffer.generation != self.generation:
            raise DeviceLost(f"{buffer.name} died with its device. Rebuild the session and prefill again.")
        if slot is not None:
            raise StaleBuffer(f"{buffer.name} was released already. Release each buffer once, then leave it alone.")
        raise StaleBuffer(f"{buffer.name} is not of this pool: it was released and destroyed, or is another pool's.")

    def check_live(self, buffer_ids: Iterable[int]) -> None:
        """Raise StaleBuffer if one of them is not leased: a step that is about to be submitted uses it too late."""
        for buffer_id in buffer_ids:
            slot = self.slots.get(buffer_id)
            if slot is None or slot.lease is None:
                raise StaleBuffer(
                    f"the step uses buffer {buffer_id}, which is {self.state(buffer_id)}. Release a buffer only after "
                    "the step that uses it was submitted."
                )

    def leases(self) -> Iterator[Buffer]:
        """Everything that is leased."""
        return (slot.lease for slot in self.slots.values() if slot.lease is not None)

    def size_of(self, buffer_id: int) -> int:
        """Bytes of a buffer that exists; 0 of one that does not."""
        slot = self.slots.get(buffer_id)
        return slot.size if slot is not None else 0

    # ---- contents ---------------------------------------------------------------------------------------------------

    def clear(self, slot: Slot, nbytes: int, zero: Zero, session: int) -> None:
        """Have the next program zero what a lease of ``nbytes`` in ``session`` may not see."""
        if session != slot.session:
            nbytes = max(nbytes, slot.dirty_bytes)  # a whole binding shows the tail too
        elif zero is Zero.IF_DIRTY:
            nbytes = min(nbytes, slot.dirty_bytes)
        slot.session = session
        nbytes = min(round_up(nbytes, 4), slot.size)
        if nbytes:
            if nbytes >= slot.dirty_bytes:
                slot.dirty_bytes = 0
            self.touch(slot, nbytes)

    def touch(self, slot: Slot, nbytes: int) -> None:
        """Have the next program zero the first ``nbytes`` of a buffer."""
        self._clears[slot.id] = max(nbytes, self._clears.get(slot.id, 0))
        self.ledger.cleared += 1
        self.ledger.bytes_cleared += nbytes

    def take_clears(self) -> dict[int, int]:
        """Buffer id → bytes (multiples of 4) to zero from its start, before all else of the next program."""
        clears, self._clears = self._clears, {}
        return clears

    # ---- accounts ---------------------------------------------------------------------------------------------------

    def move(self, slot: Slot, role: Role) -> None:
        """Put a buffer on the account of another role, with its lease if there is one."""
        if slot.lease is not None:
            self.ledger.note_released(slot.stats)
        slot.stats = self.ledger.moved(slot.stats, role)
        slot.role = role
        if slot.lease is not None:
            self.ledger.note_acquired(slot.stats)

    @property
    def held_bytes(self) -> int:
        """What a budget limits: reserved bytes, and those of destroyed buffers that the GPU may still be using."""
        return self.ledger.reserved_bytes + self.in_flight.nbytes

    def requested(self) -> dict[Role, int]:
        """Bytes that the leases of each role asked for."""
        requested = dict.fromkeys(Role, 0)
        for slot in self.slots.values():
            if slot.lease is not None:
                requested[slot.role] += slot.lease.requested
        return requested

    def doubt_unconfirmed(self) -> None:
        """Suspect the buffers created since the GPU last finished: memory ran out, and they may have none."""
        for slot in self.slots.values():
            slot.suspect = slot.suspect or slot.born > self.completed

    def note_failure(self, what: str) -> None:
        """Tell the observers: ``what`` is ``oom`` or ``lost``."""
        for observer in self.observers:
            observer.failed(what, self.ledger.reserved_bytes)

    def note_lost(self) -> None:
        """Forget every buffer: the device is gone, and they with it.  Safe to call twice."""
        if self.lost:
            return
        self.lost = True
        self.note_failure("lost")
        for slot in self.slots.values():
            if slot.lease is not None:
                self.ledger.note_released(slot.stats)
            self.ledger.note_destroyed(slot.stats, Eviction.LOST, self.run)
        self.slots.clear()
        self._condemned.clear()
        self._clears.clear()
        self.in_flight = InFlight()
        self.completed = self.serial
        self.generation += 1
        self.on_lost()

    def close(self) -> None:
        """Destroy everything, leased buffers too."""
        self._condemned.clear()
        self._clears.clear()
        try:
            for slot in list(self.slots.values()):
                if slot.lease is not None:
                    self.ledger.note_released(slot.stats)
                    slot.lease = None
                self.destroy(slot, Eviction.CLOSE)
        except DeviceLost:
            return  # the rest died with the device, and is off the books


def _role_limit(role: Role, limits: Mapping[str, int]) -> tuple[int, str]:
    """The largest buffer of a role in bytes (a multiple of 4), and the limit that says so."""
    name = min(("maxBufferSize", _BINDING_LIMIT.get(role, "maxStorageBufferBindingSize")), key=lambda n: limits[n])
    return limits[name] // 4 * 4, name
