"""The benchmark of ``attach``: arms, schedule, checks and figures, with runs that are made up."""

from typing import Any

import pytest

from harness import RunError, SetupError
from harness.arms import attach, attach_report
from harness.arms.attach import Benchmark, RunResult, parse_arms
from harness.arms.figures import ArmRun, figures

CREATES = {"bare": 54, "static": 0, "attached": 1}


class MadeUp:
    """A run whose steps take ``ms`` + 1, + 2, …, and recorded ones 10 % more; the second is ``spoilt``."""

    def __init__(self, options: dict[str, Any], ms: float, spoilt: dict[str, Any]) -> None:
        self._attach, self._alternate = options["attach"], options["alternate"]
        self.name = "attached" if self._attach and not self._alternate else options.get("kv", "bare")
        self._ms, self.spoilt, self._index = ms, spoilt, 0
        self.closed = False

    def next(self) -> attach.MeasuredStep:
        self._index += 1
        created, attached = CREATES[self.name], bool(self._attach) and (not self._alternate or self._index % 2 == 0)
        ms = (self._ms + self._index) * (1.1 if self._alternate and attached else 1)
        return {
            "ms": ms, "digest": self._index, "wrong": 0, "attached": attached, "created": created,
            "created_bytes": created << 20, "others": 3, "destroyed": 3, "live_bytes": 0,
            **(self.spoilt if self._index == 2 else {}),
        }  # fmt: skip

    def finish(self) -> dict[str, Any]:
        return {"digest": 7, "peak_bytes": 1 << 30, "stats": None, "left": 0, "left_bytes": 0}

    def close(self) -> None:
        self.closed = True


def plan_of(arms: str = "bare,static,attached", **changes: Any) -> Benchmark:
    given = {"tensors": 64, "starts": (10, 20), "steps": 6, "rounds": 3, **changes}
    return Benchmark(arms=parse_arms(arms), **given)


def run(
    plan: Benchmark, *, spoil: str = "", stop_after: int = 10**6, **spoilt: Any
) -> tuple[list[ArmRun[RunResult]], list[MadeUp]]:
    opened: list[MadeUp] = []
    said: list[str] = []

    def open_arm(options: dict[str, Any]) -> MadeUp:
        made = MadeUp(options, 100.0 + len(opened), {})
        made.spoilt = spoilt if made.name == spoil else {}
        opened.append(made)
        return made

    try:
        return attach.run_all(plan, open_arm, said.append, lambda: len(opened) > stop_after), opened
    finally:
        assert said
        assert all(made.closed for made in opened)


def test_arms() -> None:
    bare, lazy, static, record = (arm.settings for arm in parse_arms("bare, bare:cache=lazyRelease,static,record"))
    assert (bare.decoding, bare.attach) == ({}, None)
    assert lazy.decoding == {"cache": "lazyRelease"}
    assert static.decoding == {"kv": "static"}
    assert (record.attach, record.alternate) == ({"record": True}, True)
    (attached,) = parse_arms("attached:zero=never;policy=bucket;era=A;window=4;hard=true", 512)
    assert attached.settings.attach == {
        "policy": "bucket", "zero": "never", "budget": 512 << 20, "options": {"era": "A", "window": 4, "hard": True},
    }  # fmt: skip
    assert parse_arms("attached:budget=3", 512)[0].settings.attach == {"policy": "adaptive", "budget": 3 << 20}
    assert len(parse_arms(attach.DEFAULT_ARMS)) == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("warm", "no arm 'warm'"),
        ("static:zero=never", "no option 'zero'"),
        ("attached:budget=0.5", "whole number of MiB"),
    ],
)
def test_arms_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        parse_arms(text)


@pytest.mark.parametrize("changes", [{"steps": 4}, {"tensors": 32}, {"arms": "bare,bare"}])
def test_plans_that_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SetupError):
        plan_of(**changes)


def test_rows_and_ratios() -> None:
    plan = plan_of()
    found, _ = run(plan)
    made = {(row.start, row.arm): row for row in figures(plan, found)}
    assert len(made) == 6
    bare, static, attached = (made[10, arm] for arm in ("bare", "static", "attached"))
    assert (bare.created_mean, bare.created_max, plan.created_mib(bare)) == (54, 54, 54)
    assert bare.n == 3 * 2
    assert bare.peak_bytes == 1 << 30
    # Runs of start 10 are opened as number 0, 1, 2, then 6, 7, 8 (begun by static), then 12, 13, 14.
    ratio = plan.to_control(attached)
    assert ratio is not None
    assert ratio.values == pytest.approx((107.5 / 106.5, 112.5 / 111.5, 117.5 / 119.5))
    low, high = ratio.interval
    assert low <= ratio.median <= high
    assert plan.to_control(static) is None
    assert plan.to_bare(bare) is None


def test_what_the_recorder_costs_is_of_pairs_of_steps() -> None:
    plan = plan_of("bare,record", starts=(10,), steps=8, rounds=2)
    found, _ = run(plan)
    row = figures(plan, found)[1]
    ratio = plan.to_bare(row)
    assert row.n == 2 * 2  # of steps 5 to 8 the sixth and the eighth, in each round
    assert ratio is not None
    # The runs of record begin at 101 ms (the second to run) and 102 ms (the third).
    assert ratio.values == pytest.approx([1.1 * (b + 1) / b for b in (106, 108, 107, 109)])
    assert row.created_mean == 54


def test_report() -> None:
    plan = plan_of()
    found, _ = run(plan)
    assert attach_report.table(plan, found).row_count == 6 + 1  # and a gap between the starts
    lines = attach_report.markdown(plan, found).splitlines()
    assert len(lines) == 2 + 6
    assert lines[0].count("|") == lines[2].count("|")
    written = attach_report.as_json(plan, found, {"browser": "1"})
    assert [row["arm"] for row in written["rows"]] == ["bare", "static", "attached"] * 2
    assert written["rows"][2]["to_static"]["median"] == figures(plan, found)[2].ratios["static"].median
    assert len(written["runs"]) == 18
    assert written["arms"][1]["decoding"] == {"kv": "static"}


@pytest.mark.parametrize("spoilt", [{"digest": 99}, {"wrong": 5}])
def test_other_results_are_an_error(spoilt: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="attached") as raised:
        run(plan_of(), spoil="attached", **spoilt)
    assert raised.value.code == "Divergence"


def test_a_run_that_is_stopped_is_left_out() -> None:
    found, opened = run(plan_of(), stop_after=4)
    assert len(found) == 4
    assert len(opened) == 5
