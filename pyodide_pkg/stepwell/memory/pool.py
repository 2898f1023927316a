"""``BufferPool``: owns every GPU buffer.  The mechanism: a ``Policy`` decides, the pool acts and keeps the books.

What the pool guarantees, whatever the policy says:

* a buffer has one lease at a time, and a lease ends once (PoolError otherwise);
* a buffer released since the last flush is not destroyed before the next one: recorded work may still use it;
* no size exceeds what the device can bind.

A released buffer may be leased again before the flush where the policy does so.  That is right for use by commands
(they run in order), not for queue writes: what is written from the CPU has the role UNIFORM, whose policy waits.
"""

from collections.abc import Iterable, Mapping

from stepwell.errors import DeviceLost, PoolError
from stepwell.gpu.device import BufferUsage, Device
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.ledger import Ledger, MemoryReport
from stepwell.memory.policies import make_policy
from stepwell.memory.policies.base import Policy, Request, round_up
from stepwell.memory.policies.disabled import Disabled
from stepwell.memory.policies.lazy_release import LazyRelease
from stepwell.memory.policies.simple import Simple

_STORAGE = BufferUsage.STORAGE | BufferUsage.COPY_SRC | BufferUsage.COPY_DST
USAGE: Mapping[Role, BufferUsage] = {
    Role.WEIGHTS: _STORAGE,
    Role.KV: _STORAGE,
    Role.ACTIVATION: _STORAGE,
    Role.WORKSPACE: _STORAGE,
    Role.UNIFORM: BufferUsage.UNIFORM | BufferUsage.COPY_DST,
    Role.STAGING: BufferUsage.MAP_READ | BufferUsage.COPY_DST,
}
_BINDING_LIMIT = {Role.UNIFORM: "maxUniformBufferBindingSize", Role.STAGING: "maxBufferSize"}
CHOSEN_ROLES = (Role.KV, Role.ACTIVATION, Role.WORKSPACE)
"""The roles that the chosen policy serves; the others have fixed ones, as in ONNX Runtime."""


