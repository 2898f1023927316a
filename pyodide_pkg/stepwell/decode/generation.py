"""The request for a generation, and the state of one that is under way."""

import hashlib
from array import array
from dataclasses import dataclass, field

from stepwell.decode.flight import Flight, Issued, Readback
from stepwell.decode.sampling import Draws, Sampling, choose, top_logits
from stepwell.decode.timing import NO_COST, Cost, Meter, StepTiming, TokenEvent
from stepwell.errors import BadRequest
from stepwell.gpu.clock import now_ms

_DIGEST_DIGITS = 16  # of SHA-256


@dataclass(frozen=True, slots=True)
class Generation:
    """The request for a generation.

    ``eog_ids`` end the answer unless they are banned or ignored (fed back like any token).  ``digest``: a hash of every
    step's logits.  ``measure``: the counters of every token.  ``gpu_time``: also the time of its compute passes by the
    GPU's clock, which waits for the GPU at every token; no other generation may use the launcher then.
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
    def readback(self) -> Readback:
        """What steps read back: the id, chosen on the GPU where the next embedding reads it, or logits for the host."""
        on_gpu = not self.top_logits
        cuts = self.sampling.cuts if on_gpu and not self.sampling.greedy else None
        return Readback(on_gpu, tuple(sorted(self.eog_ids)) if self.ban_eos else (), self.digest, cuts)

    @property
    def settings(self) -> bytes:
        """The settings by which the GPU samples; empty where it does not."""
        return self.sampling.settings if self.readback.cuts is not None else b""


class Run:
    """One generation under way: its draws, and the times and counts of the awaited token so far.

    Here a token's times and counts are summed: those of issuing its step, which came with the flight, and those of the
    session while the token was awaited, which ``meter`` has.
    """

    def __init__(self, generation: Generation, depth: int, meter: Meter) -> None:
        """``depth`` steps may run ahead of the awaited token.  The first token's time begins now."""
        self.generation, self.readback, self.depth = generation, generation.readback, depth
        self.draws = Draws(generation.sampling)
        self._meter = meter
        self._encode_ms = self._wait_ms = 0.0
        self._cost: Cost = NO_COST
        self._last_ms = now_ms()

    def spend(self, flight: Flight, wait_ms: float) -> None:
        """Add a step that is over after ``wait_ms`` to the awaited token."""
        self._cost = self._cost.plus(flight.cost)
        self._encode_ms += flight.encode_ms
        self._wait_ms += wait_ms

    def event(
        self, index: int, position: int, data: bytes, issued: Issued, kv_class_bytes: int, gpu_ms: float | None
    ) -> TokenEvent:
        """The event of token ``index``, from the ``data`` that its step brought back; then the next token begins.

        The id is the GPU's choice, or it is chosen here.
        """
        generation, counters = self.generation, None
        if generation.measure:
            cost = self._cost.plus(self._meter.take())
            counters = self._meter.counters(cost, kv_class_bytes, issued.refused, gpu_ms)
        token, logits = self.readback.split(data)
        best: list[tuple[int, float]] = []
        if token is None:
            values = array("f", logits)
            best = top_logits(values, generation.top_logits)
            token = choose(values, generation.sampling, self.draws[index], self.readback.ban)
        digest = hashlib.sha256(logits).hexdigest()[:_DIGEST_DIGITS] if generation.digest else ""
        ends = token in generation.eog_ids and not generation.ignore_eos
        return TokenEvent(index, position, token, self._lap(), counters, ends, tuple(best), digest)

    def _lap(self) -> StepTiming:
        """The times since the token before; those of the next token begin."""
        now = now_ms()
        timing = StepTiming(now - self._last_ms, self._encode_ms, self._wait_ms)
        self._last_ms = now
        self._encode_ms = self._wait_ms = 0.0
        self._cost = NO_COST
        return timing
