"""Frontend without a browser: requests are checked on arrival, and a workload runs without a model."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.page import record as records
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.kv_pattern import KVPattern
from stepwell.errors import BadRequest
from stepwell.gpu.device import Device
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.source import FileSource
from stepwell.launch.options import ABLATION, OPTIONS, LaunchOptions
from stepwell.memory.policies import POLICIES, make_policy
from stepwell.memory.pool import BufferPool
from stepwell.page.engines import ENGINES, Engines
from stepwell.page.frontend import Frontend
from stepwell.page.request import RunRequest
from stepwell.text.backends import rust_backend
from tests.support.tiny_llama import write_tiny_llama

HOST = {"browser": "CPython", "cross_origin_isolated": True, "timer_resolution_us": 1, "pyodide": "none"}
WORKLOAD = {"workload": "kv16", "kv": "grow", "start": 2100, "tokens": 5, "policy": "bucket"}


class Page:
    """Takes the place of the page: keeps the messages of one frontend on a FakeDevice."""

    def __init__(self, model: Path | None = None, tuning: str | None = None, **device: Any) -> None:
        """``tuning`` is the text that an earlier page kept."""
        self.device = FakeDevice(log_limit=0, **device)
        self.model = model
        self.messages: list[dict[str, Any]] = []
        self.on_message: Callable[[dict[str, Any]], None] = lambda message: None
        host = json.dumps({**HOST, "tuning": tuning})
        self.frontend = Frontend(self._hear, host, self._make_tokenizer, self._open)

    def _hear(self, text: str) -> None:
        self.messages.append(json.loads(text))
        self.on_message(self.messages[-1])

    async def _open(self) -> Device:
        return self.device

    def _make_tokenizer(self, document: str) -> Any:
        encode = rust_backend(document)
        return lambda text: SimpleNamespace(to_py=lambda: encode(text))  # stands for the proxy of an Int32Array

    def run(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """The records of some requests, each of them valid by the schema."""

        async def run() -> None:
            await self.frontend.open()
            if self.model is not None:
                await self.frontend.load_source('{"name": "tiny"}', FileSource(self.model))
            for request in requests:
                await self.frontend.run(json.dumps(request))

        asyncio.run(run())
        found = [message["record"] for message in self.of("done")]
        return [records.check(record) for record in found]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == kind]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr(KVPattern, "_check", lambda *_: None)  # FakeDevice computes nothing by itself
    return Page()


def test_a_workload_gives_a_record_like_any_run(page: Page) -> None:
    (record,) = page.run(WORKLOAD)
    assert page.of("error") == []
    assert {name: record["scenario"][name] for name in WORKLOAD} == WORKLOAD
    assert record["scenario"]["model"] == "kv16"
    assert record["scenario"]["context"] == 2104
    assert [token["position"] for token in record["tokens"]] == [2100, 2101, 2102, 2103, 2104]
    assert [token["buffers_created"] for token in record["tokens"][2:]] == [6, 6, 6]
    assert record["finish_reason"] == "length"
    assert record["prompt_ids"] == []
    assert record["memory"]["by_role"]["kv"]["peak_reserved_bytes"] >= 32 * 8 << 20
    assert [message["token"] for message in page.of("token")] == record["tokens"]
    assert [message["phase"] for message in page.of("phase")][-5:] == ["ready", "kernels", "prefill", "decode", "ready"]


def test_the_pool_is_shown_as_it_fills(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.page.outbox._FRAME_MS", 0)  # every token, however fast
    page.run(WORKLOAD)
    shown = page.of("pool")
    assert len(shown) == WORKLOAD["tokens"] + 1
    classes = {(row["role"], row["size"]): row for row in shown[-1]["classes"]}
    row = classes["kv", 8 << 20]
    # after the last step: 16 hold the past; 10 of the step before are kept, 6 wait for the flush that destroys them
    assert (row["live"], row["free"], row["keeps"]) == (16, 16, 10)
    assert row["evicted"] == 3 * 6
    assert set(row) == {"role", "size", "live", "free", "hits", "misses", "keeps", "evicted"}
    assert {role for role, _ in classes} == {"kv", "activation"}
    text = shown[-1]["text"]
    assert "MiB reserved" in text
    assert [message["text"] for message in shown[:-1]] == [""] * 5
    assert page.of("done")[0]["record"]["memory"]["explanation"] == text


def test_the_pool_explains_itself_at_the_end(page: Page) -> None:
    (record,) = page.run({**WORKLOAD, "tokens": 16})
    assert re.search(r"class 8.0 MiB \(kv\): 16 wanted, 10 kept, 6 made and destroyed", record["memory"]["explanation"])


def test_the_pool_is_told_at_most_once_per_frame(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.page.outbox.now_ms", lambda: 0.0)  # no frame ever passes
    page.run(WORKLOAD)
    assert len(page.of("pool")) == 1  # the last


def test_a_budget_holds_for_its_run_only(page: Page) -> None:
    simple = {**WORKLOAD, "policy": "simple"}  # which never gives anything up by itself
    budgeted, free = page.run({**simple, "budget_mib": 300}, simple)
    assert max(token["reserved_bytes"] for token in budgeted["tokens"]) <= 300 << 20
    assert budgeted["scenario"]["budget_mib"] == 300
    assert max(token["reserved_bytes"] for token in free["tokens"]) > 300 << 20


def test_a_hard_budget_is_an_error(page: Page) -> None:
    assert page.run({**WORKLOAD, "budget_mib": 100, "hard_budget": True}) == []
    (error,) = page.of("error")
    assert error["code"] == "BudgetExceeded"
    page.frontend.close()
    assert page.device.table_sizes()["buffers"] == 0


def test_runs_start_from_the_same_state(page: Page) -> None:
    first, _, again = page.run(WORKLOAD, {**WORKLOAD, "kv": "static", "policy": "adaptive"}, WORKLOAD)
    counts = [[(t["buffers_created"], t["reserved_bytes"]) for t in record["tokens"]] for record in (first, again)]
    assert counts[0] == counts[1]
    page.frontend.close()
    assert page.device.table_sizes() == dict.fromkeys(("buffers", "pipelines", "bind_groups", "plans"), 0)


def test_the_start_has_a_default(page: Page) -> None:
    (record,) = page.run({"workload": "kv16", "tokens": 1})
    assert (record["scenario"]["start"], record["tokens"][0]["position"]) == (2000, 2000)


def test_the_page_is_told_what_there_is(page: Page) -> None:
    page.run()
    (environment,) = page.of("environment")
    assert [entry["name"] for entry in environment["workloads"]] == ["kv64", "kv16"]
    assert [entry["tensors"] for entry in environment["workloads"]] == [64, 16]
    assert {entry["position_bytes"] for entry in environment["workloads"]} == {2048}
    assert [entry["name"] for entry in environment["policies"]] == list(POLICIES)
    assert all(entry["summary"] for entry in [*environment["workloads"], *environment["policies"]])


def test_every_option_can_be_set_as_it_is_listed(page: Page) -> None:
    page.run()
    (environment,) = page.of("environment")
    for policy in environment["policies"]:
        listed = {option["name"]: option["default"] for option in policy["options"]}
        assert set(listed) == {option.name for option in POLICIES[policy["name"]].options}
        make_policy(policy["name"], **listed)  # each default is a text that the option takes
    kinds = {option["kind"] for policy in environment["policies"] for option in policy["options"]}
    assert {"int", "choice", "limits"} <= kinds


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({**WORKLOAD, "workload": "kv9"}, "no workload named 'kv9'"),
        ({**WORKLOAD, "start": 70_000}, "the device allows 134,217,728 B"),
        ({**WORKLOAD, "policy": "nope"}, "policy 'nope'"),
        ({**WORKLOAD, "policy_options": {"cap": 3}}, "no option 'cap'"),
        ({**WORKLOAD, "policy_options": [3]}, "policy_options: [3]; it must be a table of names and values"),
        ({**WORKLOAD, "budget_mib": 0}, "budget_mib: 0; it must be a whole number, 1 or more"),
        ({**WORKLOAD, "start": "2000"}, "start: '2000'; it must be a whole number, 1 or more"),
        ({**WORKLOAD, "launch": {"speed": 9}}, "launch: no option 'speed'. It has shared_pass"),
        ({**WORKLOAD, "launch": {"replay": "perhaps"}}, "replay: 'perhaps'; it must be true or false"),
        ({**WORKLOAD, "launch": [1]}, "launch: [1]; it must be a table"),
        ({**WORKLOAD, "digest": True}, "digest is for a model; kv16 has no logits"),
        ({**WORKLOAD, "kv_type": "f16"}, "kv_type is for a model; kv16 has no choice of type"),
        ({"prompt": "Hi", "kv_type": "q8"}, "kv_type: 'q8'; it must be one of f32, f16"),
        ({**WORKLOAD, "trace": 1}, "trace: 1; it must be true or false"),
        ({**WORKLOAD, "prompt": "Hi"}, "kv16 has no prompt"),
        ({**WORKLOAD, "prompt_length": 3}, "kv16 has no prompt"),
        ({**WORKLOAD, "tune": True}, "kv16 has no products to tune"),
        ({**WORKLOAD, "kernel_times": True}, "kv16 has no decode step"),
        ({"prompt": "Hi", "start": 9}, "start is for a workload; a model has no tensors to fill"),
        ({"prompt": "Hi", "prompt_ids": [1]}, "the request has prompt and prompt_ids"),
        ({"prompt": "Hi", "ban_eos": True, "ignore_eos": True}, "exclude each other"),
        ({"prompt": "Hi", "stop": ["a", ""]}, "a stop string is empty"),
        ({"prompt": "Hi", "stop": [1]}, "stop: [1]; it must be a list of texts"),
        ({"prompt": "Hi", "top_p": 0}, "top_p: 0; it must be a number above 0 and up to 1"),
        ({"prompt": "Hi", "seed": 2**32}, "from 0 to 4,294,967,295"),
        ({"prompt": "Hi"}, "no model is loaded"),
        ({"tokens": 3}, "no prompt"),
        ({"prompt": "Hi", "colour": "red"}, "request: no option 'colour'. It has prompt, tokens"),
    ],
)
def test_bad_requests_become_error_messages(page: Page, request_: dict[str, Any], message: str) -> None:
    assert page.run(request_) == []
    (error,) = page.of("error")
    assert error["code"] == "BadRequest"
    assert message in error["message"]
    page.frontend.close()
    assert page.device.table_sizes()["buffers"] == 0


def test_cancel_ends_a_workload(page: Page) -> None:
    page.on_message = lambda message: page.frontend.cancel() if message["type"] == "token" else None
    (record,) = page.run({**WORKLOAD, "tokens": 50})
    assert record["finish_reason"] == "cancelled"
    assert len(record["tokens"]) == 1


def test_null_is_the_default_and_json_round_trips() -> None:
    request = RunRequest.from_json('{"prompt": "x", "context": null, "top_p": 1, "stop": ["a"], "budget_mib": 3}')
    assert request == RunRequest(prompt="x", stop=("a",), budget_mib=3)
    assert request.budget_bytes == 3 << 20
    assert RunRequest.from_json(json.dumps(request.as_dict())) == request
    with pytest.raises(BadRequest, match="option tokens: True; it must be a whole number"):
        RunRequest.from_json('{"prompt": "x", "tokens": true}')


# ---- launches ------------------------------------------------------------------------------------------------------

MAIN = ABLATION[0][1].changes()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_llama(path)
    return path


def test_the_page_is_told_how_steps_can_be_launched(page: Page) -> None:
    page.run()
    (environment,) = page.of("environment")
    listed = {option["name"]: option for option in environment["launch_options"]}
    assert list(listed) == [option.name for option in OPTIONS]
    assert set(listed["params"]) == {"name", "kind", "default", "summary", "choices", "minimum", "maximum"}
    assert listed["params"]["choices"] == ["auto", "uniform_pool", "call_site", "immediates"]
    assert (listed["submit_every"]["minimum"], listed["readback_depth"]["maximum"]) == (None, 64)
    assert LaunchOptions.from_dict({name: option["default"] for name, option in listed.items()}) == LaunchOptions()
    arms = [(arm["name"], LaunchOptions.from_dict(arm["launch"])) for arm in environment["ablation"]]
    assert arms == list(ABLATION)


def test_an_engine_is_kept_for_each_set_of_options_up_to_a_bound() -> None:
    device = FakeDevice(log_limit=0)
    engines = Engines(device, BufferPool(device), bound=2)
    closed: list[LaunchOptions] = []
    options = [LaunchOptions(submit_every=n) for n in (1, 2, 3)]

    def get(which: LaunchOptions) -> Any:
        found: Any = engines.get(which)
        close = found.close
        found.close = lambda: (closed.append(which), close())
        return found

    first, second = get(options[0]), get(options[1])
    assert first is not second
    assert engines.get(LaunchOptions(submit_every=1)) is first
    assert first.options == options[0]
    assert (first.device, first.pool) == (second.device, second.pool)
    get(options[2])
    assert closed == [options[1]]
    assert len(engines) == 2
    assert len(ABLATION) <= ENGINES


def test_a_record_says_how_this_run_was_launched(page: Page) -> None:
    slow, fast, again = page.run({**WORKLOAD, "launch": MAIN}, WORKLOAD, {**WORKLOAD, "launch": MAIN})
    assert page.of("error") == []
    assert slow["scenario"]["launch"] == MAIN
    assert slow["launch"]["options"] == ABLATION[0][1].as_dict()
    assert slow["launch"]["params"] == "uniform_pool"
    assert fast["scenario"]["launch"] == {}
    assert fast["launch"]["options"] == LaunchOptions().as_dict()
    assert fast["launch"]["params"] in ("call_site", "immediates")
    assert slow["launch"]["identity_rate"] == 0
    step, quick = slow["tokens"][3], fast["tokens"][3]
    assert step["passes"] == step["launches"] == step["bind_groups_created"]
    assert quick["passes"] < step["passes"]
    assert quick["launches"] == step["launches"]
    reused = sum(token["bind_groups_reused"] for token in fast["tokens"])
    assert fast["launch"]["identity_rate"] == reused / sum(token["launches"] for token in fast["tokens"]) > 0
    counted = ("passes", "encoders", "submits", "syncs", "bind_groups_created", "uploads", "upload_bytes", "refused")
    assert [[token[name] for name in counted] for token in again["tokens"]] == [
        [token[name] for name in counted] for token in slow["tokens"]
    ]
    assert again["launch"] == slow["launch"]  # what is counted is of one run, not of all of the engine's


def test_every_arm_gives_the_same_tokens_and_digests(tiny: Path) -> None:
    page = Page(tiny)
    asked = {"prompt": "Hi there", "tokens": 8, "kv": "static", "ban_eos": True, "digest": True}
    records_ = page.run(*({**asked, "launch": options.changes()} for _, options in ABLATION))
    assert page.of("error") == []
    assert len(records_) == len(ABLATION)
    assert len({tuple(record["token_ids"]) for record in records_}) == 1
    assert len({tuple(token["digest"] for token in record["tokens"]) for record in records_}) == 1
    assert [record["launch"]["options"] for record in records_] == [options.as_dict() for _, options in ABLATION]
    replayed = [sum(token["replayed"] for token in record["tokens"]) for record in records_]
    assert replayed[:6] == [0] * 6
    assert min(replayed[6:]) > 0
    page.frontend.close()
    assert set(page.device.table_sizes().values()) == {0}


def test_a_long_prompt_is_read_in_parts_that_are_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.page.outbox._PROGRESS_MS", 0)
    page = Page(tiny)
    (record,) = page.run({"prompt_length": 150, "tokens": 2, "ban_eos": True})
    assert page.of("error") == []
    told = [message for message in page.of("progress") if message["unit"] == "tokens"]
    assert [(message["phase"], message["done"], message["total"]) for message in told] == [
        ("prefill", 64, 150), ("prefill", 128, 150), ("prefill", 150, 150),
    ]  # fmt: skip
    assert len(record["prompt_ids"]) == 150


@pytest.mark.parametrize("kv", KV_MODES)
def test_a_prompt_is_left_between_two_parts(tiny: Path, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled at the first report: no further part, no token, a record all the same, and the next run is whole."""
    monkeypatch.setattr("stepwell.page.outbox._PROGRESS_MS", 0)
    page = Page(tiny)
    page.on_message = lambda message: (
        page.frontend.cancel() if message.get("unit") == "tokens" and message["done"] == 64 else None
    )
    asked = {"prompt_length": 150, "tokens": 3, "kv": kv, "ban_eos": True}
    cancelled, whole = page.run(asked, {**asked, "prompt_length": 40})
    assert page.of("error") == []
    assert [message["done"] for message in page.of("progress") if message["unit"] == "tokens"] == [64, 40]
    assert (cancelled["finish_reason"], cancelled["tokens"], cancelled["ttft_ms"]) == ("cancelled", [], None)
    assert (whole["finish_reason"], len(whole["tokens"])) == ("length", 3)
    page.frontend.close()
    assert set(page.device.table_sizes().values()) == {0}


