"""attach() under an unmodified onnxruntime-web: what it saves, that results are the same bits, and what faults do.

Counts come from a wrapper of the WebGPU prototypes that is below everything attached (web/attach/count.js), times from
`python -m harness attach`; here nothing depends on how fast the adapter is.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from stepwell.memory.buffer import Role
from stepwell.replay.traces import ACQUIRE, RUN, read_trace
from tests.support.covering import FULL

pytestmark = pytest.mark.browser

MIB = 1 << 20
SCENARIOS = (Path(__file__).parent / "ort_scenarios.js").read_text(encoding="utf-8")
HEADERS = {"Cross-Origin-Embedder-Policy": "require-corp", "Cross-Origin-Resource-Policy": "same-origin"}
NOT_POOLED = MIB // 2  # uploads, read-backs and uniforms of a step: the runtime has them in every arm
APPEND: dict[str, Any] = {"model": "append", "start": 30}
CROSSING: dict[str, Any] = {"model": "kv64", "start": 26}  # 64 KiB a tensor, from the seventh step on 128 KiB
Scenario = Callable[..., Any]


@pytest.fixture
def scenario(browser: Browser, server_url: str) -> Iterator[Scenario]:
    """Runs a function of ort_scenarios.js in a page of its own, with its own runtime and device."""
    context = browser.new_context()

    def run(name: str, /, **options: Any) -> Any:
        page = context.new_page()
        page.on("console", lambda message: print(f"console {message.type}: {message.text}"))
        page.route(
            "**/ort_scenarios.js",
            lambda route: route.fulfill(body=SCENARIOS, content_type="text/javascript", headers=HEADERS),
        )
        page.goto(server_url + "manifest.json")
        call = "async ([name, options]) => (await import(new URL('/ort_scenarios.js', location.href)))[name](options)"
        found = page.evaluate(call, [name, options])
        page.close()
        return found

    yield run
    context.close()


def created(run: dict[str, Any]) -> list[int]:
    return [step["created"] for step in run["steps"]]


def digests(run: dict[str, Any]) -> list[int]:
    return [*(step["digest"] for step in run["steps"]), run["digest"]]


def assert_right(run: dict[str, Any]) -> None:
    assert not any(step["wrong"] for step in run["steps"])
    assert (run["left"], run["left_bytes"]) == (0, 0)


def recorded(trace: str, folder: Path) -> list[int]:
    """Storage buffers created in each step, by the recorder's trace: a step ends when its result is read back."""
    path = folder / "trace"
    path.write_text(trace, encoding="utf-8")
    steps = [0]
    for op, _, request in read_trace(path):
        if op == RUN:
            steps.append(0)
        elif op == ACQUIRE and request.role is Role.ACTIVATION:
            steps[-1] += 1
    return steps


def test_the_staircase_is_there_without_a_pool(scenario: Scenario, tmp_path: Path) -> None:
    """64 tensors, of which the runtime's pool keeps 20 where they have 4 MiB, and 10 where they have 8, 12 or 16."""
    starts = [("kv64", 2045, 8), ("kv64", 6150, 4), ("kv16", 2044, 8), *([("kv64", 4100, 4)] if FULL else [])]
    ways = [{"model": model, "start": start, "steps": steps} for model, start, steps in starts]
    found = scenario("runs", ways=[{**way, "attach": {"record": True}} for way in ways])
    for run in found:
        assert_right(run)
        assert recorded(run["trace"], tmp_path)[1:] == created(run)[1:]
    low, high, few, *middle = found
    # Two sets of tensors at the start of each class, then what the pool has no room for.
    assert created(low)[2:] == [44, 64, 64, 54, 54, 54]
    assert [created(run)[3:] for run in (high, *middle)] == [[54]] * (1 + len(middle))
    assert created(few)[2:] == [0, 0, 16, 16, 6, 6]


@pytest.mark.parametrize("model", ["append", "gqa"])
def test_results_are_the_same_bit_by_bit(scenario: Scenario, model: str) -> None:
    way = {"model": model, "start": 30, "steps": 44}
    attached = [{"zero": "always"}, {"zero": "never"}, {"policy": "bucket"}, {"record": True}]
    bare, *others = scenario("runs", ways=[way, *({**way, "attach": options} for options in attached)])
    for run in (bare, *others):
        assert_right(run)
        assert digests(run) == digests(bare)
    assert len(set(digests(bare))) > 40


