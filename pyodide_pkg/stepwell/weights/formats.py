"""The table of tensor formats: how GGML lays out numbers in a file, for those that this version computes with.

A format packs ``block_size`` neighbouring weights of a row (32; K-quants: 256) into ``block_bytes``; d and m are
little-endian half floats:

    Q4_0   d, 16 bytes           weight i is d * (q - 8); q is the low nibble of byte i, or the high one of byte i - 16
    Q4_1   d, m, 16 bytes        weight i is d * q + m; nibbles as in Q4_0
    Q5_0   d, u32, 16 bytes      weight i is d * (q - 16); nibbles as in Q4_0, the fifth bit is bit i of the word
    Q5_1   d, m, u32, 16 bytes   weight i is d * q + m; elements as in Q5_0
    Q8_0   d, 32 signed bytes    weight i is d * q
    Q4_K   d, m, 12 + 128 bytes  weight i is d * s * q - m * t; each 32 have a scale s and a minimum t, of 6 bits
    Q5_K   d, m, 12 + 32 + 128   the same with fifth bits
    Q6_K   128 + 64 + 16, d      weight i is d * s * (q - 32): low nibbles, high bits; each 16 have a signed byte s

Source: ggml's ``ggml.h`` (type numbers), ``ggml-common.h`` (block structs) and ``ggml-quants.c`` (dequantize_row_*).
Where each bit is: ``kernels/wgsl/repack.wgsl``.
"""

from dataclasses import dataclass

from stepwell.errors import Unsupported


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """One row of the table: blocks of ``block_size`` weights in ``block_bytes``; a GGUF file stores ``ggml_type``."""

    name: str
    ggml_type: int
    block_size: int
    block_bytes: int

    def nbytes(self, elements: int) -> int:
        """Bytes of ``elements`` weights, which must be whole blocks."""
        return elements // self.block_size * self.block_bytes


# the rows of the table
F32 = TensorFormat("F32", 0, 1, 4)
F16 = TensorFormat("F16", 1, 1, 2)
Q4_0 = TensorFormat("Q4_0", 2, 32, 18)
Q4_1 = TensorFormat("Q4_1", 3, 32, 20)
Q5_0 = TensorFormat("Q5_0", 6, 32, 22)
Q5_1 = TensorFormat("Q5_1", 7, 32, 24)
Q8_0 = TensorFormat("Q8_0", 8, 32, 34)
Q4_K = TensorFormat("Q4_K", 12, 256, 144)
Q5_K = TensorFormat("Q5_K", 13, 256, 176)
Q6_K = TensorFormat("Q6_K", 14, 256, 210)
BF16 = TensorFormat("BF16", 30, 1, 2)

FORMATS = {row.ggml_type: row for row in (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)}
"""The supported formats, by the number that a file stores."""

_OTHER_NAMES = {
    4: "Q4_2 (removed from GGML)",
    5: "Q4_3 (removed from GGML)",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4 (removed from GGML)",
    32: "Q4_0_4_8 (removed from GGML)",
    33: "Q4_0_8_8 (removed from GGML)",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4 (removed from GGML)",
    37: "IQ4_NL_4_8 (removed from GGML)",
    38: "IQ4_NL_8_8 (removed from GGML)",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


def find_format(ggml_type: int, where: str) -> TensorFormat:
    """The format numbered ``ggml_type``; any other number raises Unsupported, in which ``where`` names the tensor."""
    found = FORMATS.get(ggml_type)
    if found is None:
        name = _OTHER_NAMES.get(ggml_type, f"{ggml_type}, a number that this version does not know")
        supported = ", ".join(row.name for row in FORMATS.values())
        raise Unsupported(
            f"{where} has type {name}. Supported types: {supported}. Use a quantisation made of these alone."
        )
    return found
