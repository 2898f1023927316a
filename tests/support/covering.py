"""Covering arrays: of a product of parameters, a few rows in which every two values of two of them come together.

A fault that needs one value, or two together, is seen as by the whole product; docs/testing.md shows it for faults that
were put in.  ``STEPWELL_FULL=1`` is the whole product, as the nightly workflow runs it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

FULL = os.environ.get("STEPWELL_FULL") == "1"


def cover(
    parameters: Mapping[str, Sequence[Any]], allowed: Callable[..., bool] = lambda **_: True, *, full: bool = FULL
) -> list[tuple[Any, ...]]:
    """Values in the order of ``parameters``, of those rows that are ``allowed``, which takes them by name.

    Greedy: always the row, the first of several, with the most pairs that are still missing.  (allpairspy leaves some
    out where not every row is allowed.)
    """
    whole = [row for row in product(*parameters.values()) if allowed(**dict(zip(parameters, row, strict=True)))]
    if full:
        return whole
    pairs = {row: set(combinations(enumerate(row), 2)) for row in whole}
    missing = set().union(*pairs.values())
    found = []
    while missing:
        best = max(whole, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        found.append(best)
    return found


def covering(**parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with such rows."""
    return pytest.mark.parametrize(tuple(parameters), cover(parameters))
