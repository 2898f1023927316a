"""Choosing the next token: the settings of a request, and the choice on the host, the reference for the GPU's.

The GPU chooses (``argmax.wgsl``, ``sample.wgsl``) unless the logits come back anyway, because the largest of them are
asked for.  The random numbers are the host's in either case, one per token; ``kernels/sampling.py`` defines the draw.
"""

import heapq
import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.errors import BadRequest
from stepwell.kernels.sampling import BINS, DRAWS, STEPS, Cuts, inverse_of, settings_bytes, smallest_of


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings of sampling: ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadRequest(f"temperature is {self.temperature}; it must be 0 (greedy) or more.")
        if self.top_k < 0:
            raise BadRequest(f"top_k is {self.top_k}; it must be 0 (off) or more.")
        if not 0 < self.top_p <= 1:
            raise BadRequest(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off).")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is chosen."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def cuts(self) -> Cuts:
        """The cuts that are on."""
        return Cuts(self.top_k > 0, self.top_p < 1)

    @property
    def settings(self) -> bytes:
        """The settings for the GPU (``settings_bytes``)."""
        return settings_bytes(self.temperature, self.top_k, self.top_p)


class Draws:
    """The random numbers of a run: token n has the n-th, however often its step is issued; greedy runs have none."""

    def __init__(self, sampling: Sampling) -> None:
        self._random = None if sampling.greedy else random.Random(sampling.seed)
        self._drawn: list[int] = []

    def __getitem__(self, index: int) -> int:
        """A whole number, uniform in 0 … 2^24 - 1."""
        if self._random is None:
            return 0
        while len(self._drawn) <= index:
            self._drawn.append(self._random.randrange(DRAWS))
        return self._drawn[index]


def top_logits(logits: Sequence[float], count: int) -> list[tuple[int, float]]:
    """The ``count`` largest logits as (id, logit), largest first; of equal ones the smaller id first."""
    best = heapq.nsmallest(count, ((-logit, index) for index, logit in enumerate(logits)))
    return [(index, -negated) for negated, index in best]


def choose(logits: Sequence[float], sampling: Sampling, draw: int, ban: Sequence[int] = ()) -> int:
    """The id outside ``ban`` that ``draw`` takes of f32 ``logits``, or that of the largest for greedy ``sampling``."""
    values = array("f", logits)
    for index in ban:
        values[index] = -math.inf
    if sampling.greedy:
        return top_logits(values, 1)[0][0]
    kept = kept_ids(values, sampling)
    rest = draw / DRAWS * math.fsum(weight for _, weight in kept)
    chosen = smallest_of(tuple(ban))
    for index, weight in kept:
        chosen = index
        rest -= weight
        if rest < 0:
            break
    return chosen


def kept_ids(logits: "array[float]", sampling: Sampling) -> list[tuple[int, float]]:
    """(id, weight) of the ids that may be drawn, in the order of ids."""
    candidates = _distances(logits, sampling.temperature)
    if sampling.top_k:
        candidates = heapq.nsmallest(sampling.top_k, candidates)
    if sampling.top_p < 1:
        candidates.sort()
        candidates = candidates[: _nucleus([_weight(distance) for distance, _ in candidates], sampling.top_p)]
    return sorted((index, _weight(distance)) for distance, index in candidates)


def _distances(logits: "array[float]", temperature: float) -> list[tuple[int, int]]:
    """(distance, id) of the ids that are not out, in the order of ids; computed in f32 arithmetic."""
    largest = max(filter(math.isfinite, logits), default=None)
    if largest is None:
        return []
    inverse = inverse_of(temperature)
    ids = [index for index, logit in enumerate(logits) if -math.inf < logit <= largest]
    gaps = array("f", [largest - logits[index] for index in ids])
    scaled = array("f", [gap * inverse for gap in gaps])
    return [(int(x * STEPS), index) for index, x in zip(ids, scaled, strict=True) if x * STEPS < BINS * BINS]


def _weight(distance: int) -> float:
    return math.exp(-distance / STEPS)


def _nucleus(weights: Sequence[float], top_p: float) -> int:
    """The number of largest ``weights`` that hold ``top_p`` of their sum; at least one."""
    target = top_p * math.fsum(weights)
    held = 0.0
    for count, weight in enumerate(weights, 1):
        held += weight
        if held >= target:
            return count
    return len(weights)
