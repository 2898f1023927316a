"""Sampling in numpy, from the definition in ``stepwell.kernels.sampling``: float64 but for the distances."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

STEPS = 32_768
REACH = 32 * STEPS
DRAWS = 1 << 24
Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float64]


class Kept(NamedTuple):
    """``ids`` in their order and what they weigh; ``all_weigh`` is the sum before the nucleus was cut."""

    ids: Ids
    weights: Weights
    all_weigh: float


def distances(logits: npt.NDArray[np.float32], temperature: float, ban: tuple[int, ...] = ()) -> Ids:
    """Of every id; REACH for those that are never drawn."""
    allowed = np.isfinite(logits)
    allowed[list(ban)] = False
    if not allowed.any():
        return np.full(len(logits), REACH)
    inverse = np.float32(min(1 / temperature, 2.0**100))
    with np.errstate(all="ignore"):
        steps = (logits[allowed].max() - logits) * inverse * np.float32(STEPS)
    assert steps.dtype == np.float32
    near = allowed & (steps < REACH)
    return np.where(near, np.where(near, steps, 0).astype(np.int64), REACH)


def weigh(distance: Ids) -> Weights:
    return np.exp(-distance / STEPS)


def kept(distance: Ids, top_k: int, top_p: float) -> Kept:
    order = np.lexsort((np.arange(len(distance)), distance))
    order = order[distance[order] < REACH]
    if top_k:
        order = order[:top_k]
    sums = np.cumsum(weigh(distance[order]))
    all_weigh = float(sums[-1]) if len(sums) else 0.0
    if top_p < 1:
        order = order[: int(np.searchsorted(sums, top_p * all_weigh)) + 1]
    ids = np.sort(order)
    return Kept(ids, weigh(distance[ids]), all_weigh)


def drawn(chosen: Kept, draw: int, tolerance: float = 0.0) -> set[int]:
    """The id that ``draw`` takes, and those that it would take if it were off by ``tolerance`` of the sum."""
    ends = np.cumsum(chosen.weights)
    goal = draw / DRAWS * ends[-1]
    room = tolerance * ends[-1]
    beyond = np.searchsorted(ends, (goal - room, goal, goal + room), side="right")
    first, _, last = np.minimum(beyond, len(ends) - 1)
    return set(chosen.ids[first : last + 1].tolist())
