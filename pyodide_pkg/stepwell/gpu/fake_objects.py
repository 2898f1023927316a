"""The objects of a ``FakeDevice``, and the WebGPU rules that each checks for itself.

The rules are those of the WebGPU specification (sections on buffers, bind groups and pipelines), narrowed to what the
``Device`` protocol can express.  Every broken rule is a UsageError that names the object and carries the numbers.
"""

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from stepwell.errors import ShaderError, UsageError
from stepwell.gpu.device import Binding, BindingType, BufferUsage, Layout

KernelFunction = Callable[[Sequence[memoryview], tuple[int, int, int]], None]
"""The meaning of a pipeline: a function of the bound byte ranges (read-only where the binding is) and the grid.

Immediates come first, as one more read-only range: a kernel whose step block is bound at 0 and one that has it as
immediates have the same meaning.
"""

DEFAULT_LIMITS: Mapping[str, int] = {
    "maxBindGroups": 4,
    "maxBindingsPerBindGroup": 1000,
    "maxStorageBuffersPerShaderStage": 8,
    "maxUniformBuffersPerShaderStage": 12,
    "maxUniformBufferBindingSize": 65_536,
    "maxStorageBufferBindingSize": 134_217_728,
    "minUniformBufferOffsetAlignment": 256,
    "minStorageBufferOffsetAlignment": 256,
    "maxBufferSize": 268_435_456,
    "maxComputeWorkgroupStorageSize": 16_384,
    "maxComputeInvocationsPerWorkgroup": 256,
    "maxComputeWorkgroupSizeX": 256,
    "maxComputeWorkgroupSizeY": 256,
    "maxComputeWorkgroupSizeZ": 64,
    "maxComputeWorkgroupsPerDimension": 65_535,
}
"""The limits for compute that every WebGPU device has at least (specification, table of default limits)."""

_DECLARATION = re.compile(
    r"@group\(\s*(\d+)\s*\)\s*@binding\(\s*(\d+)\s*\)\s*var\s*<([^>]*)>"
    r"|@binding\(\s*(\d+)\s*\)\s*@group\(\s*(\d+)\s*\)\s*var\s*<([^>]*)>"
)
_IMMEDIATE = re.compile(r"\bvar\s*<\s*immediate\s*>")
_ENABLE = re.compile(r"\benable\s+([\w\s,]+);")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FEATURE_OF_EXTENSION = {"f16": "shader-f16", "subgroups": "subgroups"}


class FakeBuffer:
    """A buffer's size, usage, state, and its bytes; ``data`` stays None for as long as every byte is zero."""

    __slots__ = ("data", "destroyed", "handle", "label", "mapped", "size", "usage")

    def __init__(self, handle: int, size: int, usage: BufferUsage, label: str) -> None:
        self.handle, self.size, self.usage, self.label = handle, size, usage, label
        self.data: bytearray | None = None
        self.mapped = self.destroyed = False

    def __str__(self) -> str:
        name = f"buffer {self.handle} ({self.label})" if self.label else f"buffer {self.handle}"
        return f"{name}, {self.size:,} B, {_names(self.usage)}"

    def need(self, usage: BufferUsage, purpose: str) -> None:
        """Raise unless the buffer has ``usage``; ``purpose`` begins the message, here and below."""
        if not self.usage & usage:
            raise UsageError(f"{purpose}: {self} lacks {usage.name}. Create it with that usage.")

    def need_range(self, offset: int, nbytes: int, purpose: str, alignment: int = 4) -> None:
        """Raise unless the ``nbytes`` bytes at ``offset`` are aligned and inside the buffer."""
        if offset < 0 or nbytes < 0 or offset % alignment or nbytes % 4:
            raise UsageError(
                f"{purpose}: offset {offset:,} and size {nbytes:,} B in {self}; the offset must be a multiple of "
                f"{alignment}, the size a multiple of 4."
            )
        if offset + nbytes > self.size:
            raise UsageError(f"{purpose}: range {offset:,} + {nbytes:,} B ends outside {self}.")

    def need_usable(self, purpose: str) -> None:
        """Raise if the queue may not touch the buffer now."""
        if self.destroyed:
            raise UsageError(f"{purpose}: {self} was destroyed before the submit. Destroy it after the submit.")
        if self.mapped:
            raise UsageError(f"{purpose}: {self} is mapped while a read is pending. Await the read first.")

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A writable view of real bytes (they are allocated here)."""
        if self.data is None:
            self.data = bytearray(self.size)
        return memoryview(self.data)[offset : offset + nbytes]

    def put(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write ``data`` at ``offset``."""
        if self.data is not None or any(data):
            self.view(offset, len(data))[:] = data

    def clear(self, offset: int, nbytes: int) -> None:
        """Write ``nbytes`` zeroes at ``offset``."""
        if self.data is not None:
            self.view(offset, nbytes)[:] = bytes(nbytes)

    def copy_from(self, source: "FakeBuffer", source_offset: int, offset: int, nbytes: int) -> None:
        """Write ``nbytes`` bytes of ``source`` at ``offset``."""
        if source.data is None:
            self.clear(offset, nbytes)
        else:
            self.put(offset, source.view(source_offset, nbytes))

    def get(self, offset: int, nbytes: int) -> bytes:
        """A copy of ``nbytes`` bytes at ``offset``."""
        return bytes(nbytes) if self.data is None else bytes(self.view(offset, nbytes))


