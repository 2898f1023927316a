"""What attach records, in Node on a fake WebGPU with known counts: token ends, trace, summary, costs."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stepwell.memory.buffer import Role
from stepwell.memory.policies import make_policy
from stepwell.memory.policies.base import Request
from stepwell.replay.simulator import served, simulate
from stepwell.replay.traces import ACQUIRE, FLUSH, RELEASE, RUN, Cause, read_metadata, read_trace
from stepwell.replay.what_if import CREATE_US, CREATE_US_PER_MIB
from tests.support.attach_lab import joined
from tests.support.paths import SUPPORT

PROGRAM = (SUPPORT / "recorder_program.js").read_text(encoding="utf-8")
ALL = """\
import { Boundaries } from "./boundaries.js";
import { Recorder } from "./recorder.js";
import { roleOf } from "./event_log.js";
import { TokenTable, medianOf } from "./tokens.js";
import { costLine } from "./costs.js";
import { ASSUMED_CREATE_US, ASSUMED_CREATE_US_PER_MIB } from "./summary.js";
export const all = {
  Boundaries, Recorder, roleOf, TokenTable, medianOf, costLine,
  ASSUMED_CREATE_US, ASSUMED_CREATE_US_PER_MIB,
};
"""
MIB = 1 << 20
# a recorder and its boundaries around the fake, wired as attach.js does
WATCHED = """\
const { Boundaries, Recorder } = stepwell.all;
function watched(options = {}) {
  const recorder = new Recorder({ now, runtime: "a test", ...options });
  const boundaries = new Boundaries((cause, name) => recorder.boundary(cause, name));
  const { before, after } = recorder;
  const also = (table, name, more) => {
    const first = table[name];
    table[name] = (...args) => (first(...args), more(...args));
  };
  also(after, "GPUComputePassEncoder.dispatchWorkgroups", () => boundaries.worked());
  also(after, "GPUQueue.submit", () => boundaries.submitted());
  also(before, "GPUBuffer.mapAsync", (buffer, [mode]) => mode & 1 && boundaries.readback());
  const methods = watch({ before, after });
  return { recorder, boundaries, methods };
}
async function grow(device, sizes, options) {
  let past = [];
  for (const bytes of sizes) past = await step(device, past, { tensors: 64, bytes, ...options });
}
"""


def in_node(body: str) -> Any:
    """What ``body``, an async function's, returns, with the recorder around the fake of recorder_program.js."""
    script = joined(ALL)
    source = (
        f"{script}{PROGRAM}{WATCHED}(async () => {{{body}}})().then((value) => console.log(JSON.stringify(value)));"
    )
    done = subprocess.run(["node", "-"], input=source, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def saved(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "attached.trace"
    path.write_text(text, encoding="utf-8")
    return path


# ---- where tokens end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "ends"),
    [
        ("W S R  W S R  W S R", "readback readback readback"),  # one submit and one readback per token
        ("W S W S W S R  W S W S R", "readback readback"),  # several submits
        ("W S R R R  W S R R R", "readback readback"),  # several readbacks between the same two submits
        ("W S S R S R S R  W S S R S R", "readback readback"),  # each download with a submit that only copies
        ("R  W R  W S R", "readback"),  # nothing was submitted yet; recorded and not submitted
        ("W S W R  S R", "readback readback"),  # recorded for the next token while this one's result is asked for
        ("S R  S R R", "readback readback"),  # no dispatch ever: submits count
        ("S R  W S R  S R", "readback readback"),  # once there are dispatches only those do
        ("W S R  M W S R  W S R  M", "readback mark mark"),  # marks take over
    ],
)
def test_where_tokens_end(calls: str, ends: str) -> None:
    found = in_node(f"""
        const ends = [];
        const boundaries = new Boundaries((cause) => ends.push(cause));
        const methods = {{ W: "worked", S: "submitted", R: "readback", M: "mark" }};
        for (const call of {json.dumps(calls.split())}) boundaries[methods[call]]();
        return [ends.join(" "), boundaries.marked];
    """)
    assert found == [ends, "M" in calls]


# ---- what is recorded -----------------------------------------------------------------------------------------------


def test_counts_bytes_and_times_of_a_token() -> None:
    summary = in_node(f"""
        const {{ recorder }} = watched();
        const device = new GPUDevice();
        await grow(device, Array(9).fill({MIB}), {{ downloads: 2 }});
        return recorder.summary();
    """)
    medians = {name: figure["median"] for name, figure in summary["per_token"].items()}
    assert (summary["tokens"], summary["boundaries"]) == (8, {"readback": 9, "mark": 0})
    assert {name: value for name, value in medians.items() if not name.endswith("ms")} == {
        "creates": 66,
        "created_bytes": 64 * MIB + 96,
        "served_creates": 64,
        "served_bytes": 64 * MIB,
        "destroys": 66,
        "submits": 4,
        "passes": 2,
        "dispatches": 128,
        "draws": 0,
        "bind_groups": 128,
        "uploads": 1,
        "uploaded_bytes": 16,
        "clears": 2,
        "cleared_bytes": 2 * MIB,
        "copies": 2,
        "copied_bytes": 128,
        "readbacks": 2,
        "readback_bytes": 128,
    }
    assert medians["create_ms"] == pytest.approx(66 * 0.004)
    assert medians["ms"] == pytest.approx(10 + 66 * 0.004 + 2 * 0.2 + 2 * 0.01 + 0.18)  # and what a fresh buffer costs
    assert summary["live_bytes"] == {"activation": 64 * MIB, "uniform": 0, "staging": 0, "weights": 0}
    assert summary["peak_bytes"] == {
        "activation": 128 * MIB,
        "uniform": 32,
        "staging": 64,
        "weights": 0,
        "all": 128 * MIB + 96,
    }
    largest = summary["sizes"][0]
    assert (largest["bytes"], largest["usage"], largest["role"]) == (MIB, 0x8C, "activation")
    assert (largest["creates_per_token"], largest["reusable_per_token"], largest["most_live"]) == (64, 64, 128)
    assert summary["adapter"] == {"vendor": "fake", "description": "a fake"}
    assert summary["conclusion"].startswith(
        "A token creates 64 storage buffers of 64 MiB in all, which costs about 11.5"
    )
    assert 'stepwell.attach({policy: "adaptive"})' in summary["conclusion"]
    assert summary["notes"][0].startswith("Token ends were inferred")


def test_a_trace_is_read_and_replayed(tmp_path: Path) -> None:
    text = in_node(f"""
        const {{ recorder }} = watched();
        const device = new GPUDevice();
        device.createBuffer({{ size: 256, usage: STORAGE | 0x100 }});
        device.createBuffer({{ size: 512, usage: STORAGE, mappedAtCreation: true }});
        device.createBuffer({{ size: 0, usage: STORAGE }});
        await grow(device, Array(9).fill({MIB}), {{ downloads: 2 }});
        return recorder.trace({{ note: "mine" }});
    """)
    path = saved(tmp_path, text)
    events = list(read_trace(path))
    metadata = read_metadata(path)
    assert metadata == {
        "attach": True,
        "runtime": "a test",
        "adapter": {"vendor": "fake", "description": "a fake"},
        "usages": [0x18C, 0x8C],
        "note": "mine",
    }
    assert Counter(op for op, _, _ in events) == {ACQUIRE: 2 + 9 * 66, RELEASE: 2 + 7 * 66, FLUSH: 9 * 4 - 1, RUN: 8}
    assert [value for op, value, _ in events if op == RUN] == list(range(1, 9))
    assert [request for op, _, request in events if op == ACQUIRE][:4] == [
        Request(256, Role.ACTIVATION, 0),  # each usage a site
        Request(512, Role.WEIGHTS),  # filled where it is created
        Request(32, Role.UNIFORM),
        Request(MIB, Role.ACTIVATION, 1),
    ]
    causes = [value for op, value, _ in events if op == FLUSH]
    assert causes[:4] == [Cause.SUBMIT, Cause.SUBMIT, Cause.DOWNLOAD, Cause.DOWNLOAD]
    bare = simulate(served(read_trace(path)), make_policy("disabled"))
    assert [token.creates for token in bare.tokens] == [64] * 8
    assert bare.peak_live_bytes == 128 * MIB + 256


def test_marks_are_tokens_and_what_follows_the_last_end_is_none(tmp_path: Path) -> None:
    text, tokens = in_node("""
        const { recorder, boundaries } = watched();
        const device = new GPUDevice();
        for (let token = 0; token < 4; token += 1) {
          boundaries.mark();
          const buffer = device.createBuffer({ size: 4096, usage: STORAGE });
          device.queue.submit([]);
          buffer.destroy();
        }
        const open = recorder.trace();
        boundaries.mark();
        return [[open, recorder.trace()], recorder.summary().tokens];
    """)
    for each in text:  # a token whose end was not marked yet is one; one in which nothing was submitted is none
        events = list(read_trace(saved(tmp_path, each)))
        assert [op for op, _, _ in events] == [RUN, ACQUIRE, FLUSH, RELEASE] * 4
    assert tokens == 4


def test_a_device_that_is_gone_takes_its_buffers_along(tmp_path: Path) -> None:
    text, live, events = in_node("""
        const { recorder } = watched();
        const [first, second] = [new GPUDevice(), new GPUDevice()];
        const lost = first.createBuffer({ size: 1000, usage: STORAGE });
        const kept = second.createBuffer({ size: 2000, usage: STORAGE });
        first.lose({ reason: "unknown" });
        await null;
        await null;
        lost.destroy();
        first.destroy();
        kept.destroy();
        kept.destroy();
        return [recorder.trace(), recorder.summary().live_bytes, JSON.parse(recorder.events("chrome")).traceEvents];
    """)
    assert [(op, value) for op, value, _ in read_trace(saved(tmp_path, text))] == [
        (ACQUIRE, 0),
        (ACQUIRE, 1),
        (RELEASE, 0),
        (RELEASE, 1),
    ]
    assert set(live.values()) == {0}
    assert [event["args"]["bytes"] for event in events if event["ph"] == "C"] == [1000, 3000, 2000, 0]


def test_what_a_lost_device_had_serves_nobody() -> None:
    summary = in_node("""
        const { recorder, boundaries } = watched();
        for (let token = 0; token < 6; token += 1) {
          const device = new GPUDevice();
          const [first] = [1, 2].map(() => device.createBuffer({ size: 4096, usage: STORAGE }));
          first.destroy();
          device.createBuffer({ size: 4096, usage: STORAGE });
          device.destroy();
          boundaries.mark();
        }
        return recorder.summary();
    """)
    (only,) = summary["sizes"]
    assert (only["creates"], only["creates_per_token"], only["reusable_per_token"]) == (18, 3, 1)
    assert (only["live"], only["most_live"]) == (0, 2)
    assert summary["live_bytes"]["activation"] == 0


def test_buffers_from_before_are_unknown_and_said_to_be(tmp_path: Path) -> None:
    summary, text = in_node(f"""
        const device = new GPUDevice();
        const before = [1, 2].map((n) => device.createBuffer({{ size: n * {MIB}, usage: STORAGE }}));
        const {{ recorder }} = watched();
        for (const buffer of before) {{ buffer.destroy(); buffer.destroy(); }}
        return [recorder.summary(), recorder.trace()];
    """)
    assert summary["unknown"] == {"destroys": 2, "bytes": 3 * MIB}
    assert summary["notes"][0].startswith(
        "2 buffers (3 MiB) that were destroyed had been created before recording began"
    )
    assert summary["conclusion"].startswith("No whole token was seen")
    assert read_metadata(saved(tmp_path, text))["unknown_destroys"] == 2


def test_the_log_ends_at_its_limit_and_counts_go_on(tmp_path: Path) -> None:
    summary, text, lines = in_node(f"""
        const {{ recorder }} = watched({{ limit: 2000 }});
        await grow(new GPUDevice(), Array(20).fill({MIB}));
        return [recorder.summary(), recorder.trace(), recorder.events()];
    """)
    assert summary["tokens"] == 19
    assert summary["per_token"]["dispatches"]["median"] == 128
    assert summary["events"]["kept"] == 2000
    assert summary["events"]["dropped"] > 0
    assert summary["events"]["dropped_details"] > 0
    assert summary["notes"][-1].startswith("The limit of events was reached")
    assert summary["sizes"][0]["creates_per_token"] == 64  # of the tokens that are whole in it
    events = list(read_trace(saved(tmp_path, text)))
    assert sum(op == RUN for op, _, _ in events) > 8  # details gave way
    parsed = [json.loads(line) for line in lines.splitlines()]
    assert len(parsed) == 2000
    kinds = Counter(event["op"] for event in parsed)
    assert kinds["createBuffer"] > kinds["dispatch"] > 0
    assert parsed[0] == {
        "ms": 0.004,
        "op": "createBuffer",
        "buffer": 0,
        "bytes": 32,
        "usage": 72,
        "device": 0,
        "label": "params",
    }


def test_sizes_that_never_come_back_gain_nothing() -> None:
    summary = in_node("""
        const { recorder } = watched();
        await grow(new GPUDevice(), Array.from({ length: 12 }, (_, token) => (1 << 20) + 4096 * token));
        return recorder.summary();
    """)
    assert summary["reusable_per_token"] == 0
    assert "hardly any has a size that was there before (0 per token)" in summary["conclusion"]
    assert summary["sizes"][0]["creates_per_token"] == pytest.approx(64 / 9)


def test_a_runtime_that_creates_nothing_gains_nothing() -> None:
    summary = in_node("""
        const { recorder, boundaries } = watched();
        const device = new GPUDevice();
        for (let token = 0; token < 12; token += 1) {
          await step(device, [], { tensors: 0 });
          boundaries.mark();
        }
        return recorder.summary();
    """)
    assert summary["conclusion"].startswith("Nothing to gain: a token creates 0 storage buffers of 0 MiB in all")
    assert summary["tokens"] == 12
    assert summary["notes"] == ["The first 1 token ends were inferred from readbacks, the other 12 marked."]


@pytest.mark.parametrize(
    ("usage", "mapped", "nbytes", "role"),
    [
        (0x8C, False, 1024, 0),
        (0x8C, True, 1024, 3),
        (0x8C, False, 1022, 3),
        (0x84, False, 1024, 3),  # cannot be cleared
        (0xC8, False, 64, 0),  # STORAGE | UNIFORM | COPY_DST
        (0x48, False, 64, 1),
        (0x9, False, 64, 2),
        (0x6, True, 64, 2),
        (0xC, False, 64, 2),
        (0x28, False, 64, 3),  # vertices
    ],
)
def test_roles(usage: int, mapped: bool, nbytes: int, role: int) -> None:
    assert in_node(f"return stepwell.all.roleOf({usage}, {str(mapped).lower()}, {nbytes});") == role


# ---- what a create costs --------------------------------------------------------------------------------------------


def test_create_costs_are_measured_unseen_and_kept(tmp_path: Path) -> None:
    costs, summary, text, counted, scopes = in_node(f"""
        const {{ recorder, methods }} = watched();
        const device = new GPUDevice();
        await grow(device, Array(6).fill(4 * {MIB}));
        const before = recorder.summary().totals.creates;
        const costs = await recorder.measureCosts({{ methods, now }});
        const after = recorder.summary();
        return [costs, after, recorder.trace(), after.totals.creates - before, device.scopes];
    """)
    # the fake takes 100 us and 80 us per MiB at the first use, and 4 us in createBuffer
    assert costs["create_us"] == pytest.approx(104, abs=0.2)
    assert costs["create_us_per_mib"] == pytest.approx(80, abs=0.2)
    assert [row["bytes"] for row in costs["rows"]] == [MIB, 4 * MIB]
    assert costs["source"] == "measured for 1, 4 MiB"
    assert summary["costs"] == costs
    assert "as measured here" in summary["conclusion"]
    metadata = read_metadata(saved(tmp_path, text))
    assert (metadata["create_us"], metadata["create_costs"]) == (costs["create_us"], costs["source"])
    assert (counted, scopes) == (0, 0)


def test_measuring_without_memory_or_device_says_so() -> None:
    messages = in_node("""
        const { recorder, methods } = watched();
        const said = [];
        const note = (error) => said.push(error.message);
        await recorder.measureCosts({ methods }).catch(note);
        const device = new GPUDevice();
        device.createBuffer({ size: 1 << 20, usage: STORAGE });
        device.failing = true;
        await recorder.measureCosts({ methods }).catch(note);
        return [...said, device.scopes];
    """)
    assert messages == [
        "measureCosts: the recorded device is gone, and there is no adapter for another one.",
        "no buffers of 262144, 1048576 B could be created: the GPU is out of memory.",
        0,
    ]


def test_costs_of_a_runtime_that_let_go_of_its_device_are_measured_on_another() -> None:
    costs, destroyed, creates = in_node("""
        const { recorder, methods } = watched();
        const device = new GPUDevice();
        device.createBuffer({ size: 1 << 20, usage: STORAGE });
        device.destroy();
        const other = new GPUDevice();
        const gpu = { requestAdapter: async () => ({ requestDevice: async () => other }) };
        Object.defineProperty(globalThis, "navigator", { value: { gpu }, configurable: true });
        let destroyed = false;
        other.lost.then(() => (destroyed = true));
        const costs = await recorder.measureCosts({ methods, now });
        await null;
        return [costs, destroyed, recorder.summary().totals.creates];
    """)
    assert costs["create_us"] == pytest.approx(104, abs=0.2)
    assert (destroyed, creates) == (True, 1)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([(1, 50), (4, 80), (16, 200)], (40, 10)),
        ([(1, 50)], (50, 0)),
        ([(1, 1), (4, 40)], (0, 9.5)),  # no cost below 0
        ([(1, 60), (4, 30)], (45, 0)),
        ([(1, -5), (4, -9)], (0, 0)),
    ],
)
def test_the_line_through_the_costs(rows: list[tuple[int, float]], line: tuple[float, float]) -> None:
    given = [{"bytes": mib * MIB, "cost_us": cost} for mib, cost in rows]
    found = in_node(f"return stepwell.all.costLine({json.dumps(given)});")
    assert (found["create_us"], found["create_us_per_mib"]) == pytest.approx(line, abs=0.06)


def test_the_assumed_costs_are_those_of_what_if() -> None:
    assert in_node("return [stepwell.all.ASSUMED_CREATE_US, stepwell.all.ASSUMED_CREATE_US_PER_MIB];") == [
        CREATE_US,
        CREATE_US_PER_MIB,
    ]


def test_the_last_tokens_are_kept() -> None:
    found = in_node("""
        const { TokenTable, medianOf } = stepwell.all;
        const table = new TokenTable(2);
        for (let token = 1; token <= 5000; token += 1) table.add([token, 2 * token], [0, token]);
        const column = table.column(1, 2);
        return [table.added, column.length, column[0], column.at(-1), medianOf(column), medianOf([])];
    """)
    assert found == [5000, 4096, 905, 5000, 2952.5, 0]
