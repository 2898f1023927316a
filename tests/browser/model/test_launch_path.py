"""The launch path on the real device: whatever is switched, the same bits; and the counters that each switch promises.

Tiny random models on the CPU adapter.  A decode step has 9 launches per layer and 4 more.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from stepwell.gpu.source import FileSource
from stepwell.launch.options import Params
from stepwell.models.config import DecoderConfig
from stepwell.weights.gguf import read_gguf
from tests.browser.conftest import Lab, encode
from tests.support.covering import FULL
from tests.support.tiny_llama import reference_llama, write_tiny_llama

pytestmark = pytest.mark.browser

LAYERS = 2
LAUNCHES = 9 * LAYERS + 4
POSITIONED = 3 * LAYERS  # that read the position or the length: rope_append, attention, attention_merge
EVERY = 4  # dispatches per submit, where periodic submission is on
PROMPT = [(7 * i) % 300 + 3 for i in range(20)]
TOKENS = 10
OFF = {"shared_pass": False, "bind_group_cache": False, "skip_uploads": False, "submit_every": 0, "replay": False}
ON = {"shared_pass": True, "bind_group_cache": True, "skip_uploads": True, "submit_every": EVERY, "replay": True}
ARMS: dict[str, dict[str, Any]] = {"none": OFF, **{name: {**OFF, name: ON[name]} for name in ON}, "all": ON}
MODES = [mode.value for mode in Params if mode is not Params.AUTO]
DEPTHS = (0, 1, 4)

OPEN = """
import base64, sys
from types import SimpleNamespace
from stepwell import BufferPool, open_device
from stepwell.launch.launcher import Launcher
from stepwell.models.llama import DecoderModel
from stepwell.weights.gguf import read_gguf
from stepwell.gpu.source import BytesSource

async def main(args):
    device = await open_device()
    pool = BufferPool(device, "adaptive")
    loader = Launcher(device, pool)
    source = BytesSource(base64.b64decode(args["model"]), "tiny")
    model = await DecoderModel.load(await read_gguf(source), source, loader)
    sys.rig = SimpleNamespace(device=device, pool=pool, model=model, loader=loader)
    return device.info.immediate_bytes
"""
CLOSE = """
import sys

async def main(args):
    rig = sys.rig
    rig.model.close()
    rig.loader.close()
    rig.pool.close()
    sizes = dict(rig.device.table_sizes())
    rig.device.close()
    return sizes
"""
RUN = """
import sys
from dataclasses import asdict
from stepwell.decode.generation import Generation
from stepwell.decode.session import DecodeSession
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions

async def main(args):
    rig = sys.rig
    results = []
    for options in args["options"]:
        launcher = Launcher(rig.device, rig.pool, LaunchOptions.from_dict(options))
        for kv in args["kvs"]:
            session = DecodeSession(rig.model, launcher, kv=kv, context=128)
            generation = Generation(max_tokens=args["tokens"], digest=True)
            await session.prepare(generation, len(args["prompt"]))
            events = [event async for event in session.generate(args["prompt"], generation)]
            session.close()
            launcher.release_run()
            results.append({
                "kv": kv, "ids": [event.id for event in events], "digests": [event.digest for event in events],
                "counters": [asdict(event.counters) for event in events],
            })
        launcher.close()
    return results
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A model, and the ids that it gives in float64."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    weights = write_tiny_llama(path, n_layers=LAYERS)
    with ThreadPoolExecutor(1) as threads:  # Playwright's loop runs in this one
        file = threads.submit(asyncio.run, read_gguf(FileSource(path))).result()
    ids = list(PROMPT)
    for _ in range(TOKENS):
        ids.append(int(reference_llama(weights, DecoderConfig.from_gguf(file), ids)[-1].argmax()))
    return path, ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def rig(lab: Lab, tiny: tuple[Path, list[int]]) -> Iterator[Lab]:
    """A device, a pool and the model in the lab; what they hold is given back at the end."""
    immediate_bytes = lab.run(OPEN, model=encode(tiny[0].read_bytes()))
    assert immediate_bytes >= 16, "this browser has no immediates: use Chromium 149 or newer"
    yield lab
    assert set(lab.run(CLOSE).values()) == {0}


