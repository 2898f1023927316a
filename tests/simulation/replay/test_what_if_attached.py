"""What-if of a runtime that was watched: no pool compared with one under it, sizes as they are, the answer as code."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from stepwell.attach.keeper import Keeper, policy_maker
from stepwell.errors import BadTrace
from stepwell.memory.buffer import Role
from stepwell.memory.policies import POLICIES
from stepwell.memory.policies.base import Request
from stepwell.memory.policies.per_usage import PerUsage
from stepwell.replay.attached import attach_code
from stepwell.replay.cli import main
from stepwell.replay.simulator import simulate
from stepwell.replay.traces import ACQUIRE, FLUSH, NO_REQUEST, RELEASE, RUN, Cause, Event, write_trace
from stepwell.replay.what_if import WhatIf, compare, recorded_costs, recorded_setting, settings, survey, try_setting
from stepwell.replay.what_if_html import page

MIB = 1 << 20
ATTACHED: Mapping[str, object] = {"attach": True, "create_us": 200, "create_us_per_mib": 50, "create_costs": "measured"}


def tokens(sizes: Sequence[int], tensors: int = 44, usages: int = 1) -> Iterator[Event]:
    """Each token asks for ``tensors`` buffers of its size and destroys those of the token before."""
    count = 0
    past: list[int] = []
    for number, nbytes in enumerate(sizes, 1):
        yield RUN, number, NO_REQUEST
        present = []
        for tensor in range(tensors):
            yield ACQUIRE, count, Request(nbytes, Role.ACTIVATION, tensor % usages)
            present.append(count)
            count += 1
        yield FLUSH, Cause.DOWNLOAD, NO_REQUEST
        for lease in past:
            yield RELEASE, lease, NO_REQUEST
        past = present


def answer_of(events: Sequence[Event], metadata: Mapping[str, object] = ATTACHED, budget: int | None = None) -> WhatIf:
    found = survey(events, metadata)
    costs = recorded_costs(metadata, None, None)
    baseline, source = recorded_setting(metadata, None)
    outcomes = [try_setting(events, setting, costs, found.unit, budget) for setting in settings(found.attached)]
    return compare(found, outcomes, try_setting(events, baseline, costs, found.unit), source, costs, budget)


def test_sizes_that_come_back_want_the_pool() -> None:
    answer = answer_of(list(tokens([4 * MIB] * 20 + [8 * MIB] * 20)))
    assert answer["unit"] == "token"
    assert answer["recommended"] == "adaptive"
    assert answer["code"] == 'stepwell.attach({policy: "adaptive"})'
    baseline = answer["baseline"]
    assert (baseline["label"], answer["baseline_from"]) == ("no pool", "the runtime as it is")
    assert baseline["steady_creates_per_token"] == 44
    assert answer["costs_from"] == "recorded in the trace, measured"
    assert baseline["ms_per_token"] == pytest.approx(44 * (18 * (200 + 4 * 50) + 20 * (200 + 8 * 50)) / 38 / 1000)
    assert answer["sentence"].startswith("Attach adaptive: without a pool the runtime creates 44 buffers per token")
    best = next(found for found in answer["settings"] if found["label"] == "adaptive")
    assert best["steady_creates_per_token"] == pytest.approx(88 / 38)  # two tokens cross into the new size
    assert [found["label"] for found in answer["settings"]] == [
        "adaptive", "adaptive window=2", "adaptive window=32", "exact", "exact cap=16", "simple", "no pool",
    ]  # fmt: skip
    assert "the policy keeps none: 44 are created anew each token" in baseline["hurting"][0]["why"]


def test_a_budget_is_in_the_line_of_code() -> None:
    answer = answer_of(list(tokens([4 * MIB] * 20)), budget=400 * MIB)
    assert answer["code"] == 'stepwell.attach({policy: "adaptive", budget: 419430400})'
    assert attach_code("adaptive", {"window": "32"}) == 'stepwell.attach({policy: "adaptive", options: {window: 32}})'


def test_sizes_that_never_come_back_gain_nothing() -> None:
    answer = answer_of(list(tokens([4 * MIB + 4096 * token for token in range(30)])))
    assert (answer["recommended"], answer["code"]) == (None, None)
    assert answer["sentence"].startswith("Nothing to gain: without a pool the runtime creates 44 buffers per token")
    assert answer["sentence"].endswith("size classes or a static cache in the runtime would help.")


def test_a_runtime_that_creates_little_gains_nothing() -> None:
    answer = answer_of([*tokens([4096] * 30, tensors=0), (ACQUIRE, 0, Request(64, Role.ACTIVATION))])
    assert answer["code"] is None
    assert answer["sentence"] == (
        "Nothing to gain: without a pool the runtime creates 0.0357 buffers per token (about 0.01 ms), "
        "and no setting saves more than 0.00 ms per token."
    )


def test_a_trace_without_tokens_says_what_to_do() -> None:
    with pytest.raises(BadTrace, match=r"no run: call the attachment's mark\(\) before each token"):
        survey([(ACQUIRE, 0, Request(64, Role.ACTIVATION))], ATTACHED)


def test_the_command_answers_with_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, figures, report = tmp_path / "ort.trace.gz", tmp_path / "out.json", tmp_path / "out.html"
    write_trace(trace, tokens([4 * MIB] * 12), ATTACHED)
    assert main(["what-if", str(trace), "--jobs", "1", "--json", str(figures), "--html", str(report)]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith('Recommended: stepwell.attach({policy: "adaptive"})\n')
    assert "Baseline: no pool (the runtime as it is). Creating a buffer: 200 us and 50 us per MiB" in shown
    assert "\n\nWithout a pool:\n- class 4.0 MiB" in shown
    assert "pow2" not in shown
    assert json.loads(figures.read_text())["code"] == 'stepwell.attach({policy: "adaptive"})'
    assert "<code>stepwell.attach({policy: &#34;adaptive&#34;})</code>" in report.read_text(encoding="utf-8")
    assert main(["what-if", str(trace), "--jobs", "1", "--baseline", "exact"]) == 0
    assert capsys.readouterr().out.startswith("Nothing to gain: exact creates 0 buffers per token")
    assert "<code>" not in page(answer_of(list(tokens([4096, 8192, 64, 128, 32], 1))), "x")


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """What a runtime may ask: creates of a few sizes and usages, destroys, submits, token ends."""
    events: list[Event] = []
    live: list[int] = []
    count = 0
    for op in draw(st.lists(st.sampled_from([ACQUIRE, ACQUIRE, ACQUIRE, RELEASE, RELEASE, FLUSH, RUN]), max_size=120)):
        if op == ACQUIRE:
            request = Request(draw(st.sampled_from([64, 100, 4096])), Role.ACTIVATION, draw(st.integers(0, 2)))
            events.append((ACQUIRE, count, request))
            live.append(count)
            count += 1
        elif op == RELEASE and live:
            events.append((RELEASE, live.pop(draw(st.integers(0, len(live) - 1))), NO_REQUEST))
        elif op == FLUSH:
            events.append((FLUSH, Cause.DOWNLOAD, NO_REQUEST))
        elif op == RUN:
            # as the keeper: a run begins with a flush
            events += [(FLUSH, Cause.DOWNLOAD, NO_REQUEST), (RUN, 1, NO_REQUEST)]
    return events


@pytest.mark.parametrize("policy", [name for name, entry in POLICIES.items() if entry.attached])
@given(events=histories())
@hypothesis_settings(max_examples=60, deadline=None)
def test_a_replay_creates_what_the_keeper_would(policy: str, events: list[Event]) -> None:
    make = policy_maker(policy, {})
    keeper = Keeper(make)
    ids: dict[int, int] = {}
    for op, value, request in events:
        if op == ACQUIRE:
            found = keeper.acquire(request.site, request.nbytes)
            ids[value] = found or keeper.created(request.site, request.nbytes)
        elif op == RELEASE:
            keeper.release(ids.pop(value))
        elif op == FLUSH:
            keeper.flush()
        else:
            keeper.begin_run()
    stats = json.loads(keeper.stats())
    replay = simulate(events, PerUsage(make))
    assert (replay.misses, sum(replay.evictions.values())) == (stats["created"], stats["destroyed"])
