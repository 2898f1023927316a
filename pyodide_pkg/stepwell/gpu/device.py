"""The seam to the GPU: a ``Device`` of eleven methods, in which every GPU object is an int.

Two implementations: ``JsDevice`` (``navigator.gpu`` through Pyodide) and ``FakeDevice`` (CPython; enforces WebGPU's
rules and logs the calls).  Handles are allocated once and never reused, so they are safe as cache keys.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
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


class Binding(NamedTuple):
    """One entry of a bind group; ``size`` 0 binds the buffer from ``offset`` to its end."""

    buffer: int
    offset: int = 0
    size: int = 0


class Chunk(NamedTuple):
    """A run of a byte source that goes to a buffer; all in bytes, source offset and buffer offset multiples of 4."""

    source_offset: int
    nbytes: int
    buffer: int
    buffer_offset: int = 0


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What was opened.  ``limits`` and ``features`` are those of the *device*; names as in the WebGPU spec.

    ``subgroup_size`` is 0 when the device has no subgroups, else the smallest size the adapter reports;
    ``subgroup_max_size`` the largest.
    """

    vendor: str
    architecture: str
    description: str
    is_fallback: bool
    limits: Mapping[str, int]
    features: frozenset[str]
    subgroup_size: int = 0
    subgroup_max_size: int = 0

    @property
    def is_software(self) -> bool:
        """True for adapters that compute on the CPU: their timings never stand beside a GPU's."""
        words = f"{self.vendor} {self.architecture} {self.description}".lower()
        return self.is_fallback or any(name in words for name in ("swiftshader", "llvmpipe", "warp", "basic render"))


class ByteSource(Protocol):
    """A random-access file: bytes to the left of the GPU.  ``read`` may return fewer bytes only at the end."""

    name: str
    size: int

    async def read(self, offset: int, nbytes: int) -> bytes: ...


Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


class Device(Protocol):
    """The only thing that reaches the GPU.

    Errors that WebGPU reports late (validation, out of memory, loss) are raised by the next awaited method.
    """

    @property
    def info(self) -> DeviceInfo: ...

    def create_buffer(self, size: int, usage: BufferUsage, label: str = "") -> int:
        """A new zero-filled buffer of ``size`` bytes (a multiple of 4)."""

    async def create_pipeline(self, code: str, bindings: Sequence[BindingType], label: str = "") -> int:
        """Compile WGSL with entry point ``main``; ``bindings`` are group 0, binding 0, 1, …  Raises ShaderError."""

    def create_bind_group(self, pipeline: int, entries: Sequence[Binding]) -> int:
        """Bind buffers to group 0 of ``pipeline``."""

    def destroy(self, handle: int) -> None:
        """Free a buffer, or forget a pipeline or bind group.  The handle is dead from here on."""

    def write_buffer(self, buffer: int, offset: int, data: "bytes | bytearray | memoryview | array[int]") -> None:
        """queue.writeBuffer: ``offset`` and the length in bytes are multiples of 4."""

    def submit(self, program: "array[int]") -> None:
        """Execute a flat program (see ``program.py``) in one call."""

    async def read_buffer(self, buffer: int, offset: int, nbytes: int) -> bytes:
        """Map a MAP_READ buffer once the submitted work that fills it is done, and copy ``nbytes`` out."""

    async def upload(self, source: ByteSource, chunks: Sequence[Chunk], progress: Progress | None = None) -> None:
        """Stream parts of a file into buffers, in file order, without passing through the Python heap."""

    async def wait(self) -> None:
        """Until all submitted work is done."""

    def table_sizes(self) -> Mapping[str, int]:
        """Live objects by kind (``buffers``, ``pipelines``, ``bind_groups``): what a leak test compares."""

    def close(self) -> None:
        """Destroy the device and everything on it.  Safe to call twice."""
