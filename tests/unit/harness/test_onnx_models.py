"""The ONNX models of the site: what they compute, by onnx's own reference, and that the page's driver knows them."""

import re

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from harness import ROOT
from harness.site.onnx_models import HEAD_DIM, HEADS, MODELS, POSITION_BYTES, kv_names

START = 3


def pasts(model: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    shape = (1, HEADS, START, HEAD_DIM)
    names = kv_names(MODELS[model].tensors)
    return {f"past_key_values.{name}": rng.random(shape, dtype=np.float32) for name in names}


def run(model: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    evaluator = ReferenceEvaluator(onnx.load_from_string(MODELS[model].bytes()))
    return dict(zip(evaluator.output_names, evaluator.run(None, feeds), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_models_are_small_valid_and_always_the_same(name: str) -> None:
    model = MODELS[name]
    data = model.bytes()
    assert data == model.bytes()
    assert len(data) < 65_536
    graph = onnx.load_from_string(data).graph
    kv = kv_names(model.tensors)
    assert [i.name for i in graph.input if i.name.startswith("past")] == [f"past_key_values.{tensor}" for tensor in kv]
    assert [o.name for o in graph.output] == ["reads", *(f"present.{tensor}" for tensor in kv)]


def test_appending_keeps_the_past() -> None:
    rng = np.random.default_rng(1)
    past, row = pasts("append", rng), rng.random((1, HEADS, 1, HEAD_DIM), dtype=np.float32)
    found = run("append", {**past, "row": row, "probe": np.array([0, START], np.int32)})
    for index, name in enumerate(kv_names(MODELS["append"].tensors)):
        expected = np.concatenate([past[f"past_key_values.{name}"], row], axis=2)
        assert np.array_equal(found[f"present.{name}"], expected)
        assert np.array_equal(found["reads"][index], expected[0][:, [0, START]])
    assert expected.nbytes == (START + 1) * POSITION_BYTES


@pytest.mark.parametrize("name", ["kv16", "kv64"])
def test_filling_depends_on_the_past(name: str) -> None:
    rng = np.random.default_rng(2)
    past, row = pasts(name, rng), rng.random((1, HEADS, 1, HEAD_DIM), dtype=np.float32)
    shape = np.array([1, HEADS, START + 1, HEAD_DIM], np.int64)
    found = run(name, {**past, "row": row, "probe": np.array([1], np.int32), "shape": shape})
    for index, tensor in enumerate(kv_names(MODELS[name].tensors)):
        value = past[f"past_key_values.{tensor}"][:, :, 1:2] + row
        assert np.array_equal(found[f"present.{tensor}"], np.broadcast_to(value, shape))
        assert np.array_equal(found["reads"][index], value[0])


def test_the_driver_knows_the_models() -> None:
    text = (ROOT / "web/attach/ort.js").read_text(encoding="utf-8")
    (table,) = re.findall(r"export const TENSORS = \{(.*?)\}", text)
    found = {name: int(count) for name, count in re.findall(r"(\w+): (\d+)", table)}
    assert found == {name: model.tensors for name, model in MODELS.items()}
