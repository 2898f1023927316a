"""The tokenizer libraries: each backend takes a ``tokenizer.json`` as text and gives a function from a text to its ids.

In the browser that is @huggingface/tokenizers, through a function that the page hands in (web/tokenizer.js);
on CPython, for tests and tools, the ``tokenizers`` package.  Both parse the special tokens in a text and add none.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Encoder: TypeAlias = Callable[[str], Iterable[int]]
"""A function from a text to its ids."""
MakeEncoder: TypeAlias = Callable[[str], Encoder]
"""A function from a ``tokenizer.json``, as text, to its encoder."""


def rust_backend(tokenizer_json: str) -> Encoder:
    """The backend of CPython: the encoder of ``tokenizer_json``."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def js_backend(make_tokenizer: Callable[[str], Callable[[str], Any]]) -> MakeEncoder:
    """The backend of the browser; ``make_tokenizer`` is ``makeTokenizer`` of web/tokenizer.js.

    A text crosses the border as one string and its ids come back as one Int32Array, whose proxy dies here.
    """

    def make_encoder(tokenizer_json: str) -> Encoder:
        encode = make_tokenizer(tokenizer_json)
        return lambda text: list(encode(text).to_py())

    return make_encoder