class FakePipeline:
    """A compiled kernel: its layout and, where the caller gave one, its meaning."""

    __slots__ = ("handle", "kernel", "label", "layout")

    def __init__(self, handle: int, layout: Layout, label: str, kernel: KernelFunction | None) -> None:
        self.handle, self.layout, self.label, self.kernel = handle, layout, label, kernel

    def __str__(self) -> str:
        return f"pipeline {self.handle} ({self.label})" if self.label else f"pipeline {self.handle}"


class FakeBindGroup:
    """Bound ranges; ``conflict`` says why no dispatch may use the group ('': one may)."""

    __slots__ = ("conflict", "entries", "handle", "layout")

    def __init__(self, handle: int, layout: Layout, entries: list[tuple[FakeBuffer, int, int]]) -> None:
        self.handle, self.layout, self.entries = handle, layout, entries
        self.conflict = _conflict(layout.bindings, entries)

    def views(self) -> list[memoryview]:
        """The bound bytes as a kernel sees them: read-only unless the binding is writable."""
        views = [buffer.view(offset, size) for buffer, offset, size in self.entries]
        return [
            view if kind is BindingType.STORAGE else view.toreadonly()
            for view, kind in zip(views, self.layout.bindings, strict=True)
        ]


class FakePlan:
    """A program, and the handles it refers to: those in it, and the buffers that its bind groups bind."""

    __slots__ = ("handle", "handles", "words")

    def __init__(self, handle: int, words: "array[int]", handles: frozenset[int]) -> None:
        self.handle, self.words, self.handles = handle, words, handles


def check_buffer(size: int, usage: BufferUsage, limits: Mapping[str, int]) -> None:
    """Check the rules of createBuffer, and the protocol's own: a size above 0 that is a multiple of 4."""
    if size <= 0 or size % 4:
        raise UsageError(f"buffer of {size:,} B; the size must be above 0 and a multiple of 4. Round it up.")
    if size > limits["maxBufferSize"]:
        raise UsageError(
            f"buffer of {size:,} B; the device allows {limits['maxBufferSize']:,} B (maxBufferSize). Split it."
        )
    if not usage:
        raise UsageError("buffer without usage; give it at least one BufferUsage flag.")
    for mapping, partner in (
        (BufferUsage.MAP_READ, BufferUsage.COPY_DST),
        (BufferUsage.MAP_WRITE, BufferUsage.COPY_SRC),
    ):
        if usage & mapping and usage & ~(mapping | partner):
            raise UsageError(
                f"usage {_names(usage)}: {mapping.name} combines with {partner.name} only. Copy via a second buffer."
            )


class _Shader(NamedTuple):
    """The declarations of a WGSL text: (group, binding, address space) each."""

    has_entry: bool
    extensions: tuple[str, ...]
    has_immediates: bool
    declarations: tuple[tuple[int, int, str], ...]


@lru_cache(maxsize=1024)  # simulations compile the same texts thousands of times
def _read_shader(code: str) -> _Shader:
    code = _COMMENT.sub(" ", code)
    found = [groups[:3] if groups[2] else (groups[4], groups[3], groups[5]) for groups in _DECLARATION.findall(code)]
    return _Shader(
        re.search(r"@compute\b[^{;]*\bfn\s+main\s*\(", code, re.DOTALL) is not None,
        tuple(name for names in _ENABLE.findall(code) for name in re.findall(r"\w+", names)),
        _IMMEDIATE.search(code) is not None,
        tuple((int(group), int(binding), space) for group, binding, space in found),
    )


