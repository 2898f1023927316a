"""Runs kernels in Chromium: cases of named buffers and recorded operations, many in one call of the lab.

Every buffer has poison behind its contents, as a buffer of the pool may have, and outputs are all poison before the
case runs: what a kernel does not write, or writes or reads out of bounds, shows.  Poison is a signalling NaN: a result
that it went into is a NaN too, but with other bits.
"""

from base64 import b64decode
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stepwell.kernels.tuning import Tuning
from tests.browser.conftest import Lab, encode

Shape = TypeVar("Shape", bound=Hashable)
Contents = npt.NDArray[Any]

POISON = 0xFFA5A5A5
GUARD_BYTES = 256
SMALLEST_HALF = 2.0**-14  # that is normal

SOURCE = """
import asyncio
import struct
from base64 import b64decode, b64encode
from dataclasses import replace
from stepwell import BufferPool, Role, open_device
from stepwell.errors import StepwellError
from stepwell.kernels.fused import FusedOps
from stepwell.kernels.kv import KVShape, KVSlabs, KVTensors, PageTable, table_words
from stepwell.kernels.ops import Heads, Matrix, Ops
from stepwell.kernels.tuning import Tile, Tuning
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.step.recorder import Launch, Recorder

class Case:
    def __init__(self, launcher, case, poison):
        device, pool = launcher.device, launcher.pool
        tuning = Tuning(**case["tuning"])
        tuning = replace(tuning, tiles=tuple(Tile(*tile) for tile in tuning.tiles))
        if tuning.subgroup:  # asked for subgroups: those that this adapter has
            info = device.info
            tuning = replace(tuning, subgroup=info.subgroup_size * (info.subgroup_size == info.subgroup_max_size))
        self.position = case["position"]
        rec, ops = Recorder(case["position"], case["rows"]), (FusedOps if case["fused"] else Ops)(tuning)
        names = {}
        for name, data in case["buffers"].items():
            contents = poison.to_bytes(4, "little") * data if isinstance(data, int) else b64decode(data)
            names[name] = pool.acquire(len(contents), Role.WORKSPACE, name)
            device.write_buffer(names[name].id, 0, contents)
        for name, (kind, n, k, words, scales) in case["matrices"].items():
            names[name] = Matrix(kind, n, k, names[words], names.get(scales))
        for name, geometry in case["heads"].items():
            names[name] = Heads(*geometry)
        for name, (buffers, positions) in case["kv"].items():
            buffers = [names[buffer] for buffer in buffers]
            paged = positions and self.slabs(pool, tuning, buffers, positions, case["half"])
            names[name] = paged or KVTensors(*buffers, case["half"])
        for operation, args, options in case["calls"]:
            options = {name: self.named(value, names) for name, value in options.items()}
            getattr(ops, operation)(rec, *(self.named(arg, names) for arg in args), **options)
        self.outputs, self.total = [], 0
        for name in case["outputs"]:
            self.outputs.append((name, self.total, names[name].requested))
            self.total += names[name].requested
        self.staging = pool.acquire(self.total, Role.STAGING)
        for name, start, nbytes in self.outputs:
            rec.copy(names[name], 0, self.staging, start, nbytes)
        self.step = rec.finish()

    @staticmethod
    def named(value, names):
        return tuple(value) if isinstance(value, list) else names.get(value, value) if isinstance(value, str) else value

    def slabs(self, pool, tuning, buffers, positions, half):
        shape = KVShape(1, 0, tuning.slabs, (tuning.attention_chunk, tuning.decode_chunk), half)
        spans = [(sum(positions[:i]), count) for i, count in enumerate(positions)]
        tables = []
        for group in range(-(-len(spans) // tuning.slabs)):
            words = table_words(shape, spans, group)
            tables.append(pool.acquire(4 * len(words), Role.UNIFORM, "page table", host=True))
            pool.device.write_buffer(tables[-1].id, 0, struct.pack(f"<{len(words)}I", *words))
        last = next(i for i, (first, count) in enumerate(spans) if self.position < first + count)
        return KVSlabs(PageTable(shape, tuple(spans), tuple(tables)), buffers, last)

    async def run(self, launcher):
        launcher.submit(self.step)
        data = await launcher.read(self.staging, self.total)
        return {"outputs": {name: b64encode(data[start : start + n]).decode() for name, start, n in self.outputs},
                "kernels": sorted({c.variant.kernel for c in self.step.commands if isinstance(c, Launch)})}

async def main(args):
    device = await open_device()
    launcher = Launcher(device, BufferPool(device, "disabled"), LaunchOptions(variants_per_node=0))
    try:
        cases = [Case(launcher, case, args["poison"]) for case in args["cases"]]
        compiled = await asyncio.gather(*(launcher.prepare(case.step) for case in cases), return_exceptions=True)
        results = []
        for case, failure in zip(cases, compiled):
            try:
                if failure:
                    raise failure
                results.append(await case.run(launcher))
            except StepwellError as error:
                results.append({"error": f"{error.code}: {error}"})
        return results
    finally:
        device.close()
"""


def poison(*shape: int, dtype: npt.DTypeLike = np.float32) -> Contents:
    """The contents of an output before the case: 32-bit words that no kernel writes.  It is read back as ``dtype``."""
    return np.full(shape, POISON, dtype=np.uint32).view(dtype)


