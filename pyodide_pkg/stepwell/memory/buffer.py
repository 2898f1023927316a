"""What the pool hands out: a ``Buffer``, the ``Role`` that says what its bytes are for, and the choices of a lease."""

from enum import StrEnum
from typing import NamedTuple


class Role(StrEnum):
    """What a buffer is for: decides its WebGPU usage, the policy that serves it, and its line in the ledger."""

    WEIGHTS = "weights"
    KV = "kv"
    ACTIVATION = "activation"
    WORKSPACE = "workspace"
    UNIFORM = "uniform"
    STAGING = "staging"
    PINNED = "pinned"  # held by a recorded plan: never reused while it is


CHOSEN_ROLES = (Role.KV, Role.ACTIVATION, Role.WORKSPACE)
"""The roles that the chosen policy serves; the others have fixed ones, as in ONNX Runtime."""


class Zero(StrEnum):
    """What a lease's bytes are at first.  A buffer's first lease is zero in any case: WebGPU sees to that.

    Across sessions every lease is cleared, whatever it asks for.
    """

    NEVER = "never"  # undefined: the first command writes them all
    IF_DIRTY = "if_dirty"  # zero; only what earlier leases may have written is cleared
    ALWAYS = "always"  # zero; all requested bytes are cleared


class State(StrEnum):
    """Where a buffer is between creation and destruction."""

    LIVE = "live"  # leased
    FREE_RECORDED = "free_recorded"  # recorded, unsubmitted commands may use it
    FREE_SUBMITTED = "free_submitted"  # the GPU may be using it
    FREE_COMPLETE = "free_complete"  # nothing uses it
    DESTROYED = "destroyed"


class Buffer(NamedTuple):
    """One lease of a GPU buffer, from ``acquire`` to ``release``; the next lease of the same memory is another object.

    ``id`` is the device's handle, ``size`` the reserved and ``requested`` the asked-for bytes, ``site`` the place in
    the program that asked (equal sites of successive runs get equal buffers where the policy can).  ``generation``
    counts the pool's devices: a lease dies with its device.
    """

    id: int
    size: int
    requested: int
    role: Role
    label: str = ""
    site: int = 0
    generation: int = 0

    @property
    def name(self) -> str:
        """What an error calls it: its id, label or role, and size."""
        return f"buffer {self.id} ({self.label or self.role}, {self.size:,} B)"


def mib(nbytes: int) -> str:
    """Text for ``nbytes``: in MiB, or exact below one."""
    if nbytes < 1 << 20:
        return f"{nbytes:,} B"
    return f"{nbytes / (1 << 20):,.1f} MiB"
