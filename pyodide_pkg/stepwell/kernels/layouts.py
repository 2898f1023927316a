"""How a matrix lies in GPU memory: one small family of layouts, into which every tensor format of a file fits exactly.

A layout packs blocks of 32 weights of a row; a weight is ``scale * (element - offset)``, or ``scale * element +
minimum``, with unsigned elements of 4, 5, 6 or 8 bits.  ``wgsl/formats.wgsl`` is the one place that reads it,
``wgsl/repack.wgsl`` the one that writes it.

    layout   holds          bits per weight: in memory   in the file    of which elements + scales
    F32      F32                             32          32
    F16      F16                             16          16
    BF16     BF16                            16          16
    u4       Q4_0                             5           4.5           4 + 1 f32
    u4m      Q4_1, Q4_K                       6           5, 4.5        4 + 2 f32
    u5       Q5_0                             6           5.5           5 + 1 f32
    u5m      Q5_1, Q5_K                       7           6, 5.5        5 + 2 f32
    u6/16    Q6_K                             8           6.5625        6 + 2 f32
    u8       Q8_0                             9           8.5           8 + 1 f32
    u6m/16   Q6_K beside Q4_K or Q5_K        10                         6 + 4 f32
    u8m, u8/16, u8m/16: other mixtures    10, 10, 12                    8 + 2, 2, 4 f32

Scales are f32: those of K-quants (an f16 times an integer of 6 or 8 bits) have no exact f16.

Elements of 5 and 6 bits are nibbles and words of high bits, not bytes: decoding on a GPU is bound by bytes read, and a
kernel widens eight of them to bytes with about eight instructions, so that its inner loop knows nibbles and bytes only.
A CPU adapter would rather have bytes (a product of one row takes it about 1.25 times as long as with u8), but is no
reason for layouts that GPUs do not run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

BLOCK = 32
"""Weights of a row that a layout packs together."""


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """One row of the family: elements of ``bits`` bits, a scale per ``group`` weights (0: no scales).

    With ``minimum`` a weight is scale * element + minimum, else scale * (element - offset).  A block has ``vectors``
    vec4u of elements, then ``scale_words`` u32: its scales, each followed by its minimum if there is one, and its high
    bits.  These are read as ``scale_vectors`` vectors of ``scale_width`` words.
    """

    name: str
    bits: int
    group: int = 0
    minimum: bool = False

    @property
    def quantised(self) -> bool:
        """Whether elements are integers with scales, not floats."""
        return self.group > 0

    @property
    def offset(self) -> int:
        """The number subtracted from an element; 0 where a minimum is added instead."""
        return 0 if self.minimum or not self.quantised else 1 << (self.bits - 1)

    @property
    def unpacked_bits(self) -> int:
        """Bits of an element as kernels compute with it: 4, 8, 16 or 32."""
        return 8 if self.bits in (5, 6) else self.bits

    @property
    def high_words(self) -> int:
        """Words per block that hold the bits above the fourth of each element."""
        return self.bits - 4 if self.bits in (5, 6) else 0

    @property
    def vectors(self) -> int:
        """Vectors of four words per block that hold elements, or their low four bits."""
        return (self.bits - self.high_words) * BLOCK // 128

    @property
    def groups(self) -> int:
        """Scales per block."""
        return BLOCK // self.group if self.group else 0

    @property
    def scale_words(self) -> int:
        """Words per block for scales, minima and high bits."""
        return self.groups * (2 if self.minimum else 1) + self.high_words

    @property
    def scale_width(self) -> int:
        """Words per vector in which ``scale_words`` are read: 4, 2 or 1."""
        return 4 if self.scale_words % 4 == 0 else 2 if self.scale_words % 2 == 0 else 1

    @property
    def scale_vectors(self) -> int:
        """Vectors of ``scale_width`` words per block."""
        return self.scale_words // self.scale_width

    def words_bytes(self, n: int, k: int) -> int:
        """Bytes of the elements of a matrix [n][k]."""
        return 16 * self.vectors * n * (k // BLOCK)

    def scales_bytes(self, n: int, k: int) -> int:
        """Bytes of the scales and high bits of a matrix [n][k]; 0 if there are none."""
        return 4 * self.scale_words * n * (k // BLOCK)


def _integers(bits: int, group: int = BLOCK, minimum: bool = False) -> MatrixLayout:
    name = f"u{bits}{'m' if minimum else ''}{f'/{group}' if group != BLOCK else ''}"
    return MatrixLayout(name, bits, group, minimum)


F32, F16, BF16 = MatrixLayout("F32", 32), MatrixLayout("F16", 16), MatrixLayout("BF16", 16)
"""The layouts of floats."""

LAYOUTS: Mapping[str, MatrixLayout] = {
    layout.name: layout
    for layout in (
        *(F32, F16, BF16),
        *(_integers(bits, BLOCK, minimum) for bits, minimum in product((4, 5), (False, True))),
        *(_integers(6, 16, minimum) for minimum in (False, True)),
        *(_integers(8, group, minimum) for group, minimum in product((BLOCK, 16), (False, True))),
    )
}
"""The family, by name."""

LAYOUT_OF_FORMAT: Mapping[str, MatrixLayout] = {
    "F32": F32,
    "F16": F16,
    "BF16": BF16,
    "Q4_0": LAYOUTS["u4"],
    "Q4_1": LAYOUTS["u4m"],
    "Q5_0": LAYOUTS["u5"],
    "Q5_1": LAYOUTS["u5m"],
    "Q8_0": LAYOUTS["u8"],
    "Q4_K": LAYOUTS["u4m"],
    "Q5_K": LAYOUTS["u5m"],
    "Q6_K": LAYOUTS["u6/16"],
}
"""The smallest layout that holds a tensor format of a file, by the format's name."""


def layout_of_formats(formats: Iterable[str]) -> MatrixLayout | None:
    """The smallest layout that holds tensors of all ``formats`` without rounding; None if there is none.

    A code of fewer bits is one of more bits with another offset, a scale of 32 weights is two of 16, and an offset is
    a minimum: so any integer formats have a common layout, and floats of different types become F32.
    """
    layouts = {LAYOUT_OF_FORMAT[name] for name in formats}
    if len(layouts) == 1:
        return layouts.pop()
    if not any(layout.quantised for layout in layouts):
        return F32
    if not all(layout.quantised for layout in layouts):
        return None
    bits, group = max(layout.bits for layout in layouts), min(layout.group for layout in layouts)
    return LAYOUTS[_integers(bits, group, any(layout.minimum for layout in layouts)).name]
