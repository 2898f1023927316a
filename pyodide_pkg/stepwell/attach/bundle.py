"""``script()``: the ES modules of ``js/`` as one classic script, so that the wheel needs no JavaScript tools.

Each module becomes a function of its own that returns what the module exports, so names meet only where they are
imported.  That works for a plain subset of ES modules, which is checked: named imports with relative paths, and
``export`` before a function, class or const.
"""

import re
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from posixpath import dirname, join, normpath

try:
    VERSION = version("stepwell")
except PackageNotFoundError:  # run from a source tree that was not installed
    VERSION = "0+unknown"

ENTRY = "attach.js"
"""The module under ``js/`` whose exports are ``globalThis.stepwell``."""
_IMPORT = re.compile(r'^import \{([\w\s,]+)\} from "(\.[\w./]+\.js)";$', re.M)
_EXPORT = re.compile(r"^export (?=(?:(?:async )?function\*? ?|class |const )(\w+))", re.M)
_LEFT = re.compile(r"^\s*(?:import\b(?!\()|export\b).*", re.M)


@cache
def script() -> str:
    """The classic script that sets ``globalThis.stepwell``, unless it is set already: the first one loaded counts."""
    folder = files("stepwell.attach").joinpath("js")
    sources = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in _names(folder)}
    return join_modules(sources, ENTRY, VERSION)


def order_of(sources: Mapping[str, str], entry: str) -> tuple[str, ...]:
    """``entry`` and the modules of ``sources`` that it needs, each after those that it imports.

    ValueError if they import each other in a circle.
    """
    imported: dict[str, list[str]] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in imported:
            paths = (_resolved(name, path) for _, path in _IMPORT.findall(sources[name]))
            imported[name] = [path for path in paths if path in sources]
            waiting += imported[name]
    return tuple(TopologicalSorter(imported).static_order())


def join_modules(sources: Mapping[str, str], entry: str, number: str) -> str:
    """The module ``entry`` and all that it imports from ``sources`` as one script of version ``number``.

    ValueError if the modules are not in the subset that can be joined.
    """
    exports: dict[str, set[str]] = {}
    parts = []
    for name in order_of(sources, entry):
        body = _IMPORT.sub(lambda found, name=name: _take(found, name, exports), sources[name])  # type: ignore[misc]
        exports[name] = set(_EXPORT.findall(body))
        body = _EXPORT.sub("", body)
        if left := _LEFT.search(body):
            raise ValueError(f"{name}: {left.group().strip()!r}; only `import {{ a, b }} from \"./x.js\";` and `export`"
                             " before a function, class or const can be joined.")  # fmt: skip
        returned = ", ".join(sorted(exports[name]))
        parts.append(
            f"// ---- {name}\nconst {_variable(name)} = (() => {{\n{body.strip()}\nreturn {{ {returned} }};\n}})();\n"
        )
    value = f'{{ ...{_variable(entry)}, version: "{number}" }}'
    parts.append(f"if (!globalThis.stepwell?.version) globalThis.stepwell = {value};")
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();\n"


def _take(found: re.Match[str], name: str, exports: Mapping[str, set[str]]) -> str:
    """The line in place of an import of the module ``name``: the same names, taken from what their module returned."""
    wanted, path = found.groups()
    source = _resolved(name, path)
    for part in filter(None, (part.strip() for part in wanted.split(","))):
        exported = part.split(" as ")[0]
        if exported not in exports.get(source, ()):
            raise ValueError(f"{name} imports {exported} from {path}, which does not export it.")
    return f"const {{{wanted.replace(' as ', ': ')}}} = {_variable(source)};"


def _resolved(name: str, path: str) -> str:
    """The module that ``name`` imports by the relative ``path``."""
    return normpath(join(dirname(name), path))


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _names(folder: Traversable, prefix: str = "") -> list[str]:
    """The paths of the modules under ``folder``, a folder of the package, which may be in an archive."""
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _names(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".js"):
            found.append(prefix + entry.name)
    return sorted(found)
