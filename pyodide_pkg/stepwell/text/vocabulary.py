"""The vocabulary of a GGUF file: its ``tokenizer.ggml.*`` keys, checked once and put into one record.

Which tokens are special, and which end a generation, is decided as in llama.cpp (llama-vocab.cpp): a GGUF file says it
only in part, and for the rest llama.cpp goes by the token's text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar, cast

from stepwell.errors import BadFile, Unsupported
from stepwell.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from stepwell.text.sentencepiece import byte_of, derive_merges

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


T = TypeVar("T", str, int, float)


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
    """The facts that a tokenizer is made from.  A token's id is its place in ``tokens``."""

    tokens: Sequence[str]
    merges: Sequence[str]  # "left right", the first is merged first
    pre_tokenizer: PreTokenizer | None  # of a byte-level vocabulary; None: a SentencePiece vocabulary
    special_ids: frozenset[int]  # parsed in a text, and not text for people: control, unknown, end of generation
    user_defined_ids: frozenset[int]  # parsed in a text, and text for people
    right_strip_ids: frozenset[int]  # take the white space after them in a text with them
    bytes: Mapping[int, int]  # id → byte of a SentencePiece vocabulary's tokens for single bytes
    eog_ids: frozenset[int]  # end a generation
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None  # SentencePiece: the token of a character without a token or bytes of its own
    add_bos: bool
    space_prefix: bool  # a text gets a space in front of it, and in front of what follows a special token


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary in ``metadata``, that of a GGUF file.

    Raises Unsupported for a tokenizer that is not implemented, BadFile for keys that are missing or contradict others.
    """
    pre_tokenizer = _pre_tokenizer(metadata)
    tokens = _array(metadata, "tokenizer.ggml.tokens", str)
    types = _column(metadata, "tokenizer.ggml.token_type", int, len(tokens))
    ids = _ids(tokens)
    special_ids = set(_of_type(types, TokenType.CONTROL, TokenType.UNKNOWN))
    special_ids |= {ids[name] for name in _END_OF_GENERATION if name in ids}
    user_defined_ids = set(_of_type(types, TokenType.USER_DEFINED))
    spm = pre_tokenizer is None
    bos_id = _token_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens), 1 if spm else None)
    return Vocabulary(
        tokens=tokens,
        merges=_merges(metadata, ids) if pre_tokenizer else _derived_merges(metadata, tokens, types),
        pre_tokenizer=pre_tokenizer,
        special_ids=frozenset(special_ids),
        user_defined_ids=frozenset(user_defined_ids - special_ids),
        right_strip_ids=_right_strip_ids(metadata, tokens, special_ids | user_defined_ids) if spm else frozenset(),
        bytes={i: byte_of(tokens[i], i) for i in _of_type(types, TokenType.BYTE)} if spm else {},
        eog_ids=_eog_ids(metadata, ids, 2 if spm else None),
        bos_id=bos_id,
        eos_id=_token_id(metadata, "tokenizer.ggml.eos_token_id", len(tokens), 2 if spm else None),
        unknown_id=_token_id(metadata, "tokenizer.ggml.unknown_token_id", len(tokens), 0) if spm else None,
        add_bos=_add_bos(metadata, bos_id, default=pre_tokenizer.add_bos if pre_tokenizer else True),
        space_prefix=_flag(metadata, "tokenizer.ggml.add_space_prefix", default=True) if spm else False,
    )


def _pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer | None:
    """The pre-tokenizer of a byte-level vocabulary; None for a SentencePiece one, which cuts nothing."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise BadFile("tokenizer.ggml.model is missing: the file has no tokenizer.")
    if model == "llama":
        return None
    if model != "gpt2":
        raise Unsupported(
            f"tokenizer.ggml.model is {model!r}; supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE)."
        )
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


