"""The order of the rooms, read from the imports: nothing imports upward or in a circle, and no folder is crowded."""

import ast
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

LAYERS = (
    ("stepwell.errors",),
    ("stepwell.options", "stepwell.gpu", "stepwell.text"),
    ("stepwell.memory",),
    ("stepwell.replay", "stepwell.attach", "stepwell.step"),
    ("stepwell",),  # the public face
    ("stepwell.kernels",),
    ("stepwell.launch",),
    ("stepwell.weights",),
    ("stepwell.models",),
    ("stepwell.decode", "stepwell.tuning"),
    ("stepwell.profiling",),
    ("stepwell.page",),
    ("harness",),
    ("harness.site",),
    ("harness.page",),
    ("harness.arms",),
    ("harness.cli",),
    ("harness.__main__",),
)
"""Rooms (folders, loose modules, and the two faces) from the ground up.  A room imports from lower layers alone."""
MOST_ROOMS = 20
MOST_FILES = 30


def _modules() -> dict[str, Path]:
    found = {}
    for base, top in ((ROOT / "pyodide_pkg", "stepwell"), (ROOT, "harness")):
        for path in (base / top).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imports(module: str) -> Iterator[str]:
    """The project's modules that ``module`` imports anywhere: in functions and under TYPE_CHECKING as well."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            if name and name != module:
                yield name


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_every_room_has_its_layer() -> None:
    placed = [room for layer in LAYERS for room in layer]
    assert sorted(placed) == sorted({_room(module) for module in MODULES})
    faces = {"stepwell", "harness", "harness.__main__"}
    assert len(set(placed) - faces) <= MOST_ROOMS


def test_nothing_imports_upward() -> None:
    height = {room: number for number, layer in enumerate(LAYERS) for room in layer}
    upward = [
        f"{module} imports {imported}"
        for module in MODULES
        for imported in _imports(module)
        if _room(imported) != _room(module) and height[_room(imported)] >= height[_room(module)]
    ]
    assert upward == []


def test_there_is_no_circle() -> None:
    graph = {module: set(_imports(module)) for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_only_the_seams_import_the_browser() -> None:
    seams = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("js", "pyodide"))
        or (isinstance(node, ast.Import) and {alias.name.split(".")[0] for alias in node.names} & {"js", "pyodide"})
    }
    assert seams
    assert {module for module in seams if _room(module) != "stepwell.gpu"} <= {"stepwell.attach.attachment"}


def test_no_folder_is_crowded() -> None:
    tracked = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).split("\n")
    folders: dict[Path, int] = {}
    for name in filter(None, tracked):
        if (ROOT / name).exists():
            folders[Path(name).parent] = folders.get(Path(name).parent, 0) + 1
    assert {str(folder): count for folder, count in folders.items() if count > MOST_FILES} == {}
