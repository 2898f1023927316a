"""How byte-level BPE vocabularies cut a text into words before they merge: one row per ``tokenizer.ggml.pre``.

A pattern must mean the same to both libraries (Oniguruma's syntax on CPython, translated to JavaScript's in the
browser).  The last alternative of the originals, ``\\s+``, is left out: white space that matches nothing is a piece
anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The ``patterns`` that cut a text, one after the other; each match is a piece of its own."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges make of it
    add_bos: bool = False  # where the file does not say whether to
    nfc: bool = False  # the text is composed first (Unicode's form NFC)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

# Case is written out, for JavaScript's sake; to ``(?i:'s)`` the long s is an s as well.
_CONTRACTION = r"'(?:[sStTmMdD" + "\u017f" + r"]|[rR][eE]|[vV][eE]|[lL][lL])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"  # with one character before it that is no letter, digit or end of line
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)"

# Capitals begin a word: CamelCase is two.  Letters without case are on both sides.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?:{_CONTRACTION})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?:{_CONTRACTION})?"
)

_CL100K = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACE}"
_LLAMA3 = PreTokenizer((_CL100K,), ignore_merges=True, add_bos=True)
_GPT2_ALONE = PreTokenizer((_GPT2,))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-4o": PreTokenizer(
        (rf"{_CASED_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}",)  # Phi-4-mini
    ),
    "dbrx": PreTokenizer((_CL100K,)),  # Phi-4
    "qwen2": PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACE}",), nfc=True),
    "gpt-2": _GPT2_ALONE,
    "phi-2": _GPT2_ALONE,
}
"""The pre-tokenizers, by the value of ``tokenizer.ggml.pre``."""