def _column(metadata: Mapping[str, object], key: str, kind: type[T], rows: int) -> Sequence[T]:
    """The array under ``key``, with a value for each of ``rows`` tokens."""
    values = _array(metadata, key, kind)
    if len(values) != rows:
        raise BadFile(f"{key} has {len(values):,} entries, tokenizer.ggml.tokens has {rows:,}.")
    return values


def _of_type(types: Sequence[int], *kinds: TokenType) -> list[int]:
    """The ids of the tokens whose type is one of ``kinds``."""
    wanted = {
        int(kind) for kind in kinds
    }  # plain ints: comparing enums takes a tenth of a second for a large vocabulary
    return [i for i, kind in enumerate(types) if kind in wanted]


def _flag(metadata: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise BadFile(f"{key} is {value!r}; a bool belongs there.")
    return value


def _add_bos(metadata: Mapping[str, object], bos_id: int | None, *, default: bool) -> bool:
    key = "tokenizer.ggml.add_bos_token"
    wanted = _flag(metadata, key, default=default)
    if wanted and bos_id is None and key in metadata:
        raise BadFile(f"{key} is true, but there is no tokenizer.ggml.bos_token_id.")
    return wanted and bos_id is not None


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    """Token text → id.  Raises BadFile for a text that occurs twice or is empty (it would match everywhere)."""
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


def _merges(metadata: Mapping[str, object], ids: Mapping[str, int]) -> Sequence[str]:
    merges = _array(metadata, "tokenizer.ggml.merges", str)
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if " " in right or left not in ids or right not in ids or left + right not in ids:
            raise BadFile(f"tokenizer.ggml.merges: merge {index:,}, {merge!r}, is not two tokens that make a third.")
    return merges


def _derived_merges(metadata: Mapping[str, object], tokens: Sequence[str], types: Sequence[int]) -> Sequence[str]:
    """The merges of the tokens that a text is made of; the others are matched before it is cut, or never."""
    scores = _column(metadata, "tokenizer.ggml.scores", float, len(tokens))
    not_a_number = next((i for i, score in enumerate(scores) if score != score), None)
    if not_a_number is not None:
        raise BadFile(f"tokenizer.ggml.scores: the score of token {not_a_number:,} is not a number.")
    return derive_merges({tokens[i]: scores[i] for i in _of_type(types, TokenType.NORMAL, TokenType.UNUSED)})


def _right_strip_ids(metadata: Mapping[str, object], tokens: Sequence[str], added: set[int]) -> frozenset[int]:
    """The tokens that take the white space after them: Phi-3's special ones, which a GGUF file does not say."""
    if metadata.get("general.architecture") != "phi3":
        return frozenset()
    return frozenset(i for i in added if tokens[i] not in ("<unk>", "<s>", "<|endoftext|>"))


def _token_id(metadata: Mapping[str, object], key: str, size: int, default: int | None = None) -> int | None:
    """The id under ``key``; without one ``default``, if a vocabulary of ``size`` tokens has that id."""
    value = metadata.get(key)
    if value is None:
        return default if default is not None and default < size else None
    if type(value) is not int or not 0 <= value < size:
        raise BadFile(f"{key} is {value!r}; the vocabulary has the ids 0 to {size - 1:,}.")
    return value


def _eog_ids(metadata: Mapping[str, object], ids: Mapping[str, int], default_eos: int | None) -> frozenset[int]:
    names = [name for name in _END_OF_GENERATION if name in ids]
    found = {
        _token_id(metadata, "tokenizer.ggml.eos_token_id", len(ids), default_eos),
        _token_id(metadata, "tokenizer.ggml.eot_token_id", len(ids)),
        _token_id(metadata, "tokenizer.ggml.eom_token_id", len(ids)),
    }
    for key, candidates in _FILL_IN_THE_MIDDLE.items():
        by_key = _token_id(metadata, key, len(ids))
        by_name = next((ids[name] for name in candidates if name in ids), None)
        found.add(by_name if by_key is None else by_key)
    return frozenset(i for i in found if i is not None).union(ids[name] for name in names)
