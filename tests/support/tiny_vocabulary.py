"""The metadata of vocabularies small enough to read: tokens for the 256 bytes, and what a test adds."""

from collections.abc import Sequence


def byte_symbol(byte: int) -> str:
    """The character of GPT-2's alphabet for a byte, written down as ranges: no formula shared with the package."""
    if byte <= 0x20:
        return chr(0x100 + byte)
    if 0x7F <= byte <= 0xA0:
        return chr(0x121 + byte - 0x7F)
    return chr(0x143) if byte == 0xAD else chr(byte)


def symbols(data: bytes) -> str:
    return "".join(map(byte_symbol, data))


def tiny_metadata(
    merges: Sequence[str] = (), /, special: Sequence[str] = (), user_defined: Sequence[str] = (), **keys: object
) -> dict[str, object]:
    """Byte-level BPE.  Tokens in this order: the bytes, what the merges make, special tokens, user-defined ones.

    ``keys`` are ``tokenizer.ggml`` keys that replace those; None removes one.
    """
    merged = [merge.replace(" ", "") for merge in merges]
    normal = [*map(byte_symbol, range(256)), *merged]
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": [*normal, *special, *user_defined],
        "token_type": [1] * len(normal) + [3] * len(special) + [4] * len(user_defined),
        "merges": list(merges),
    }
    values |= keys
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def tiny_sentencepiece(
    pieces: Sequence[str] = (), /, special: Sequence[str] = (), user_defined: Sequence[str] = (), **keys: object
) -> dict[str, object]:
    """SentencePiece.  Tokens in this order: <unk>, <s>, </s>, the bytes, ``pieces`` (the first has the best score),
    special tokens, user-defined ones.

    ``keys`` are ``tokenizer.ggml`` keys that replace those; None removes one.
    """
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    values: dict[str, object] = {
        "model": "llama",
        "tokens": [*first, *pieces, *special, *user_defined],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), *[3] * len(special), *[4] * len(user_defined)],
        "scores": [0.0] * 259 + [float(-i) for i in range(len(pieces))] + [0.0] * (len(special) + len(user_defined)),
    }
    values |= keys
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