def test_a_step_creates_nothing_when_attached(scenario: Scenario) -> None:
    budget = 21 * MIB
    way = {**CROSSING, "steps": 16}
    ways = [way, {**way, "attach": {}}, {**way, "attach": {"zero": "never"}}, {**way, "attach": {"budget": budget}}]
    bare, *attached = scenario("runs", ways=[*ways, {**way, "kv": "static"}])
    static = attached.pop()
    assert min(created(bare)[2:]) == 14
    assert max(created(static)[2:]) == 0
    for run in (bare, static, *attached):
        assert_right(run)
        assert digests(run)[:-1] == digests(bare)[:-1]
    for run in attached:
        found = created(run)
        # Natives have exactly the size that is asked for, so a new class of the runtime's is new buffers, twice.
        assert found[6:8] == [64, 64]
        assert max([*found[2:6], *found[8:]]) <= 2
    always, never, limited = (run["stats"]["devices"][0] for run in attached)
    assert always["native"]["cleared"] == always["native"]["reused"] > 0
    assert never["native"]["cleared"] == 0
    assert limited["peak_bytes"] <= budget < always["peak_bytes"]
    assert attached[2]["peak_bytes"] <= budget + NOT_POOLED


def test_sessions_come_and_go(scenario: Scenario) -> None:
    found = scenario("cycles", **CROSSING, attach={}, steps=10, count=3, rest=0)
    first, second, third = found["digests"]
    assert first == second == third
    left = found["left"]
    assert left[2] == left[1] <= max(left[0], found["peak_bytes"])
    assert found["detached"] < left[2]
    assert found["at_the_end"] == 0


def test_two_sessions_in_turns(scenario: Scenario) -> None:
    decodings = [APPEND, {"model": "gqa", "start": 40}]
    bare, attached = (scenario("pair", attach=options, decodings=decodings, steps=8) for options in (None, {}))
    assert attached == bare
    assert bare["at_the_end"] == 0


def test_a_runtime_in_a_worker(scenario: Scenario) -> None:
    way = {"model": "kv64", "start": 40, "steps": 6}
    ways = [way, {**way, "attach": {}}]
    bare, attached = scenario("inWorker", name="runs", options={"ways": ways})
    assert digests(attached) == digests(bare)
    assert max(created(attached)[2:]) == 0
    assert attached["stats"]["devices"][0]["native"]["reused"] > 0


def test_attached_late_and_detached_early(scenario: Scenario) -> None:
    way = {**CROSSING, "steps": 16}
    (bare,) = scenario("runs", ways=[way])
    found = scenario("between", **way, attach={}, **{"from": 3, "to": 12})
    assert digests(found) == digests(bare)
    assert found["at_the_end"] == 0
    # Buffers from before attach() stay the browser's; those of the class that the tensors then enter are the pool's.
    assert created(found)[:3] == created(bare)[:3]
    assert max(created(found)[8:12]) == 0
    assert created(found)[12:] == created(bare)[12:]


@pytest.mark.parametrize("nth", [1, 9])
def test_out_of_memory_is_the_runtimes_own_error(scenario: Scenario, nth: int) -> None:
    bare, attached = (
        scenario("shortOfMemory", **APPEND, steps=4, at=1, nth=nth, attach=options) for options in (None, {})
    )
    if not bare["failed"]:
        pytest.skip("the adapter has memory for its largest buffer")
    assert "is invalid due to a previous error" in bare["outcomes"][1]
    assert attached == bare
    assert bare["at_the_end"] == 0


def test_a_lost_device_is_the_runtimes_own_error(scenario: Scenario) -> None:
    bare, attached = (scenario("losing", **APPEND, steps=4, at=2, attach=options) for options in (None, {}))
    assert attached["outcomes"] == bare["outcomes"]
    assert [type(outcome) for outcome in bare["outcomes"]] == [int, int, str]
    (device,) = attached["stats"]["devices"]
    assert device["state"] == "lost"
    assert (device["live_bytes"], device["free_bytes"]) == (0, 0)
