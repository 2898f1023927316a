"""The modules of stepwell/attach/js as one script: what is joined, what is refused, what Node makes of it."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from harness import CACHE, ROOT
from harness.site import wheels
from stepwell.attach.bundle import MODULES, join_modules, script

FOLDER = ROOT / "pyodide_pkg/stepwell/attach/js"


def node(source: str) -> str:
    done = subprocess.run(["node", "-"], input=source, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def join(last: str, **others: str) -> str:
    sources = {f"inner/{name}.js": text for name, text in others.items()} | {"last.js": last}
    return join_modules(sources, tuple(sources), "1.2")


def test_modules_are_joined() -> None:
    a = "const hidden = 1;\nexport const one = hidden;\nexport async function two() {\n  return hidden + 1;\n}\n"
    b = 'import { one } from "./a.js";\nconst hidden = 10;\nexport class Sum {\n  value = one + hidden;\n}\n'
    last = (
        'import { one as first,\n  two } from "./inner/a.js";\nimport { Sum } from "./inner/b.js";\n'
        "export function* all() {\n  yield* [first, new Sum().value];\n}\nexport const later = two;\n"
    )
    joined = join(last, a=a, b=b)
    print_all = (
        "stepwell.later().then((two) => console.log(JSON.stringify([stepwell.version, two, ...stepwell.all()])));"
    )
    assert json.loads(node(joined + print_all)) == ["1.2", 2, 1, 11]
    assert (
        node(joined + "console.log(Object.keys(globalThis).filter((name) => name.startsWith('step')))")
        == "[ 'stepwell' ]"
    )


def test_the_first_script_loaded_counts() -> None:
    first, second = join("export const n = 1;"), join("export const n = 2;")
    assert node(f"{first}{second}console.log(stepwell.n)") == "1"
    assert node(f"globalThis.stepwell = {{}};{first}console.log(stepwell.n)") == "1"  # an element with that id


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('import { three } from "./inner/a.js";', r"last\.js imports three from \./inner/a\.js"),
        ('import { one } from "./inner/b.js";', r"imports one from \./inner/b\.js, which no module before it"),
        ('import one from "./inner/a.js";', "only `import"),
        ('import "./inner/a.js";', "only `import"),
        ("export default 1;", "only `import"),
        ("export let one = 1;", "only `import"),
        ("const one = 1;\nexport { one };", "only `import"),
        ("export const { one } = {};", "only `import"),
    ],
)
def test_what_cannot_be_joined_is_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join(source, a="export const one = 1;")


def test_every_module_is_listed() -> None:
    with pytest.raises(ValueError, match=r"b\.js: MODULES"):
        join_modules({"a.js": "", "b.js": ""}, ("a.js",), "1")
    with pytest.raises(ValueError, match=r"b\.js: MODULES"):
        join_modules({"a.js": ""}, ("a.js", "b.js"), "1")
    assert set(MODULES) == {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.js")}


def test_the_script_is_one_that_runs() -> None:
    assert node(script() + "console.log(typeof stepwell.version)") == "string"


def test_the_wheel_has_the_modules() -> None:
    """The wheel that the site serves, built (or found) for this tree."""
    with zipfile.ZipFile(wheels.build(ROOT, CACHE / "build", lambda _: None)) as archive:
        for name in MODULES:
            assert archive.read(f"stepwell/attach/js/{name}") == (Path(FOLDER) / name).read_bytes()
