"""What a step is to bring back, and a step that was issued."""

import struct
from collections.abc import Awaitable, Generator
from dataclasses import dataclass
from typing import NamedTuple

from stepwell.decode.timing import Cost
from stepwell.kernels.sampling import Cuts
from stepwell.step.recorder import Step

LOGITS_AT = 16  # behind the token's id, where both are read back


class Want(NamedTuple):
    """What a step is to bring back: the id chosen on the GPU (and never one of ``ban``), or the logits, or both.

    ``cuts`` None: the id chosen there is that of the largest logit; else it is drawn, by the settings.
    """

    on_gpu: bool
    ban: tuple[int, ...] = ()
    digest: bool = False
    cuts: Cuts | None = None

    def nbytes(self, vocab: int) -> int:
        if not self.on_gpu:
            return 4 * vocab
        return LOGITS_AT + 4 * vocab if self.digest else 4

    def split(self, data: bytes) -> tuple[int | None, bytes]:
        """(id or None, logits or nothing) of what was read back."""
        if not self.on_gpu:
            return None, data
        (token,) = struct.unpack_from("<I", data)
        return token, data[LOGITS_AT:]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was issued.  ``read`` is its result, None if nothing comes back; ``refused`` why it was no replay."""

    read: Awaitable[bytes] | None
    issued_ms: tuple[float, float]  # from, to
    refused: str | None
    cost: Cost  # of issuing it
    step: Step | None = None  # what was recorded, of a step that was issued live

    @property
    def encode_ms(self) -> float:
        return self.issued_ms[1] - self.issued_ms[0]


class Landed:
    """A result that is there already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __await__(self) -> Generator[None, None, bytes]:
        return self._data
        yield  # a generator that ends at once
