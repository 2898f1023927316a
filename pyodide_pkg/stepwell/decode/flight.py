"""The request for a step, the way it reached the GPU, and what it reads back."""

import struct
from collections.abc import Awaitable, Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from stepwell.decode.timing import Cost
from stepwell.kernels.sampling import Cuts
from stepwell.step.recorder import Step

LOGITS_AT = 16
"""The offset in bytes of the logits, where they are read back with the token's id, which comes first."""


class Issued(StrEnum):
    """How a step reached the GPU: as the replay of a plan, or live, and then why."""

    REPLAYED = "replayed"
    RECORDED = "recorded"  # and kept as a plan
    OFF = "off"  # replay is switched off
    PREFILL = "prefill"  # its scalars are not those of a decode step
    LIVE = "live"  # asked for
    IN_FLIGHT = "in flight"  # a plan is due, once nothing is
    BUFFERS_CHANGED = "buffers changed"
    BEYOND_COPIES = "beyond its copies"  # of the plan
    UNSOUND = "unsound"  # its trace breaks a rule that plans must keep
    DIFFERS = "differs"  # a replay gave other bits
    RETRIED = "retried"  # after a failure
    WORKLOAD = "workload"  # which has no plans

    @property
    def is_replay(self) -> bool:
        """Whether a plan was replayed."""
        return self is Issued.REPLAYED

    @property
    def refused(self) -> str | None:
        """Why there was no replay, as the record says it; None if there was one."""
        return None if self is Issued.REPLAYED else self.value


class StepRequest(NamedTuple):
    """One step to issue.

    ``ids`` are written by the host; None: the id is on the GPU already.  ``rows`` is their number.  ``prompt_end`` is
    the length at the end of the prompt that the step is part of.  ``last``: its logits choose a token.  ``live``:
    neither a plan nor for one.  ``token`` is the id of a decode step, given when nothing is in flight: then a plan may
    be recorded.  ``draw`` is the random number for the next id.
    """

    ids: Sequence[int] | None
    rows: int = 1
    prompt_end: int = 0
    last: bool = True
    live: bool = False
    token: int | None = None
    draw: int = 0


class Readback(NamedTuple):
    """What a step reads back: the id chosen on the GPU (never one of ``ban``), or the logits, or with ``digest`` both.

    ``cuts`` None: the id is that of the largest logit; else it is drawn, by the settings.
    """

    on_gpu: bool
    ban: tuple[int, ...] = ()
    digest: bool = False
    cuts: Cuts | None = None

    def nbytes(self, vocab: int) -> int:
        """Bytes that come back, with ``vocab`` logits."""
        if not self.on_gpu:
            return 4 * vocab
        return LOGITS_AT + 4 * vocab if self.digest else 4

    def split(self, data: bytes) -> tuple[int | None, bytes]:
        """The id (None if the host is to choose it) and the logits (or nothing) in what was read back."""
        if not self.on_gpu:
            return None, data
        (token,) = struct.unpack_from("<I", data)
        return token, data[LOGITS_AT:]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was issued.

    ``read`` is its result, None if nothing comes back; ``span_ms`` is when issuing began and ended; ``cost`` is that of
    issuing it; ``step`` is what was recorded, if it was issued live.
    """

    read: Awaitable[bytes] | None
    span_ms: tuple[float, float]
    issued: Issued
    cost: Cost
    step: Step | None = None

    @property
    def encode_ms(self) -> float:
        """Milliseconds that issuing took."""
        return self.span_ms[1] - self.span_ms[0]


class Ready:
    """A result that is there already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __await__(self) -> Generator[None, None, bytes]:
        return self._data
        yield  # a generator that ends at once
