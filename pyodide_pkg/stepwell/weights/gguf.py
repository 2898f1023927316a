"""Reads the header of a GGUF file: metadata and tensor table.  Tensor bytes are never read here.

Layout (GGUF specification, versions 2 and 3, which differ only in that 3 allows big-endian files):

    "GGUF"  u32 version  u64 tensors  u64 entries
    entry:   string key, u32 value type, value              string: u64 byte length, UTF-8
    tensor:  string name, u32 dimensions, u64 each (fastest first), u32 type, u64 offset from the data section
    padding to ``general.alignment`` (32), then the data section

The file is not trusted: each count is compared with the bytes that are left before anything of that size is made, each
entry is parsed by loops of bounded depth, and whatever is wrong is a BadFile or Unsupported that says what and where.
Text that is not UTF-8 is a BadFile, as in the gguf Python package: vocabularies store raw bytes in a printable form.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from stepwell.errors import BadFile, Unsupported
from stepwell.weights.formats import TensorFormat, find_format

if TYPE_CHECKING:
    from stepwell.gpu.device import ByteSource

Value: TypeAlias = "bool | int | float | str | list[Value]"
"""A value of the metadata."""
T = TypeVar("T")

FIRST_READ_BYTES = 1 << 20
"""Bytes of the first read of a file."""
HEADER_LIMIT_BYTES = 64 << 20
"""The longest header: the largest vocabularies in use (256 k tokens with scores and merges) need about 15 MiB."""
ARRAY_DEPTH = 4
"""How deep arrays may be nested."""
MAX_DIMENSIONS = 4
"""The most dimensions of a tensor."""
MAX_KEY_BYTES = 65_535
"""The longest key."""
MAX_TENSOR_NAME_BYTES = 64
"""The longest name of a tensor."""
DEFAULT_ALIGNMENT = 32
"""The alignment of tensors in a file that does not state one."""

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_SCALAR_STRUCTS = {kind: struct.Struct(f"<{letter}") for kind, letter in _SCALARS.items()}
_SMALLEST_BYTES = {kind: row.size for kind, row in _SCALAR_STRUCTS.items()} | {_STRING: 8, _ARRAY: 12}
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` in GGUF order (contiguous dimension first), ``offset`` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    format: TensorFormat
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked header: every tensor is aligned, inside the file and apart from the others."""

    name: str
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    alignment: int
    data_offset: int
    size: int


class _NeedMore(Exception):
    """A signal, not an error, that never leaves this module: the entry continues beyond the bytes read so far."""


class _Header:
    """The part of the file read so far and a position in it; ``what`` names what is being parsed, for messages."""

    __slots__ = ("_source", "data", "name", "position", "size", "what")

    def __init__(self, source: "ByteSource") -> None:
        self._source = source
        self.name, self.size = source.name, source.size
        self.data = b""
        self.position = 0
        self.what = "the file header"

    async def parse(self, parser: Callable[["_Header"], T]) -> T:
        """Run ``parser`` here; when it runs out of bytes, read on and run it again from the same position."""
        start, what = self.position, self.what
        while True:
            try:
                result = parser(self)
            except _NeedMore:
                self.position, self.what = start, what
                await self._read_on()
            else:
                self.what = what
                return result

    async def _read_on(self) -> None:
        """Double the bytes read, so that parsing an entry again costs no more than the entry did."""
        have = len(self.data)
        want = min(max(FIRST_READ_BYTES, have), HEADER_LIMIT_BYTES - have, self.size - have)
        if want <= 0:
            raise self.bad(
                f"{self.what} continues beyond the first {HEADER_LIMIT_BYTES:,} bytes, the most a header may have"
            )
        more = await self._source.read(have, want)
        if len(more) != want:
            raise self.bad(f"a read of {want:,} bytes at byte {have:,} gave {len(more):,} of a file of {self.size:,}")
        self.data += more

    def bad(self, text: str) -> BadFile:
        return BadFile(f"{self.name}: {text}.")

    def bad_here(self, text: str) -> BadFile:
        return self.bad(f"{self.what}, byte {self.position:,}: {text}")

    def skip(self, nbytes: int) -> int:
        """Move over ``nbytes`` that are in memory and return where they start."""
        start = self.position
        if start + nbytes > len(self.data):
            if start + nbytes > self.size:
                raise self.bad_here(
                    f"{nbytes:,} bytes are needed but the file ends at {self.size:,}: it is cut short or corrupt"
                )
            raise _NeedMore
        self.position = start + nbytes
        return start

    def number(self, layout: struct.Struct) -> int:
        value: int = layout.unpack_from(self.data, self.skip(layout.size))[0]
        return value

    def string(self, limit: int | None = None) -> str:
        start = self.position
        length = self.number(_U64)
        if limit is not None and not 0 < length <= limit:
            self.position = start
            raise self.bad_here(f"a name of {length:,} bytes; 1 to {limit:,} are allowed")
        at = self.skip(length)
        try:
            return self.data[at : at + length].decode()
        except UnicodeDecodeError as error:
            self.position = at + error.start
            raise self.bad_here(f"not UTF-8 ({error.reason})") from error

    def check_count(self, count: int, smallest: int, noun: str) -> None:
        """Refuse ``count`` things of at least ``smallest`` bytes each that cannot be in the rest of the file."""
        left = min(self.size, HEADER_LIMIT_BYTES) - self.position
        if count * smallest > left:
            raise self.bad_here(
                f"{count:,} {noun} need at least {count * smallest:,} bytes; {max(left, 0):,} are left for them"
            )


