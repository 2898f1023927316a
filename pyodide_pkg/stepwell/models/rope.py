"""The tables of rotations: cos and sin for each binary digit of a position, and the factors of their frequencies."""

import math
import struct
from array import array
from collections.abc import Sequence

from stepwell.errors import BadFile
from stepwell.gpu.device import ByteSource
from stepwell.kernels.ops import ROPE_BITS
from stepwell.models.config import DecoderConfig
from stepwell.weights.gguf import GgufFile


async def read_factors(file: GgufFile, source: ByteSource, name: str) -> list[float]:
    """The values of the small f32 tensor ``name``, which divide frequencies.  Raises BadFile for values that cannot."""
    tensor = file.tensors[name]
    values = struct.unpack(f"<{tensor.shape[0]}f", await source.read(tensor.offset, tensor.nbytes))
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            raise BadFile(f"{file.name}: {name}[{index}] is {value}; a positive number is needed.")
    return list(values)


def rotation_tables(config: DecoderConfig, factors: Sequence[Sequence[float]] = ()) -> bytes:
    """cos and sin of 2^bit * theta^(-2i/rope_dim), f32 [ROPE_BITS][rope_dim / 2][2]: see ``wgsl/rope_append.wgsl``.

    There is a table for each of ``factors``, whose values divide the frequencies, and one plain table without any.
    """
    half = config.rope_dim // 2
    rotations = array("f")
    for divisors in factors or [[1.0] * half]:
        for bit in range(ROPE_BITS):
            for i in range(half):
                angle = 2**bit * config.rope_theta ** (-i / half) / divisors[i]
                rotations.extend((math.cos(angle), math.sin(angle)))
    return rotations.tobytes()
