"""The GGUF reader: what it reads, what it refuses and with which words, and how much of the file it touches."""

import asyncio
import struct
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import BadFile, StepwellError, Unsupported
from stepwell.gpu.source import BytesSource, FileSource
from stepwell.weights import gguf as reader
from stepwell.weights.formats import _OTHER_NAMES, FORMATS
from stepwell.weights.gguf import GgufFile, read_gguf
from tests.support.demo_model import demo_model_path
from tests.support.gguf_writer import (
    ARRAY,
    BOOL,
    F64,
    I8,
    I64,
    STRING,
    U8,
    U16,
    U64,
    Tensor,
    Typed,
    assemble,
    entry,
    gguf_bytes,
    string,
    tensor_row,
)

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.bool": True,
    "a.u32": 7,
    "a.f32": 0.5,
    "a.i8": Typed(I8, -3),
    "a.u16": Typed(U16, 65_535),
    "a.u64": Typed(U64, 2**64 - 1),
    "a.i64": Typed(I64, -(2**63)),
    "a.f64": Typed(F64, 0.1),
    "a.empty": "",
    "a.text": "Ġtoken é 漢",
    "a.strings": ["a", "", "Ċ", "x" * 300],
    "a.ints": [1, -2, 3],
    "a.bools": Typed(ARRAY, [1, 0, 1], BOOL),
    "a.none": Typed(ARRAY, [], U8),
    "a.nested": [["a", "b"], ["c"]],
}
TENSORS = [
    Tensor("norm", (5,), 0, bytes(range(20))),
    Tensor("matrix", (64, 3), 3, bytes(3 * 2 * 20)),
    Tensor("half", (3, 2, 2), 1, bytes(24)),
]
GOOD = gguf_bytes(METADATA, TENSORS)


def read(data: bytes, name: str = "m.gguf") -> GgufFile:
    return asyncio.run(read_gguf(BytesSource(data, name)))


