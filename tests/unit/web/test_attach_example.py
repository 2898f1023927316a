"""What the example page of attach makes of its steps, in Node."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT
from harness.site import onnx_models

MODULES = ("comparing.js", "statistics.js", "attach/arms.js", "attach/ort.js")
LIMITS = {"maxBufferSize": 2**32, "maxStorageBufferBindingSize": 2**31}


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules in a folder that says that they are some."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "package.json").write_text('{"type": "module"}')
    for name in MODULES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "web" / name, folder / name)
    models = folder / onnx_models.FOLDER
    models.mkdir(parents=True)
    (models / "models.js").write_bytes(onnx_models.files()["models.js"])
    return folder


def call(web: Path, expression: str) -> Any:
    source = f"import * as arms from './attach/arms.js'; console.log(JSON.stringify({expression} ?? null));"
    done = subprocess.run(
        ["node", "--input-type=module", "-"],
        input=source,
        cwd=web,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def turn(arm: str, ms: list[float], created: int, **more: Any) -> dict[str, Any]:
    """A turn whose first steps, which do not count, are slow."""
    warm_up = [{"index": i, "ms": 900, "created": 99, "wrong": 0} for i in range(4)]
    steps = [{"index": 4 + i, "ms": value, "created": created, "wrong": 0} for i, value in enumerate(ms)]
    return {"arm": arm, "round": 0, "steps": warm_up + steps, "peakBytes": 1, "digest": 7, **more}


def test_rows_leave_the_warm_up_out_and_pair_the_rounds(web: Path) -> None:
    turns = [
        turn("off", [60, 60], 54, peakBytes=300), turn("on", [12, 12], 0), turn("static", [10, 10], 0),
        turn("on", [33, 36], 1, round=1), turn("static", [30, 30], 0, round=1, peakBytes=None),
        turn("off", [], 0, round=1),
    ]  # fmt: skip
    off, on, static = call(web, f"arms.rowsOf({json.dumps(turns)})")
    assert (off["n"], off["medianMs"], off["created"], off["peakBytes"], off["ratio"]["middle"]) == (2, 60, 54, 300, 6)
    assert (on["n"], on["created"], on["meanCreated"]) == (4, 0.5, 0.5)
    assert on["ratio"] == {"middle": pytest.approx(1.175), "least": pytest.approx(1.15), "greatest": 1.2}
    assert static["ratio"]["middle"] == 1 and not any(row["wrong"] for row in (off, on, static))
    wrong = turn("on", [1], 0)
    wrong["steps"][-1]["wrong"] = 3
    assert call(web, f"arms.rowsOf({json.dumps([wrong])})")[0]["wrong"] is True
    assert call(web, "arms.rowsOf([])") == []


@pytest.mark.parametrize(("digests", "same"), [([7, 7, None], True), ([7, 8], False), ([7, None], None), ([], None)])
def test_bits_are_compared_where_there_are_some(web: Path, digests: list[int | None], same: bool | None) -> None:
    turns = [turn("on", [1], 0, digest=digest) for digest in digests]
    assert call(web, f"arms.sameBits({json.dumps(turns)})") is same


@pytest.mark.parametrize(
    ("given", "model"),
    [
        ({"software": False, "limits": LIMITS}, "kv64"),
        ({"software": False, "limits": LIMITS, "memoryGib": 8}, "kv64"),
        ({"software": True, "limits": LIMITS}, "kv16"),
        ({"software": False, "limits": LIMITS, "memoryGib": 1}, "kv16"),
        ({"software": False, "limits": {**LIMITS, "maxBufferSize": 2**28}}, "kv16"),
    ],
)
def test_the_first_size_fits_the_adapter(web: Path, given: dict[str, Any], model: str) -> None:
    assert call(web, f"arms.firstSize({json.dumps(given)})")["model"] == model


def test_what_is_too_large_is_said_with_what_would_fit(web: Path) -> None:
    limits = json.dumps({"maxBufferSize": 2**28, "maxStorageBufferBindingSize": 2**27})
    assert call(web, f"arms.tooLarge({{ start: 65516, steps: 20 }}, {limits})") == ""
    said = call(web, f"arms.tooLarge({{ start: 65517, steps: 20 }}, {limits})")
    assert "134,217,728 B: start at 65,516 at most" in said


def test_the_code_is_what_is_attached(web: Path) -> None:
    code = call(web, 'arms.codeOf({ policy: "adaptive", budget: 1024 })')
    assert code.splitlines()[1] == 'const attachment = stepwell.attach({ policy: "adaptive", budget: 1024 });'
