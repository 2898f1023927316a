"""What a pool policy is: pure decisions over sizes, roles, sites and ids.

A policy knows no device, clock, randomness or file: the same requests get the same decisions, so a policy can be
replayed and tested without a GPU.  It may hand a released buffer out again before the flush (the GPU runs commands in
order, so reuse by commands is safe); when a buffer may be *destroyed*, written from the CPU or used by another
recording is the pool's business.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from stepwell.memory.buffer import Role


class Request(NamedTuple):
    """What a policy sees of an ``acquire``: bytes, role, and the place in the program that asks."""

    nbytes: int
    role: Role
    site: int = 0
    exact: bool = False  # the size is what was asked for, not a class, and a larger buffer will not do


class Policy(Protocol):
    """Decisions: the size of a new buffer, which free buffer is reused, and which are given up.

    Every id is in one of three places: with the caller (between ``acquire`` and ``release``), kept by the policy, or
    given up (returned once by one of the methods, and forgotten).
    """

    def size_class(self, request: Request) -> int:
        """Bytes to reserve for ``request``: at least ``request.nbytes``, a multiple of 4."""

    def acquire(self, request: Request, size: int) -> int | None:
        """The id of a free buffer of ``size`` bytes or more, or None: the pool creates one of ``size``.

        ``size`` is what ``size_class`` said, or less where the device's limit is lower or the request is ``exact``.
        """

    def release(self, buffer_id: int, request: Request, size: int, recorded: bool) -> Sequence[int]:
        """Take back a buffer of ``size`` bytes.  Returns ids to destroy (the pool waits until that is safe).

        ``request``: that of its last lease.  ``recorded``: work was recorded since the last flush, and may use it.
        """

    def flush(self) -> Sequence[int]:
        """Note that everything recorded was submitted.  Returns ids to destroy."""
        return ()

    def begin_run(self) -> Sequence[int]:
        """Note that a run (one decode step) begins.  Returns ids to destroy."""
        return ()

    def reclaim(self, nbytes: int) -> Sequence[int]:
        """Ids to destroy because memory is short: of ``nbytes`` in total, or all; the cheapest to lose first."""

    def drain(self) -> Sequence[int]:
        """Forget every buffer it keeps; returns their ids.  What it has learned of demand may stay."""

    def target(self, size: int, role: Role) -> int | None:
        """How many free buffers of ``size`` bytes and ``role`` it would keep now; None: no limit."""


@runtime_checkable
class Growing(Protocol):
    """A policy that can keep KV buffers before they are needed."""

    def plan_growth(self, requests: Sequence[Request]) -> list[tuple[Request, int]]:
        """The buffers, with their sizes, that the KV ``requests`` to come will need and that are not there yet."""

    def adopt(self, buffer_id: int, size: int, runs: int) -> None:
        """Keep a new buffer of ``size`` bytes for ``runs`` runs at most, until a request takes it."""


def round_up(nbytes: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``nbytes``."""
    return -(-nbytes // multiple) * multiple
