"""The autotuner on FakeDevice, whose kernels take the time that a test says, on a clock of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stepwell.gpu.device import DeviceInfo
from stepwell.gpu.fake_device import FAKE_INFO
from stepwell.gpu.source import FileSource
from stepwell.kernels.tuning import ProductKey, Tiling, Tuning
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.memory.pool import BufferPool
from stepwell.models.llama import DecoderModel
from stepwell.tuning import autotune
from stepwell.tuning.autotune import MARGIN, Autotuner, TuningOutcome, is_faster, tolerance
from stepwell.tuning.candidates import alternatives, fits
from stepwell.weights.gguf import read_gguf
from tests.support.tuning_lab import LIMITS, PRODUCTS, TimedDevice, write_model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


async def tuned(
    device: TimedDevice, file: Path, budget_ms: float = 1e9, act: Callable[[Autotuner], Any] = lambda tuner: None
) -> TuningOutcome:
    """Tune the model of ``file``; afterwards nothing but the model is left on the device."""
    pool = BufferPool(device)
    launcher = Launcher(device, pool, LaunchOptions())
    source = FileSource(file)
    model = await DecoderModel.load(await read_gguf(source), source, launcher)
    in_use = pool.ledger.in_use_bytes
    tuner = Autotuner(model, launcher, budget_ms)
    act(tuner)
    outcome = await tuner.run()
    tuner.close()
    assert pool.ledger.in_use_bytes == in_use
    launcher.close()
    model.close()
    pool.close()
    assert device.table_sizes() == dict.fromkeys(("buffers", "pipelines", "bind_groups", "plans"), 0)
    return outcome


def run(work: Awaitable[TuningOutcome]) -> TuningOutcome:
    return asyncio.run(work)  # type: ignore[arg-type]


def flat(key: ProductKey, tiling: Tiling) -> float:
    return 20.0


def test_without_a_difference_the_rule_stays(file: Path) -> None:
    device = TimedDevice(flat)
    outcome = run(tuned(device, file))
    assert outcome.complete
    assert (outcome.products, list(outcome.measured.values())) == (PRODUCTS, [None] * PRODUCTS)
    tried = {key: sum(other == key for other, _ in device.compiled) for key, _ in device.compiled}
    assert set(tried) == set(outcome.measured)
    assert all(6 < number <= 27 for number in tried.values())


def test_the_fastest_is_chosen_for_each_product(file: Path) -> None:
    device = TimedDevice(lambda key, tiling: 20 + abs(tiling.wide - (16 if key.after == "swiglu" else 4)) + tiling.per)
    outcome = run(tuned(device, file))
    for key, choice in outcome.measured.items():
        assert choice is not None
        assert (choice.tiling.wide, choice.tiling.per) == (16 if key.after == "swiglu" else 4, 1)
        assert choice.us == pytest.approx(2100)
        assert choice.default_us > choice.us
    assert {(key.before, key.after) for key in outcome.measured} == {
        ("norm", "rope"), ("merge", "residual"), ("norm", "swiglu"), ("plain", "residual"), ("norm", "plain"),
    }  # fmt: skip


@pytest.mark.parametrize("gain", [0.5, 2.0])
def test_a_gain_below_the_margin_is_none(file: Path, gain: float) -> None:
    device = TimedDevice(lambda key, tiling: 20 * (1 - gain * MARGIN * (tiling.wide == 4)))
    outcome = run(tuned(device, file))
    assert all((choice is not None) == (gain > 1) for choice in outcome.measured.values())


@pytest.mark.parametrize(
    ("times", "faster"),
    [
        ([90.0] * 7, True),
        ([97.5] * 7, False),  # the margin
        ([80, 85, 90, 90, 90, 95, 200], True),  # a round that went wrong is no reason
        ([70, 75, 90, 90, 90, 105, 110], False),  # rounds that disagree by more than is gained are one
    ],
)
def test_what_counts_as_faster(times: list[float], faster: bool) -> None:
    usual = [99.0, 100.0, 100.0, 100.0, 100.0, 101.0, 150.0]
    assert is_faster(times, usual) is faster
    assert not is_faster(usual, times)


def test_one_that_is_wrong_is_refused_by_name_and_the_next_is_taken(file: Path) -> None:
    device = TimedDevice(lambda key, tiling: 10.0 * tiling.wide)
    device.wrong = lambda tiling: 0.01 * (tiling.wide == 4 and tiling.per == 1)
    outcome = run(tuned(device, file))
    assert all(
        choice is None or (choice.tiling.wide, choice.tiling.per) != (4, 1) for choice in outcome.measured.values()
    )
    assert any("wide=4, per=1" in text and "differ by up to 0.01" in text for text in outcome.refused)
    assert any(choice is not None and choice.tiling.wide == 4 for choice in outcome.measured.values())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 3 * tolerance(512)])
def test_nothing_wrong_is_ever_taken(file: Path, wrong: float) -> None:
    device = TimedDevice(lambda key, tiling: 10.0 * tiling.wide)
    device.wrong = lambda tiling: wrong * (tiling.wide == 4) if wrong == wrong else (wrong if tiling.wide == 4 else 0)
    outcome = run(tuned(device, file))
    assert all(choice is None or choice.tiling.wide != 4 for choice in outcome.measured.values())
    assert outcome.refused


def test_rounding_is_not_wrong(file: Path) -> None:
    device = TimedDevice(lambda key, tiling: 10.0 * tiling.wide)
    device.wrong = lambda tiling: 0.1 * tolerance(256) * (tiling.wide == 4)
    outcome = run(tuned(device, file))
    assert outcome.refused == []
    assert all(choice is not None and choice.tiling.wide == 4 for choice in outcome.measured.values())


def test_one_that_does_not_compile_is_refused(file: Path) -> None:
    device = TimedDevice(lambda key, tiling: 10.0 * tiling.wide)
    device.broken = lambda tiling: tiling.wide == 4
    outcome = run(tuned(device, file))
    assert outcome.complete
    assert all(choice is None for choice in outcome.measured.values())
    assert all("does not compile: too many registers" in text for text in outcome.refused)
    assert outcome.refused


def test_the_time_is_kept_and_what_was_found_stays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the clock of the device: one product needs more than 20 candidates x 2 rounds x 10 ms."""
    device = TimedDevice(lambda key, tiling: 20.0 + tiling.wide)
    monkeypatch.setattr(autotune, "now_ms", lambda: device.clock.us / 1000)
    outcome = run(tuned(device, file, budget_ms=1000))
    assert not outcome.complete
    assert 0 < len(outcome.measured) < PRODUCTS
    assert any(outcome.measured.values())
    assert device.clock.us <= 1.1e6
    first = next(iter(outcome.measured))
    assert first.k * first.n * 2 >= 2 * 256 * 1024  # gate and up of both layers: those with most weights come first


