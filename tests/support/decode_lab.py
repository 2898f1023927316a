"""Decode sessions on FakeDevice whose kernels mean something: every token depends on all that went before it.

A kernel fills what it writes with a hash of its name, its grid, the step's scalars that its WGSL reads, and the first
bytes of what it reads; K and V are read up to the step's length.  So a lost copy, an old id, a step that was done twice
or a parameter of another step gives another token.
"""

import asyncio
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stepwell.decode.generation import Generation
from stepwell.decode.session import DecodeSession
from stepwell.decode.timing import TokenEvent
from stepwell.errors import DeviceError, OutOfMemory
from stepwell.gpu.device import BufferUsage, Layout
from stepwell.gpu.fake_objects import FakeBuffer, KernelFunction
from stepwell.gpu.program import Scalar
from stepwell.gpu.source import FileSource
from stepwell.kernels import fields_of, layout_of, render
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.memory.pool import BufferPool
from stepwell.models.llama import DecoderModel
from stepwell.weights.gguf import read_gguf
from tests.support.launch_lab import Guarded
from tests.support.tiny_llama import write_tiny_llama

VOCAB = 320
LAYERS = 2
KV_WIDTH = 4 * 2 * 16  # bytes of a position of one K or V tensor of f32
CONTEXT = 1024
_SEEN = 16  # bytes of a tensor that a kernel reads


@cache
def _rendered(kernel: str, constants: tuple[tuple[str, Any], ...]) -> str:
    return render(kernel, dict(constants))


_fields_of, _layout_of = cache(fields_of), cache(layout_of)


@pytest.fixture(autouse=True)
def templates_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of labs compile the same kernels: to render and read them each time would be most of the time."""
    monkeypatch.setattr("stepwell.launch.compiler.render", lambda kernel, c: _rendered(kernel, tuple(c.items())))
    monkeypatch.setattr("stepwell.launch.compiler.fields_of", _fields_of)
    monkeypatch.setattr("stepwell.launch.compiler.layout_of", _layout_of)


@pytest.fixture(autouse=True)
def short_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequences here are short: with these a paged cache has several slabs of them."""
    monkeypatch.setattr("stepwell.decode.paged_kv.PAGE", 4)
    monkeypatch.setattr("stepwell.decode.paged_kv.SHORT", 40)


def write_model(path: Path) -> Path:
    write_tiny_llama(path, n_layers=LAYERS, n_heads=4, n_kv_heads=2, head_dim=16, vocab=VOCAB, context=CONTEXT)
    return path


def meaning(label: str, code: str) -> KernelFunction | None:
    """What a kernel of the model does, as ``FakeDevice`` wants it.  Where K and V are makes no difference."""
    fields = _fields_of(code)
    if fields is None:
        return None
    kernel, _, constants = label.partition("(")
    attention = kernel.startswith("attention")
    label = re.sub(r", (slabs|column)=\w+", "", label)
    paged = "slabs=" in constants and "slabs=0" not in constants
    merge = kernel == "attention_merge" or "before=merge" in constants
    # how many chunks there are, and who says so, is another matter in each KV mode
    wanted = Scalar.ROWS if merge else fields
    mask = [int(bool(wanted & bit)) for bit in Scalar]
    residual = "=residual" in constants
    width = KV_WIDTH // 2 if "half=True" in constants else KV_WIDTH

    def run(views: Sequence[memoryview], grid: tuple[int, int, int]) -> None:
        block, *bound = views
        position, *_ = scalars = block.cast("I").tolist()
        seen = [word * wanted for word, wanted in zip(scalars, mask, strict=True)]
        crc = zlib.crc32(repr((seen, grid[attention:])).encode(), zlib.crc32(label.encode()))
        rows = grid[1]  # of kernels with a row to a workgroup
        if kernel == "embed":
            crc = zlib.crc32(bound[0][: 4 * rows], crc)
            targets = bound[1:2]
        elif kernel == "rope_append" or "after=rope" in constants:
            *others, k, v = bound
            crc = _hashed(others, kernel == "rope_append", crc)  # in place
            _append((k, v), position, rows, paged, crc, width)
            targets = [view for view in others if not view.readonly]
        elif kernel in ("attention_quad", "attention_split", "attention_decode"):
            qkv, partials, normals, *cache = bound
            later = paged and _spans(cache[0])[0][0] > 0  # slabs: what the launch for earlier ones has left also counts
            crc = partials.cast("I")[0] if later else zlib.crc32(qkv[:_SEEN], crc)
            crc ^= _digest(cache, position + grid[2], paged, width)
            targets = [partials, normals]
        elif kernel == "argmax" or "stage=pick" in constants:
            *_, source, ids = bound
            ids.cast("I")[0] = zlib.crc32(source[:_SEEN], crc) % VOCAB
            return
        else:
            crc = _hashed(bound[:-1] if merge and paged else bound, residual, crc)
            targets = [view for view in bound if not view.readonly]
        for view in targets:
            view[:] = _words(crc, len(view))

    return run


def _hashed(views: Sequence[memoryview], written: bool, crc: int) -> int:
    """What is read, and what is ``written`` if that is read too."""
    for view in views:
        if view.readonly or written:
            crc = zlib.crc32(view[:_SEEN], crc)
    return crc


