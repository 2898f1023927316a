"""Which kernel variants an adapter gets.  One place decides; the model code only names operations."""

from dataclasses import dataclass

from stepwell.gpu.device import DeviceInfo


@dataclass(frozen=True, slots=True)
class Tuning:
    """Workgroup sizes and tiles, in threads and rows."""

    matmul_threads: int
    matmul_tile: int  # rows of a prefill that share one unpacked weight
    norm_threads: int
    attention_threads: int
    argmax_threads: int
    elementwise_threads: int = 64


def tuning_for(info: DeviceInfo) -> Tuning:
    """CPU adapters (subgroups of 4 or none) want few, fat threads and no barriers; GPUs want many."""
    if info.is_software:
        return Tuning(matmul_threads=16, matmul_tile=4, norm_threads=4, attention_threads=4, argmax_threads=16)
    return Tuning(matmul_threads=64, matmul_tile=4, norm_threads=64, attention_threads=32, argmax_threads=256)
