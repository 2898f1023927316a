"""Finds the demo model (SmolLM2-135M-Instruct) where the harness keeps it: its cache, or an installed package."""

import os
from pathlib import Path

import pytest

from harness import CACHE
from harness.site.models import locate
from harness.site.pins import MODELS


def demo_model_path() -> Path:
    """The model file; without it the test that asks is skipped here and fails in CI.  Nothing is downloaded."""
    path = locate(MODELS[0], CACHE / "models")
    if path is None:
        missing = f"{MODELS[0].name} is not on this machine: python -m harness site fetches it"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return path
