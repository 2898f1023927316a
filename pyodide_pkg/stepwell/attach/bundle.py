"""``script()``: the ES modules of ``js/`` as one classic script, so that the wheel needs no JavaScript tools.

Each module becomes a function of its own that returns what the module exports, so names meet only where they are
imported.  That works for a plain subset of ES modules, which is checked: named imports with relative paths, and
``export`` before a function, class or const.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from posixpath import dirname, join, normpath

try:
    VERSION = version("stepwell")
except PackageNotFoundError:  # run from a source tree that was not installed
    VERSION = "0+unknown"

MODULES = (
    "errors.js",
    "budget.js",
    "policies/options.js",
    "policies/free_lists.js",
    "policies/size_class.js",
    "policies/adaptive.js",
    "policies/bucket.js",
    "policies/simple.js",
    "policies/exact.js",
    "policies/lazy_release.js",
    "policies/disabled.js",
    "policies/index.js",
    "keeper.js",
    "event_log.js",
    "tokens.js",
    "boundaries.js",
    "recording.js",
    "trace_text.js",
    "costs.js",
    "reuse.js",
    "summary.js",
    "recorder.js",
    "natives.js",
    "alias.js",
    "uses.js",
    "shims.js",
    "tombstones.js",
    "zero.js",
    "proof.js",
    "pool.js",
    "intercept.js",
    "idle.js",
    "caretaker.js",
    "attach.js",
)
"""Every module under ``js/``, after those that it imports.  What the last one exports is ``globalThis.stepwell``."""
_IMPORT = re.compile(r'^import \{([\w\s,]+)\} from "(\.[\w./]+\.js)";$', re.M)
_EXPORT = re.compile(r"^export (?=(?:(?:async )?function\*? ?|class |const )(\w+))", re.M)
_LEFT = re.compile(r"^\s*(?:import\b(?!\()|export\b).*", re.M)


@cache
def script() -> str:
    """A classic script that sets ``globalThis.stepwell``, unless it is set already: the first one loaded counts."""
    folder = files("stepwell.attach").joinpath("js")
    sources = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in _names(folder)}

    return join_modules(sources, MODULES, VERSION)


def join_modules(sources: Mapping[str, str], order: Sequence[str], number: str) -> str:
    """The modules in ``order`` as one script of version ``number``; ValueError if they are no such subset."""
    if set(sources) != set(order):
        odd = ", ".join(sorted(set(sources) ^ set(order)))
        raise ValueError(f"{odd}: MODULES of stepwell/attach/bundle.py is to list every module of js/, and no other.")
    exports: dict[str, set[str]] = {}
    parts = []
    for name in order:
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
    value = f'{{ ...{_variable(order[-1])}, version: "{number}" }}'
    parts.append(f"if (!globalThis.stepwell?.version) globalThis.stepwell = {value};")
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();\n"


def _take(found: re.Match[str], name: str, exports: Mapping[str, set[str]]) -> str:
    """What an import line becomes: the same names, taken from what a module before it returned."""
    wanted, path = found.groups()
    source = normpath(join(dirname(name), path))
    for part in filter(None, (part.strip() for part in wanted.split(","))):
        exported = part.split(" as ")[0]
        if exported not in exports.get(source, ()):
            raise ValueError(f"{name} imports {exported} from {path}, which no module before it exports.")
    return f"const {{{wanted.replace(' as ', ': ')}}} = {_variable(source)};"


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _names(folder: Traversable, prefix: str = "") -> list[str]:
    """The modules under a folder of the package, which may be in an archive."""
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _names(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".js"):
            found.append(prefix + entry.name)
    return sorted(found)
