"""A vocabulary as a ``tokenizer.json``, the format of Hugging Face's tokenizers: the part that both libraries read."""

from stepwell.text.pre_tokenizers import PreTokenizer
from stepwell.text.sentencepiece import SPACE
from stepwell.text.vocabulary import Vocabulary


def document(vocabulary: Vocabulary) -> dict[str, object]:
    """The ``tokenizer.json`` of ``vocabulary``, as plain data."""
    pre_tokenizer = vocabulary.pre_tokenizer
    stages = _sentencepiece(vocabulary.space_prefix) if pre_tokenizer is None else _byte_level(pre_tokenizer)
    unknown = vocabulary.unknown_id
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": None,
        **stages,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": pre_tokenizer is None,
            "ignore_merges": pre_tokenizer is not None and pre_tokenizer.ignore_merges,
            "vocab": {token: i for i, token in enumerate(vocabulary.tokens)},
            "merges": vocabulary.merges,
        },
    }


def _byte_level(pre_tokenizer: PreTokenizer) -> dict[str, object]:
    # Split by patterns and ByteLevel without its own regex, where "Digits" and ByteLevel's default would be shorter:
    # the JavaScript library's Digits knows ASCII only and its ByteLevel pattern does not know U+0085 as white space.
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre_tokenizer.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre_tokenizer.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
    }


def _sentencepiece(space_prefix: bool) -> dict[str, object]:
    prepend = [{"type": "Prepend", "prepend": SPACE}] if space_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space_prefix else []
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
    }


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, object]]:
    return [
        {
            "id": i,
            "content": vocabulary.tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": i in vocabulary.right_strip_ids,
            "normalized": False,
            "special": i in vocabulary.special_ids,
        }
        for i in sorted(vocabulary.special_ids | vocabulary.user_defined_ids)
    ]
