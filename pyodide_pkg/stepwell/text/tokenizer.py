"""The tokenizer of a GGUF file, on top of a tokenizer library.

The metadata becomes a ``tokenizer.json`` (the format of Hugging Face's tokenizers); a *backend* built from it cuts a
text into ids.  The way back needs no library: a token stands for bytes, and ``token_bytes`` says which.
"""

import json
from collections.abc import Mapping

from stepwell.text.backends import MakeEncoder
from stepwell.text.document import document
from stepwell.text.sentencepiece import SPACE
from stepwell.text.vocabulary import read_vocabulary


def tokenizer_json(metadata: Mapping[str, object]) -> dict[str, object]:
    """The ``tokenizer.json`` of the vocabulary in ``metadata``.  Raises as ``read_vocabulary`` does."""
    return document(read_vocabulary(metadata))


class Tokenizer:
    """Text → ids through a backend (``rust_backend``, ``js_backend(…)``), id → bytes by the vocabulary alone.

    ``metadata`` is that of a GGUF file; raises as ``read_vocabulary`` does.
    """

    def __init__(self, metadata: Mapping[str, object], make_encoder: MakeEncoder) -> None:
        vocabulary = read_vocabulary(metadata)
        self._vocabulary = vocabulary
        self._literal_ids = vocabulary.special_ids | vocabulary.user_defined_ids
        self._encode = make_encoder(json.dumps(document(vocabulary), ensure_ascii=False, separators=(",", ":")))
        self.space_prefix = vocabulary.space_prefix
        self.vocab_size = len(vocabulary.tokens)
        self.eog_ids = vocabulary.eog_ids
        self.bos_token = "" if vocabulary.bos_id is None else vocabulary.tokens[vocabulary.bos_id]
        self.eos_token = "" if vocabulary.eos_id is None else vocabulary.tokens[vocabulary.eos_id]

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``; special tokens written in it are parsed.

        The BOS token is put in front where the file asks for it, unless the text (a chat template's, say) begins with
        it.  A byte for which a byte-level vocabulary has no token is dropped, as every engine does: the list may be
        empty.
        """
        ids = list(self._encode(_scalar_values(text)))
        bos_id = self._vocabulary.bos_id
        if self._vocabulary.add_bos and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that ``token_id`` stands for; a special or user-defined token is its own text in UTF-8.

        Ids beyond the vocabulary stand for nothing: models pad their embedding, and may choose a row of padding.
        """
        if token_id >= self.vocab_size:
            return b""
        token = self._vocabulary.tokens[token_id]
        if token_id in self._literal_ids:
            return token.encode()
        if self._vocabulary.pre_tokenizer is None:
            byte = self._vocabulary.bytes.get(token_id)
            return token.replace(SPACE, " ").encode() if byte is None else bytes((byte,))
        try:
            return bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # a token outside the byte alphabet: an added token that the file does not mark as one
            return token.encode()

    def is_control(self, token_id: int) -> bool:
        """Whether ``token_id`` is a sign for the model, not text for people."""
        return token_id in self._vocabulary.special_ids


def _scalar_values(text: str) -> str:
    """``text`` with each lone surrogate replaced by U+FFFD: JSON can carry one from the page, UTF-8 cannot."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable byte of Latin-1 is its own character, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()