@pytest.fixture(scope="module")
def plain(rig: Lab, tiny: tuple[Path, list[int]]) -> dict[str, Any]:
    """What every arm must give, bit by bit: that of the plainest one, whose ids are those of the float64 model."""
    options = [{**OFF, "params": "uniform_pool", "readback_depth": 0}]
    static, grow = rig.run(RUN, options=options, kvs=["static", "grow"], prompt=PROMPT, tokens=TOKENS)
    assert static["ids"] == grow["ids"] == tiny[1]
    assert static["digests"] == grow["digests"]
    assert len(set(static["digests"])) == TOKENS
    run: dict[str, Any] = static
    return run


def promised(arm: Mapping[str, Any], mode: str, kv: str) -> dict[str, int]:
    """The counters of one token in steady state."""
    submits = -(-LAUNCHES // arm["submit_every"]) if arm["submit_every"] else 1
    passes = submits if arm["shared_pass"] else LAUNCHES
    immediates = mode == "immediates"
    # one more in a plan: the last norm reads ``rows``, which is the same for all steps, but a plan does not know that
    changed = POSITIONED + arm["replay"]
    uploads = 0 if immediates else changed if arm["skip_uploads"] else LAUNCHES
    keeps_groups = arm["bind_group_cache"] or arm["replay"]
    return {
        "launches": LAUNCHES,
        "passes": passes,
        "submits": submits,
        "encoders": submits,
        "syncs": 1,
        "copies": 3 + (2 * LAYERS if kv == "grow" else 0),  # token and logits, together, out; and the past
        "bind_groups_created": 0 if keeps_groups else LAUNCHES,
        "bind_groups_reused": LAUNCHES if keeps_groups else 0,
        "uploads": uploads,
        "uploads_skipped": 0 if immediates else LAUNCHES - uploads,
        "immediates": 0 if not immediates else passes if arm["skip_uploads"] else LAUNCHES,
        "readbacks": 1,
        "replayed": int(arm["replay"]),
    }


@pytest.mark.parametrize("mode", MODES)
def test_every_switch_alone_and_together(rig: Lab, plain: dict[str, Any], mode: str) -> None:
    """7 settings of the switches at 3 read-back depths; in both KV modes at depth 0, for which counts are promised."""
    ways = [(depth, kv) for depth in DEPTHS for kv in ("static", "grow")]
    settings = [
        (name, depth, kv)
        for number, name in enumerate(ARMS)
        for depth, kv in ways
        if FULL or not depth or (kv == "grow") == bool((number + depth) % 2)
    ]
    labelled = []
    for kv in ("static", "grow"):
        chosen = [(name, depth) for name, depth, of in settings if of == kv]
        options = [{**ARMS[name], "params": mode, "readback_depth": depth} for name, depth in chosen]
        results = rig.run(RUN, options=options, kvs=[kv], prompt=PROMPT, tokens=TOKENS)
        labelled += zip(chosen, results, strict=True)
    assert len(labelled) == len(settings) >= 28
    for (name, depth), run in labelled:
        where = f"{name}, {mode}, K = {depth}, {run['kv']}"
        assert run["ids"] == plain["ids"], where
        assert run["digests"] == plain["digests"], where
        steps = run["counters"][1:]
        if run["kv"] == "grow" and depth:
            # a set of tensors more for each step in flight, and a plan for each: these runs are too short for that
            assert {step["passes"] for step in steps if step["refused"] != "recorded"} == {
                promised(ARMS[name], mode, "grow")["passes"]
            }, where
            continue
        expected = promised(ARMS[name], mode, run["kv"])
        for step in steps[-3:]:
            assert {key: step[key] for key in expected} == expected, where
            assert step["refused"] == (None if ARMS[name]["replay"] else "off"), where


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_growing_cache_replays_steps_ahead(rig: Lab, depth: int) -> None:
    """K + 2 sets of tensors take turns, and each turn has its plan: recorded once, then only replayed."""
    prompt, tokens = (PROMPT * 4)[:66], 60  # the tensors' class ends at 128 positions
    options = [
        {**OFF, "readback_depth": 0, "params": "uniform_pool"},
        {**ON, "submit_every": 0, "readback_depth": depth},
    ]
    off, on = rig.run(RUN, options=options, kvs=["grow"], prompt=prompt, tokens=tokens)
    assert on["ids"] == off["ids"]
    assert on["digests"] == off["digests"]
    assert len({step["kv_class_bytes"] for step in on["counters"]}) == 1
    refused = [step["refused"] for step in on["counters"]]
    assert refused.count("recorded") == depth + 2
    assert refused[-10:] == [None] * 10
    expected = promised({**ON, "submit_every": 0}, "immediates", "grow")
    assert {key: on["counters"][-1][key] for key in expected} == expected


# ---- the host in the middle of a step --------------------------------------------------------------------------------

INTERRUPTED = """
import sys
from stepwell.decode import stepper
from stepwell.decode.generation import Generation
from stepwell.decode.session import DecodeSession
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.step.recorder import Recorder
from stepwell.memory.buffer import Role

async def main(args):
    rig = sys.rig
    spare = rig.pool.acquire(64, Role.ACTIVATION, "spare", host=True)
    interrupt = [0]

    class Interrupted(Recorder):
        '''A host that writes something before the n-th launch of a step, another n at every step.'''
        __slots__ = ("left",)
        def __init__(self, position=0, rows=1, shapes=None, draw=0):
            super().__init__(position, rows, shapes, draw)
            self.left = interrupt[0] and position % interrupt[0] + 2
        def launch(self, *args, **more):
            self.left -= 1
            if not self.left:
                self.write(spare, 0, [self.position])
            super().launch(*args, **more)

    launcher = Launcher(rig.device, rig.pool, LaunchOptions.from_dict({**args["options"], "params": args["params"]}))
    runs = []
    stepper.Recorder = Interrupted
    try:
        for interrupt[0] in (0, args["launches"] - 2):
            session = DecodeSession(rig.model, launcher, kv="static", context=64)
            generation = Generation(max_tokens=args["tokens"], digest=True)
            events = [event async for event in session.generate(args["prompt"], generation)]
            session.close()
            launcher.release_run()
            steps = [event.counters for event in events]
            runs.append({
                "digests": [event.digest for event in events], "ids": [event.id for event in events],
                "submits": [step.submits for step in steps], "uploads": [step.uploads for step in steps],
                "hits": [step.bind_groups_reused for step in steps], "passes": [step.passes for step in steps],
                "misses": [step.bind_groups_created for step in steps],
            })
    finally:
        stepper.Recorder = Recorder
        launcher.close()
        rig.pool.release(spare)
    return runs
"""


@pytest.mark.parametrize("mode", MODES)
def test_a_host_write_in_mid_step(rig: Lab, plain: dict[str, Any], mode: str) -> None:
    """The write ends the pass and starts the batch anew: keys by the place in the batch miss, stable ones hit."""
    options = {**ON, "submit_every": 0, "replay": False, "readback_depth": 0}
    calm, interrupted = rig.run(
        INTERRUPTED, options=options, params=mode, launches=LAUNCHES, prompt=PROMPT, tokens=TOKENS
    )
    for run in (calm, interrupted):
        assert run["ids"] == plain["ids"]
        assert run["digests"] == plain["digests"]
    steady = slice(2, None)  # the first decode step has made the groups
    rate = sum(interrupted["hits"][steady]) / (LAUNCHES * (TOKENS - 2))
    print(f"{mode}: {rate:.0%} of bind groups hit with a write in mid-step, {interrupted['uploads'][steady]} uploads")
    assert set(calm["submits"][steady]) == set(calm["passes"][steady]) == {1}
    assert set(calm["misses"][steady]) == {0}
    assert set(interrupted["submits"][steady]) == set(interrupted["passes"][steady]) == {2}
    written = 0 if mode == "immediates" else POSITIONED
    assert set(calm["uploads"][steady]) == {written}
    if mode == "uniform_pool":
        assert rate < 0.75
        # what moved to another slot is written again
        assert sum(interrupted["uploads"][steady]) > 1.25 * (1 + written) * (TOKENS - 2)
    else:
        assert rate == 1
        assert set(interrupted["uploads"][steady]) == {1 + written}


# ---- one call per token ----------------------------------------------------------------------------------------------

FRONTEND = '''
import base64, sys
from js import makeTokenizer
from pyodide.code import run_js
from stepwell.page.frontend import Frontend
from stepwell.gpu import js_device
from stepwell.gpu.source import BytesSource

emit = run_js("(text) => { const m = JSON.parse(text); (globalThis.sent ??= []).push(m);"
              "  if (m.type === 'error') console.log(text); }")
spying = run_js("""(module) => {
  const spied = (executor) => new Proxy(executor, { get(target, name) {
    const value = target[name];
    if (typeof value !== "function") return value;
    const method = (...args) => {
      globalThis.crossed?.push([name, ...args.map((argument) => typeof argument)]);
      return value.apply(target, args);
    };
    return Object.defineProperty(method, "name", { value: name });
  } });
  const openAdapter = async () => {
    const { facts, openDevice } = await module.openAdapter();
    return { facts, openDevice: async (request) => spied(await openDevice(request)) };
  };
  return { ...module, openAdapter };
}""")

async def main(args):
    spied = spying(js_device.script())
    js_device.script = lambda: spied
    sys.frontend = Frontend(emit, "{}", makeTokenizer)
    await sys.frontend.open()
    await sys.frontend.load_source('{"name": "tiny"}', BytesSource(base64.b64decode(args["model"]), "tiny"))
'''
ASK = """
import json, sys
from pyodide.ffi import JsProxy
from pyodide.code import run_js

class Spy:
    '''Every call of Python code to a JS function while it is there: (file, function, callee, type of its argument).

    A method of a JS object counts when Python code calls it (``.then`` of an await, ``.to_bytes``, ``.to_py``).
    '''
    def __enter__(self):
        self.calls = []
        sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, "calls to JS")
        sys.monitoring.register_callback(sys.monitoring.PROFILER_ID, sys.monitoring.events.CALL, self.on_call)
        sys.monitoring.set_events(sys.monitoring.PROFILER_ID, sys.monitoring.events.CALL)
        return self

    def __exit__(self, *exception):
        sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)
        sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)

    def on_call(self, code, offset, called, argument):
        method = isinstance(argument, JsProxy) and hasattr(called, "__objclass__")
        if isinstance(called, JsProxy) or isinstance(getattr(called, "__self__", None), JsProxy) or method:
            name = str(called.name) if isinstance(called, JsProxy) else called.__name__
            text = argument[:15] if isinstance(argument, str) else ""
            self.calls.append((code.co_filename.rpartition("/")[2], code.co_name, name, type(argument).__name__, text))

async def main(args):
    run_js("globalThis.sent.length = 0")
    if not args["spy"]:
        await sys.frontend.run(json.dumps(args["request"]))
        return []
    run_js("globalThis.crossed = []")
    with Spy() as spy:
        await sys.frontend.run(json.dumps(args["request"]))
    return spy.calls
"""


@pytest.fixture(scope="module")
def thirty_layers(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A frontend with as many launches per token as SmolLM2 has, as the page's worker makes it."""
    path = tmp_path_factory.mktemp("model") / "deep.gguf"
    write_tiny_llama(path, n_layers=30)
    lab.run(FRONTEND, model=encode(path.read_bytes()))
    yield lab
    lab.run("import sys\nasync def main(args):\n    sys.frontend.close()")


def ask(lab: Lab, *, spy: bool = False, **request: Any) -> tuple[list[list[str]], dict[str, Any], list[dict[str, Any]]]:
    """(calls into JS, the record, all messages)"""
    asked = {"prompt": "hello", "kv": "static", "tokens": 40, "ban_eos": True, "context": 128, **request}
    calls = lab.run(ASK, request=asked, spy=spy)
    messages = lab.js("globalThis.sent")
    (done,) = [message for message in messages if message["type"] == "done"]
    return calls, done["record"], messages


def test_calls_to_js_per_token(thirty_layers: Lab) -> None:
    """Three calls per replayed token: replay, the start of its read, and the page's message; numbers and text only.

    The fourth is the event loop's, when the read wakes the task that waits for it.  What the page is told of the pool
    comes at most once per frame, not per token (tests/unit/page/test_outbox.py).
    """
    ask(thirty_layers, tokens=60)
    calls, record, _ = ask(thirty_layers, spy=True, tokens=60)
    starts = [
        i for i, (_, name, _, _, text) in enumerate(calls) if name == "emit" and text.startswith('{"type":"token"')
    ]
    assert len(record["tokens"]) == 60 <= len(starts)  # one more if the text has a tail
    steady = range(16, 56)  # when the pool has settled; the last replay is issued ahead of the last token
    assert [record["tokens"][i]["replayed"] for i in steady] == [1] * len(steady)
    for i in steady:
        made = calls[starts[i] : starts[i + 1]]
        of_loop = [call for call in made if call[0] == "webloop.py"]
        of_pool = [call for call in made if call[4].startswith('{"type":"pool"')]
        own = [call for call in made if call not in of_loop and call not in of_pool]
        assert [(file, callee, kind) for file, _, callee, kind, _ in own if callee] == [
            ("js_device.py", "replay", "int"), ("js_device.py", "readBuffer", "int"),
        ]  # fmt: skip
        assert [(file, kind) for file, _, callee, kind, _ in own if not callee] == [("outbox.py", "str")]
        assert len(of_loop) <= 1
        assert len(of_pool) <= 1
    crossed = thirty_layers.js("globalThis.crossed")
    kinds = {tuple(entry) for entry in crossed if entry[0] in ("replay", "readBuffer")}
    assert kinds == {("replay", *["number"] * 6), ("readBuffer", *["number"] * 4)}


def test_time_to_encode_a_token(thirty_layers: Lab) -> None:
    """Python and JS from the token before to the submitted step, 274 launches: printed.

    A time is the machine's; what is done for a token is counted, here and in tests/simulation/decode/test_step_cost.py.
    """
    ask(thirty_layers)
    shown = {}
    for name, launch in {
        "replay": {},
        "live": {"replay": False},
        "nothing on": {**OFF, "params": "uniform_pool"},
    }.items():
        ask(thirty_layers, launch=launch, tokens=4)
        _, record, _ = ask(thirty_layers, launch=launch)
        tokens = [token for token in record["tokens"][4:] if token["replayed"] == (name == "replay")]
        assert len(tokens) >= 30
        assert {token["launches"] for token in tokens} == {274}
        times = [token["encode_ms"] for token in tokens]
        shown[name] = f"{median(times):.3f} ({min(times):.3f})"
        made = {token["bind_groups_created"] + token["uploads"] for token in tokens}
        assert made == ({2 * 274} if name == "nothing on" else {0}), name
    print("encode_ms per token, median (and least):", shown)


def test_a_read_that_is_waited_for_when_its_device_closes(lab: Lab) -> None:
    """It fails, rather than never coming."""
    source = """
import asyncio
from stepwell import BufferUsage, open_device
from stepwell.errors import DeviceLost

async def main(args):
    device = await open_device()
    staging = device.create_buffer(64, BufferUsage.MAP_READ | BufferUsage.COPY_DST)
    read = device.read_buffer(staging, 0, 4)
    waiting = [asyncio.ensure_future(asyncio.wait_for(read, 5)) for _ in range(2)]
    await asyncio.sleep(0)
    device.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    return [isinstance(result, DeviceLost) for result in results]
"""
    assert lab.run(source) == [True, True]


# ---- the clocks ------------------------------------------------------------------------------------------------------


def test_gpu_time_and_trace(thirty_layers: Lab) -> None:
    """Every token has its GPU time when it is asked for: that of its passes, each a span of the trace."""
    _, record, messages = ask(thirty_layers, tokens=12)
    assert {token["gpu_ms"] for token in record["tokens"]} == {None}
    assert [message for message in messages if message["type"] == "trace"] == []
    _, timed, messages = ask(thirty_layers, tokens=12, gpu_time=True, trace=True)
    assert timed["token_ids"] == record["token_ids"]
    assert all(token["gpu_ms"] > 0 for token in timed["tokens"])
    (trace,) = [json.loads(message["text"]) for message in messages if message["type"] == "trace"]
    tracks = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert set(tracks.values()) == {"python", "js", "gpu"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    by_track = {name: [span for span in spans if tracks[span["tid"]] == name] for name in tracks.values()}
    names = {track: {span["name"] for span in found} for track, found in by_track.items()}
    assert names == {
        "python": {"record and submit", "replay", "wait"}, "js": {"encode", "submit"}, "gpu": {"compute pass"},
    }  # fmt: skip
    assert min(span["ts"] for span in spans) == 0
    for track, found in by_track.items():
        assert all(span["dur"] >= 0 for span in found)
        assert sum(span["dur"] for span in found) > 0, track
    passes = sum(token["passes"] for token in timed["tokens"])
    assert len(by_track["gpu"]) == passes
    assert all(span["dur"] > 0 for span in by_track["gpu"])
    assert sum(span["dur"] for span in by_track["gpu"]) == pytest.approx(
        1000 * sum(token["gpu_ms"] for token in timed["tokens"]), rel=0.01
    )
