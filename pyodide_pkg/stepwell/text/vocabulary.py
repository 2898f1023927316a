"""The vocabulary of a GGUF file: its ``tokenizer.ggml.*`` keys, checked once and put into one record.

Which tokens are special and which end a generation follows llama.cpp (llama-vocab.cpp): a GGUF file says it only in
part, for the rest llama.cpp goes by the token's text, and so do all who must agree with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar, cast

from stepwell.errors import BadFile, Unsupported

# GPT-2's pattern without its last alternative ``\s+``: white space that it leaves over is a piece of its own anyway.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

# tokenizer.ggml.pre → the patterns that cut a text into words, one after the other, each match a piece of its own.
PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", _GPT2),
}

# Tokens that end a generation whatever their type says.  Left out: those of vocabularies in which llama.cpp takes some
# of them back (harmony, solar-open, gemma4), none of which has a pre-tokenizer here.
_END_OF_GENERATION = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>", "[e~["),  # noqa: RUF001
)

# Fill-in-the-middle tokens end a generation too; the key wins, else the first of the names that the vocabulary has.
_FILL_IN_THE_MIDDLE = {
    "tokenizer.ggml.fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "tokenizer.ggml.fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "tokenizer.ggml.fim_sep_token_id": ("<|file_sep|>",),
}


T = TypeVar("T", str, int)


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``, as the GGUF specification numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a byte-level BPE tokenizer is made from.  A token's id is its place in ``tokens``."""

    tokens: Sequence[str]
    merges: Sequence[str]  # "left right", the first is merged first
    patterns: tuple[str, ...]  # of the pre-tokenizer
    special_ids: frozenset[int]  # parsed in a text, no text for people: control, unknown, end of generation
    user_defined_ids: frozenset[int]  # parsed in a text, and text themselves
    eog_ids: frozenset[int]  # end a generation
    bos_id: int | None
    eos_id: int | None
    add_bos: bool


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary in ``metadata`` (the dict of a GGUF file).

    Raises Unsupported for a tokenizer that we do not have, BadFile for keys that are missing or contradict each other.
    """
    patterns = _pre_tokenizer(metadata)
    tokens = _array(metadata, "tokenizer.ggml.tokens", str)
    types = _array(metadata, "tokenizer.ggml.token_type", int)
    merges = _array(metadata, "tokenizer.ggml.merges", str)
    if len(types) != len(tokens):
        raise BadFile(
            f"tokenizer.ggml.token_type has {len(types):,} entries, tokenizer.ggml.tokens has {len(tokens):,}."
        )
    ids = _ids(tokens)
    _check_merges(merges, ids)
    bos_id = _token_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens))
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", False)
    if not isinstance(add_bos, bool):
        raise BadFile(f"tokenizer.ggml.add_bos_token is {add_bos!r}; a bool belongs there.")
    if add_bos and bos_id is None:
        raise BadFile("tokenizer.ggml.add_bos_token is true, but there is no tokenizer.ggml.bos_token_id.")
    special_ids = {i for i, kind in enumerate(types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)}
    special_ids |= {ids[name] for name in _END_OF_GENERATION if name in ids}
    user_defined_ids = {i for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED}
    return Vocabulary(
        tokens=tokens,
        merges=merges,
        patterns=patterns,
        special_ids=frozenset(special_ids),
        user_defined_ids=frozenset(user_defined_ids - special_ids),
        eog_ids=_eog_ids(metadata, ids),
        bos_id=bos_id,
        eos_id=_token_id(metadata, "tokenizer.ggml.eos_token_id", len(tokens)),
        add_bos=add_bos,
    )


def _pre_tokenizer(metadata: Mapping[str, object]) -> tuple[str, ...]:
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise BadFile("tokenizer.ggml.model is missing: the file has no tokenizer.")
    if model != "gpt2":
        raise Unsupported(f"tokenizer.ggml.model is {model!r}; supported: 'gpt2' (byte-level BPE).")
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise Unsupported(f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(map(repr, PRE_TOKENIZERS))}.")
    return PRE_TOKENIZERS[pre]


def _array(metadata: Mapping[str, object], key: str, kind: type[T]) -> Sequence[T]:
    value = metadata.get(key)
    if value is None:
        raise BadFile(f"{key} is missing: the tokenizer is incomplete.")
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not set(map(type, value)) <= {kind}:
        raise BadFile(f"{key} is not an array of {kind.__name__}.")
    return cast("Sequence[T]", value)


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    """Token text → id.  Every text stands once, and none is empty: an empty special token would match everywhere."""
    ids = {token: i for i, token in enumerate(tokens)}
    if not ids:
        raise BadFile("tokenizer.ggml.tokens is empty.")
    if "" in ids:
        raise BadFile(f"tokenizer.ggml.tokens: token {ids['']:,} is empty.")
    if len(ids) != len(tokens):
        first = next(i for i, token in enumerate(tokens) if ids[token] != i)
        raise BadFile(
            f"tokenizer.ggml.tokens: {tokens[first]!r} is both token {first:,} and token {ids[tokens[first]]:,}."
        )
    return ids


def _check_merges(merges: Sequence[str], ids: Mapping[str, int]) -> None:
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if " " in right or left not in ids or right not in ids or left + right not in ids:
            raise BadFile(f"tokenizer.ggml.merges: merge {index:,}, {merge!r}, is not two tokens that make a third.")


def _token_id(metadata: Mapping[str, object], key: str, size: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < size:
        raise BadFile(f"{key} is {value!r}; the vocabulary has the ids 0 to {size - 1:,}.")
    return value


def _eog_ids(metadata: Mapping[str, object], ids: Mapping[str, int]) -> frozenset[int]:
    names = [name for name in _END_OF_GENERATION if name in ids]
    found = {_token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(ids)) for name in ("eos", "eot", "eom")}
    for key, candidates in _FILL_IN_THE_MIDDLE.items():
        by_key = _token_id(metadata, key, len(ids))
        by_name = next((ids[name] for name in candidates if name in ids), None)
        found.add(by_name if by_key is None else by_key)
    return frozenset(i for i in found if i is not None).union(ids[name] for name in names)