def test_cancelling_keeps_what_was_found(file: Path) -> None:
    tuners: list[Autotuner] = []

    def cost(key: ProductKey, tiling: Tiling) -> float:
        if key.after == "rope":
            tuners[0].cancel()
        return 20.0 + tiling.wide

    outcome = run(tuned(TimedDevice(cost), file, act=tuners.append))
    assert tuners[0].cancelled
    assert not outcome.complete
    assert 0 < len(outcome.measured) < PRODUCTS
    assert all(key.after != "rope" for key in outcome.measured)


@pytest.mark.parametrize("immediate_bytes", [0, 64])
def test_without_a_clock_on_the_gpu_time_is_taken_outside(
    file: Path, monkeypatch: pytest.MonkeyPatch, immediate_bytes: int
) -> None:
    info = DeviceInfo("acme", "gpu", "", False, LIMITS, frozenset({"subgroups"}), 32, 32, immediate_bytes)
    device = TimedDevice(lambda key, tiling: 10.0 * tiling.wide, info)
    monkeypatch.setattr(autotune, "now_ms", lambda: device.clock.us / 1000)
    outcome = run(tuned(device, file))
    assert all(choice is not None and choice.tiling.wide == 4 for choice in outcome.measured.values())


def test_the_kernels_of_cpu_adapters_are_tuned_by_outputs_per_thread(file: Path) -> None:
    device = TimedDevice(lambda key, tiling: 40.0 - tiling.per, FAKE_INFO)
    outcome = run(tuned(device, file))
    assert len(outcome.measured) == PRODUCTS
    found = {key.after: choice.tiling if choice else None for key, choice in outcome.measured.items()}
    assert found == {"swiglu": Tiling(4, 10, 1), "residual": Tiling(4, 16, 1), "plain": Tiling(4, 16, 1)}
    assert {key.kernel for key in outcome.measured} == {"matmul_quad"}


def test_candidates_can_be_compiled() -> None:
    tuning = Tuning("split", False, 4, 64, 64, 256, 64, subgroup=32, workgroup_bytes=32768)
    for after, k, n in (("swiglu", 3072, 16384), ("rope", 2048, 3072), ("plain", 3072, 200064)):
        key = ProductKey("matvec", "norm", after, "u4", k, n, 32)
        default = Tiling(8, 1, 64, 4)
        found = alternatives(key, default, tuning)
        assert found[0] == default
        assert len(set(found)) == len(found) > 8
        for tiling in found:
            threads = tiling.wide * tiling.splits
            assert fits(key, tiling, tuning)
            assert threads % 32 == 0
            assert threads <= 512
            assert tiling.per <= tiling.splits
    assert not fits(key, Tiling(8, 1, 3, 1), tuning)  # no whole subgroup
    assert not fits(key, Tiling(8, 8, 4, 1), tuning)  # fewer threads than outputs
    assert not fits(key, Tiling(1, 1, 32, 1), tuning)  # half a pair


def test_candidates_read_ahead_and_leave_the_arithmetic_to_the_rule() -> None:
    tuning = Tuning("split", False, 4, 64, 64, 256, 64, subgroup=32, workgroup_bytes=32768, dot4=True)
    key = ProductKey("matvec", "norm", "plain", "u4", 3072, 4096, 32, "dot4")
    found = alternatives(key, Tiling(8, 1, 64, 4, "dot4"), tuning)
    assert {tiling.arithmetic for tiling in found} == {"dot4"}
    assert {tiling.ahead for tiling in found if (tiling.wide, tiling.per, tiling.splits) == (8, 1, 64)} == {
        1,
        2,
        4,
        8,
    }
    assert not fits(key, Tiling(8, 1, 64, 1), tuning)
    assert not fits(key, Tiling(8, 1, 64, 0, "dot4"), tuning)
    assert not fits(key, Tiling(8, 1, 64, 9, "dot4"), tuning)
    assert fits(key._replace(k=12288), Tiling(8, 1, 64, 4, "dot4"), tuning)  # 30 KiB of x
    assert not fits(key._replace(k=13312), Tiling(8, 1, 64, 4, "dot4"), tuning)  # 32.5 KiB
