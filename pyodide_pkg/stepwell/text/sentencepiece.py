"""SentencePiece vocabularies (``tokenizer.ggml.model`` "llama"): BPE over characters, ordered by the tokens' scores.

A file has no merges: two neighbours merge if together they are a token, the token with the highest score first.  BPE
libraries want a rank for each pair, so each token's pairs get the place of its score.
"""

from collections.abc import Mapping

from stepwell.errors import BadFile

SPACE = "\u2581"
"""The character that stands for a space in a token."""


def derive_merges(scores: Mapping[str, float]) -> list[str]:
    """The merges of a vocabulary with ``scores`` (token -> score), as "left right"; the first is merged first.

    They are the pairs of tokens that together are a token as well.  The pairs of one token follow the scores of their
    parts, which only matters where two of them overlap in a text.
    """
    merges: list[str] = []
    # A token with a space in it is in no text: those have SPACE for it.
    for token in sorted((t for t in scores if " " not in t), key=scores.__getitem__, reverse=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in scores and right in scores]
        pairs.sort(key=lambda pair: (scores[pair[0]], scores[pair[1]]), reverse=True)
        merges += [f"{left} {right}" for left, right in pairs]
    return merges


def byte_of(token: str, token_id: int) -> int:
    """The byte that ``token`` of type BYTE, such as ``<0x0A>``, stands for.  Raises BadFile, with ``token_id``."""
    digits = token[3:5]
    if token != f"<0x{digits}>" or not set(digits) <= set("0123456789ABCDEF"):
        raise BadFile(f"tokenizer.ggml.tokens: token {token_id:,}, {token!r}, is marked as a byte, but is not <0xNN>.")
    return int(digits, 16)