def check_shader(
    code: str, layout: Layout, limits: Mapping[str, int], features: frozenset[str], immediate_bytes: int
) -> None:
    """Reject WGSL without an entry point, with extensions the device lacks, or that declares what ``layout`` lacks.

    ``immediate_bytes`` is the most that the device allows.
    """
    shader = _read_shader(code)
    if not shader.has_entry:
        raise ShaderError("no entry point: WGSL needs '@compute @workgroup_size(…) fn main(…)'.")
    for name in shader.extensions:
        if _FEATURE_OF_EXTENSION.get(name, name) not in features:
            raise ShaderError(f"'enable {name};' needs the feature {_FEATURE_OF_EXTENSION.get(name, name)}.")
    for limit, kinds in (
        ("maxStorageBuffersPerShaderStage", (BindingType.STORAGE, BindingType.READ_ONLY_STORAGE)),
        ("maxUniformBuffersPerShaderStage", (BindingType.UNIFORM,)),
    ):
        count = sum(kind in kinds for kind in layout.bindings)
        if count > limits[limit]:
            raise ShaderError(f"{count} buffers of type {kinds[0]}; the device allows {limits[limit]} ({limit}).")
    if layout.immediate_bytes > immediate_bytes or layout.immediate_bytes % 4:
        raise ShaderError(
            f"{layout.immediate_bytes} bytes of immediates; a multiple of 4 up to {immediate_bytes} is allowed here."
        )
    if shader.has_immediates and not layout.immediate_bytes:
        raise ShaderError("WGSL declares var<immediate>; the layout has no immediates.")
    for group, binding, space in shader.declarations:
        _check_declaration(group, binding, space, layout)


def bind(
    layout: Layout, entries: Sequence[Binding], buffers: Sequence[FakeBuffer], limits: Mapping[str, int]
) -> list[tuple[FakeBuffer, int, int]]:
    """The ``entries`` with their sizes filled in, checked against ``layout``; ``buffers`` are the entries' buffers."""
    bindings = layout.bindings
    if len(entries) != len(bindings):
        raise UsageError(f"{len(entries)} entries for a layout of {len(bindings)} bindings. Bind each binding once.")
    bound = []
    for index, (kind, entry, buffer) in enumerate(zip(bindings, entries, buffers, strict=True), layout.first):
        size = entry.size or buffer.size - entry.offset
        _check_entry(f"binding {index} ({kind})", kind, buffer, entry.offset, size, limits)
        bound.append((buffer, entry.offset, size))
    return bound


def _check_entry(
    where: str, kind: BindingType, buffer: FakeBuffer, offset: int, size: int, limits: Mapping[str, int]
) -> None:
    uniform = kind is BindingType.UNIFORM
    name = "Uniform" if uniform else "Storage"
    buffer.need(BufferUsage.UNIFORM if uniform else BufferUsage.STORAGE, where)
    alignment = limits[f"min{name}BufferOffsetAlignment"]
    if offset < 0 or offset % alignment:
        raise UsageError(
            f"{where}: offset {offset:,} in {buffer}; it must be a multiple of {alignment} "
            f"(min{name}BufferOffsetAlignment)."
        )
    if size <= 0 or offset + size > buffer.size:
        raise UsageError(f"{where}: range {offset:,} + {size:,} B is empty or ends outside {buffer}.")
    if not uniform and size % 4:
        raise UsageError(f"{where}: {size:,} B bound; a storage binding is a multiple of 4 B. Round it up.")
    limit = limits[f"max{name}BufferBindingSize"]
    if size > limit:
        raise UsageError(
            f"{where}: binding of {size:,} B; the device allows {limit:,} B (max{name}BufferBindingSize). "
            "Use a smaller context or a quantised model."
        )


def _check_declaration(group: int, binding: int, space: str, layout: Layout) -> None:
    words = re.findall(r"\w+", space)
    if words[:1] == ["uniform"]:
        kind = BindingType.UNIFORM
    else:
        kind = BindingType.STORAGE if "read_write" in words else BindingType.READ_ONLY_STORAGE
    index = binding - layout.first
    if group != 0 or not 0 <= index < len(layout.bindings):
        raise ShaderError(
            f"WGSL declares @group({group}) @binding({binding}); the layout has {len(layout.bindings)} in group 0, "
            f"from {layout.first} on."
        )
    if layout.bindings[index] != kind:
        raise ShaderError(f"@binding({binding}) is {kind} in WGSL and {layout.bindings[index]} in the layout.")


def _conflict(bindings: Sequence[BindingType], entries: Sequence[tuple[FakeBuffer, int, int]]) -> str:
    """What breaks the usage-scope rule (a written buffer has no other use in a dispatch) or the aliasing one; or ''."""
    for i, (buffer, start, size) in enumerate(entries):
        if bindings[i] is not BindingType.STORAGE:
            continue
        for j, (other, other_start, other_size) in enumerate(entries):
            if j == i or other is not buffer:
                continue
            if bindings[j] is not BindingType.STORAGE:
                return f"{buffer} is writable at binding {i} and {bindings[j]} at binding {j}. Bind two buffers."
            if start < other_start + other_size and other_start < start + size:
                return f"{buffer} is writable at bindings {i} and {j} with overlapping ranges. Bind disjoint ranges."
    return ""


def _names(usage: BufferUsage) -> str:
    return "|".join(flag.name for flag in usage if flag.name) or "no usage"
