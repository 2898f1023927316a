"""Run records: the schema accepts what the page writes, refuses what it must not, and files are written whole."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from harness import RunError
from harness.page import record as records
from stepwell.decode.kv_modes import KV_MODES
from stepwell.decode.timing import StepCounters, StepTiming
from stepwell.kernels.kv import KV_TYPES
from stepwell.launch.options import LaunchOptions
from stepwell.memory.buffer import Role
from stepwell.memory.ledger import RoleReport
from tests.support.run_records import KERNELS, make_record, with_kernels

Change = Callable[[dict[str, Any]], Any]


def test_a_record_is_accepted() -> None:
    record = make_record([30, 10, 11])
    assert records.check(record) is record


def test_an_empty_run_and_logits_are_accepted() -> None:
    records.check({**make_record([]), "finish_reason": "cancelled"})
    record = make_record([30])
    record["tokens"][0] |= {"top_logits": [[5, 1.25], [7, -3]], "digest": "0123456789abcdef", "gpu_ms": 1.5}
    record["tokens"][0] |= {"replayed": 1, "refused": None}
    record["launch"]["identity_rate"] = None
    record["scenario"]["sha256"] = ""
    records.check(record)


def test_the_schema_names_what_the_package_measures() -> None:
    schema = json.loads(records.SCHEMA_FILE.read_text(encoding="utf-8"))
    token = schema["$defs"]["token"]
    measured = {field.name for kind in (StepTiming, StepCounters) for field in fields(kind)}
    assert set(token["required"]) == {"index", "position", "id", *measured}
    assert set(token["properties"]) == {*token["required"], "top_logits", "digest"}
    options = schema["properties"]["launch"]["properties"]["options"]
    assert options["required"] == [field.name for field in fields(LaunchOptions)]
    assert set(schema["$defs"]["account"]["required"]) == {field.name for field in fields(RoleReport)}
    assert set(schema["properties"]["memory"]["properties"]["by_role"]["propertyNames"]["enum"]) == set(Role)
    assert set(schema["properties"]["scenario"]["properties"]["kv"]["enum"]) == set(KV_MODES)
    assert schema["properties"]["scenario"]["properties"]["kv_type"]["enum"] == list(KV_TYPES)


FAULTS: dict[str, tuple[Change, str]] = {
    "schema": (lambda r: r.update(schema=1), r"\$\.schema"),
    "missing": (lambda r: r.pop("memory"), "memory"),
    "unknown": (lambda r: r.update(extra=1), "extra"),
    "finish": (lambda r: r.update(finish_reason="tired"), r"\$\.finish_reason"),
    "kv": (lambda r: r["scenario"].update(kv="endless"), r"\$\.scenario\.kv"),
    "kv_type": (lambda r: r["scenario"].update(kv_type="q8"), r"\$\.scenario\.kv_type"),
    "negative": (lambda r: r["tokens"][1].update(ms=-1), r"\$\.tokens\[1\]\.ms"),
    "fraction": (lambda r: r["tokens"][1].update(launches=1.5), r"\$\.tokens\[1\]\.launches"),
    "counter": (lambda r: r["tokens"][0].pop("pool_hits"), "pool_hits"),
    "role": (lambda r: r["memory"]["by_role"].update(gold=r["memory"]["by_role"]["kv"]), "gold"),
    "logits": (lambda r: r["tokens"][0].update(top_logits=[[1]]), "top_logits"),
    "adapter": (lambda r: r["environment"]["adapter"].pop("is_software"), "is_software"),
    "ids": (lambda r: r["token_ids"].pop(), "their ids are not"),
    "index": (lambda r: r["tokens"][1].update(index=5), "count from 0"),
    "wait": (lambda r: r["tokens"][1].update(wait_ms=500), r"tokens\[1\]: wait_ms exceeds ms"),
    "parts": (lambda r: [token.update(encode_ms=25) for token in r["tokens"]], "exceed ms in all"),
    "replayed": (lambda r: r["tokens"][1].update(replayed=2), r"\$\.tokens\[1\]\.replayed"),
    "digest": (lambda r: r["tokens"][1].update(digest="xyz"), r"\$\.tokens\[1\]\.digest"),
    "no digest": (lambda r: r["scenario"].update(digest=True), r"tokens\[0\]: the scenario asks for digest"),
    "no GPU time": (lambda r: r["scenario"].update(gpu_time=True), r"tokens\[0\]: the scenario asks for gpu_time"),
    "params": (lambda r: r["launch"].update(params="auto"), r"\$\.launch\.params"),
    "options": (lambda r: r["launch"]["options"].pop("replay"), "'replay' is a required"),
    "plans": (lambda r: r["launch"]["plans"]["refused"].update(tired="very"), r"refused\.tired"),
    "no kernels": (
        lambda r: r["scenario"].update(kernel_times=True),
        r"\$\.kernels: the scenario asks for kernel_times",
    ),
    "kernels": (lambda r: r.update(kernels={}), r"\$\.kernels: 'steps' is a required"),
    "kernel launches": (lambda r: r.update(kernels={**KERNELS, "launches_per_token": 4}), "165 launches of 4"),
    "kernel shares": (
        lambda r: r.update(kernels={**KERNELS, "rows": KERNELS["rows"][:1], "launches_per_token": 32}),
        "not 1",
    ),
    "variants": (lambda r: r["launch"]["variants"]["matmul"].pop("shapes"), "shapes"),
}


def test_a_table_of_kernels_is_in_the_record_that_asks_for_it() -> None:
    record = with_kernels(make_record([30, 10]))
    assert records.check(record) is record
    del record["kernels"]
    record["finish_reason"] = "cancelled"
    assert records.check(record) is record


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str) -> None:
    change, words = FAULTS[name]
    record = make_record([30, 10])
    change(record)
    with pytest.raises(RunError, match=words) as caught:
        records.check(record)
    assert caught.value.code == "BadRecord"


def test_many_faults_are_counted() -> None:
    record = make_record([1] * 20)
    for token in record["tokens"]:
        token["launches"] = -1
    with pytest.raises(RunError, match="and 15 more"):
        records.check(record)


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    record = make_record([30, 10])
    records.write(record, path)
    assert json.loads(path.read_text(encoding="utf-8")) == record
    with pytest.raises(ValueError, match="JSON"):
        records.write({**record, "ttft_ms": float("nan")}, path)
    with pytest.raises(TypeError):
        records.write({**record, "text": object()}, path)
    assert json.loads(path.read_text(encoding="utf-8")) == record
    assert list(path.parent.iterdir()) == [path]
