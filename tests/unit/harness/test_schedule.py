"""What every comparison is made of: schedules, the text of ``--arms``, paired ratios and their intervals."""

from random import Random
from typing import Any

import pytest

from harness import SetupError
from harness.arms.figures import Ratio, median_interval
from harness.arms.schedule import Arm, Schedule, read_arms


def schedule(*names: str, **changes: Any) -> Schedule[None]:
    arms = tuple(Arm(name, None) for name in names)
    return Schedule(arms=arms, **{"rounds": 3, "steps": 8, "skip": 3, "starts": (2036, 4084), **changes})


def test_the_order_rotates() -> None:
    plan = schedule("adaptive", "bucket", "static")
    turns = list(plan)
    assert [turn.arm.name[0] for turn in turns if turn.start == 2036] == list("absbsasab")
    assert [turn.arm.name[0] for turn in turns if turn.start == 4084] == list("absbsasab")
    assert [turn.round for turn in turns] == [0] * 6 + [1] * 6 + [2] * 6
    assert [turn.number for turn in turns] == list(range(18))
    assert len(plan) == 18
    assert plan.progress(turns[10]) == "11 of 18: static from 4,084, round 2"


@pytest.mark.parametrize(
    ("names", "changes", "said"),
    [
        ([], {}, "there is no arm to run"),
        (["static", "bucket", "static"], {}, "an arm is named twice: static, bucket, static"),
        (["static"], {"steps": 3}, "3 steps, of which 3 are warm-up: ask for 4 or more"),
    ],
)
def test_schedules_that_are_refused(names: list[str], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        schedule(*names, **changes)


def test_the_text_of_arms() -> None:
    assert list(read_arms(" adaptive:window=4; stagger = false ,, static,")) == [
        ("adaptive:window=4; stagger = false", "adaptive", {"window": "4", "stagger": "false"}),
        ("static", "static", {}),
    ]
    assert list(read_arms("bucket:limits=4 MiB:64")) == [("bucket:limits=4 MiB:64", "bucket", {"limits": "4 MiB:64"})]


@pytest.mark.parametrize("part", ["window", "window=", "=4"])
def test_an_option_of_an_arm_is_a_name_and_a_value(part: str) -> None:
    with pytest.raises(SetupError, match=f"arm 'adaptive:{part}': '{part}' is not name=value"):
        list(read_arms(f"static,adaptive:{part}"))


def test_ratios_are_of_rounds_that_both_arms_have() -> None:
    ratio = Ratio.paired({0: 2.0, 1: 6.0, 2: 9.0, 3: 1.0}, {1: 2.0, 0: 1.0, 3: 0.0})
    assert ratio.values == (2.0, 3.0)
    assert ratio.median == 2.5
    assert f"{ratio:.1f}" == "2.5 [2.0, 3.0]"


def test_the_interval_is_deterministic_and_covers() -> None:
    assert median_interval([2.0]) == (2.0, 2.0)
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert median_interval(values) == median_interval(values)
    low, high = median_interval(values)
    assert 1 <= low < 3 < high <= 5
    random, hits = Random(7), 0
    for _ in range(60):  # samples of 15 from a distribution whose median is 1
        sample = [random.lognormvariate(0, 0.2) for _ in range(15)]
        low, high = median_interval(sample, resamples=300)
        hits += low <= 1 <= high
    assert hits >= 51  # 95 % of 60 are 57; 51 or fewer by chance: less than 1 in 100
