"""The ONNX models of the site: what they compute, by onnx's own reference, and what the page is told of them."""

import json
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from harness.site.onnx_models import HEAD_DIM, HEADS, MODELS, files, kv_names
from stepwell.replay.kv_shapes import POSITION_BYTES

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


def test_the_page_is_told_what_they_are(tmp_path: Path) -> None:
    found = files()
    assert {name for name in found if name.endswith(".onnx")} == {f"{name}.onnx" for name in MODELS}
    (tmp_path / "models.mjs").write_bytes(found["models.js"])
    print_all = "import('./models.mjs').then((all) => console.log(JSON.stringify(all)));"
    done = subprocess.run(["node", "-e", print_all], cwd=tmp_path, capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout) == {
        "HEADS": 8,
        "HEAD_DIM": 64,
        "TENSORS": {"kv64": 64, "kv16": 16, "append": 16, "gqa": 4},
        "WORKLOADS": ["kv64", "kv16"],
    }
