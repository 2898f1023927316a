"""The host's sampling against the definition in numpy, and the distribution that it draws from."""

import math
from array import array

import numpy as np
import pytest

from stepwell.decode.sampling import Draws, Sampling, choose, kept_ids
from stepwell.errors import BadRequest
from stepwell.kernels.sampling import DRAWS
from stepwell.kernels.tuning import Tuning
from tests.reference import sampling as reference

CUTS = ((0, 1.0), (1, 1.0), (5, 1.0), (0, 0.5), (0, 1e-9), (12, 0.8), (10_000, 0.9999))


@pytest.mark.parametrize("temperature", [1e-45, 0.05, 0.7, 1.0, 3.0, 1e300])
@pytest.mark.parametrize(("top_k", "top_p"), CUTS)
@pytest.mark.parametrize("ban", [(), (0, 3, 199)])
def test_what_is_kept_and_drawn(temperature: float, top_k: int, top_p: float, ban: tuple[int, ...]) -> None:
    """Of normal logits with ties, and with some that are no numbers."""
    random = np.random.default_rng(5)
    logits = np.round(random.normal(scale=3, size=200) * 4).astype(np.float32) / 4
    logits[40:60:3], logits[70], logits[80] = np.nan, np.inf, -np.inf
    sampling = Sampling(temperature, top_k, top_p)
    distance = reference.distances(logits, temperature, ban)
    expected = reference.kept(distance, top_k, top_p)
    values = array("f", logits.tolist())
    for index in ban:
        values[index] = -math.inf
    kept = kept_ids(values, sampling)
    assert [index for index, _ in kept] == expected.ids.tolist()
    assert [weight for _, weight in kept] == pytest.approx(expected.weights.tolist())
    if top_k == 1:
        return  # choose takes the largest, infinities included: test_greedy
    for draw in (0, 1, DRAWS - 1, *random.integers(DRAWS, size=50).tolist()):
        assert choose(values, sampling, draw, ban) in reference.drawn(expected, draw, 1e-12)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 1.0), (0, 0.7)])
def test_the_distribution_is_the_softmax(top_k: int, top_p: float) -> None:
    """Over draws at even distances each id comes as often as its probability says, give or take two."""
    logits = np.random.default_rng(1).normal(scale=2, size=30).astype(np.float32)
    sampling, count = Sampling(0.8, top_k, top_p), 4096
    drawn = np.bincount(
        [choose(logits.tolist(), sampling, draw) for draw in range(0, DRAWS, DRAWS // count)], minlength=30
    )
    softmax = np.exp((logits - logits.max()) / 0.8)
    order = np.argsort(-softmax)
    if top_k:
        softmax[order[top_k:]] = 0
    if top_p < 1:
        sums = np.cumsum(softmax[order]) / softmax.sum()
        softmax[order[np.searchsorted(sums, top_p) + 1 :]] = 0
    assert np.abs(drawn - count * softmax / softmax.sum()).max() < 2


def test_greedy() -> None:
    logits = [1.0, 3.0, 3.0, -2.0]
    for sampling in (Sampling(), Sampling(temperature=2.0, top_k=1)):
        assert sampling.greedy
        assert choose(logits, sampling, 0) == 1
        assert choose(logits, sampling, 0, (1,)) == 2


def test_nothing_is_left() -> None:
    nothing = [math.nan, -math.inf, math.inf, math.nan]
    assert choose(nothing, Sampling(1.0), 5) == 0
    assert choose(nothing, Sampling(1.0), 5, (1, 0)) == 2
    assert choose([1.0, 2.0], Sampling(1.0), 5, (1,)) == 0


def test_draws_are_of_the_token_not_of_the_call() -> None:
    sampling = Sampling(temperature=1.0, seed=9)
    draws, again = Draws(sampling), Draws(sampling)
    late = draws[5]
    first = [draws[index] for index in range(6)]
    assert first[5] == late
    assert [again[index] for index in range(6)] == first
    assert [Draws(Sampling(1.0, seed=10))[index] for index in range(6)] != first
    assert [Draws(Sampling(seed=9))[index] for index in range(3)] == [0, 0, 0]


def test_draws_are_uniform() -> None:
    """Chi-square over 64 bins: 63 degrees of freedom exceed 103.4 once in a thousand seeds."""
    draws = Draws(Sampling(temperature=1.0, seed=0))
    counts = np.bincount([draws[index] * 64 // DRAWS for index in range(6400)], minlength=64)
    assert len(counts) == 64
    assert ((counts - 100) ** 2 / 100).sum() < 103.4


@pytest.mark.parametrize(("parts", "threads"), [(0, 16), (17, 16), (4, 24), (4, 2048)])
def test_tunings_that_cannot_be(parts: int, threads: int) -> None:
    with pytest.raises(BadRequest, match="a power of two up to 1,024, and no more parts"):
        Tuning("split", False, 4, 64, 64, 16, 4, sample_parts=parts, sample_threads=threads)
