"""The modules of stepwell/attach/js in Node: joined as the bundle joins them, with a module of the test at the end."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from stepwell.attach.bundle import join_modules
from tests.support.paths import ROOT

FOLDER = ROOT / "pyodide_pkg/stepwell/attach/js"

_SERVE = """
const readline = require("node:readline");
readline.createInterface({ input: process.stdin }).on("line", (line) => {
  let answer;
  try {
    answer = { value: stepwell.answer(JSON.parse(line)) };
  } catch (error) {
    answer = { error: [error.name, error.message] };
  }
  process.stdout.write(JSON.stringify(answer) + "\\n");
});
"""


class NodeError(Exception):
    """What a JS exception was: its name and message."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, message)
        self.name, self.message = name, message


class NodeModules:
    """A Node process that answers questions one after the other: JSON values in, JSON values out."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": ["Node", "the process has ended"]}')
        if "error" in answer:
            raise NodeError(*answer["error"])
        return answer.get("value")


@cache
def sources() -> dict[str, str]:
    """Every module under ``FOLDER``."""
    return {path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.js")}


def joined(source: str) -> str:
    """A script of the module ``source`` and what it imports; its exports are ``globalThis.stepwell``."""
    return join_modules(sources() | {"test.js": source}, "test.js", "test")


@contextmanager
def node_modules(source: str) -> Iterator[NodeModules]:
    """The module ``source``, which imports from ``FOLDER`` and exports ``answer(question)``, in Node."""
    script = joined(source) + _SERVE
    # the script as an argument: standard input is for the questions
    with subprocess.Popen(["node", "-e", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield NodeModules(process)
        finally:
            process.kill()
