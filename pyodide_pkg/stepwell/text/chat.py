"""Chat templates: the Jinja program in a model file that turns messages into the prompt the model was trained on.

The template comes from a file, so it is hostile input.  It runs in Jinja's immutable sandbox (no private attributes, no
change to its values, ``range`` up to 100,000, calls 20 deep), sees nothing but the values below, and may write no more
than MAX_OUTPUT characters.  Two things are not bounded: the time it takes (nested loops), and the memory of a value on
the way (a string doubled in a loop).  In the browser both stay inside the worker that runs it.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType

from stepwell.errors import BadFile, BadRequest

MAX_OUTPUT = 4_000_000
"""The most characters that a template may write: about a million tokens."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
) -> str:
    """The prompt for ``messages`` (each with the strings ``role`` and ``content``), rendered as transformers does.

    Raises BadRequest for messages that are malformed or that the template refuses (``raise_exception``), BadFile with
    the line for a template that does not compile, fails or writes too much.
    """
    # Here, not above: Jinja takes half a second to import in the browser, and only a chat prompt should pay for it.
    from stepwell.text.sandbox import ChatSandbox

    _check_messages(messages)
    # The names, and the None of those that we have no value for, are what templates test: `if tools is not none`.
    values = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "tools": None,
        "documents": None,
    }
    pieces: list[str] = []
    length = 0
    try:
        for piece in ChatSandbox().from_string(template).generate(values):
            length += len(piece)
            if length > MAX_OUTPUT:
                raise BadFile(f"The chat template writes more than {MAX_OUTPUT:,} characters. Send the prompt raw.")
            pieces.append(piece)
    except (BadFile, BadRequest):
        raise
    except Exception as error:  # whatever a template can do wrong
        raise BadFile(f"The chat template fails{_where(error)}: {error or type(error).__name__}") from error
    return "".join(pieces)


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise BadRequest("messages is empty; a chat template needs at least one.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise BadRequest(f"messages[{index}] is {message!r}; an object with role and content belongs there.")
        for key in ("role", "content"):
            value = message.get(key)
            if not isinstance(value, str):
                raise BadRequest(f"messages[{index}]: {key} is {value!r}; a string belongs there.")


def _where(error: Exception) -> str:
    """The template's line, if ``error`` tells it: a syntax error has it, else Jinja puts it into the traceback."""
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return f" in line {error.lineno}"
    line = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" in line {line}"
