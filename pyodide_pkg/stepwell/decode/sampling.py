"""Choosing the next token from the logits on the host: temperature, top-k, top-p, seeded.

Greedy decoding does not come through here: its argmax runs on the GPU and four bytes come back.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off."""

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
        return self.temperature == 0


def top_logits(logits: Sequence[float], count: int) -> list[tuple[int, float]]:
    """The ``count`` largest logits as (id, logit), largest first; of equal ones the smaller id first."""
    best = heapq.nsmallest(count, ((-logit, index) for index, logit in enumerate(logits)))
    return [(index, -negated) for negated, index in best]


class Sampler:
    """Draws token ids; the same seed and logits give the same ids."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = random.Random(sampling.seed)

    def choose(self, logits: Sequence[float], ban: Sequence[int] = ()) -> int:
        """An id drawn from softmax(logits / temperature), cut to the top k and then to the nucleus p."""
        sampling = self._sampling
        # banned ids are dropped after the cut, so the cut takes that many more
        wanted = 1 if sampling.greedy else sampling.top_k or len(logits)
        keep = min(len(logits), wanted + len(ban))
        candidates = [pair for pair in top_logits(logits, keep) if pair[0] not in ban]
        if sampling.top_k:
            candidates = candidates[: sampling.top_k]
        if sampling.greedy:
            return candidates[0][0]
        highest = candidates[0][1]
        weights = [math.exp((logit - highest) / sampling.temperature) for _, logit in candidates]
        if sampling.top_p < 1:
            weights = weights[: _nucleus(weights, sampling.top_p)]
        threshold = self._random.random() * math.fsum(weights)
        for (index, _), weight in zip(candidates, weights, strict=False):
            threshold -= weight
            if threshold < 0:
                return index
        return candidates[len(weights) - 1][0]


def _nucleus(weights: Sequence[float], top_p: float) -> int:
    """How many of the largest weights it takes to hold ``top_p`` of the sum; at least one."""
    target = top_p * math.fsum(weights)
    held = 0.0
    for count, weight in enumerate(weights, 1):
        held += weight
        if held >= target:
            return count
    return len(weights)
