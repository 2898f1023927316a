"""The what-if of a page, without a browser: a trace file in, a verdict out; and the trace of a run of its own."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stepwell.gpu.device import Device
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.source import BytesSource
from stepwell.memory.pool import BufferPool
from stepwell.page.frontend import Frontend
from stepwell.page.what_if import Question
from stepwell.replay.traces import TraceRecorder, read_metadata, read_trace, write_trace
from stepwell.replay.what_if import Costs, compare, recorded_setting, settings, survey, try_setting
from stepwell.replay.workloads import workload_events
from tests.support.pattern_lab import kernels

HOST = '{"browser": "CPython", "cross_origin_isolated": true, "timer_resolution_us": 1, "pyodide": "none"}'
METADATA = {"policy": "bucket", "create_us": 90, "create_us_per_mib": 75}


class Page:
    """Keeps the messages of one frontend."""

    def __init__(self) -> None:
        self.device = FakeDevice(log_limit=0)
        self.messages: list[dict[str, Any]] = []
        self.cancel_at = -1  # messages
        self.frontend = Frontend(self._hear, HOST, lambda _: None, self._open)

    def _hear(self, text: str) -> None:
        self.messages.append(json.loads(text))
        if len(self.messages) == self.cancel_at:
            self.frontend.cancel()

    async def _open(self) -> Device:
        return self.device

    def ask(self, data: bytes, name: str = "a.trace", **question: Any) -> list[dict[str, Any]]:
        self.messages.clear()
        asyncio.run(self.frontend.what_if_source(json.dumps(question), BytesSource(data, name)))
        return self.of("verdict")

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == kind]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("trace") / "kv16.trace"
    write_trace(path, workload_events("kv16", 2040, 2060), METADATA)
    return path.read_bytes()


def test_the_verdict_is_that_of_the_command_line(trace: bytes, tmp_path: Path) -> None:
    page = Page()
    (verdict,) = page.ask(trace)
    assert page.of("error") == []
    events = list(workload_events("kv16", 2040, 2060))
    baseline, baseline_from = recorded_setting(METADATA, None)
    costs = Costs(90, 75, "recorded in the trace")
    unit = survey(events).unit
    tried = [try_setting(events, setting, costs, unit) for setting in (baseline, *settings())]
    expected = {"trace": "a.trace", **compare(survey(events), tried[1:], tried[0], baseline_from, costs)}
    assert verdict["answer"] == json.loads(json.dumps(expected))
    (last,) = page.ask(gzip.compress(trace), "b.txt")  # by its bytes, not by its name
    assert last["answer"] == {**verdict["answer"], "trace": "b.txt"}
    (last,) = page.ask(trace, "c.trace.gz")  # a browser may have unpacked it
    assert last["answer"]["settings"] == verdict["answer"]["settings"]


def test_progress_names_the_settings_and_never_goes_back(trace: bytes) -> None:
    page = Page()
    page.ask(trace)
    phases = [message["text"] for message in page.of("phase")]
    count = len(settings()) + 1
    assert phases[0] == "Reading a.trace"
    assert phases[1] == f"Replaying a.trace under bucket (1 of {count})"
    assert phases[count] == f"Replaying a.trace under disabled ({count} of {count})"
    assert phases[-1] == "Ready" and len(phases) == count + 2
    done = [message["done"] for message in page.of("progress") if message["total"] is not None]
    assert done == sorted(done)
    assert {message["unit"] for message in page.of("progress")} == {"events"}
    assert done[-1] == page.of("progress")[-1]["total"]


def test_what_is_asked_takes_the_place_of_what_was_recorded(trace: bytes) -> None:
    page = Page()
    (verdict,) = page.ask(trace, baseline="disabled", create_us=10, budget_mib=200)
    answer = verdict["answer"]
    assert (answer["baseline"]["label"], answer["create_us"], answer["create_us_per_mib"]) == ("disabled", 10, 80)
    assert answer["budget_bytes"] == 200 << 20
    assert answer["over_budget"] and all(row["peak_bytes"] <= 200 << 20 for row in answer["settings"])


@pytest.mark.parametrize("moment", ["reading", "replaying"])
def test_a_cancelled_replay_has_no_verdict_and_the_next_one_has(trace: bytes, moment: str) -> None:
    page = Page()
    page.cancel_at = 2 if moment == "reading" else 9
    (verdict,) = page.ask(trace)
    assert verdict["answer"] is None
    assert len(page.messages) < 20
    page.cancel_at = -1
    assert page.ask(trace)[0]["answer"]["recommended"] is not None


WRONG = {
    "another file": (b"%PDF-1.7\n", "a.pdf", "Is it a trace?"),
    "empty": (b"", "a.trace", "empty"),
    "cut off": (b"stepwell-trace 1 {}\nb 1\n+ 4 k\n", "a.trace", "a.trace ends after 2 events without its end mark"),
    "cut off archive": (gzip.compress(b"stepwell-trace 1 {}\nb 1\n")[:-4], "a.trace.gz", "damaged or cut off"),
    "binary": (b"\x00\xff\xfe\x80", "b.trace", "damaged"),
    "no run": (b"stepwell-trace 1 {}\n+ 4 k\n. 1\n", "a.trace", "has no run"),
    "unknown policy": (b'stepwell-trace 1 {"policy": "best"}\nb 1\n+ 4 k\n. 2\n', "a.trace", "best"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_is_no_trace_is_an_error_that_says_so(case: str) -> None:
    data, name, text = WRONG[case]
    page = Page()
    assert page.ask(data, name) == []
    (error,) = page.of("error")
    assert (error["code"], error["phase"]) == ("BadTrace", "what-if")
    assert text in error["message"] and "/" not in error["message"].replace(" / ", "")


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ({"colour": 1}, "no option 'colour'. It has baseline"),
        ({"create_us": "9"}, "create_us: '9'; it must be a number, 0 or more"),
        ({"create_us": -1}, "it must be a number, 0 or more"),
        ({"create_us": True}, "create_us: True"),
        ({"budget_mib": 0}, "it must be a number from 1 to"),
        ({"baseline": 3}, "it must be a text"),
        ({"baseline": "best"}, "none of that name"),
    ],
)
def test_a_wrong_question_is_refused(trace: bytes, question: dict[str, Any], text: str) -> None:
    page = Page()
    assert page.ask(trace, **question) == []
    (error,) = page.of("error")
    assert error["code"] == "BadRequest" and text in error["message"]


def test_too_many_events_are_refused_with_the_way_out(trace: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.page.what_if.MOST_EVENTS", 100)
    page = Page()
    assert page.ask(trace) == []
    assert "python -m stepwell.replay what-if" in page.of("error")[0]["message"]


def test_a_question_may_leave_everything_out() -> None:
    assert Question.from_json('{"baseline": null, "budget_mib": null}') == Question()
    assert Question.from_json('{"budget_mib": 1.5}').budget_bytes == 3 << 19


def test_a_run_is_recorded_when_that_is_asked_for(tmp_path: Path) -> None:
    page = Page()
    page.device.kernels.update(kernels("kv16"))
    asked = {"workload": "kv16", "kv": "grow", "start": 2100, "tokens": 8, "policy": "bucket"}

    async def run() -> None:
        await page.frontend.open()
        for more in ({"pool_trace": True, "policy_options": {"era": "A"}}, {}):
            await page.frontend.run(json.dumps({**asked, **more}))

    asyncio.run(run())
    (recorded,) = page.of("pool_trace")
    kinds = [message["type"] for message in page.messages]
    assert kinds.index("pool_trace") < kinds.index("done")
    path = tmp_path / "own.trace"
    path.write_text(recorded["text"], encoding="utf-8")
    metadata = read_metadata(path)
    assert metadata["policy"] == "bucket" and metadata["options"] == {"era": "A"} and metadata["model"] == "kv16"
    runs = survey(read_trace(path))
    assert (runs.runs, runs.unit) == (8, "token")
    (verdict,) = page.ask(path.read_bytes())
    answer = verdict["answer"]
    assert (answer["baseline"]["label"], answer["baseline_from"]) == ("bucket era=A", "as recorded")
    assert answer["recommended"] is not None


def test_a_run_that_fails_leaves_no_recorder_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders: list[TraceRecorder] = []

    class Kept(TraceRecorder):
        def __init__(self, pool: BufferPool) -> None:
            super().__init__(pool)
            recorders.append(self)

    monkeypatch.setattr("stepwell.replay.traces.TraceRecorder", Kept)
    page = Page()
    asked = {"workload": "kv16", "kv": "grow", "start": 2100, "tokens": 4}
    counts = []

    async def run() -> None:
        await page.frontend.open()
        for more in ({"pool_trace": True}, {}):
            await page.frontend.run(json.dumps({**asked, **more}))  # the FakeDevice's sums are wrong
            counts.append(len(recorders[0].events))

    asyncio.run(run())
    assert len(page.of("error")) == 2 and not page.of("pool_trace")
    assert len(recorders) == 1 and counts[0] > 0
    assert counts[1] == counts[0]  # of the second run it hears nothing
