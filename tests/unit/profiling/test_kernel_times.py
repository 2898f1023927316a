"""GPU time per kernel: what a launch is and reads, the table's arithmetic, and the measurement behind a run."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepwell.gpu.device import Binding
from stepwell.gpu.fake_device import FAKE_INFO
from stepwell.launch.options import LaunchOptions
from stepwell.memory.buffer import Buffer, Role
from stepwell.profiling import kernel_times
from stepwell.profiling.attribution import Attributed, KernelRow, attribute
from stepwell.profiling.plain_read import UNIT_BYTES, PlainRead, size_for
from stepwell.profiling.table import Clock, tabulate
from stepwell.step.recorder import Launch, Variant
from tests.support.tiny_llama import write_tiny_llama
from tests.unit.page.test_frontend import WORKLOAD, Page

LAYERS = 2
HIDDEN, FFN, VOCAB, KV_WIDTH, QKV = 64, 96, 320, 32, 128
Q4_1, Q8_0 = 6 / 8, 9 / 8  # bytes per weight in memory
MATRICES = LAYERS * Q4_1 * (HIDDEN * QKV + HIDDEN * HIDDEN + 3 * FFN * HIDDEN) + Q8_0 * VOCAB * HIDDEN
ASKED = {"prompt": "Hi", "tokens": 4, "ban_eos": True, "kernel_times": True}
GPU = replace(FAKE_INFO, is_fallback=False, description="a GPU", architecture="")
PASS_US = 8.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_llama(path, n_layers=LAYERS)
    return path


def timed(page: Page, time_us: Callable[[int], float]) -> Page:
    """The page with a GPU whose n-th pass since the last take lasts ``time_us(n)``."""
    passes = page.device.profiler.passes_us
    page.device.profiler.end_pass = lambda: passes.append(time_us(len(passes)))  # type: ignore[method-assign]
    return page


def gpu_page(tiny: Path, launches: int) -> Page:
    """Launch i of a step takes i + 1 microseconds beside its pass, and a plain read 1."""
    page = Page(tiny, info=GPU, limits={"maxStorageBufferBindingSize": 4 << 20})
    return timed(page, lambda number: PASS_US + (number + 1 if number < launches else 0))


# ---- what a launch is ------------------------------------------------------------------------------------------------

LEASES = {
    number: Buffer(number, 1024, requested, role)
    for number, requested, role in (
        (1, 900, Role.WEIGHTS), (2, 100, Role.WEIGHTS), (3, 64, Role.ACTIVATION), (4, 999, Role.KV), (5, 999, Role.KV)
    )
}  # fmt: skip


def launch(kernel: str, buffers: Sequence[int | Binding], **constants: Any) -> Launch:
    return Launch(Variant(kernel, tuple(constants.items())), tuple(buffers), (1, 1, 1), "node", (1,))


def found(of: Launch, length: int = 10) -> Attributed:
    return attribute(of, LEASES, rows=1, length=length, position_bytes=16)


def test_a_product_reads_its_weights() -> None:
    row = found(launch("matvec", (3, Binding(1, 0, 64), 2, 3, 99), format="u4", k=64, n=96))
    assert row == Attributed(KernelRow("node", "matvec", "64 x 96", "u4"), True, 1000, 0)
    # one that appends to the cache writes there: it reads nothing of it
    assert found(launch("matvec", (1, 4, 5), format="u4", k=64, n=96)).nbytes == 900


def test_attention_reads_the_positions_that_it_sees() -> None:
    row = found(launch("attention_decode", (3, 4, 5, 3), kv_heads=1))
    assert row == Attributed(KernelRow("node", "attention_decode", "", ""), False, 0, 160)
    assert found(launch("attention_split", (3, 4, 5, 3), window=0)).kv_bytes == 160
    assert found(launch("attention_split", (3, 4, 5, 3), window=4)).kv_bytes == 64
    assert found(launch("attention_split", (3, 4, 5, 3), window=40)).kv_bytes == 160
    assert found(launch("attention_merge", (3, 3))).nbytes == 0
    assert found(launch("rope_append", (2, 3, 4, 5))).nbytes == 100


def test_an_embedding_reads_a_row_of_its_table() -> None:
    row = found(launch("embed", (3, 3, 1, 2), format="u8", width=64, vocab=320))
    assert row == Attributed(KernelRow("node", "embed", "64 x 320", "u8"), False, 72, 0)
    assert found(launch("embed", (3, 3, 1), format="F16", width=64, vocab=320)).nbytes == 128


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_rows_are_medians_over_steps_less_their_passes() -> None:
    a, b, c = KernelRow("a", "x", "", ""), KernelRow("b", "x", "", ""), KernelRow("c", "x", "", "")
    launches = [Attributed(a, True, 4000, 0), Attributed(b, False, 0, 500), Attributed(a, True, 2000, 0)]
    launches.append(Attributed(c, False, 0, 0))
    steps = [(10, 20, 12, 1), (12, 26, 14, 3), (90, 24, 15, 2)]  # of a: 22, 26, 105
    table = tabulate(launches, steps, 3.0, PlainRead(1 << 20, 100.0))
    first, second, third = table["rows"]
    assert (first["node"], first["launches"]) == ("b", 1)
    assert (first["us_per_token"], first["net_us_per_token"], first["gb_s"]) == (24, 21, pytest.approx(500 / 21 / 1e3))
    assert (second["node"], second["launches"], second["us_per_launch"], second["net_us_per_launch"]) == (
        "a",
        2,
        13,
        10,
    )
    assert (second["us_per_token"], second["bytes_per_launch"], second["gb_s"]) == (26, 3000, pytest.approx(0.3))
    assert (third["net_us_per_token"], third["gb_s"], third["share"]) == (0, None, 0)  # never below 0
    assert [row["share"] for row in table["rows"]] == [pytest.approx(21 / 41), pytest.approx(20 / 41), 0]
    assert (table["us_per_token"], table["net_us_per_token"], table["pass_us"]) == (52, 41, 3)
    assert table["plain_read_gb_s"] == pytest.approx(10.48576)
    assert table["weights"] == {
        "launches": 2, "bytes_per_token": 6000, "us_per_token": 26, "net_us_per_token": 20, "gb_s": pytest.approx(0.3),
        "share_of_plain_read": pytest.approx(0.3 / 10.48576),
    }  # fmt: skip


def test_what_cannot_be_told_is_none() -> None:
    launches = [Attributed(KernelRow("a", "x", "", ""), True, 4000, 0)]
    table = tabulate(launches, [(2.0,)], 3.0, None)
    (row,) = table["rows"]
    assert (row["share"], row["gb_s"], table["weights"]["gb_s"], table["plain_read_gb_s"]) == (None,) * 4
    assert PlainRead(1 << 20, 0.0).gb_s is None


def test_a_coarse_clock_is_found_out() -> None:
    quantum = 65.536
    assert Clock.of([0.0, 3 * quantum, quantum, 8 * quantum]) == Clock(quantum)
    assert Clock.of([0.0, 3 * quantum, quantum]).is_coarse
    assert Clock.of([0.0, 100.0, 300.0]) == Clock(100.0)
    assert Clock.of([0.0, 0.0]) == Clock(None)
    assert Clock(None).is_coarse
    assert Clock.of([10.24, 13.312, 8.192]) == Clock(1.024)
    assert not Clock.of([10.24, 13.312, 8.192]).is_coarse


def test_how_much_is_read() -> None:
    limits = {"maxBufferSize": 4 << 30, "maxStorageBufferBindingSize": (2 << 30) - 4}
    assert size_for(replace(GPU, limits=limits)) == 1 << 30
    small = replace(GPU, limits={**limits, "maxStorageBufferBindingSize": (128 << 20) - 4})
    assert size_for(small) == (128 << 20) - UNIT_BYTES
    assert size_for(replace(FAKE_INFO, limits=limits)) == 16 << 20


# ---- behind a run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv", "kv_type"), [("static", "f32"), ("donate", "f16"), ("grow", "f32")])
def test_every_launch_of_the_step_is_in_the_table(tiny: Path, kv: str, kv_type: str) -> None:
    launches = 9 * LAYERS + 4
    page = timed(Page(tiny), lambda number: PASS_US + (number + 1 if number < launches else 0))
    asked = {**ASKED, "kv": kv, "kv_type": kv_type}
    plain, record = page.run({**asked, "kernel_times": False}, asked)
    assert page.of("error") == []
    assert "kernels" not in plain
    kernels = record["kernels"]
    (own,) = {token["launches"] for token in record["tokens"][2:]}
    assert own == launches == kernels["launches_per_token"] == sum(row["launches"] for row in kernels["rows"])
    assert (kernels["steps"], kernels["pass_us"], kernels["coarse_clock"]) == (kernel_times.STEPS, PASS_US, False)
    assert kernels["position"] == record["tokens"][-1]["position"] == len(record["prompt_ids"]) + 3
    assert sum(row["share"] for row in kernels["rows"]) == pytest.approx(1)
    assert kernels["net_us_per_token"] == launches * (launches + 1) / 2
    rows = {(row["node"], row["kernel"]): row for row in kernels["rows"]}
    layers = [range(first, first + 9) for first in (1, 10)]  # the embedding is launch 0
    assert rows["qkv", "matmul_quad"]["net_us_per_token"] == sum(layer[1] + 1 for layer in layers)
    assert rows["ffn_down", "matmul_quad"]["net_us_per_launch"] == sum(layer[8] + 1 for layer in layers) / 2
    assert rows["output", "matmul_quad"]["us_per_launch"] == PASS_US + launches - 1
    assert (rows["qkv", "matmul_quad"]["shape"], rows["qkv", "matmul_quad"]["format"]) == (f"{HIDDEN} x {QKV}", "u4m")
    assert kernels["weights"]["bytes_per_token"] == MATRICES
    attention = next(row for (_, kernel), row in rows.items() if kernel == "attention_split")
    width_bytes = {"f32": 4, "f16": 2}[kv_type] * KV_WIDTH
    assert attention["bytes_per_launch"] == 2 * width_bytes * (kernels["position"] + 1)
    assert kernels["plain_read_bytes"] == 16 << 20
    assert kernels["plain_read_gb_s"] == pytest.approx((16 << 20) / 1e3)  # its fastest pass takes one net microsecond
    page.frontend.close()
    assert set(page.device.table_sizes().values()) == {0}


def test_the_run_is_as_without_it(tiny: Path) -> None:
    page = Page(tiny)
    asked = {**ASKED, "kernel_times": False}
    plain, record, again = page.run(asked, ASKED, asked)
    assert page.of("error") == []

    def counted(of: dict[str, Any]) -> Any:
        counts = [{name: value for name, value in token.items() if not name.endswith("ms")} for token in of["tokens"]]
        launch = {name: of["launch"][name] for name in ("plans", "identity_rate", "options")}
        return [of["token_ids"], counts, of["memory"], launch]

    assert counted(record) == counted(again)
    assert record["token_ids"] == plain["token_ids"]
    texts = [(message["phase"], message["text"]) for message in page.of("phase")]
    assert texts.count(("decode", "Timing each kernel")) == 1
    page.frontend.close()
    assert set(page.device.table_sizes().values()) == {0}


def test_the_decode_step_of_gpus(tiny: Path) -> None:
    launches = 5 * LAYERS + 5
    page = gpu_page(tiny, launches)
    (record,) = page.run(ASKED)
    assert page.of("error") == []
    kernels = record["kernels"]
    assert kernels["launches_per_token"] == launches == record["tokens"][-1]["launches"]
    by_node = {row["node"]: row for row in kernels["rows"]}
    assert {row["launches"] for node, row in by_node.items() if node in ("qkv", "attention", "gate_up")} == {LAYERS}
    assert by_node["argmax"]["launches"] == 2
    norms = 2 * LAYERS + 1  # are read by the products
    assert kernels["weights"]["bytes_per_token"] == MATRICES + 4 * HIDDEN * norms
    assert by_node["attention"]["bytes_per_launch"] == 2 * 4 * KV_WIDTH * (kernels["position"] + 1)
    assert by_node["attn_output"]["bytes_per_launch"] == Q4_1 * HIDDEN * HIDDEN
    assert kernels["plain_read_bytes"] == 4 << 20


def test_a_step_with_more_switches_off_is_measured_all_the_same(tiny: Path) -> None:
    page = gpu_page(tiny, 5 * LAYERS + 5)
    off = {"shared_pass": False, "replay": False, "bind_group_cache": False, "params": "uniform_pool"}
    records = page.run({**ASKED, "launch": off}, {**ASKED, "temperature": 0.7, "launch": {"submit_every": 4}})
    assert page.of("error") == []
    greedy, sampled = (record["kernels"] for record in records)
    assert greedy["launches_per_token"] == 5 * LAYERS + 5
    assert sampled["launches_per_token"] == records[1]["tokens"][-1]["launches"]
    options = kernel_times.timing_options(LaunchOptions.from_dict(off))
    assert (options.shared_pass, options.replay, options.bind_group_cache) == (False, False, False)


def test_a_coarse_clock_is_in_the_record(tiny: Path) -> None:
    page = timed(Page(tiny), lambda number: 65.536 * (number % 2))
    (record,) = page.run(ASKED)
    assert (record["kernels"]["coarse_clock"], record["kernels"]["clock_us"]) == (True, 65.536)


def test_without_timestamps_nothing_is_run(tiny: Path) -> None:
    page = Page(tiny, info=replace(FAKE_INFO, features=frozenset()))
    assert page.run(ASKED) == []
    (error,) = page.of("error")
    assert error["code"] == "MissingCapability"
    assert "timestamp-query" in error["message"]
    assert page.of("token") == []


def test_without_room_behind_the_last_token_nothing_is_run(tiny: Path) -> None:
    page = Page(tiny)
    (short,) = page.run({**ASKED, "tokens": 2, "kernel_times": False})
    positions = len(short["prompt_ids"]) + 2
    page.messages.clear()
    records = asyncio.run(_more(page, {**ASKED, "tokens": 2, "context": positions - 1}))
    assert records == []
    (error,) = page.of("error")
    assert error["code"] == "BadRequest"
    assert f"have {positions} positions, the context {positions - 1}" in error["message"]
    page.messages.clear()
    (record,) = asyncio.run(_more(page, {**ASKED, "tokens": 2, "context": positions}))
    assert record["kernels"]["steps"] == kernel_times.STEPS


async def _more(page: Page, request: dict[str, Any]) -> list[dict[str, Any]]:
    await page.frontend.run(json.dumps(request))
    return [message["record"] for message in page.of("done")]


def test_a_workload_has_no_such_step(tiny: Path) -> None:
    page = Page(tiny)
    assert page.run({**WORKLOAD, "kernel_times": True}) == []
    assert "kv16 has no decode step" in page.of("error")[0]["message"]


@pytest.mark.parametrize(("after", "steps"), [(1, 0), (kernel_times.WARM_UP + 2, 2)])
def test_cancelled_while_it_measures(tiny: Path, after: int, steps: int) -> None:
    """What was measured until then is there; with nothing measured the run is a cancelled one."""
    page = Page(tiny)
    takes = iter(range(10_000))
    take = page.device.take_profile

    async def counting() -> Any:
        if page.of("phase")[-1]["text"] == "Timing each kernel" and next(takes) == after:
            page.frontend.cancel()
        return await take()

    page.device.take_profile = counting  # type: ignore[method-assign]
    (record,) = page.run(ASKED)
    assert record["token_ids"] and page.of("error") == []
    assert record.get("kernels", {}).get("steps", 0) == steps
    assert record["finish_reason"] == ("length" if steps else "cancelled")
    page.frontend.close()
    assert set(page.device.table_sizes().values()) == {0}


def test_a_gpu_without_room_for_the_plain_read_has_no_figure(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(tiny)
    (record,) = page.run({**ASKED, "budget_mib": 8, "hard_budget": True})
    assert page.of("error") == []
    kernels = record["kernels"]
    assert (kernels["plain_read_gb_s"], kernels["plain_read_bytes"]) == (None, None)
    assert kernels["weights"]["bytes_per_token"] == MATRICES
    assert kernels["weights"]["share_of_plain_read"] is None
