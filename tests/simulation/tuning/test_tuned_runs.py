"""Tuned runs of a frontend on FakeDevice: what the page is told and keeps, and what is in use in later runs."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from harness.page import record as records
from stepwell.gpu.source import FileSource
from stepwell.kernels.tuning import ProductKey, Tiling
from tests.support.tuning_lab import PRODUCTS, TimedDevice, write_model
from tests.unit.page.test_frontend import Page

RUN = {"prompt_ids": [1, 2, 3], "tokens": 4, "ignore_eos": True}
TUNE = {**RUN, "tune": True, "tune_ms": 60_000}


def slow_when_wide(key: ProductKey, tiling: Tiling) -> float:
    return 10.0 * tiling.wide


class TunedPage(Page):
    """A page on a device with a clock of its own, which keeps text as a browser does."""

    def __init__(self, model: Path, device: TimedDevice, kept: str | None = None) -> None:
        super().__init__(model, kept)
        self.device = device

    @property
    def kept(self) -> str | None:
        return next((message["text"] for message in reversed(self.of("tuning")) if message["text"]), None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def tuned(record: dict[str, Any]) -> set[tuple[str, int]]:
    return {(row["after"], row["wide"]) for row in record["launch"]["tuned"]}


def test_a_run_is_tuned_told_and_uses_what_was_found(model: Path) -> None:
    page = TunedPage(model, TimedDevice(slow_when_wide))
    plain, first, second, without = page.run(RUN, TUNE, RUN, {**RUN, "launch": {"tuned": False}})
    assert page.of("error") == []
    phases = [message["phase"] for message in page.of("phase")]
    assert phases[phases.index("tuning") :][:4] == ["tuning", "kernels", "prefill", "decode"]
    done = [(m["done"], m["total"]) for m in page.of("progress") if m["unit"] == "products"]
    assert done[0][1] == done[-1][0] == done[-1][1] == PRODUCTS
    (message,) = page.of("tuning")
    assert message["notices"] == []
    choices = message["outcome"].pop("choices")
    assert message["outcome"] == {"products": PRODUCTS, "measured": PRODUCTS, "faster": PRODUCTS, "complete": True}
    assert [row["spread"]["wide"] for row in choices] == [4] * PRODUCTS
    assert all(row["us"] < row["default_us"] for row in choices)
    everywhere = {("rope", 4), ("residual", 4), ("swiglu", 4), ("plain", 4)}
    assert tuned(plain) == tuned(without) == set()
    assert tuned(first) == tuned(second) == everywhere
    assert first["scenario"]["tune"] and first["scenario"]["tune_ms"] == 60_000
    assert len(first["tokens"]) == len(second["tokens"]) == 4
    page.frontend.close()
    assert page.device.table_sizes() == dict.fromkeys(("buffers", "pipelines", "bind_groups", "plans"), 0)


def test_the_next_page_uses_what_was_kept(model: Path) -> None:
    before = TunedPage(model, TimedDevice(slow_when_wide))
    before.run(TUNE)
    page = TunedPage(model, TimedDevice(slow_when_wide), before.kept)
    (record,) = page.run(RUN)
    assert len(record["launch"]["tuned"]) == PRODUCTS
    assert page.of("tuning") == [{"type": "tuning", "notices": [], "outcome": None, "text": None}]


def test_a_page_that_kept_nothing_is_told_nothing(model: Path) -> None:
    page = TunedPage(model, TimedDevice(slow_when_wide))
    (record,) = page.run(RUN)
    assert page.of("tuning") == []
    assert record["launch"]["tuned"] == []


def test_corrupt_text_is_a_notice_and_the_next_tuning_replaces_it(model: Path) -> None:
    page = TunedPage(model, TimedDevice(slow_when_wide), "{")
    plain, after = page.run(RUN, TUNE)
    assert page.of("error") == []
    assert "cannot be read" in page.of("tuning")[0]["notices"][0]
    assert plain["launch"]["tuned"] == []
    assert len(after["launch"]["tuned"]) == PRODUCTS
    assert json.loads(page.kept or "")["format"] == 1


def test_stop_ends_tuning_and_the_run_and_keeps_what_was_found(model: Path) -> None:
    stopping: list[TunedPage] = []

    def cost(key: ProductKey, tiling: Tiling) -> float:
        if key.after == "rope":
            stopping[0].frontend.cancel()
        return slow_when_wide(key, tiling)

    stopping.append(page := TunedPage(model, TimedDevice(cost)))
    (record,) = page.run(TUNE)
    assert records.check(record)["finish_reason"] == "cancelled"
    assert record["tokens"] == []
    (message,) = page.of("tuning")
    assert not message["outcome"]["complete"]
    assert 0 < message["outcome"]["faster"] < PRODUCTS
    assert len(json.loads(message["text"])["adapters"][0]["choices"]) == message["outcome"]["faster"]
    assert page.of("phase")[-1]["phase"] == "ready"


def test_a_device_that_dies_while_it_is_tuned_is_an_error_and_the_page_goes_on(model: Path) -> None:
    devices: list[TimedDevice] = []

    def cost(key: ProductKey, tiling: Tiling) -> float:
        devices[0].lose()
        return 1.0

    devices.append(device := TimedDevice(cost))
    page = TunedPage(model, device)
    assert page.run(TUNE) == []
    assert [message["code"] for message in page.of("error")] == ["DeviceLost"]
    assert page.of("error")[0]["phase"] == "tuning"
    page.frontend.close()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"workload": "kv16", "tune": True}, "tune is for a model; kv16 has no products to tune"),
        ({**RUN, "tune": True, "tune_ms": 0}, "tune_ms: 0; it must be a whole number, 1 or more"),
        ({**RUN, "tune": "yes"}, "tune: 'yes'; it must be true or false"),
    ],
)
def test_what_cannot_be_tuned_is_refused(model: Path, request_: dict[str, Any], words: str) -> None:
    page = TunedPage(model, TimedDevice(slow_when_wide))
    assert page.run(request_) == []
    assert words in page.of("error")[0]["message"]


def test_two_models_share_what_was_tuned(model: Path, tmp_path: Path) -> None:
    """One text for all models of an adapter: another one loaded later finds its own products only."""
    page = TunedPage(model, TimedDevice(slow_when_wide))

    async def run() -> None:
        await page.frontend.open()
        await page.frontend.load_source('{"name": "tiny"}', FileSource(model))
        await page.frontend.run(json.dumps(TUNE))
        await page.frontend.load_source('{"name": "again"}', FileSource(model))
        await page.frontend.run(json.dumps(RUN))

    asyncio.run(run())
    assert [len(message["record"]["launch"]["tuned"]) for message in page.of("done")] == [PRODUCTS] * 2
