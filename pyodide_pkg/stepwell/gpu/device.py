"""The seam to the GPU: a ``Device``, in which every GPU object is an int.

Two implementations: ``JsDevice`` (``navigator.gpu`` through Pyodide) and ``FakeDevice`` (CPython; enforces WebGPU's
rules and logs the calls).  Handles are allocated once and never reused, by no device of the process, so they are safe
as cache keys even where two devices share a cache.
"""

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag, StrEnum
from typing import NamedTuple, Protocol


class BufferUsage(IntFlag):
    """GPUBufferUsage, with the values of the WebGPU IDL."""

    MAP_READ = 0x0001
    MAP_WRITE = 0x0002
    COPY_SRC = 0x0004
    COPY_DST = 0x0008
    UNIFORM = 0x0040
    STORAGE = 0x0080


class BindingType(StrEnum):
    """GPUBufferBindingType: how a shader sees one binding."""

    STORAGE = "storage"
    READ_ONLY_STORAGE = "read-only-storage"
    UNIFORM = "uniform"


class Layout(NamedTuple):
    """The bindings of a pipeline: those of group 0 are numbered ``first``, ``first`` + 1, …

    ``immediate_bytes``: size of its immediates, 0 for none.
    """

    bindings: tuple[BindingType, ...] = ()
    first: int = 0
    immediate_bytes: int = 0


class Binding(NamedTuple):
    """One entry of a bind group; ``size`` 0 binds the buffer from ``offset`` to its end."""

    buffer: int
    offset: int = 0
    size: int = 0


class Chunk(NamedTuple):
    """A part of a byte source that goes to a buffer; all in bytes, both offsets multiples of 4."""

    source_offset: int
    nbytes: int
    buffer: int
    buffer_offset: int = 0


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """An opened device.  ``limits`` and ``features`` are those of the *device*; names as in the WebGPU spec.

    ``subgroup_size`` is 0 when the device has no subgroups, else the smallest size the adapter reports;
    ``subgroup_max_size`` the largest.  ``immediate_bytes`` is the most that a pipeline may have, 0 without immediates.
    ``language`` has the names of WGSL's language extensions that the browser knows.
    """

    vendor: str
    architecture: str
    description: str
    is_fallback: bool
    limits: Mapping[str, int]
    features: frozenset[str]
    subgroup_size: int = 0
    subgroup_max_size: int = 0
    immediate_bytes: int = 0
    language: frozenset[str] = frozenset()

    @property
    def is_software(self) -> bool:
        """True for adapters that compute on the CPU: their timings never stand beside a GPU's."""
        words = f"{self.vendor} {self.architecture} {self.description}".lower()
        return self.is_fallback or any(name in words for name in ("swiftshader", "llvmpipe", "warp", "basic render"))


class Span(NamedTuple):
    """Time that the device's thread spent on one submission: ``encode`` up to it, then ``submit``.

    Times are milliseconds of performance.now.
    """

    name: str
    start_ms: float
    end_ms: float


class DeviceProfile(NamedTuple):
    """The times measured since the last ``take_profile``.

    ``passes_us`` are the GPU's times of the compute passes, in the order in which they were begun.  ``now_ms`` is the
    clock of the spans at the take.  Browsers round the GPU's clock (Chromium to 100 µs unless it is told otherwise).
    """

    spans: tuple[Span, ...]
    passes_us: tuple[float, ...]
    now_ms: float


class ByteSource(Protocol):
    """A random-access file: ``name``, ``size`` in bytes."""

    name: str
    size: int

    async def read(self, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes at ``offset``; fewer only at the end of the file."""


Progress = Callable[[int, int], None]
"""A function called with (bytes done, bytes in total)."""


class Device(Protocol):
    """The only way to the GPU.

    Errors that WebGPU reports late (validation, out of memory, loss) are raised by the next awaited method.
    """

    @property
    def info(self) -> DeviceInfo:
        """The adapter, limits and features of the device."""

    def create_buffer(self, size: int, usage: BufferUsage, label: str = "") -> int:
        """A new zero-filled buffer of ``size`` bytes (a multiple of 4)."""

    async def create_pipeline(self, code: str, layout: Layout, label: str = "") -> int:
        """Compile ``code``, WGSL with the entry point ``main`` and the bindings of ``layout``.  Raises ShaderError."""

    def create_bind_group(self, pipeline: int, entries: Sequence[Binding]) -> int:
        """Bind buffers to group 0 of ``pipeline``: one entry per binding of its layout, in that order."""

    def create_plan(self, program: "array[int]") -> int:
        """Keep ``program`` for ``replay``; the objects that it refers to are looked up here, once.

        It must begin with SCALARS, whose operands are placeholders: every replay brings its own.
        """

    def destroy(self, handle: int) -> None:
        """Free a buffer, or forget a pipeline, bind group or plan.  ``handle`` is dead from here on.

        Plans that refer to it, or bind it, are dead too: their replay is a UsageError.
        """

    def write_buffer(self, buffer: int, offset: int, data: "bytes | bytearray | memoryview | array[int]") -> None:
        """Write ``data`` (queue.writeBuffer); ``offset`` and the length in bytes are multiples of 4."""

    def submit(self, program: "array[int]") -> None:
        """Execute ``program``, a flat one (see ``program.py``), in one call."""

    def replay(self, plan: int, position: int, rows: int, length: int, draw: int, staging: int) -> None:
        """Execute ``plan`` with these SCALARS, as ``submit`` would execute its program with them."""

    def read_buffer(self, buffer: int, offset: int, nbytes: int) -> Awaitable[bytes]:
        """Map a MAP_READ buffer once the submitted work that fills it is done, and copy ``nbytes`` out.

        The mapping begins with the call, and the queue may not touch the buffer until it ends.  The result may be
        awaited later, or never: then nothing is raised.
        """

    async def upload(self, source: ByteSource, chunks: Sequence[Chunk], progress: Progress | None = None) -> None:
        """Stream ``chunks`` of a file into buffers, in file order, without passing through the Python heap."""

    async def wait(self) -> None:
        """Wait until all submitted work is done."""

    def table_sizes(self) -> Mapping[str, int]:
        """Live objects by kind (``buffers``, ``pipelines``, ``bind_groups``, ``plans``), for leak tests to compare."""

    def set_profile(self, spans: bool = False, passes: bool = False) -> None:
        """Measure ``spans`` and ``passes`` from here on, or stop.

        Raises MissingCapability for ``passes`` without the feature timestamp-query.
        """

    async def take_profile(self) -> DeviceProfile:
        """The times measured since the last take, once the GPU has done the work."""

    def close(self) -> None:
        """Destroy the device and everything on it.  Safe to call twice."""
