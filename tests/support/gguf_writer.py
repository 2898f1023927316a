"""Writes GGUF files, good and bad, from plain structs.

``gguf_bytes`` lays out a whole file; its parts (``string``, ``entry``, ``tensor_row``, ``assemble``) are for tests that
build one wrong part into an otherwise right file.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


class Typed(NamedTuple):
    """A value with its type number; the elements of an ARRAY have type ``items``."""

    kind: int
    value: Any
    items: int | None = None


class Tensor(NamedTuple):
    """A tensor with its dimensions in GGUF order, its GGML type number and its bytes."""

    name: str
    shape: Sequence[int]
    ggml_type: int
    data: bytes


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(typed: Typed) -> bytes:
    """The value alone, without its type."""
    if typed.kind == STRING:
        return string(typed.value)
    if typed.kind == ARRAY:
        if typed.items in (STRING, ARRAY):
            elements = b"".join(value(item if isinstance(item, Typed) else Typed(STRING, item)) for item in typed.value)
        else:
            elements = struct.pack(f"<{len(typed.value)}{SCALARS[typed.items]}", *typed.value)
        return struct.pack("<IQ", typed.items, len(typed.value)) + elements
    return struct.pack(f"<{SCALARS[typed.kind]}", typed.value)


def infer(raw: Any) -> Typed:
    """The type that model converters give a Python value."""
    if isinstance(raw, Typed):
        return raw
    if isinstance(raw, list):
        items = infer(raw[0]).kind if raw else STRING
        return Typed(ARRAY, [infer(item) for item in raw] if items == ARRAY else raw, I32 if items == U32 else items)
    kinds: dict[type, int] = {bool: BOOL, int: U32, float: F32, str: STRING, bytes: STRING}
    return Typed(kinds[type(raw)], raw)


def entry(key: str | bytes, raw: Any) -> bytes:
    typed = infer(raw)
    return string(key) + struct.pack("<I", typed.kind) + value(typed)


def tensor_row(name: str | bytes, shape: Sequence[int], ggml_type: int, offset: int) -> bytes:
    head = string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return head + struct.pack("<IQ", ggml_type, offset)


def assemble(
    entries: Sequence[bytes] = (),
    rows: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_entries: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file out of its parts; the counts may be forged."""
    counts = (len(rows) if n_tensors is None else n_tensors, len(entries) if n_entries is None else n_entries)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(rows)
    return header + (bytes(-len(header) % alignment) + data if data else b"")


def gguf_bytes(metadata: Mapping[str, Any], tensors: Iterable[Tensor] = (), **forged: Any) -> bytes:
    """A file whose tensors lie one behind the other, aligned, with nothing behind the last one."""
    alignment = forged.get("alignment", 32)
    rows, data = [], bytearray()
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        rows.append(tensor_row(tensor.name, tensor.shape, tensor.ggml_type, len(data)))
        data += tensor.data
    return assemble([entry(key, raw) for key, raw in metadata.items()], rows, bytes(data), **forged)
