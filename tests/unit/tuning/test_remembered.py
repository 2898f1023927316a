"""What was tuned, as text: there and back, for several adapters, and what is done with text that is no use."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from stepwell.gpu.device import DeviceInfo
from stepwell.kernels.tuning import ProductKey, Tiling
from stepwell.tuning import remembered
from stepwell.tuning.remembered import Choice, Remembered, kernels_version

LIMITS = {"maxComputeInvocationsPerWorkgroup": 1024, "maxComputeWorkgroupStorageSize": 32768}
GPU = DeviceInfo("acme", "gen-9", "", False, LIMITS, frozenset(), 32, 32)
DOWN = ProductKey("matvec", "plain", "residual", "u4m", 1536, 576, 32)
LOGITS = ProductKey("matvec", "norm", "plain", "u8", 576, 49152, 32)
CHOICES = {DOWN: Choice(Tiling(16, 2, 4, 1), 8.5, 10.0), LOGITS: Choice(Tiling(8, 1, 16, 4), 30.25, 31.5)}


def kept(info: DeviceInfo = GPU, choices: Mapping[ProductKey, Choice | None] = CHOICES, before: str = "") -> str:
    """The text of an adapter that has learned these, and read another text before."""
    found = Remembered(info)
    if before:
        assert found.read(before) == []
    found.learn(choices)
    return found.text()


def read(text: str, info: DeviceInfo = GPU) -> tuple[Remembered, list[str]]:
    found = Remembered(info)
    return found, found.read(text)


def test_what_is_kept_is_found_again() -> None:
    found, notices = read(kept())
    assert notices == []
    assert found.choices == CHOICES
    assert found.tilings == {key: choice.tiling for key, choice in CHOICES.items()}
    assert found.text() == kept()


def test_a_table_that_is_in_use_follows() -> None:
    found = Remembered(GPU)
    table = found.tilings
    found.read(kept())
    assert table[DOWN] == Tiling(16, 2, 4, 1)
    found.learn({DOWN: None, LOGITS: Choice(Tiling(32, 1, 8, 2), 20.0, 31.0)})
    assert table == {LOGITS: Tiling(32, 1, 8, 2)}
    found.learn({ProductKey("matvec", "plain", "plain", "u4", 64, 64, 32): None})
    assert list(found.choices) == [LOGITS]


@pytest.mark.parametrize(
    "change", [{"vendor": "other"}, {"description": "a driver"}, {"subgroup_size": 16}, {"subgroup_max_size": 64}]
)
def test_another_adapter_has_its_own(change: dict[str, Any]) -> None:
    other = replace(GPU, **change)
    found, notices = read(kept(), other)
    assert (found.choices, notices) == ({}, [])
    both = kept(other, {DOWN: Choice(Tiling(4, 1, 32, 1), 7.0, 9.0)}, before=kept())
    assert read(both)[0].choices == CHOICES
    assert read(both, other)[0].tilings == {DOWN: Tiling(4, 1, 32, 1)}
    assert json.loads(kept(choices={DOWN: None}, before=both))["adapters"][0]["adapter"]["vendor"] == other.vendor


def test_the_version_is_that_of_the_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    text, version = kept(), kernels_version()
    assert version == kernels_version()
    monkeypatch.setattr(remembered, "_KERNELS", ("matvec",))
    assert kernels_version() != version
    found, notices = read(text)
    assert found.choices == {}
    assert len(notices) == 1 and "another version of the kernels" in notices[0]


def test_an_included_part_belongs_to_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text, version = remembered.template, kernels_version()
    for part in ("formats.wgsl", "reduce.wgsl", "quantise.wgsl", "step.wgsl", "matvec.wgsl", "matmul_quad.wgsl"):
        monkeypatch.setattr(remembered, "template", lambda name, part=part: read_text(name) + " " * (name == part))
        assert kernels_version() != version
    monkeypatch.setattr(remembered, "template", lambda name: read_text(name) + " " * (name == "argmax.wgsl"))
    assert kernels_version() == version


CORRUPT = [
    "", "{", "[]", "null", "7", '"text"', "{}", '{"format": 1}', "[" * 100_000, kept()[:-40],
    json.dumps({"format": 1, "kernels": kernels_version(), "adapters": 7}),
    json.dumps({"format": 1, "kernels": kernels_version(), "adapters": [7]}),
    json.dumps({"format": 1, "kernels": kernels_version(), "adapters": [{"adapter": {}, "choices": None}]}),
]  # fmt: skip


@pytest.mark.parametrize("text", CORRUPT, ids=range(len(CORRUPT)))
def test_what_cannot_be_read_is_ignored_with_a_notice(text: str) -> None:
    found, notices = read(text)
    assert found.choices == {}
    assert len(notices) == 1 and "cannot be read" in notices[0]
    found.learn(CHOICES)
    assert read(found.text())[0].choices == CHOICES


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spread", "wide"), 3), (("spread", "wide"), 0), (("spread", "wide"), -16), (("spread", "wide"), "16"),
        (("spread", "wide"), 16.0), (("spread", "wide"), True), (("spread", "wide"), 1 << 40), (("spread", "per"), 64),
        (("spread", "splits"), 1024), (("spread", "splits"), 5), (("spread",), None), (("spread",), 8),
        (("k",), "1536"), (("kernel",), "argmax"), (("kernel",), None), (("us",), -1.0), (("us",), float("nan")),
        (("default_us",), 10), (("before",), ["plain"]),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_run_is_left_out(path: tuple[str, ...], value: object) -> None:
    document = json.loads(kept())
    row = document["adapters"][0]["choices"][0]
    (row if len(path) == 1 else row[path[0]])[path[-1]] = value
    found, notices = read(json.dumps(document))
    assert found.choices == {LOGITS: CHOICES[LOGITS]}
    assert notices == ["1 of 2 remembered choices cannot be used here and are ignored."]


def test_choices_of_a_larger_device_are_left_out_on_a_smaller_one() -> None:
    small = replace(GPU, limits={"maxComputeInvocationsPerWorkgroup": 64, "maxComputeWorkgroupStorageSize": 16384})
    found, notices = read(kept(), small)
    assert found.tilings == {DOWN: Tiling(16, 2, 4, 1)}
    assert len(notices) == 1