class BufferPool:
    """``policy``: a name in POLICIES or a Policy object of the caller's."""

    def __init__(self, device: Device, policy: str | Policy = "adaptive") -> None:
        self.device = device
        self.ledger = Ledger()
        self.policy = make_policy(policy) if isinstance(policy, str) else policy
        self._policy_of: dict[Role, Policy] = {
            Role.WEIGHTS: LazyRelease(),
            Role.UNIFORM: Simple(),
            Role.STAGING: Disabled(),
            **dict.fromkeys(CHOSEN_ROLES, self.policy),
        }
        self._limit = {role: _role_limit(role, device.info.limits) for role in Role}
        self._owned: dict[int, tuple[int, Role]] = {}  # id → size and the role that used it last
        self._leases: dict[int, tuple[Buffer, Request, Policy]] = {}
        self._released: set[int] = set()  # since the last flush: recorded work may use them
        self._condemned: list[int] = []  # to destroy at the flush
        self._recording = False  # something was acquired since the last flush
        self._closed = False

    def acquire(self, nbytes: int, role: Role, label: str = "", site: int = 0) -> Buffer:
        """Lease a buffer of at least ``nbytes``.  Its contents are undefined: only a new one is zero."""
        if self._closed:
            raise PoolError(f"acquire of {nbytes:,} B for {label or role}: the pool is closed.")
        request = Request(nbytes, role, site)
        policy = self._policy_of[role]
        size = self._size(request, policy, label)
        buffer_id = policy.acquire(request, size)
        if buffer_id is None:
            buffer_id = self.device.create_buffer(size, USAGE[role], label)
            self.ledger.note_created(size, role)
        else:
            self.ledger.note_reused(size, role, self._last_role(buffer_id, size))
        self._owned[buffer_id] = (size, role)
        self._recording = True
        buffer = Buffer(buffer_id, size, nbytes, role, label, site)
        self._leases[buffer_id] = (buffer, request, policy)
        self.ledger.note_acquired(size, nbytes, role)
        return buffer

    def release(self, buffer: Buffer) -> None:
        """End the lease.  The buffer goes back to its policy, and is destroyed at the next flush at the earliest."""
        self.check(buffer)
        _, request, policy = self._leases.pop(buffer.id)
        self._released.add(buffer.id)
        self.ledger.note_released(buffer.size, buffer.requested, buffer.role)
        if policy is self._policy_of[buffer.role]:
            self._retire(policy.release(buffer.id, request, buffer.size, self._recording))
        else:
            self._retire((buffer.id,))  # leased under a policy that was replaced

    def check(self, buffer: Buffer) -> None:
        """PoolError unless ``buffer`` is a lease of this pool that has not ended."""
        lease = self._leases.get(buffer.id)
        if lease is not None and lease[0] is buffer:
            return
        name = f"buffer {buffer.id} ({buffer.label or buffer.role}, {buffer.size:,} B)"
        if buffer.id in self._owned:
            raise PoolError(f"{name} was released already. Release each buffer once and do not use it afterwards.")
        raise PoolError(f"{name} is not of this pool: it was released and destroyed, or comes from another pool.")

    def flush(self) -> None:
        """Nothing recorded is unsubmitted any more: carry out what waited for that."""
        self._released.clear()
        self._recording = False
        condemned, self._condemned = self._condemned, []
        self._retire(condemned)
        for policy in self._policies():
            self._retire(policy.flush())

    def begin_run(self) -> None:
        """A decode step begins: flush, then the policies' windows turn over."""
        self.flush()
        for policy in self._policies():
            self._retire(policy.begin_run())

    def set_policy(self, policy: str | Policy) -> None:
        """Serve from now on with another policy.  The old one's free buffers are destroyed, leased ones at release."""
        new = make_policy(policy) if isinstance(policy, str) else policy
        if new is self.policy:
            return
        old, self.policy = self.policy, new
        self._policy_of.update(dict.fromkeys(CHOSEN_ROLES, new))
        self._retire(old.drain())

    def trim(self) -> None:
        """Destroy every free buffer; those released since the last flush at the next one."""
        for policy in self._policies():
            self._retire(policy.drain())

    def report(self) -> MemoryReport:
        return self.ledger.report()

    # Single figures of the report, for reading before and after every token.

    @property
    def created(self) -> int:
        return self.ledger.created

    @property
    def destroyed(self) -> int:
        return self.ledger.destroyed

    @property
    def hits(self) -> int:
        return self.ledger.hits

    @property
    def misses(self) -> int:
        return self.ledger.misses

    @property
    def bytes_created(self) -> int:
        return self.ledger.bytes_created

    @property
    def bytes_destroyed(self) -> int:
        return self.ledger.bytes_destroyed

    @property
    def reserved_bytes(self) -> int:
        return self.ledger.reserved_bytes

    @property
    def in_use_bytes(self) -> int:
        return self.ledger.in_use_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self.ledger.peak_reserved_bytes

    def close(self) -> None:
        """Destroy everything, leased buffers too.  Safe to call twice, and after the device was lost."""
        self._closed = True
        for policy in self._policies():
            policy.drain()
        for buffer, _, _ in self._leases.values():
            self.ledger.note_released(buffer.size, buffer.requested, buffer.role)
        self._leases.clear()
        self._released.clear()
        self._condemned.clear()
        for buffer_id in list(self._owned):
            try:
                self._destroy(buffer_id)
            except DeviceLost:
                continue  # it died with the device

    def _size(self, request: Request, policy: Policy, label: str) -> int:
        nbytes = request.nbytes
        if nbytes <= 0:
            raise PoolError(f"acquire of {nbytes} B for {label or request.role}: ask for 1 B or more.")
        limit, name = self._limit[request.role]
        if nbytes > limit:
            raise PoolError(
                f"acquire of {nbytes:,} B for {label or request.role}; the device allows {limit:,} B ({name}). "
                "Use a smaller context or a quantised model."
            )
        size = policy.size_class(request)
        return size if size <= limit else min(round_up(nbytes, 256), limit)

    def _last_role(self, buffer_id: int, size: int) -> Role:
        """The role that used a free buffer last; PoolError if the policy may not hand it out."""
        owned_size, last_role = self._owned.get(buffer_id, (0, Role.WORKSPACE))
        if owned_size != size or buffer_id in self._leases:
            state = "leased" if buffer_id in self._leases else f"{owned_size:,} B"
            raise PoolError(f"{type(self.policy).__name__} handed out buffer {buffer_id} ({state}) for {size:,} B.")
        return last_role

    def _policies(self) -> Iterable[Policy]:
        """Each policy once."""
        return dict.fromkeys(self._policy_of.values())

    def _retire(self, buffer_ids: Iterable[int]) -> None:
        """Destroy buffers that a policy gave up: now, or at the flush if recorded work may use them."""
        for buffer_id in buffer_ids:
            if buffer_id in self._leases:
                raise PoolError(f"{type(self.policy).__name__} gave up buffer {buffer_id}, which is leased.")
            if buffer_id in self._released:
                self._condemned.append(buffer_id)
            else:
                self._destroy(buffer_id)

    def _destroy(self, buffer_id: int) -> None:
        self.ledger.note_destroyed(*self._owned.pop(buffer_id))
        self.device.destroy(buffer_id)


def _role_limit(role: Role, limits: Mapping[str, int]) -> tuple[int, str]:
    """The largest buffer of a role in bytes (a multiple of 4), and the limit that says so."""
    name = min(("maxBufferSize", _BINDING_LIMIT.get(role, "maxStorageBufferBindingSize")), key=lambda n: limits[n])
    return limits[name] // 4 * 4, name
