"""Streams a model's tensors to the GPU and repacks them there.

Tensor bytes go from the byte source to the queue in file order, some megabytes at a time; a repack kernel turns each
batch into the layout that the matmul kernels read, and its raw buffers return to the pool before the next batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stepwell.errors import Unsupported
from stepwell.gpu.device import ByteSource, Chunk, Progress
from stepwell.kernels.layouts import layout_of_formats
from stepwell.kernels.ops import Matrix, Ops
from stepwell.launch.launcher import Launcher
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool
from stepwell.step.recorder import Recorder, Step
from stepwell.weights.gguf import GgufFile, TensorInfo

BATCH_BYTES = 32 << 20
"""Bytes of tensors that are on the GPU in both forms at a time."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights on the GPU, by the names that the architecture gives them; a matrix may have two names."""

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Buffer]

    def matrix(self, name: str) -> Matrix:
        """The matrix called ``name``."""
        return self.matrices[name]

    def vector(self, name: str) -> Buffer:
        """The f32 vector called ``name``."""
        return self.vectors[name]

    def release(self, pool: BufferPool) -> None:
        """Give every buffer back to ``pool``."""
        for buffer in _owned(self.matrices, self.vectors):
            pool.release(buffer)


async def load_weights(
    file: GgufFile,
    source: ByteSource,
    launcher: Launcher,
    matrices: Mapping[str, tuple[str, ...]],
    vectors: Mapping[str, str],
    progress: Progress | None = None,
    pairings: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Weights:
    """Load ``matrices`` (name -> tensors stacked row on row) and ``vectors`` (name -> f32 tensor) of ``file``.

    ``source`` has the file's bytes.  ``progress`` gets (bytes done, bytes in total).  ``pairings`` (tensor -> the
    pairing of ``Ops.repack``) has the tensors whose heads are rotated by halves.  Raises Unsupported for mixtures of
    formats that no layout holds, and what the pool, the source and the device raise; then every buffer is given back.
    """
    loader = _Loader(file, launcher, pairings)
    try:
        loader.allocate(matrices, vectors)
        await loader.stream(source, progress)
    except BaseException:
        loader.abandon()
        raise
    return Weights(loader.matrices, loader.vectors)


@dataclass(frozen=True, slots=True)
class _Part:
    """Where a tensor goes: straight into a vector's buffer, or repacked into a matrix from row ``first_row`` on."""

    tensor: TensorInfo
    target: Buffer | Matrix
    first_row: int = 0


class _Loader:
    def __init__(self, file: GgufFile, launcher: Launcher, pairings: Mapping[str, tuple[int, ...]]) -> None:
        self._file = file
        self._pairings = pairings
        self._launcher = launcher
        self._pool = launcher.pool
        self._ops = Ops(launcher.tuning)
        self._parts: list[_Part] = []
        self._raw: list[Buffer] = []
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Buffer] = {}

    def allocate(self, matrices: Mapping[str, tuple[str, ...]], vectors: Mapping[str, str]) -> None:
        made: dict[tuple[str, ...], Matrix] = {}
        for name, tensors in matrices.items():
            if tensors not in made:  # tied embeddings: one matrix, two names
                made[tensors] = self._allocate_matrix(name, [self._file.tensors[tensor] for tensor in tensors])
            self.matrices[name] = made[tensors]
        for name, tensor_name in vectors.items():
            tensor = self._file.tensors[tensor_name]
            if tensor.format.name != "F32":
                raise Unsupported(f"tensor {tensor.name} is {tensor.format.name}; norm weights must be F32.")
            self.vectors[name] = self._pool.acquire(tensor.nbytes, Role.WEIGHTS, name)
            self._parts.append(_Part(tensor, self.vectors[name]))

    def _allocate_matrix(self, name: str, tensors: list[TensorInfo]) -> Matrix:
        layout = layout_of_formats(tensor.format.name for tensor in tensors)
        columns = tensors[0].shape[0]
        if layout is None:
            found = ", ".join(f"{tensor.name} is {tensor.format.name}" for tensor in tensors)
            raise Unsupported(f"{found}: no layout holds quantised and float tensors in one fused matrix exactly.")
        if columns % 32:
            raise Unsupported(f"tensor {tensors[0].name} has rows of {columns} values; multiples of 32 are supported.")
        rows = sum(tensor.shape[1] for tensor in tensors)
        words = self._pool.acquire(layout.words_bytes(rows, columns), Role.WEIGHTS, name)
        scales = None
        try:
            if layout.quantised:
                scales = self._pool.acquire(layout.scales_bytes(rows, columns), Role.WEIGHTS, f"{name} scales")
        except BaseException:
            self._pool.release(words)
            raise
        matrix = Matrix(layout.name, rows, columns, words, scales)
        first_row = 0
        for tensor in tensors:
            self._parts.append(_Part(tensor, matrix, first_row))
            first_row += tensor.shape[1]
        return matrix

    async def stream(self, source: ByteSource, progress: Progress | None) -> None:
        total = sum(part.tensor.nbytes for part in self._parts)
        done = 0

        def report(batch_done: int, _: int) -> None:
            if progress is not None:
                progress(done + batch_done, total)

        for batch in self._batches():
            await self._load_batch(batch, source, report)
            done += sum(part.tensor.nbytes for part in batch)
        self._forget_raw()

    async def _load_batch(self, batch: list[_Part], source: ByteSource, report: Progress) -> None:
        async with self._pool.step():  # what the CPU is to write, no command waits for that was not submitted
            chunks, step = self._record(batch)
        await self._launcher.device.upload(source, chunks, report)
        await self._launcher.issue(step)
        await self._launcher.device.wait()
        self._release_raw()

    def _record(self, batch: list[_Part]) -> tuple[list[Chunk], Step]:
        """Where the tensors of ``batch`` are to be uploaded, and the step that then repacks them."""
        chunks = []
        rec = Recorder()
        for part in batch:
            tensor, target = part.tensor, part.target
            if isinstance(target, Matrix):
                # one word more than the tensor: the repack kernel may read a block's last bytes as a whole word
                raw = self._pool.acquire(tensor.nbytes + 4, Role.WORKSPACE, f"raw {tensor.name}")
                self._raw.append(raw)
                pairing = self._pairings.get(tensor.name, ())
                self._ops.repack(rec, raw, tensor.format.name, target, tensor.shape[1], part.first_row, pairing)
                target = raw
            chunks.append(Chunk(tensor.offset, tensor.nbytes, target.id))
        return chunks, rec.finish()

    def _batches(self) -> list[list[_Part]]:
        """The parts in file order, cut where a batch would exceed BATCH_BYTES."""
        batches: list[list[_Part]] = []
        size = 0
        for part in sorted(self._parts, key=lambda part: part.tensor.offset):
            if not batches or size + part.tensor.nbytes > BATCH_BYTES:
                batches.append([])
                size = 0
            batches[-1].append(part)
            size += part.tensor.nbytes
        return batches

    def _release_raw(self) -> None:
        while self._raw:
            self._pool.release(self._raw.pop())

    def abandon(self) -> None:
        self._release_raw()
        for buffer in _owned(self.matrices, self.vectors):
            self._pool.release(buffer)
        self._forget_raw()

    def _forget_raw(self) -> None:
        """Destroy the raw buffers and what binds them; nothing is recorded any more."""
        self._launcher.release_run()
        self._pool.flush()
        self._pool.trim()


def _owned(matrices: Mapping[str, Matrix], vectors: Mapping[str, Buffer]) -> list[Buffer]:
    """Every buffer once, though a matrix may have two names."""
    distinct = {id(matrix): matrix for matrix in matrices.values()}
    return [buffer for matrix in distinct.values() for buffer in matrix.buffers] + list(vectors.values())
