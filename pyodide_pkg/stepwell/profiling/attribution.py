"""Attributes each launch of a step: to its row of the table, and to the bytes that it has to read."""

from collections.abc import Mapping
from typing import NamedTuple

from stepwell.gpu.device import Binding
from stepwell.kernels.layouts import LAYOUTS
from stepwell.memory.buffer import Buffer, Role
from stepwell.step.recorder import Constant, Launch


class KernelRow(NamedTuple):
    """What a row of the table is for: launches of one node that run the same kernel on a matrix of one shape.

    ``shape`` is ``k x n`` for a product (its inputs, and its outputs with those that SwiGLU puts together), ``width x
    rows`` for the embedding's table, else empty; ``format`` is the layout of the matrix, empty without one.
    """

    node: str
    kernel: str
    shape: str
    format: str


class Attributed(NamedTuple):
    """A launch: its row, whether it is a product with a weight matrix, and the least that it reads from memory.

    ``weight_bytes``: the weight buffers that it binds (words, scales, norms); only its tokens' rows of the embedding.
    ``kv_bytes``: K and V of the positions that attention sees.  Activations are not counted.
    """

    row: KernelRow
    is_product: bool
    weight_bytes: int
    kv_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of weights, K and V."""
        return self.weight_bytes + self.kv_bytes


def attribute(
    launch: Launch, leases: Mapping[int, Buffer], *, rows: int, length: int, position_bytes: int
) -> Attributed:
    """Attribute ``launch``, of a step of ``rows`` tokens that ends at ``length`` positions.

    ``leases`` are the pool's, by handle; ``position_bytes`` are bytes of K and V per position and layer.
    """
    name = launch.variant.kernel
    constants = dict(launch.variant.constants)
    found = [lease for handle in handles(launch) if (lease := leases.get(handle)) is not None]
    weights = sum(lease.requested for lease in found if lease.role is Role.WEIGHTS)
    is_product = {"format", "k", "n"} <= constants.keys()
    shape = ""
    if is_product:
        shape = f"{constants['k']} x {constants['n']}"
    elif name == "embed":
        shape = f"{constants['width']} x {constants['vocab']}"
        weights = rows * _row_bytes(constants)
    kv = 0
    if name.startswith("attention") and any(lease.role is Role.KV for lease in found):
        window = constants.get("window", 0)
        kv = position_bytes * (min(length, window) if isinstance(window, int) and window else length)
        kv = min(kv, sum(lease.requested for lease in found if lease.role is Role.KV))  # pages: no more than it binds
    row = KernelRow(launch.node, name, shape, str(constants.get("format", "")))
    return Attributed(row, is_product, weights, kv)


def handles(launch: Launch) -> set[int]:
    """The handles of the buffers that ``launch`` binds."""
    return {entry.buffer if isinstance(entry, Binding) else entry for entry in launch.buffers}


def _row_bytes(constants: Mapping[str, Constant]) -> int:
    layout, width = LAYOUTS[str(constants["format"])], int(constants["width"])  # type: ignore[arg-type]
    return layout.words_bytes(1, width) + layout.scales_bytes(1, width)
