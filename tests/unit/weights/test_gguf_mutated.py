"""300 broken GGUF files through the whole load, as the page does it: a typed error or a clean load each, in no time.

Every mutation is drawn from its index, so a failure names the file that causes it: ``mutate(base, index)``.
"""

import asyncio
import json
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell import errors
from stepwell.gpu.device import Device
from stepwell.gpu.fake_device import FakeDevice
from stepwell.gpu.source import BytesSource
from stepwell.page.frontend import Frontend
from stepwell.text.backends import rust_backend
from stepwell.weights.gguf import GgufFile, read_gguf
from tests.support.gguf_writer import string
from tests.support.tiny_llama import write_tiny_llama

COUNT = 300
HANG_S = 60.0  # of the processor's time, for what takes some ms: a loop over a count that the file made up
HOST = {"browser": "CPython", "cross_origin_isolated": True, "timer_resolution_us": 1, "pyodide": "none"}
COUNTS = (0, 1, 2, 3, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 60) + 1, 1 << 63, (1 << 64) - 1)


class Base:
    """A good file, and where the parts of its header are."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.file: GgufFile = asyncio.run(read_gguf(BytesSource(data, "base.gguf")))
        self.names = list(self.file.tensors)
        first = self.data.index(string(self.names[0]))
        # the table's rows begin behind the metadata; a name occurs in the file's header once, as a row
        self.rows = {name: self.data.index(string(name), first) + len(string(name)) for name in self.names}

    def dimensions(self, name: str) -> range:
        """Where the sizes of a row are."""
        start = self.rows[name] + 4
        return range(start, start + 8 * len(self.file.tensors[name].shape), 8)

    def kind(self, name: str) -> int:
        """Where the type of a row is; its offset is four bytes on."""
        return self.dimensions(name).stop


def put(data: bytearray, at: int, layout: str, value: int) -> None:
    struct.pack_into(layout, data, at, value)


def truncated(base: Base, data: bytearray, draw: random.Random) -> None:
    """Cut in the metadata, in the table or in the tensors."""
    last = draw.choice((min(base.rows.values()), base.file.data_offset, len(data)))
    del data[draw.randrange(last) :]


def flipped(base: Base, data: bytearray, draw: random.Random) -> None:
    """One to eight bits of the header and the table."""
    first = draw.choice((0, min(base.rows.values())))  # half of them in the table, which is small
    for _ in range(draw.randint(1, 8)):
        data[draw.randrange(first, base.file.data_offset)] ^= 1 << draw.randrange(8)


def miscounted(base: Base, data: bytearray, draw: random.Random) -> None:
    """The number of tensors, of entries, of an array's elements, or the length of a string."""
    key = string(draw.choice(list(base.file.metadata)))
    value = data.index(key) + len(key) + 4
    at = draw.choice((8, 16, value, value + 4, data.index(key)))
    right = struct.unpack_from("<Q", data, at)[0]
    put(data, at, "<Q", draw.choice((*COUNTS, right + 1, right - 1)) % (1 << 64))


def misplaced(base: Base, data: bytearray, draw: random.Random) -> None:
    """Offsets that go round in a circle, overlap, point at each other, behind the end or between the alignment."""
    names = draw.sample(base.names, draw.randint(2, len(base.names)))
    offsets = [struct.unpack_from("<Q", data, base.kind(name) + 4)[0] for name in names]
    way: Callable[[int], int] = draw.choice(
        (
            lambda i: offsets[i - 1],
            lambda i: offsets[0],
            lambda i: offsets[i] + draw.choice((-64, -32, 32, 64)),
            lambda i: offsets[i] + draw.choice((1, 4, 31)),
            lambda i: draw.choice(COUNTS),
            lambda i: len(data) - draw.randrange(64),
        )
    )
    for i, name in enumerate(names):
        put(data, base.kind(name) + 4, "<Q", way(i) % (1 << 64))


