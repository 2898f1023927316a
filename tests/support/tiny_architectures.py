"""The tiny models that stand for the architectures: what each has that another has not.

``make_transformers_reference.py`` stores what transformers computes of them, in ``data/architectures``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.paths import DATA as TESTS_DATA
from tests.support.tiny_llama import Array, write_tiny_llama, write_tiny_phi3

STEPS = 64
DATA = TESTS_DATA / "architectures"


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's scaling of frequencies: slow pairs are divided by ``factor``, fast ones not, some are in between."""

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 64

    def divisors(self, theta: float, head_dim: int) -> list[float]:
        """What a converter writes to ``rope_freqs.weight``."""
        values = []
        for i in range(head_dim // 2):
            wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
            blend = (self.original_context / wavelength - self.low) / (self.high - self.low)
            blend = min(max(blend, 0.0), 1.0)
            values.append(1 / ((1 - blend) / self.factor + blend))
        return values


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model that ``write`` makes of ``options``; ``prompt`` is how many tokens it is given."""

    write: Callable[..., dict[str, Array]]
    options: Mapping[str, Any]
    prompt: int
    scaling: Llama3Scaling | None

    def make(self, path: Path) -> dict[str, Array]:
        return self.write(path, **self.options)

    def prompt_ids(self) -> list[int]:
        """Any ids: the same ones each time."""
        return [(37 * i * i + 11 * i + 5) % self.options["vocab"] for i in range(self.prompt)]


def reference_file(name: str) -> Path:
    """Where what transformers computes of a model is stored."""
    return DATA / f"{name.replace(',', '').replace(' ', '-')}.json"


def growing(first: float, last: float, count: int) -> list[float]:
    return [first * (last / first) ** (i / (count - 1)) for i in range(count)]


def _tiny(write: Callable[..., dict[str, Array]], prompt: int, **options: Any) -> TinyModel:
    return TinyModel(write, options, prompt, options.pop("scaling", None))


_LLAMA3 = Llama3Scaling()
_THETA = 500.0

# seeds with which a model does not repeat itself soon and never hesitates: see the reference files
TINY_MODELS: Mapping[str, TinyModel] = {
    "llama, grouped heads, tied": _tiny(write_tiny_llama, 9, seed=30, vocab=321),
    "llama, a k and v per head, an output matrix": _tiny(
        write_tiny_llama, 70, vocab=333, hidden=96, n_kv_heads=4, head_dim=24, formats="Q5_1", embed_format="F16",
        tied=False,
    ),
    "llama 3, scaled frequencies": _tiny(
        write_tiny_llama, 65, vocab=300, hidden=96, n_heads=6, head_dim=32, formats="Q4_0", embed_format="Q4_0",
        tied=False, rope_theta=_THETA, rope_freqs=_LLAMA3.divisors(_THETA, 32), scaling=_LLAMA3,
    ),
    "phi-3, a window, an output matrix": _tiny(
        write_tiny_phi3, 19, vocab=323, n_kv_heads=4, head_dim=24, rope_dim=24, formats="Q4_0", tied=False,
        sliding_window=23,
    ),
    "phi-3, a window shorter than the prompt": _tiny(
        write_tiny_phi3, 120, seed=6, vocab=323, formats="BF16", embed_format="F32", sliding_window=40
    ),
    "phi-3.5, a prompt above the original context": _tiny(
        write_tiny_phi3, 80, seed=3, vocab=350, n_kv_heads=4, head_dim=32, rope_dim=32, formats="Q5_0",
        embed_format="Q5_0", tied=False, context=1024, original_context=64, short=growing(1.0, 2.0, 16),
        long=growing(1.1, 40.0, 16),
    ),
    "phi-4, part of a head, crossing the original context": _tiny(
        write_tiny_phi3, 17, seed=6, vocab=341, n_heads=6, head_dim=32, rope_dim=24, formats="Q8_0",
        embed_format="Q4_1", context=512, original_context=40, short=growing(1.0, 1.5, 12),
        long=growing(1.0, 30.0, 12), sliding_window=4096,
    ),
}  # fmt: skip