@pytest.mark.parametrize("kv", KV_MODES)
def test_an_answer_that_fills_the_context_is_finished(tiny: Path, kv: str) -> None:
    """A prompt that is longer is an error with the numbers."""
    page = Page(tiny)
    asked = {"prompt_length": 20, "tokens": 30, "kv": kv, "ban_eos": True}
    (record,) = page.run({**asked, "context": 24}, {**asked, "context": 19}, {**asked, "context": 100_000})
    assert (record["finish_reason"], len(record["tokens"]), record["tokens"][-1]["position"]) == ("length", 5, 24)
    too_long, too_large = page.of("error")
    assert too_long["code"] == "ContextFull"
    assert "the prompt has 20 tokens, 0 are in the cache already; the context holds 19" in too_long["message"]
    assert too_large["code"] == "BadRequest"
    assert "a context of 100,000 positions" in too_large["message"]
    page.frontend.close()
    assert set(page.device.table_sizes().values()) == {0}


def test_a_model_stays_when_its_first_engine_makes_room(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.page.engines.ENGINES", 1)
    monkeypatch.setattr(Engines.__init__, "__defaults__", (1,))
    page = Page(tiny)
    asked = {"prompt": "Hi", "tokens": 3, "ban_eos": True}
    first, other, again = page.run(asked, {**asked, "launch": MAIN}, asked)
    assert page.of("error") == []
    assert first["token_ids"] == other["token_ids"] == again["token_ids"]
    page.frontend.close()
    assert set(page.device.table_sizes().values()) == {0}


def test_models_of_other_sizes_come_one_after_another(tmp_path: Path) -> None:
    """Nothing that was sized by one is left for the next: workspaces go by the shape of a step, not by the model."""
    asked = json.dumps({"prompt": "Hi", "tokens": 3, "ban_eos": True, "kv": "paged"})
    page = Page()

    async def run() -> None:
        await page.frontend.open()
        for heads in (2, 8, 4):
            path = tmp_path / f"{heads}.gguf"
            write_tiny_llama(path, n_heads=heads, n_kv_heads=2)
            await page.frontend.load_source(json.dumps({"name": str(heads)}), FileSource(path))
            await page.frontend.run(asked)

    asyncio.run(run())
    assert page.of("error") == []
    assert [len(message["record"]["tokens"]) for message in page.of("done")] == [3, 3, 3]
    page.frontend.close()
    assert set(page.device.table_sizes().values()) == {0}


@pytest.mark.parametrize("what", ["model", "workload"])
def test_time_on_the_gpu_and_a_trace_are_there_when_asked_for(what: str, tiny: Path, page: Page) -> None:
    page.model = tiny
    asked = {"prompt": "Hi", "tokens": 5, "ban_eos": True} if what == "model" else WORKLOAD
    plain, timed = page.run(asked, {**asked, "gpu_time": True, "trace": True})
    assert page.of("error") == []
    assert {token["gpu_ms"] for token in plain["tokens"]} == {None}
    assert all(token["gpu_ms"] >= 0 for token in timed["tokens"])
    assert "digest" not in plain["tokens"][0]
    (trace,) = page.of("trace")
    kinds = [message["type"] for message in page.messages]
    assert kinds.index("trace") == len(kinds) - 3  # before the second done, and after the first
    events = json.loads(trace["text"])["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {tracks[span["tid"]] for span in spans} == {"python", "js", "gpu"}
    assert {"encode", "submit", "wait"} <= {span["name"] for span in spans}
    assert min(span["dur"] for span in spans) >= 0
    assert page.device.table_sizes()["buffers"] > 0
    page.frontend.close()
