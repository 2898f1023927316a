"""Plain words in package and harness, as far as a program can tell.

A docstring begins with a noun phrase or an imperative and names its parameters.  No sentence begins with "Of"; a
quantity has its parameter's name, not "so many"; "after" is for time, "behind" for place; every public name has a
docstring, and a constant has that or a comment.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

FILES = sorted(path for base in ("pyodide_pkg/stepwell", "harness") for path in (ROOT / base).rglob("*.py"))
ABOUT_PLACE = {"pyodide_pkg/stepwell/launch/options.py": {"token ids may lag behind"}}
"""File → the phrases in which "behind" is about place."""
_BEGINS_WITH_OF = re.compile(r"(?:^|[.!?:]\s+|\n\s*\n\s*)Of\s")
_SO_MANY = re.compile(r"\bso\s+many\b", re.IGNORECASE)
_BEHIND = re.compile(r"\bbehind\b", re.IGNORECASE)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _prose(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, text) of every string and of every block of comments: docstrings, errors and all."""
    found = [
        (node.lineno, node.value)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("#: ")
            if line == last + 1:
                first, before = found.pop()
                found.append((first, f"{before} {text}"))
            else:
                found.append((line, text))
            last = line
    return tuple(found)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _found(pattern: re.Pattern[str]) -> list[str]:
    """The places whose prose ``pattern`` finds."""
    found = []
    for path in FILES:
        for line, text in _prose(path):
            for phrase in ABOUT_PLACE.get(_name(path), ()):
                text = text.replace(phrase, "")
            if hit := pattern.search(text):
                found.append(f"{_name(path)}:{line}: …{' '.join(text[hit.start() : hit.start() + 60].split())}…")
    return found


def test_the_patterns_find_what_they_are_for() -> None:
    assert _BEGINS_WITH_OF.search("Bytes.\n\n    Of a step.")
    assert _BEGINS_WITH_OF.search("Bytes of a step: Of all.")
    assert not _BEGINS_WITH_OF.search("Bytes of a step.  Offsets.")
    assert _SO_MANY.search("as\nso many")
    assert not _BEHIND.search("behindhand")


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


@cache
def _classes() -> tuple[ast.ClassDef, ...]:
    return tuple(node for path in FILES for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef))


@cache
def _protocols() -> tuple[ast.ClassDef, ...]:
    return tuple(node for node in _classes() if "Protocol" in _bases(node))


@cache
def _above(node: ast.ClassDef) -> list[ast.ClassDef]:
    """The classes that ``node`` derives from, by name."""
    return [found for found in _classes() if found.name in _bases(node) and found is not node]


@cache
def _members(node: ast.ClassDef) -> frozenset[str]:
    """The methods of a class and the attributes that it or they assign, with those of its bases."""
    methods = {method.name for method in _methods(node)}
    stored = {
        item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
    }
    return frozenset(methods | stored | set(_assigned(node.body))).union(*map(_members, _above(node)))


def _assigned(body: Iterable[ast.stmt]) -> list[str]:
    """The names that statements assign."""
    names = []
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)]
    return names


@cache
def _documented(node: ast.ClassDef) -> frozenset[str]:
    """The methods of ``node`` that have a docstring here, in a base class, or in a protocol that it implements."""
    members = _members(node)
    implemented = (
        found
        for found in _protocols()
        if found is not node and members.issuperset(method.name for method in _methods(found))
    )
    here = frozenset(method.name for method in _methods(node) if ast.get_docstring(method))
    return here.union(*map(_documented, [*_above(node), *implemented]))


def _has_words(node: ast.stmt, line: str) -> bool:
    """Whether an assignment, which begins with ``line``, has a comment or a help text; type variables need none."""
    if "#" in line or any(isinstance(item, ast.keyword) and item.arg == "help" for item in ast.walk(node)):
        return True
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("TypeVar(")


def _constants(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of the public constants without a word on them.

    A docstring after them or a comment above them speaks for all that follow each other without a blank line.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    groups: list[list[ast.stmt]] = []
    for node in _tree(path).body:
        if not groups or node.lineno > (groups[-1][-1].end_lineno or 0) + 1:
            groups.append([])
        groups[-1].append(node)
    for group in groups:
        if lines[group[0].lineno - 2].lstrip().startswith("#"):
            continue
        wordless: list[tuple[int, str]] = []
        for node in group:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                wordless = []
            elif not _has_words(node, lines[node.lineno - 1]):
                wordless += [(node.lineno, name) for name in _assigned([node]) if name[0].isupper()]
        yield from wordless


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
