"""The modules of stepwell/attach/js as one script: what is joined, what is refused, what Node makes of it."""

import json
import re
import subprocess
import zipfile

import pytest

from harness import CACHE, ROOT
from harness.site import wheels
from stepwell.attach.bundle import ENTRY, join_modules, order_of, script
from tests.support.attach_lab import FOLDER, sources


def node(source: str) -> str:
    done = subprocess.run(["node", "-"], input=source, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def join(last: str, **others: str) -> str:
    modules = {"last.js": last} | {f"inner/{name}.js": text for name, text in others.items()}
    return join_modules(modules, "last.js", "1.2")


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
        ('import { one } from "./inner/b.js";', r"imports one from \./inner/b\.js, which does not export it"),
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


def test_modules_come_after_those_that_they_import() -> None:
    modules = {
        "main.js": 'import { b } from "./b.js";\nimport { c } from "./lib/c.js";\n',
        "b.js": 'import { c } from "./lib/c.js";\nexport const b = c;\n',
        "lib/c.js": "export const c = 1;\n",
        "apart.js": "export const nobody = 1;\n",
    }
    assert order_of(modules, "main.js") == ("lib/c.js", "b.js", "main.js")
    assert order_of(dict(reversed(modules.items())), "b.js") == ("lib/c.js", "b.js")
    modules["lib/c.js"] = 'import { b } from "../b.js";\nexport const c = 1;\n'
    with pytest.raises(ValueError, match=r"cycle.*b\.js"):
        order_of(modules, "main.js")


def test_every_module_is_in_the_script() -> None:
    """In an order that the imports as Node reads them bear out: each names a module that was there before."""
    order = order_of(sources(), ENTRY)
    assert sorted(order) == sorted(sources())
    assert order[-1] == ENTRY
    for index, name in enumerate(order):
        for line in re.findall(r"^import .*?;$", sources()[name], re.MULTILINE | re.DOTALL):
            path = (FOLDER / name).parent / line.split('"')[1]
            assert path.resolve().relative_to(FOLDER).as_posix() in order[:index], f"{name}: {line}"


def test_the_script_is_one_that_runs() -> None:
    assert node(script() + "console.log(typeof stepwell.version)") == "string"


def test_the_wheel_has_the_modules() -> None:
    """The wheel that the site serves, built (or found) for this tree."""
    with zipfile.ZipFile(wheels.build(ROOT, CACHE / "build", lambda _: None)) as archive:
        for name, text in sources().items():
            assert archive.read(f"stepwell/attach/js/{name}").decode() == text