class CountingSource(BytesSource):
    """Counts the bytes that were read, and can pretend that the file goes on with zeros."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        super().__init__(data, "counted.gguf")
        self.stored = len(data)
        self.size = size or len(data)
        self.bytes_read = 0

    async def read(self, offset: int, nbytes: int) -> bytes:
        self.bytes_read += nbytes
        found = await super().read(offset, nbytes)
        return found + bytes(min(nbytes, self.size - offset) - len(found))


def test_reads_every_value_type_and_places_the_tensors() -> None:
    file = read(GOOD)
    plain = {key: raw.value if isinstance(raw, Typed) else raw for key, raw in METADATA.items()}
    assert dict(file.metadata) == plain | {"a.bools": [True, False, True]}
    assert file.metadata["a.bool"] is True
    assert file.metadata["a.bools"][0] is True  # type: ignore[index]
    assert (file.name, file.version, file.alignment, file.size) == ("m.gguf", 3, 32, len(GOOD))
    assert file.data_offset % 32 == 0
    assert [(info.name, info.shape, info.format.name, info.nbytes) for info in file.tensors.values()] == [
        ("norm", (5,), "F32", 20),
        ("matrix", (64, 3), "Q4_1", 120),
        ("half", (3, 2, 2), "F16", 24),
    ]
    for tensor in TENSORS:
        info = file.tensors[tensor.name]
        assert GOOD[info.offset : info.offset + info.nbytes] == tensor.data


def test_version_2_has_the_same_layout() -> None:
    file = read(gguf_bytes(METADATA, TENSORS, version=2))
    assert file.version == 2
    assert file.tensors == read(GOOD).tensors


def test_a_file_without_tensors_is_a_file() -> None:
    assert read(gguf_bytes({"a": 1})).metadata == {"a": 1}


def test_alignment_moves_the_data() -> None:
    file = read(gguf_bytes(METADATA | {"general.alignment": 256}, TENSORS, alignment=256))
    assert file.alignment == 256
    assert all(info.offset % 256 == 0 for info in file.tensors.values())


def test_the_gguf_package_reads_what_our_writer_writes(tmp_path: Path) -> None:
    flat = {key: raw for key, raw in METADATA.items() if key not in ("a.nested", "a.none", "a.bools")}
    path = tmp_path / "ours.gguf"
    path.write_bytes(gguf_bytes(flat, TENSORS))
    theirs = gguf.GGUFReader(path)
    ours = asyncio.run(read_gguf(FileSource(path)))
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value, key
    assert [(t.name, t.n_bytes, t.data_offset, t.tensor_type) for t in theirs.tensors] == [
        (t.name, t.nbytes, t.offset, t.format.ggml_type) for t in ours.tensors.values()
    ]


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_rope_freq_base(10_000.0)
    writer.add_token_list(["a", "Ġb", "漢"])
    writer.add_token_types([1, 1, 3])
    writer.add_add_bos_token(False)
    weights = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("n", weights[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = asyncio.run(read_gguf(FileSource(path)))
    assert dict(file.metadata) == {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "llama.rope.freq_base": 10_000.0,
        "tokenizer.ggml.tokens": ["a", "Ġb", "漢"],
        "tokenizer.ggml.token_type": [1, 1, 3],
        "tokenizer.ggml.add_bos_token": False,
    }
    info = file.tensors["w"]
    assert (info.shape, info.format.name) == ((64, 3), "Q8_0")
    assert path.read_bytes()[info.offset : info.offset + info.nbytes] == packed.tobytes()


def test_the_format_table_agrees_with_the_gguf_package() -> None:
    for kind, (block_size, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        if row := FORMATS.get(kind.value):
            assert (row.name, row.block_size, row.block_bytes) == (kind.name, block_size, block_bytes)
        else:
            assert _OTHER_NAMES[kind.value] == kind.name
    assert not FORMATS.keys() & _OTHER_NAMES.keys()


def test_reads_only_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    big = Tensor("w", (1 << 20,), 0, b"")
    header = gguf_bytes({"tokens": [f"token {index}" for index in range(200_000)]}, [big])
    source = CountingSource(header, size=len(header) + 64 + (4 << 20))
    file = asyncio.run(read_gguf(source))
    assert file.tensors["w"].nbytes == 4 << 20
    assert len(header) > 3 << 20
    assert source.bytes_read < 2 * len(header)
    small = CountingSource(GOOD, size=50 << 20)
    asyncio.run(read_gguf(small))
    assert small.bytes_read == reader.FIRST_READ_BYTES


@pytest.mark.parametrize("first", [1, 2, 7, 64])
def test_entries_that_span_reads_are_read_again(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(GOOD)
    monkeypatch.setattr(reader, "FIRST_READ_BYTES", first)
    assert read(GOOD) == whole
    with pytest.raises(BadFile, match=r"m\.gguf: value of 'b', byte 54: a boolean with value 2"):
        read(assemble([entry("a", 1), entry("b", Typed(BOOL, 2))]))


def test_every_truncation_is_a_bad_file() -> None:
    assert read(GOOD)
    for cut in range(len(GOOD)):
        with pytest.raises(BadFile, match=r"^cut\.gguf: "):
            read(GOOD[:cut], "cut.gguf")


def rows(*made: bytes, data: int = 4096) -> bytes:
    return assemble([], made, bytes(data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are too few"),
        (b"<!DOCTYPE html><html></html>", "starts with b'<!DO'"),
        (assemble(magic=b"GGML"), "starts with b'GGML'"),
        (assemble([entry("a", Typed(BOOL, 2))]), "value of 'a', byte 37: a boolean with value 2"),
        (assemble([entry("a", Typed(ARRAY, [0, 1, 5], BOOL))]), "value of 'a', byte 51: a boolean with value 5"),
        (assemble([string("a") + struct.pack("<IQ", 13, 0)]), "value of 'a', byte 33: unknown value type 13"),
        (assemble([string("a") + struct.pack("<IIQ", 9, 99, 0)]), "unknown array element type 99"),
        (assemble([entry("a", 1), entry("a", 2)]), "the key 'a' occurs twice"),
        (assemble([entry("", 1)]), "metadata entry 0 of 1, byte 24: a name of 0 bytes"),
        (assemble([entry("k" * 65_536, 1)]), "a name of 65,536 bytes"),
        (assemble([entry(b"\xff", 1)]), "metadata entry 0 of 1, byte 32: not UTF-8"),
        (assemble([entry("a", b"ab\xffc")]), "value of 'a', byte 47: not UTF-8"),
        (assemble([entry("a", ["ok", b"\xc3"])]), "value of 'a', string 1 of 2, byte 67: not UTF-8"),
        (assemble(n_entries=2**63), "9,223,372,036,854,775,808 metadata entries need at least"),
        (assemble(n_tensors=2**64 - 1), "18,446,744,073,709,551,615 tensors need at least"),
        (assemble([string("a") + struct.pack("<IQ", STRING, 2**62)]), "4,611,686,018,427,387,904 bytes are needed but"),
        (assemble([string("a") + struct.pack("<IIQ", ARRAY, STRING, 2**40)]), "array elements need at least"),
        (assemble([string("a") + struct.pack("<IIQ", ARRAY, F64, 2**61)]), "array elements need at least"),
        (assemble([string("a") + struct.pack("<IIQQ", ARRAY, STRING, 1, 2**63)]), "string 0 of 1, byte 57"),
        (assemble([entry("general.alignment", 0)]), "general.alignment is 0"),
        (assemble([entry("general.alignment", 24)]), "general.alignment is 24"),
        (assemble([entry("general.alignment", 4)]), "general.alignment is 4"),
        (assemble([entry("general.alignment", "32")]), "general.alignment is '32', not an integer"),
        (assemble([entry("general.alignment", True)]), "general.alignment is True, not an integer"),
        (rows(tensor_row("w", (), 0, 0)), "tensor 'w', byte 33: 0 dimensions"),
        (rows(tensor_row("w", (1, 1, 1, 1, 1), 0, 0)), "tensor 'w', byte 33: 5 dimensions"),
        (rows(tensor_row("w", (4, 0), 0, 0)), r"tensor 'w', byte 37: shape \[4, 0\]"),
        (rows(tensor_row("w", (2**32, 2**32), 0, 0)), "tensor 'w', byte 37: shape"),
        (rows(tensor_row("w", (48, 2), 3, 0)), "rows of 48 are not whole Q4_1 blocks of 32"),
        (rows(tensor_row("w", (4,), 0, 16)), "tensor 'w': offset 16 is not a multiple of the alignment, 32"),
        (rows(tensor_row("w", (1025,), 0, 0)), "tensor 'w' takes bytes 64 to 4,164 of a file that ends at 4,160"),
        (rows(tensor_row("w", (4,), 0, 2**63)), "of a file that ends at 4,160"),
        (rows(tensor_row("w", (2**60,), 0, 0)), "of a file that ends at 4,160"),
        (rows(tensor_row("", (4,), 0, 0)), "a name of 0 bytes"),
        (rows(tensor_row("w" * 65, (4,), 0, 0)), "a name of 65 bytes"),
        (rows(tensor_row("w", (4,), 0, 0), tensor_row("w", (4,), 0, 32)), "the tensor name 'w' occurs twice"),
        (
            rows(tensor_row("b", (9,), 0, 32), tensor_row("a", (9,), 0, 0)),
            r"tensors 'a' \(to byte 132\) and 'b' \(from byte 128\) overlap",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_refuses_what_is_wrong_and_says_where(data: bytes, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        read(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf_bytes(METADATA, version=1), "GGUF version 1; versions 2 and 3 are supported"),
        (gguf_bytes(METADATA, version=4), "GGUF version 4;"),
        (gguf_bytes(METADATA, version=0), "GGUF version 0;"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (
            rows(tensor_row("w", (256,), 10, 0)),
            "tensor 'w' has type Q2_K. Supported types: "
            "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K. Use a",
        ),
        (rows(tensor_row("w", (256,), 39, 0)), "tensor 'w' has type MXFP4"),
        (rows(tensor_row("w", (256,), 4, 0)), r"type Q4_2 \(removed"),
        (rows(tensor_row("w", (256,), 777, 0)), "type 777, a number that this version does not know"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_refuses_what_it_does_not_have_by_name(data: bytes, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        read(data)


def nested(depth: int) -> bytes:
    return (
        string("a") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * (depth - 1) + struct.pack("<IQ", U8, 0)
    )


def test_nesting_is_bounded() -> None:
    assert read(assemble([nested(4)])).metadata["a"] == [[[[]]]]
    for depth in (5, 100_000):
        with pytest.raises(BadFile, match="arrays nested more than 4 deep"):
            read(assemble([nested(depth)]))


def test_forged_counts_allocate_nothing() -> None:
    forged = assemble([string("a") + struct.pack("<IIQ", ARRAY, U8, 2**34)])
    source = CountingSource(forged, size=2**35)
    tracemalloc.start()
    try:
        with pytest.raises(BadFile, match="17,179,869,184 array elements need"):
            asyncio.run(read_gguf(source))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert source.bytes_read == reader.FIRST_READ_BYTES


def test_a_header_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "HEADER_LIMIT_BYTES", 3 << 20)
    source = CountingSource(assemble([string("a") + struct.pack("<IQ", STRING, 5 << 20)]), size=20 << 20)
    with pytest.raises(BadFile, match="metadata entry 0 of 1 continues beyond the first 3,145,728 bytes"):
        asyncio.run(read_gguf(source))
    assert source.bytes_read == 3 << 20


def test_a_source_that_ends_early_is_a_bad_file() -> None:
    source = BytesSource(GOOD, "short.gguf")
    source.size += 100
    with pytest.raises(BadFile, match=r"short\.gguf: a read of .* at byte 0 gave"):
        asyncio.run(read_gguf(source))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="cannot be read: No such file"):
        FileSource(tmp_path / "none.gguf")
    path = tmp_path / "gone.gguf"
    path.write_bytes(GOOD)
    source = FileSource(path)
    path.unlink()
    with pytest.raises(BadFile, match="cannot be read"):
        asyncio.run(source.read(0, 4))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_give_a_file_or_a_typed_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for position, byte in changes:
        data[position] = byte
    try:
        file = read(bytes(data))
    except StepwellError as error:
        assert str(error).startswith("m.gguf: ")
    else:
        assert all(info.offset + info.nbytes <= file.size for info in file.tensors.values())


def test_the_demo_model() -> None:
    file = asyncio.run(read_gguf(FileSource(demo_model_path())))
    assert Counter(info.format.name for info in file.tensors.values()) == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert len(file.metadata) == 33
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49_152  # type: ignore[arg-type]
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48_900  # type: ignore[arg-type]
    assert (file.data_offset, file.size) == (1_785_664, 98_362_432)