async def read_gguf(source: "ByteSource") -> GgufFile:
    """Read and check the header of ``source``: 1 MiB, then doubling, at most 64 MiB and never the tensor data.

    Raises BadFile for a file that is truncated, corrupt or not GGUF, Unsupported for versions and tensor types that
    this version does not have.
    """
    header = _Header(source)
    version, n_tensors, n_entries = await header.parse(_parse_start)
    metadata: dict[str, Value] = {}
    for index in range(n_entries):
        header.what = f"metadata entry {index:,} of {n_entries:,}"
        key, value = await header.parse(_parse_entry)
        if key in metadata:
            raise header.bad_here(f"the key {key!r} occurs twice")
        metadata[key] = value
    alignment = _alignment(header, metadata)

    infos: list[TensorInfo] = []
    for index in range(n_tensors):
        header.what = f"tensor {index:,} of {n_tensors:,}"
        infos.append(await header.parse(_parse_tensor))
    data_offset = -(-header.position // alignment) * alignment
    tensors = _place(header, infos, data_offset, alignment)
    return GgufFile(
        header.name, version, MappingProxyType(metadata), MappingProxyType(tensors), alignment, data_offset, header.size
    )


def _parse_start(header: _Header) -> tuple[int, int, int]:
    """Magic, version and the two counts."""
    if header.size < 24:
        raise header.bad(f"{header.size:,} bytes are too few for a GGUF file, whose fixed header alone has 24")
    header.skip(4)
    magic = header.data[:4]
    if magic != b"GGUF":
        raise header.bad(
            f"not a GGUF file: it starts with {magic!r}, not b'GGUF'. A download may have saved a web page or a pointer"
        )
    version = header.number(_U32)
    if version & 0xFFFF == 0 and version:
        raise Unsupported(
            f"{header.name}: a big-endian GGUF file. Convert it to little-endian (gguf_convert_endian.py)."
        )
    if version not in (2, 3):
        raise Unsupported(
            f"{header.name}: GGUF version {version:,}; versions 2 and 3 are supported. Convert the model again."
        )
    n_tensors, n_entries = header.number(_U64), header.number(_U64)
    header.check_count(n_entries, _SMALLEST_ENTRY, "metadata entries")
    header.check_count(n_tensors, _SMALLEST_TENSOR, "tensors")
    return version, n_tensors, n_entries


def _parse_entry(header: _Header) -> tuple[str, Value]:
    key = header.string(MAX_KEY_BYTES)
    header.what = f"value of {key!r}"
    return key, _value(header, header.number(_U32))


def _value(header: _Header, kind: int, depth: int = 0) -> Value:
    if kind == _STRING:
        return header.string()
    if kind == _ARRAY:
        return _array(header, depth + 1)
    layout = _SCALAR_STRUCTS.get(kind)
    if layout is None:
        header.position -= 4
        raise header.bad_here(f"unknown value type {kind:,} (0 to 12 exist)")
    value: int | float = layout.unpack_from(header.data, header.skip(layout.size))[0]
    if kind != _BOOL:
        return value
    if value > 1:
        header.position -= 1
        raise header.bad_here(f"a boolean with value {value} (0 and 1 exist)")
    return bool(value)


def _array(header: _Header, depth: int) -> list[Value]:
    if depth > ARRAY_DEPTH:
        raise header.bad_here(f"arrays nested more than {ARRAY_DEPTH} deep")
    kind, count = header.number(_U32), header.number(_U64)
    smallest = _SMALLEST_BYTES.get(kind)
    if smallest is None:
        header.position -= 12
        raise header.bad_here(f"unknown array element type {kind:,} (0 to 12 exist)")
    header.check_count(count, smallest, "array elements")
    if kind == _STRING:
        return _strings(header, count)
    if kind == _ARRAY:
        return [_array(header, depth + 1) for _ in range(count)]
    at = header.skip(count * smallest)
    if kind == _BOOL:
        raw = header.data[at : header.position]
        if rest := raw.lstrip(b"\0\1"):
            header.position -= len(rest)
            raise header.bad_here(f"a boolean with value {rest[0]} (0 and 1 exist)")
        return [byte == 1 for byte in raw]
    return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", header.data, at))


def _strings(header: _Header, count: int) -> list[Value]:
    """``count`` strings.  Vocabularies have 10^5, so the loop is bare; ``string`` explains what is wrong."""
    data, unpack, position = header.data, _U64.unpack_from, header.position
    available = len(data)
    out: list[Value] = []
    append = out.append
    try:
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > available:
                position = start - 8
                break
            append(data[start:position].decode())
    except (struct.error, UnicodeDecodeError):
        position = start - 8
    header.position = position
    if len(out) < count:
        header.what += f", string {len(out):,} of {count:,}"
        header.string()  # raises _NeedMore, or the BadFile that says what is wrong here
    return out


def _parse_tensor(header: _Header) -> TensorInfo:
    """One row of the tensor table; ``offset`` is still relative to the data section."""
    name = header.string(MAX_TENSOR_NAME_BYTES)
    header.what = f"tensor {name!r}"
    n_dimensions = header.number(_U32)
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        header.position -= 4
        raise header.bad_here(f"{n_dimensions:,} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    shape = tuple(header.number(_U64) for _ in range(n_dimensions))
    elements = prod(shape)
    if not 0 < elements < 1 << 63:
        header.position -= 8 * n_dimensions
        raise header.bad_here(f"shape {list(shape)} has a zero or more than 2^63 - 1 elements")
    row_format = find_format(header.number(_U32), f"{header.name}: {header.what}")
    if shape[0] % row_format.block_size:
        raise header.bad_here(f"rows of {shape[0]:,} are not whole {row_format.name} blocks of {row_format.block_size}")
    return TensorInfo(name, shape, row_format, header.number(_U64), row_format.nbytes(elements))


def _alignment(header: _Header, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int):
        raise header.bad(f"general.alignment is {alignment!r}, not an integer")
    if alignment < 8 or alignment & (alignment - 1):
        raise header.bad(f"general.alignment is {alignment:,}; a power of two of at least 8 is needed")
    return alignment


def _place(header: _Header, infos: list[TensorInfo], data_offset: int, alignment: int) -> dict[str, TensorInfo]:
    """The tensors by name, with their offsets in the file.  Refuses doubled, misaligned, cut and overlapping ones."""
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in tensors:
            raise header.bad(f"the tensor name {info.name!r} occurs twice")
        if info.offset % alignment:
            raise header.bad(
                f"tensor {info.name!r}: offset {info.offset:,} is not a multiple of the alignment, {alignment:,}"
            )
        start = data_offset + info.offset
        if start + info.nbytes > header.size:
            raise header.bad(
                f"tensor {info.name!r} takes bytes {start:,} to {start + info.nbytes:,} of a file that ends at "
                f"{header.size:,}: it is cut short or corrupt; download it again"
            )
        tensors[info.name] = TensorInfo(info.name, info.shape, info.format, start, info.nbytes)
    for left, right in pairwise(sorted(tensors.values(), key=lambda info: info.offset)):
        if left.offset + left.nbytes > right.offset:
            raise header.bad(
                f"tensors {left.name!r} (to byte {left.offset + left.nbytes:,}) and {right.name!r} "
                f"(from byte {right.offset:,}) overlap"
            )
    return tensors
