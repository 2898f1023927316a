"""The modules of stepwell/attach/js in Node: joined as the bundle joins them, with a module of the test at the end."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

from stepwell.attach.bundle import MODULES, join_modules

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


def joined(needed: str, source: str) -> str:
    """A script with the modules up to ``needed``, and ``source``, whose exports are ``globalThis.stepwell``."""
    order = MODULES[: MODULES.index(needed) + 1]
    folder = files("stepwell.attach").joinpath("js")
    sources = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in order} | {"test.js": source}
    return join_modules(sources, (*order, "test.js"), "test")


@contextmanager
def node_modules(needed: str, source: str) -> Iterator[NodeModules]:
    """The modules up to ``needed``, and ``source``: one that imports from them, and exports ``answer(question)``."""
    script = joined(needed, source) + _SERVE
    # the script as an argument: standard input is for the questions
    with subprocess.Popen(["node", "-e", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield NodeModules(process)
        finally:
            process.kill()
