"""What a generation is asked for, and the state of one that is under way."""

import hashlib
from array import array
from dataclasses import dataclass, field

from stepwell.decode.flight import Flight, Want
from stepwell.decode.sampling import Draws, Sampling, choose, top_logits
from stepwell.decode.timing import NOTHING, Cost, StepCounters, StepTiming, TokenEvent
from stepwell.errors import BadRequest
from stepwell.gpu.clock import now_ms

_DIGEST_DIGITS = 16  # of SHA-256


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate.  ``eog_ids`` end the answer unless they are banned or ignored (fed back like any token).

    ``digest``: a hash of every step's logits.  ``measure``: with the counters of every token; ``gpu_time``: and the
    time of its compute passes by the GPU's clock, which waits for the GPU at every token; alone on its launcher.
    """

    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    eog_ids: frozenset[int] = frozenset()
    ban_eos: bool = False
    ignore_eos: bool = False
    top_logits: int = 0
    digest: bool = False
    measure: bool = True
    gpu_time: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequest(f"{self.max_tokens} tokens asked for; ask for at least 1.")
        if self.ban_eos and self.ignore_eos:
            raise BadRequest("ban_eos and ignore_eos exclude each other: choose one.")
        if not 0 <= self.top_logits <= 1000:
            raise BadRequest(f"top_logits is {self.top_logits}; it must be 0 to 1,000.")

    @property
    def want(self) -> Want:
        """The choice stays on the GPU, where the next embedding reads it, unless the host is to see the logits."""
        on_gpu = not self.top_logits
        cuts = self.sampling.cuts if on_gpu and not self.sampling.greedy else None
        return Want(on_gpu, tuple(sorted(self.eog_ids)) if self.ban_eos else (), self.digest, cuts)

    @property
    def settings(self) -> bytes:
        """What the GPU samples by; nothing where it does not."""
        return self.sampling.settings if self.want.cuts is not None else b""


class Run:
    """One generation under way: what its tokens are drawn with, and what the one that is awaited has taken so far."""

    def __init__(self, generation: Generation, depth: int, start_ms: float) -> None:
        self.generation, self.want, self.depth = generation, generation.want, depth
        self.draws = Draws(generation.sampling)
        self.encode_ms = self.wait_ms = 0.0
        self.cost: Cost = NOTHING  # of the token that is awaited
        self._last_ms = start_ms

    def spend(self, flight: Flight, wait_ms: float) -> None:
        """Account for a step that is over: the token that is awaited took it."""
        self.cost = self.cost.plus(flight.cost)
        self.encode_ms += flight.encode_ms
        self.wait_ms += wait_ms

    def event(self, index: int, position: int, data: bytes, counters: StepCounters | None) -> TokenEvent:
        """Token ``index``, of what its step brought back: chosen here unless the GPU did.  The next one begins."""
        generation = self.generation
        token, logits = self.want.split(data)
        best: list[tuple[int, float]] = []
        if token is None:
            values = array("f", logits)
            best = top_logits(values, generation.top_logits)
            token = choose(values, generation.sampling, self.draws[index], self.want.ban)
        digest = hashlib.sha256(logits).hexdigest()[:_DIGEST_DIGITS] if generation.digest else ""
        ends = token in generation.eog_ids and not generation.ignore_eos
        return TokenEvent(index, position, token, self._lap(), counters, ends, tuple(best), digest)

    def _lap(self) -> StepTiming:
        """The time since the token before, which is now over."""
        now = now_ms()
        timing = StepTiming(now - self._last_ms, self.encode_ms, self.wait_ms)
        self._last_ms = now
        self.encode_ms = self.wait_ms = 0.0
        self.cost = NOTHING
        return timing