def _append(cache: Sequence[memoryview], position: int, rows: int, paged: bool, crc: int, width: int) -> None:
    """Write the step's rows of K and V."""
    k = v = position
    tensors = cache
    if paged:
        table, slab = cache
        ((first, positions),) = [span for span in _spans(table) if span[0] <= position < sum(span)]
        assert position + rows <= first + positions, "a step appends to one slab"
        assert len(slab) == 2 * positions * width, "the slab that the table says"
        k, v = position - first, position - first + positions
        tensors = (slab, slab)
    for tensor, row in zip(tensors, (k, v), strict=True):
        tensor[row * width : (row + rows) * width] = _words(crc, width * rows)


def _digest(cache: Sequence[memoryview], end: int, paged: bool, width: int) -> int:
    """Of the rows of K and V up to position ``end``: of any part of them it is what makes the whole by exclusive or."""
    spans, slabs = ([(0, end)], [cache]) if not paged else (_spans(cache[0]), [(slab, slab) for slab in cache[1:]])
    assert len(spans) <= len(slabs), "a launch binds every slab of its group"
    found = 0
    for (first, positions), (k, v) in zip(spans, slabs, strict=False):
        v_rows = positions if paged else 0
        for row in range(min(end - first, positions)):
            k_at, v_at = row * width, (v_rows + row) * width
            found ^= zlib.crc32(v[v_at : v_at + width], zlib.crc32(k[k_at : k_at + width], first + row))
    return found


def _spans(table: memoryview) -> list[tuple[int, int]]:
    """(first position, positions) of the slabs in a page table: of four words each, behind four others."""
    words = table.cast("I")[4:]
    return [(words[i], words[i + 1]) for i in range(0, len(words), 4) if words[i] < 0xFFFF_FFFF]


def _words(crc: int, nbytes: int) -> bytes:
    return crc.to_bytes(4, "little") * (nbytes // 4)


class DecodeDevice(Guarded):
    """Runs out of memory at the creates, and dies at the submits and replays, whose numbers (from 0) are given.

    ``spoil``: what happens after a replay, given its number and its operands.  ``turns``: how many turns of the event
    loop a read takes; the buffer is mapped meanwhile.
    """

    turns = 0

    def __init__(self, out_of_memory: Sequence[int] = (), dies_at: int = -1, **options: Any) -> None:
        super().__init__(log_limit=0, **options)
        self.out_of_memory, self.dies_at = frozenset(out_of_memory), dies_at
        self.creates = self.submits = self.replays = self.compiled = 0
        self.spoil: Callable[[int, tuple[int, ...]], None] | None = None

    def create_buffer(self, size: int, usage: BufferUsage, label: str = "") -> int:
        if self.creates in self.out_of_memory:
            self.fail_next_create = OutOfMemory
        self.creates += 1
        return super().create_buffer(size, usage, label)

    async def create_pipeline(self, code: str, layout: Layout, label: str = "") -> int:
        kernel = meaning(label, code)
        if kernel is not None:
            self.kernels.setdefault(label, kernel)
        self.compiled += 1
        return await super().create_pipeline(code, layout, label)

    async def _read(self, source: FakeBuffer, offset: int, nbytes: int) -> bytes | DeviceError:
        for _ in range(self.turns):
            await asyncio.sleep(0)
        return await super()._read(source, offset, nbytes)

    def submit(self, program: Any) -> None:
        super().submit(program)
        self._submitted()

    def replay(self, *scalars: int) -> None:
        super().replay(*scalars)
        if self.spoil is not None:
            self.spoil(self.replays, scalars)
        self.replays += 1
        self._submitted()

    def words(self, buffer: int) -> list[int]:
        """What a buffer holds."""
        found = self.get(buffer, FakeBuffer, "words")
        return list(memoryview(found.get(0, found.size)).cast("I"))

    def _submitted(self) -> None:
        if self.submits == self.dies_at:
            self.lose()
        self.submits += 1


class DecodeLab:
    """A device, a pool, a launcher and a loaded model."""

    def __init__(
        self,
        options: LaunchOptions | None = None,
        policy: str = "adaptive",
        device: "DecodeDevice | None" = None,
        **of_device: Any,
    ) -> None:
        self.device = device or DecodeDevice(**of_device)
        self.pool = BufferPool(self.device, policy)
        self.launcher = self.another(options)
        self.model: DecoderModel

    def another(self, options: LaunchOptions | None = None) -> Launcher:
        """One more launcher on the same device and pool."""
        launcher = Launcher(self.device, self.pool, options or LaunchOptions())
        self.device.guarded.append(launcher.plans)
        return launcher

    async def load(self, path: Path) -> "DecodeLab":
        source = FileSource(path)
        self.model = await DecoderModel.load(await read_gguf(source), source, self.launcher)
        return self

    def session(
        self, kv: str = "static", context: int = 128, launcher: Launcher | None = None, kv_type: str = "f32"
    ) -> DecodeSession:
        return DecodeSession(self.model, launcher or self.launcher, kv=kv, kv_type=kv_type, context=context)

    def close(self) -> None:
        """Give everything back; nothing may be left."""
        self.launcher.close()
        self.model.close()
        self.pool.close()
        assert self.device.table_sizes() == dict.fromkeys(("buffers", "pipelines", "bind_groups", "plans"), 0)


async def tokens(session: DecodeSession, prompt: Sequence[int], count: int, **options: Any) -> list[TokenEvent]:
    async with aclosing(session.generate(prompt, Generation(max_tokens=count, **options))) as events:
        return [event async for event in events]


def ids(events: Sequence[TokenEvent]) -> list[int]:
    return [event.id for event in events]
