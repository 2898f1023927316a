"""Frontend without a browser: requests are checked on arrival, and a workload runs without a model."""

import asyncio
import json
import re
from typing import Any

import pytest

from harness import record as records
from stepwell.clock import now_ms
from stepwell.decode.kv_pattern import KVPattern
from stepwell.errors import BadRequest
from stepwell.frontend import Frontend
from stepwell.gpu.device import Device
from stepwell.gpu.fake_device import FakeDevice
from stepwell.memory.policies import POLICIES, make_policy
from stepwell.request import Request

HOST = {"browser": "CPython", "cross_origin_isolated": True, "timer_resolution_us": 1, "pyodide": "none"}
WORKLOAD = {"workload": "kv16", "kv": "grow", "start": 2100, "tokens": 5, "policy": "bucket"}


class Page:
    """Takes the place of the page: keeps the messages of one frontend on a FakeDevice."""

    def __init__(self) -> None:
        self.device = FakeDevice(log_limit=0)
        self.messages: list[dict[str, Any]] = []
        self.frontend = Frontend(self._hear, json.dumps(HOST), lambda _: list, self._open)

    def _hear(self, text: str) -> None:
        self.messages.append(json.loads(text))

    async def _open(self) -> Device:
        return self.device

    def run(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """The records of some requests, each of them valid by the schema."""

        async def run() -> None:
            await self.frontend.open()
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
    monkeypatch.setattr("stepwell.frontend._FRAME_MS", 0)  # every token, however fast
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
    monkeypatch.setattr("stepwell.frontend._FRAME_MS", 1e9)
    page.frontend._last_pool = now_ms()
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
        ({**WORKLOAD, "policy_options": [3]}, "policy_options is"),
        ({**WORKLOAD, "budget_mib": 0}, "1 MiB or more"),
        ({**WORKLOAD, "start": "2000"}, "start is '2000'"),
        ({"prompt": "Hi"}, "no model is loaded"),
        ({"tokens": 3}, "no prompt"),
        ({"prompt": "Hi", "colour": "red"}, "a field 'colour'"),
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
    hear = page._hear

    def cancelling(text: str) -> None:
        hear(text)
        if '"type":"token"' in text:
            page.frontend.cancel()

    page.frontend = Frontend(cancelling, json.dumps(HOST), lambda _: list, page._open)
    (record,) = page.run({**WORKLOAD, "tokens": 50})
    assert record["finish_reason"] == "cancelled"
    assert len(record["tokens"]) == 1


def test_null_is_the_default_and_json_round_trips() -> None:
    request = Request.from_json('{"prompt": "x", "context": null, "top_p": 1, "stop": ["a"], "budget_mib": 3}')
    assert request == Request(prompt="x", stop=("a",), budget_mib=3)
    assert request.budget_bytes == 3 << 20
    assert Request.from_json(json.dumps(request.as_dict())) == request
    with pytest.raises(BadRequest, match="must be of type int"):
        Request.from_json('{"prompt": "x", "tokens": true}')
