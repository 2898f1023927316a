"""The tools that the site builder runs (npm, pip), their failures turned into one readable error."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness import SetupError

Report = Callable[[str], None]
"""Told, in words, about each step that may take long."""

_OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "NewConnectionError", "NameResolutionError")


def run_tool(command: Sequence[str], what: str, advice: str, *, env: Mapping[str, str] | None = None) -> str:
    """Run ``command`` with ``env`` and return its standard output.

    SetupError with ``what`` failed, the tool's last words and ``advice``.
    """
    merged = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=merged)
    except FileNotFoundError as error:
        raise SetupError(f"{what}: {command[0]} was not found. {advice}") from error
    if done.returncode == 0:
        return done.stdout
    words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-12:]
    if any(mark in line for mark in _OFFLINE for line in words):
        advice = f"The registry could not be reached: check the network or proxy settings, then try again. {advice}"
    raise SetupError(
        f"{what}: {Path(command[0]).name} ended with code {done.returncode}.\n" + "\n".join(words) + f"\n{advice}"
    )
