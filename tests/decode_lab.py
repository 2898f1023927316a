"""Decode sessions on FakeDevice whose kernels mean something: every token depends on all that went before it.

A kernel fills what it writes with a hash of its name, its grid, the step's scalars that its WGSL reads, and the first
bytes of what it reads; K and V are read up to the step's length.  So a lost copy, an old id, a step that was done twice
or a parameter of another step gives another token.
"""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stepwell.decode.session import DecodeSession, Generation, TokenEvent
from stepwell.errors import DeviceError, OutOfMemory
from stepwell.gpu.device import BufferUsage, Layout
from stepwell.gpu.fake_objects import FakeBuffer, Kernel
from stepwell.gpu.program import Scalar
from stepwell.kernels import fields_of, render
from stepwell.launch.launcher import Launcher
from stepwell.launch.options import LaunchOptions
from stepwell.memory.pool import BufferPool
from stepwell.models.llama import Llama
from stepwell.weights.gguf import read_gguf
from stepwell.weights.source import FileSource
from tests.launch_lab import Guarded
from tests.tiny_llama import write_tiny_llama

VOCAB = 320
LAYERS = 2
KV_WIDTH = 4 * 2 * 16  # bytes of a position of one K or V tensor
CONTEXT = 1024
_SEEN = 16  # bytes of a tensor that a kernel reads


@cache
def _rendered(kernel: str, constants: tuple[tuple[str, Any], ...]) -> str:
    return render(kernel, dict(constants))


@pytest.fixture(autouse=True)
def templates_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of labs compile the same kernels: rendering their templates would be most of the time."""
    monkeypatch.setattr("stepwell.launch.kernel_cache.render", lambda kernel, c: _rendered(kernel, tuple(c.items())))


def write_model(path: Path) -> Path:
    write_tiny_llama(path, n_layers=LAYERS, n_heads=4, n_kv_heads=2, head_dim=16, vocab=VOCAB, context=CONTEXT)
    return path


def meaning(label: str, code: str) -> Kernel | None:
    """What a kernel of the model does, as ``FakeDevice`` wants it."""
    kernel, _, constants = label.partition("(")
    fields = fields_of(code)
    if fields is None:
        return None
    mask = [int(bool(fields & bit)) for bit in Scalar]
    residual = "mode=residual" in constants

    def run(views: Sequence[memoryview], grid: tuple[int, int, int]) -> None:
        block, *bound = views
        position, rows, length, draw = block.cast("I")
        seen = [word * wanted for word, wanted in zip((position, rows, length, draw), mask, strict=True)]
        crc = zlib.crc32(repr((seen, grid)).encode(), zlib.crc32(label.encode()))
        rows = grid[1]  # of kernels with a row to a workgroup
        if kernel == "embed":
            crc = zlib.crc32(bound[0][: 4 * rows], crc)
            targets = bound[1:2]
        elif kernel == "rope_append":
            _, qkv, k, v = bound
            crc = zlib.crc32(qkv[:_SEEN], crc)
            for tensor in (k, v):
                tensor[position * KV_WIDTH : (position + rows) * KV_WIDTH] = _words(crc, KV_WIDTH * rows)
            targets = [qkv]
        elif kernel.startswith(("attention_quad", "attention_split")):
            qkv, k, v, *targets = bound
            end = (position + grid[2]) * KV_WIDTH
            for view in (qkv[:_SEEN], k[:end], v[:end]):
                crc = zlib.crc32(view, crc)
        elif kernel == "argmax" or "stage=pick" in constants:
            *_, source, ids = bound
            ids.cast("I")[0] = zlib.crc32(source[:_SEEN], crc) % VOCAB
            return
        else:
            for view in bound:
                if view.readonly or residual:
                    crc = zlib.crc32(view[:_SEEN], crc)
            targets = [view for view in bound if not view.readonly]
        for view in targets:
            view[:] = _words(crc, len(view))

    return run


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
        self.creates = self.submits = self.replays = 0
        self.spoil: Callable[[int, tuple[int, ...]], None] | None = None

    def create_buffer(self, size: int, usage: BufferUsage, label: str = "") -> int:
        if self.creates in self.out_of_memory:
            self.fail_next_create = OutOfMemory
        self.creates += 1
        return super().create_buffer(size, usage, label)

    async def create_pipeline(self, code: str, layout: Layout, label: str = "") -> int:
        kernel = meaning(label, code)
        if kernel is not None:
            self._kernels.setdefault(label, kernel)
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
        self.model: Llama

    def another(self, options: LaunchOptions | None = None) -> Launcher:
        """One more launcher on the same device and pool."""
        launcher = Launcher(self.device, self.pool, options or LaunchOptions())
        self.device.guarded.append(launcher.plans)
        return launcher

    async def load(self, path: Path) -> "DecodeLab":
        source = FileSource(path)
        self.model = await Llama.load(await read_gguf(source), source, self.launcher)
        return self

    def session(self, kv: str = "static", context: int = 128, launcher: Launcher | None = None) -> DecodeSession:
        return DecodeSession(self.model, launcher or self.launcher, kv=kv, context=context)

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