def misshapen(base: Base, data: bytearray, draw: random.Random) -> None:
    """A tensor's sizes, their number or its type."""
    name = draw.choice(base.names)
    what = draw.randrange(3)
    if what == 0:
        put(data, draw.choice(base.dimensions(name)), "<Q", draw.choice((*COUNTS, 32, 64, 96, 256)))
    elif what == 1:
        put(data, base.rows[name], "<I", draw.choice((0, 1, 2, 3, 4, 5, 1 << 31)))
    else:
        put(data, base.kind(name), "<I", draw.randrange(45))


def spliced(base: Base, data: bytearray, draw: random.Random) -> None:
    """A piece of the header left out, doubled, moved or made of noise."""
    start = draw.randrange(24, base.file.data_offset)
    piece = data[start : start + draw.randint(1, 64)]
    what = draw.randrange(4)
    if what != 1:
        del data[start : start + len(piece)]
    if what in (1, 2):
        at = start if what == 1 else draw.randrange(24, base.file.data_offset - 64)
        data[at:at] = piece
    elif what == 3:
        data[start:start] = draw.randbytes(len(piece))


MUTATIONS = (truncated, flipped, miscounted, misplaced, misshapen, spliced)


def mutate(base: Base, index: int) -> bytes:
    data = bytearray(base.data)
    MUTATIONS[index % len(MUTATIONS)](base, data, random.Random(index))
    return bytes(data)


class Page:
    """Loads files one after the other, as the page would, on one device."""

    def __init__(self) -> None:
        self.device = FakeDevice(log_limit=0)
        self.messages: list[dict[str, Any]] = []
        self.frontend = Frontend(
            lambda text: self.messages.append(json.loads(text)), json.dumps(HOST), self._make_tokenizer, self._open
        )

    async def _open(self) -> Device:
        return self.device

    def _make_tokenizer(self, document: str) -> Any:
        encode = rust_backend(document)
        return lambda text: SimpleNamespace(to_py=lambda: encode(text))

    async def load(self, data: bytes, name: str) -> dict[str, Any]:
        """The message that the load ends with: ``model`` or ``error``."""
        self.messages.clear()
        await self.frontend.load_source(json.dumps({"name": name}), BytesSource(data, name))
        (end,) = (message for message in self.messages if message["type"] in ("model", "error"))
        return end

    @property
    def buffers(self) -> int:
        return self.device.table_sizes()["buffers"]


@pytest.fixture(scope="module", params=["Q4_1", "Q5_0"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    path = tmp_path_factory.mktemp("mutated") / "base.gguf"
    write_tiny_llama(path, vocab=270, formats=request.param, n_layers=1)
    return Base(path.read_bytes())


def test_every_mutated_file_is_a_typed_error_or_a_clean_load(base: Base) -> None:
    async def load_all() -> Counter[str]:
        page = Page()
        await page.frontend.open()
        empty = page.buffers
        assert (await page.load(base.data, "base.gguf"))["type"] == "model"
        assert page.buffers > empty
        ends: Counter[str] = Counter()
        for index in range(COUNT):
            data = mutate(base, index)
            started = time.process_time()
            end = await page.load(data, "mutated.gguf")
            spent = time.process_time() - started
            assert spent < HANG_S, (index, spent)
            if end["type"] == "error":
                assert issubclass(getattr(errors, end["code"]), errors.ModelError), (index, end)
                assert len(end["message"]) > 20, (index, end)
            else:
                assert (await page.load(b"", "nothing.gguf"))["code"] == "BadFile"  # unloads the model first
            assert page.buffers == empty, (index, end)
            ends[end.get("code", "model")] += 1
        page.frontend.close()
        return ends

    ends = asyncio.run(load_all())
    print(dict(ends))
    assert ends.keys() == {"BadFile", "Unsupported", "model"}
    assert ends["BadFile"] > COUNT / 2


def test_each_mutation_changes_the_file(base: Base) -> None:
    assert sum(mutate(base, index) == base.data for index in range(COUNT)) < COUNT / 50
    assert mutate(base, 7) == mutate(base, 7)
