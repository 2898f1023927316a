"""docs/add-a-policy.md, followed literally in a copy of the project: write the file, add the row, run what it says."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TUTORIAL = ROOT / "docs" / "add-a-policy.md"
_STEP = re.compile(r"^## \d\. (.+?)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
_PATH = re.compile(r"`(pyodide_pkg/[\w/.]+\.py)`")


def steps() -> dict[str, str]:
    return dict(_STEP.findall(TUTORIAL.read_text(encoding="utf-8")))


def blocks(text: str, language: str) -> list[str]:
    return [body for kind, body in _BLOCK.findall(text) if kind == language]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project after the tutorial's steps 1 and 2."""
    root = tmp_path_factory.mktemp("project")
    ignore = shutil.ignore_patterns("__pycache__", "data")
    shutil.copytree(ROOT / "pyodide_pkg", root / "pyodide_pkg", ignore=ignore)
    for file in ("support/policy_contract.py", "support/policy_lab.py", "unit/memory/test_policies.py"):
        (root / "tests" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / file, root / "tests" / file)
    shutil.copy(ROOT / "pyproject.toml", root)
    write, row = steps()["Write the file"], steps()["Add the row"]
    (code,) = blocks(write, "python")
    (root / _PATH.findall(write)[0]).write_text(code, encoding="utf-8")
    table = root / _PATH.findall(row)[0]
    statement, entry = blocks(row, "python")
    text = table.read_text(encoding="utf-8")
    table.write_text(_add_row(_add_import(text, statement), entry), encoding="utf-8")
    return root


def _add_import(text: str, statement: str) -> str:
    first = text.index("\nfrom ") + 1
    return text[:first] + statement + text[first:]


def _add_row(text: str, entry: str) -> str:
    end = text.index("\n}\n", text.index("POLICIES: ")) + 1
    return text[:end] + entry + text[end:]


def run(command: str, root: Path) -> str:
    """A shell line of the tutorial, in the copy, with this Python."""
    words = shlex.split(command)
    assert words[0] == "python"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "pyodide_pkg"), str(root)])}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_file_has_at_most_50_lines() -> None:
    (code,) = blocks(steps()["Write the file"], "python")
    assert 30 <= len(code.splitlines()) <= 50


def test_the_contract_holds_for_it(copy: Path) -> None:
    (command,) = blocks(steps()["Check it"], "sh")
    output = run(command, copy)
    assert re.search(r"\b[5-9] passed", output), output
    assert "failed" not in output


def test_the_contract_can_fail(copy: Path) -> None:
    """The same check finds a policy that hands a buffer out twice."""
    path = copy / _PATH.findall(steps()["Write the file"])[0]
    good = path.read_text(encoding="utf-8")
    path.write_text(good.replace("return self._free.pop(size)", "return (self._free.by_size[size] or [None])[-1]"))
    try:
        with pytest.raises(AssertionError, match="failed"):
            run(blocks(steps()["Check it"], "sh")[0] + " -x", copy)
    finally:
        path.write_text(good, encoding="utf-8")


def test_it_can_be_simulated(copy: Path) -> None:
    (command,) = blocks(steps()["See what it is worth"], "sh")
    assert "recent" in run(command, copy)


def test_it_can_be_attached(copy: Path) -> None:
    (program,) = blocks(steps()["Put it under another runtime"], "python")
    assert program.count("assert") == 2
    run(f"python -c {shlex.quote(program)}", copy)


def test_its_options_are_in_the_table(copy: Path) -> None:
    program = "from stepwell.memory.policies import make_policy; print(type(make_policy('recent', runs=8)).__name__)"
    assert run(f"python -c {shlex.quote(program)}", copy).strip() == "Recent"


def test_it_is_typed_and_formatted(copy: Path) -> None:
    """The code of the tutorial passes the checks that the project's own code does."""
    path = _PATH.findall(steps()["Write the file"])[0]
    for module in ("ruff check", "ruff format --check", "mypy --strict"):
        pytest.importorskip(module.split()[0])
        run(f"python -m {module} {path}", copy)
