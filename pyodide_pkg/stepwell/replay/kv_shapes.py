"""The shapes of the growing-KV workloads: traces, GPU workloads and ONNX models named ``kv64`` and ``kv16`` have these.

Shapes: Phi-4-mini and Qwen3.5-4B as measured in microsoft/onnxruntime issue 32017.
"""

from collections.abc import Mapping
from dataclasses import dataclass

POSITION_BYTES = 2048
"""Bytes of a position in one K or V tensor: 8 heads of 128 (kv64) or 4 of 256 (kv16), f16."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """A model of ``layers`` layers, of which every ``kv_every``-th has a K and a V tensor that grow.

    ``hidden_bytes``: of one row of the smallest of a layer's six intermediates, which are 1 to 6 times that.
    ``upload``: whether a step's inputs are uploaded, which flushes; else everything stays on the GPU.
    ``model`` and ``remark`` are for texts: the model's name, and what its KV cache shows.
    """

    layers: int
    kv_every: int
    hidden_bytes: int
    upload: bool = True
    model: str = ""
    remark: str = ""

    @property
    def tensors(self) -> int:
        """The number of K and V tensors."""
        return 2 * (self.layers // self.kv_every)


PHI4_MINI = DecodeShape(32, 1, 6144, model="Phi-4-mini", remark="the staircase in a minute")
QWEN35_4B = DecodeShape(32, 4, 5120, model="Qwen3.5-4B", remark="which fits ONNX Runtime's limits")
"""The models whose K and V the workloads have."""

KV_WORKLOADS: Mapping[str, DecodeShape] = {"kv64": PHI4_MINI, "kv16": QWEN35_4B}
"""The workloads by name."""
