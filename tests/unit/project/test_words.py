"""Plain words: what CONTRIBUTING's rule for docstrings says, as far as a program can tell, over package and harness."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

FILES = sorted([*(ROOT / "pyodide_pkg" / "stepwell").rglob("*.py"), *(ROOT / "harness").rglob("*.py")])
ABOUT_PLACE = {
    "pyodide_pkg/stepwell/gpu/fake_objects.py": {"keeps behind its handles"},
    "pyodide_pkg/stepwell/gpu/fake_device.py": {"object behind ``handle``"},
    "pyodide_pkg/stepwell/gpu/js_device.py": {"file behind a URL"},
}
"""File → the phrases in which "behind" is about place."""

_BEGINS_WITH_OF = re.compile(r"(?:^|[.!?:]\s+|\n\s*\n\s*)Of\s")
_SO_MANY = re.compile(r"\bso\s+many\b", re.IGNORECASE)
_BEHIND = re.compile(r"\bbehind\b", re.IGNORECASE)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every string and of every block of comments: docstrings, errors and all."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            if block and block[-1][0] != token.start[0] - 1:
                yield block[0][0], " ".join(text for _, text in block)
                block = []
            block.append((token.start[0], token.string.lstrip("#: ")))
    if block:
        yield block[0][0], " ".join(text for _, text in block)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _found(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in FILES:
        for line, text in _prose(path):
            for phrase in ABOUT_PLACE.get(_name(path), ()):
                text = text.replace(phrase, "")
            if hit := pattern.search(text):
                found.append(f"{_name(path)}:{line}: …{' '.join(text[hit.start() : hit.start() + 60].split())}…")
    return found


def test_no_sentence_begins_with_of() -> None:
    assert _found(_BEGINS_WITH_OF) == []


def test_quantities_have_names() -> None:
    assert _found(_SO_MANY) == []


def test_behind_is_a_place() -> None:
    assert _found(_BEHIND) == []


# ---- docstrings ------------------------------------------------------------------------------------------------------


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]


def _bases(node: ast.ClassDef) -> set[str]:
    """The simple names of the base classes."""
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return {ast.unparse(base).rpartition(".")[2] for base in bases}


def _members(node: ast.ClassDef) -> set[str]:
    """The methods of a class, and the attributes that they assign."""
    assigned = {
        item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
    }
    return assigned | {method.name for method in _methods(node)}


CLASSES = [node for path in FILES for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)]
PROTOCOLS = [node for node in CLASSES if "Protocol" in _bases(node)]


@cache
def _documented(node: ast.ClassDef) -> frozenset[str]:
    """The methods of ``node`` that have a docstring here, in a base class, or in a protocol that it implements."""
    own, bases = _members(node), _bases(node)
    above = [found for found in CLASSES if found.name in bases and found is not node]
    above += [found for found in PROTOCOLS if found is not node and {method.name for method in _methods(found)} <= own]
    return frozenset(method.name for method in _methods(node) if ast.get_docstring(method)).union(
        *map(_documented, above)
    )


def _constants(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of the public constants without a word on them.

    A docstring after them or a comment above them speaks for all that follow each other without a blank line.
    """
    lines = path.read_text(encoding="utf-8").splitlines()

    def told(node: ast.stmt) -> bool:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "TypeVar"
        ):
            return True
        return "#" in lines[node.lineno - 1] or any(
            isinstance(item, ast.keyword) and item.arg == "help" for item in ast.walk(node)
        )

    groups: list[list[ast.stmt]] = []
    for node in _tree(path).body:
        if not groups or node.lineno > (groups[-1][-1].end_lineno or 0) + 1:
            groups.append([])
        groups[-1].append(node)
    for group in groups:
        if lines[group[0].lineno - 2].lstrip().startswith("#"):
            continue
        nameless: list[tuple[int, str]] = []
        for node in group:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                nameless = []
            elif isinstance(node, ast.Assign | ast.AnnAssign) and not told(node):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)]
                nameless += [(node.lineno, name) for name in names if len(name) > 1 and name[0].isupper()]
        yield from nameless


def _undocumented(path: Path) -> Iterator[str]:
    tree = _tree(path)
    yield from (f"{_name(path)}:{line}: {name}" for line, name in _constants(path))
    if tree.body and not ast.get_docstring(tree):
        yield f"{_name(path)}:1: the module"
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield f"{_name(path)}:{node.lineno}: {node.name}"
        if isinstance(node, ast.ClassDef):
            for method in _methods(node):
                if not method.name.startswith("_") and method.name not in _documented(node):
                    yield f"{_name(path)}:{method.lineno}: {node.name}.{method.name}"


def test_every_public_name_has_a_docstring() -> None:
    assert [found for path in FILES for found in _undocumented(path)] == []
