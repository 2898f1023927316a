"""The Jinja environment that chat templates run in.  Imports jinja2 at once: import this module only to render."""

import json
import time
from functools import partial
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stepwell.errors import BadRequest

MAX_CALL_DEPTH = 20
"""How deep calls may nest: a macro that renders a nested value calls itself a few times."""


class GenerationTag(Extension):
    """``{% generation %}`` … ``{% endgeneration %}``: it marks the model's text for training; here that text alone."""

    tags = {"generation"}  # noqa: RUF012 (a set in Jinja's own class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the settings, names and filter that transformers gives to chat templates.

    Calls may nest MAX_CALL_DEPTH deep: each level of a recursive macro takes a piece of the JavaScript stack, and using
    that up ends Pyodide where CPython would raise RecursionError.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag])
        # Jinja's own tojson escapes for HTML, which would change a prompt.
        self.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = time.strftime
        self._depth = 0

    # Positional only, as in Jinja: the keywords are the template's.
    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call ``obj`` for a template.  Raises SecurityError beyond MAX_CALL_DEPTH."""
        if self._depth >= MAX_CALL_DEPTH:
            raise SecurityError(f"calls nest deeper than {MAX_CALL_DEPTH}")
        self._depth += 1
        try:
            return super().call(context, obj, *args, **kwargs)
        finally:
            self._depth -= 1


def _refuse(message: object) -> NoReturn:
    raise BadRequest(f"The chat template refuses these messages: {message}")
