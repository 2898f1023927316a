"""Random weights made on the GPU: a model's shape without its file, nothing to download, nothing through Python.

An element of a matrix is a hash of its place and of the matrix's number in the model (``kernels/wgsl/noise.wgsl``), so
the same shape in the same layout has the same weights on every device.  Their standard deviation is 1/sqrt(columns), so
that a product has the size of its input, and norm weights are one.  The residual stream then begins as small as an
embedding and ends at about the square root of the number of layers: what the layers add outweighs the last token, which
a tied output matrix would otherwise repeat for ever.  Logits have a standard deviation of about one.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepwell.errors import Unsupported
from stepwell.gpu.device import Progress
from stepwell.kernels.layouts import BLOCK, LAYOUT_OF_FORMAT, MatrixLayout
from stepwell.kernels.ops import Matrix, Ops
from stepwell.launch.launcher import Launcher
from stepwell.memory.buffer import Buffer, Role
from stepwell.step.recorder import Recorder
from stepwell.weights.loader import Weights

BATCH_BYTES = 128 << 20
"""Bytes between two reports of progress."""


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The weights to make: ``matrices`` (names, rows, columns) in ``layout``, and ``vectors`` (name -> values)."""

    layout: MatrixLayout
    matrices: Sequence[tuple[tuple[str, ...], int, int]]
    vectors: Mapping[str, int]

    @property
    def buffers(self) -> dict[str, int]:
        """Bytes of every buffer, by the name of what it holds."""
        sizes = {}
        for (name, *_), n, k in self.matrices:
            sizes[name] = self.layout.words_bytes(n, k)
            if self.layout.quantised:
                sizes[f"{name} scales"] = self.layout.scales_bytes(n, k)
        return sizes | {name: 4 * values for name, values in self.vectors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.nbytes_in(self.layout)

    def nbytes_in(self, layout: MatrixLayout) -> int:
        """Bytes of all buffers, were the matrices in ``layout``."""
        weights = sum(n * k for _, n, k in self.matrices)
        return layout.words_bytes(1, weights) + layout.scales_bytes(1, weights) + 4 * sum(self.vectors.values())


def plan_weights(
    kind: str,
    tensors: Mapping[str, tuple[int, ...]],
    matrices: Mapping[str, tuple[str, ...]],
    vectors: Mapping[str, str],
) -> WeightPlan:
    """The weights of an architecture, all its matrices in the layout of the tensor format ``kind``.

    ``tensors`` has shapes (inputs, outputs); ``matrices`` and ``vectors`` are as in ``load_weights``.  Raises
    Unsupported for a format that there is not, and for rows that are not whole blocks.
    """
    if kind not in LAYOUT_OF_FORMAT:
        raise Unsupported(f"there are no weights of type {kind!r}, only {', '.join(LAYOUT_OF_FORMAT)}.")
    names: dict[tuple[str, ...], list[str]] = {}
    for name, parts in matrices.items():  # tied embeddings: one matrix, two names
        names.setdefault(parts, []).append(name)
    found = []
    for parts, called in names.items():
        columns = tensors[parts[0]][0]
        if columns % BLOCK:
            raise Unsupported(f"{called[0]} has rows of {columns} weights; multiples of {BLOCK} are supported.")
        found.append((tuple(called), sum(tensors[part][1] for part in parts), columns))
    return WeightPlan(LAYOUT_OF_FORMAT[kind], found, {name: tensors[tensor][0] for name, tensor in vectors.items()})


async def make_weights(plan: WeightPlan, launcher: Launcher, progress: Progress | None = None) -> Weights:
    """Make the weights of ``plan`` on the GPU.  ``progress`` gets (bytes done, bytes in total).

    Raises what the pool and the device raise; then every buffer is given back.
    """
    maker = _Maker(plan, launcher)
    try:
        return await maker.make(progress or (lambda done, total: None))
    except BaseException:
        maker.abandon()
        raise
    finally:
        launcher.release_run()  # nothing is recorded any more: no bind group of these is needed


class _Maker:
    def __init__(self, plan: WeightPlan, launcher: Launcher) -> None:
        self._plan, self._launcher, self._pool = plan, launcher, launcher.pool
        self._ops = Ops(launcher.tuning)
        self._held: list[Buffer] = []

    async def make(self, progress: Progress) -> Weights:
        plan, total = self._plan, self._plan.nbytes
        vectors = {name: self._ones(name, values) for name, values in plan.vectors.items()}
        matrices: dict[str, Matrix] = {}
        done, unreported = 0, sum(buffer.requested for buffer in vectors.values())
        for number, (names, n, k) in enumerate(plan.matrices):
            matrix = self._matrix(names[0], n, k)
            rec = Recorder(position=number)  # the seed
            self._ops.noise(rec, matrix, k**-0.5)
            await self._launcher.issue(rec.finish())
            matrices |= dict.fromkeys(names, matrix)
            unreported += sum(buffer.requested for buffer in matrix.buffers)
            if unreported >= BATCH_BYTES or number == len(plan.matrices) - 1:
                await self._launcher.device.wait()
                done, unreported = done + unreported, 0
                progress(done, total)
        return Weights(matrices, vectors)

    def _ones(self, name: str, values: int) -> Buffer:
        buffer = self._hold(4 * values, name)
        self._launcher.device.write_buffer(buffer.id, 0, array("f", [1.0]).tobytes() * values)
        return buffer

    def _matrix(self, name: str, n: int, k: int) -> Matrix:
        layout = self._plan.layout
        words = self._hold(layout.words_bytes(n, k), name)
        scales = self._hold(layout.scales_bytes(n, k), f"{name} scales") if layout.quantised else None
        return Matrix(layout.name, n, k, words, scales)

    def _hold(self, nbytes: int, label: str) -> Buffer:
        self._held.append(self._pool.acquire(nbytes, Role.WEIGHTS, label))
        return self._held[-1]

    def abandon(self) -> None:
        while self._held:
            self._pool.release(self._held.pop())
        self._pool.flush()
