"""Covering arrays: every pair of values that may come together, in fewer rows than the product, always the same."""

from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import pytest

from tests.support.covering import cover

SHAPES: list[Mapping[str, list[Any]]] = [
    {"kv": ["grow", "donate", "static", "paged"], "depth": [0, 1, 2, 4], "replay": [True, False], "params": [1, 2, 3]},
    {"a": [1, 2], "b": [1, 2], "c": [1, 2]},
    {"a": list(range(7)), "b": list(range(3)), "c": [None, 0.5, ""], "d": [(1, 2), (2, 1)]},
]


def pairs(row: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


@pytest.mark.parametrize("parameters", SHAPES, ids=str)
def test_every_pair_is_covered(parameters: Mapping[str, list[Any]]) -> None:
    found = cover(parameters, full=False)
    whole = set(product(*parameters.values()))
    assert set(found) <= whole
    assert len(set(found)) == len(found) < len(whole)
    assert set().union(*map(pairs, found)) == set().union(*map(pairs, whole))
    assert cover(parameters, full=False) == found
    assert set(cover(parameters, full=True)) == whole


def test_what_is_not_allowed_is_left_out_and_all_else_covered() -> None:
    parameters = {"fused": [False, True], "subgroups": [False, True], "dot4": [False, True], "kv": list("gdsp")}

    def allowed(fused: bool, subgroups: bool, dot4: bool, kv: str) -> bool:
        return not dot4 or (fused and subgroups)

    found = cover(parameters, allowed, full=False)
    whole = [row for row in product(*parameters.values()) if not row[2] or (row[0] and row[1])]
    assert set(found) <= set(whole)
    assert len(found) < len(whole)
    assert set().union(*map(pairs, found)) == set().union(*map(pairs, whole))
    assert set(cover(parameters, allowed, full=True)) == set(whole)


def test_two_parameters_are_their_product() -> None:
    assert cover({"a": [1, 2], "b": [3, 4]}, full=False) == [(1, 3), (1, 4), (2, 3), (2, 4)]
