"""The tools that build the site, serve it, and drive it in Chrome: ``python -m harness --help``.

These errors are raised on purpose; the command line turns each into one message and an exit code.

HarnessError
├── SetupError    something on this machine is missing or refused (exit 2): a tool, the network, a browser, an option
└── RunError      the page or the model run failed (exit 1)

A message says what happened and what to do next.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""

DIST = ROOT / "dist"
"""Where the built site goes."""

CACHE = ROOT / ".stepwell"
"""Downloads and built wheels; deleting it only costs time."""

CRASHED = "the browser's page process crashed (out of memory, or a lost GPU process)"
"""The message of a RunError with the code ``Crash``."""


class HarnessError(Exception):
    """An error with a message for people; ``exit_code`` is that of the command line."""

    exit_code = 1


class SetupError(HarnessError):
    """Something on this machine is missing, or an option is refused."""

    exit_code = 2


class RunError(HarnessError):
    """The page or a model run failed.

    ``code``: the class name of the package's error, or what the browser reported (``crash``, ``timeout``, …).
    """

    def __init__(self, message: str, code: str = "") -> None:
        self.code = code
        super().__init__(f"{code}: {message}" if code else message)