def is_poison(contents: Contents) -> npt.NDArray[np.bool_]:
    return np.equal(np.ascontiguousarray(contents).view(np.uint32), POISON, dtype=np.bool_)


@dataclass(frozen=True)
class Case:
    """One step.  A call is (method of ``Ops``, arguments after the recorder, keyword arguments); strings among the
    arguments name a buffer, a matrix or heads, or are themselves if they name none.
    """

    tuning: Tuning
    buffers: Mapping[str, Contents]
    calls: Sequence[tuple[str, tuple[Any, ...], Mapping[str, Any]]]
    outputs: tuple[str, ...]  # read back after the step; their contents before are in `buffers`
    matrices: Mapping[str, tuple[str, int, int, str, str]] = field(default_factory=dict)  # format, n, k, words, scales
    heads: Mapping[str, tuple[int, int, int, int]] = field(default_factory=dict)  # heads, kv_heads, head_dim, rope_dim
    kv: Mapping[str, tuple[Sequence[str], Sequence[int]]] = field(default_factory=dict)  # buffers, positions of slabs
    half: bool = False  # K and V are f16
    position: int = 0
    rows: int = 1
    fused: bool = False  # the calls are FusedOps' methods

    def as_json(self) -> dict[str, Any]:
        return {
            "tuning": asdict(self.tuning),
            "position": self.position,
            "rows": self.rows,
            "fused": self.fused,
            "buffers": {name: _pack(contents) for name, contents in self.buffers.items()},
            "matrices": self.matrices,
            "heads": self.heads,
            "kv": self.kv,
            "half": self.half,
            "calls": self.calls,
            "outputs": self.outputs,
        }


def cache_buffers(k: Contents, v: Contents, slabs: Sequence[int]) -> dict[str, Contents]:
    """K and V [position][heads][values], as they are or in slabs of so many positions."""
    if not slabs:
        return {"k": k, "v": v}
    assert sum(slabs) == len(k) == len(v)
    parts = [np.split(tensor, np.cumsum(slabs)[:-1]) for tensor in (k, v)]
    return {f"slab{i}": np.concatenate(pair) for i, pair in enumerate(zip(*parts, strict=True))}


def cache_of(buffers: Mapping[str, Contents], slabs: Sequence[int]) -> tuple[Contents, Contents]:
    """K and V out of what ``cache_buffers`` made of them."""
    if not slabs:
        return buffers["k"], buffers["v"]
    pairs = [np.split(buffers[f"slab{i}"], 2) for i in range(len(slabs))]
    return np.concatenate([k for k, _ in pairs]), np.concatenate([v for _, v in pairs])


def poison_half(*shape: int) -> Contents:
    """``poison`` of f16; the last dimension is even."""
    return np.full((*shape[:-1], shape[-1] // 2), POISON, dtype=np.uint32).view(np.float16)


def half(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float16]:
    """Rounded to f16; what is subnormal there, which a GPU may read as zero, is zero."""
    return np.where(np.abs(values) < SMALLEST_HALF, 0, values).astype(np.float16)


def half_error(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How far an f16 may be from what it stands for: rounded in any direction, subnormals perhaps to zero."""
    return np.maximum(2.0**-10 * np.abs(values), SMALLEST_HALF)


class KernelLab:
    """Runs all cases of a kind together, when the first of them is asked for."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._batches: dict[Any, dict[Any, tuple[Case, dict[str, Any]]]] = {}

    def run(
        self, build: Callable[[Shape], Case], shapes: Sequence[Shape], shape: Shape
    ) -> tuple[Case, Mapping[str, Contents]]:
        """The case that ``build`` makes of ``shape``, and its outputs, with the shapes and types they had before."""
        case, result = self.batch(build, shapes)[shape]
        assert "error" not in result, result["error"]
        return case, {name: _unpack(name, data, case.buffers[name]) for name, data in result["outputs"].items()}

    def launched(self, build: Callable[[Shape], Case], shapes: Sequence[Shape]) -> set[str]:
        """The kernels that these cases ran."""
        results = self.batch(build, shapes).values()
        return {kernel for _, result in results for kernel in result.get("kernels", ())}

    def batch(self, build: Callable[[Shape], Case], shapes: Sequence[Shape]) -> dict[Any, tuple[Case, dict[str, Any]]]:
        """Each case and what came of it: outputs and kernels, or an error."""
        if build not in self._batches:
            cases = [build(shape) for shape in shapes]
            results = self._lab.run(SOURCE, poison=POISON, cases=[case.as_json() for case in cases])
            self._batches[build] = dict(zip(shapes, zip(cases, results, strict=True), strict=True))
        return self._batches[build]


def _pack(contents: Contents) -> str | int:
    """A buffer's bytes and the poison behind them: base64, or the number of words if there is nothing but poison."""
    data = contents.tobytes()
    poisoned = poison(-(-len(data) // 4) + GUARD_BYTES // 4).tobytes()
    return len(poisoned) // 4 if poisoned.startswith(data) else encode(data + poisoned[len(data) :])


def _unpack(name: str, data: str, before: Contents) -> Contents:
    """The contents of a buffer like ``before``, after a look at the poison behind them."""
    words = np.frombuffer(b64decode(data), dtype=np.uint32)
    contents, guard = words[: before.nbytes // 4], words[before.nbytes // 4 :]
    assert is_poison(guard).all(), f"written behind the end of {name}: words {np.flatnonzero(guard != POISON)}"
    return contents.view(before.dtype).reshape(before.shape)
