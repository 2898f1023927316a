"""Where K and V are, as attention's launches see it: whole tensors, and slabs in few kernels however many there are."""

import pytest

from stepwell.kernels.kv import UNUSED, KVShape, KVSlabs, KVTensors, PageTable, table_words
from stepwell.memory.buffer import Buffer, Role
from stepwell.step.recorder import ByLength


def buffer(number: int) -> Buffer:
    return Buffer(number, 256, 256, Role.KV)


def layer(count: int, most: int) -> KVSlabs:
    """``count`` slabs of 100 positions; a launch binds ``most`` at most."""
    shape = KVShape(1, 64, most, (64, 32))
    spans = tuple((100 * number, 100) for number in range(count))
    tables = tuple(buffer(1000 + group) for group in range(-(-count // most)))
    return KVSlabs(PageTable(shape, spans, tables), [buffer(number) for number in range(count)], count - 1)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 4, 5]), (12, [1, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12])],
)
def test_places_for_slabs(most: int, expected: list[int]) -> None:
    shape = KVShape(1, 64, most)
    assert [shape.bound(count) for count in range(1, most + 1)] == expected


@pytest.mark.parametrize(
    ("count", "most", "expected"),
    [
        (1, 12, [1]),
        (2, 12, [2]),
        (3, 12, [4]),
        (12, 12, [12]),
        (13, 12, [12, 1]),
        (23, 12, [12, 12]),
        (3, 1, [1, 1, 1]),
    ],
)
@pytest.mark.parametrize("shares", [0, 7])
def test_reads(count: int, most: int, expected: list[int], shares: int) -> None:
    kv = layer(count, most)
    reads = list(kv.reads(32, 2, 3, shares))
    assert [dict(read.constants) for read in reads] == [
        {"slabs": places, "half": False, "column": "w", "chunk": 32} for places in expected
    ]
    for group, (read, places) in enumerate(zip(reads, expected, strict=True)):
        table, *slabs = (bound.id for bound in read.buffers)
        assert table == 1000 + group
        there = [number for number in range(count) if number // most == group]
        assert slabs == there + there[-1:] * (places - len(there))
        assert read.grid == (min(4 * count, shares) if shares else 4 * len(there), 2, 3)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 12, 13, 24])
def test_a_table_is_as_long_as_its_group_may_become(count: int) -> None:
    """What appends and what merges is compiled for that: a slab more is no other kernel."""
    kv = layer(count, 12)
    for group, places in enumerate(kv.table.bound):
        words = table_words(kv.table.shape, kv.table.slabs, group)
        assert len(words) == 4 * (1 + 12)
        there = min(12, count - 12 * group)
        assert there <= places <= 12
        assert words[4 + 4 * there :] == [UNUSED] * (4 * (12 - there))
    assert kv.append_constants() == layer(1, 12).append_constants()
    assert kv.merge_constants(64) == layer(1, 12).merge_constants(64)
    assert [bound.id for bound in kv.appended()] == [1000 + (count - 1) // 12, count - 1]
    assert kv.counted() == kv.table.groups[-1:]


def test_tensors_are_read_at_once() -> None:
    kv = KVTensors(buffer(1), buffer(2), half=True)
    (read,) = kv.reads(64, 2, 1)
    assert read.constants == kv.merge_constants(64) == (("slabs", 0), ("half", True), ("chunk", 64))
    assert read.buffers == kv.buffers
    assert read.grid == ByLength(64, 2, 1)
    (read,) = kv.reads(64, 2, 1, 32)
    assert read.grid == ByLength(64, 2, 1, 32)
