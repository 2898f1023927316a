"""What the pool hands out: a ``Buffer``, and the ``Role`` that says what its bytes are for."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a buffer is for.  Decides its WebGPU usage, the policy that serves it, and its line in the ledger."""

    WEIGHTS = "weights"
    KV = "kv"
    ACTIVATION = "activation"
    WORKSPACE = "workspace"
    UNIFORM = "uniform"
    STAGING = "staging"


@dataclass(frozen=True, slots=True)
class Buffer:
    """One lease of a GPU buffer, from ``acquire`` to ``release``; the next lease of the same memory is another object.

    ``id`` is the device's handle, ``size`` the reserved and ``requested`` the asked-for bytes, ``site`` the place in
    the program that asked (equal sites of successive runs get equal buffers where the policy can).
    """

    id: int
    size: int
    requested: int
    role: Role
    label: str = ""
    site: int = 0
