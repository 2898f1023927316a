"""Vocabularies of every family, trained by the ``tokenizers`` library on the stored cases, as GGUF metadata.

Each comes with the trained tokenizer itself: what it makes of a text is what ours must make of it.  Their
pre-tokenizers are put together as in the ``tokenizer.json`` of the family's models, not as we write them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tests.support.paths import DATA

_CASES = json.loads((DATA / "smollm2-tokenizer-cases.json").read_text("utf-8"))["cases"]
_MORE = (  # one thing each
    "CamelCase XMLHttpRequest iPhone HTML5 ÉCOLE École ǅungla ǅUNGLA",
    "I'M you'RE We'Ll it'S don'T 'Sup ''s",
    "'\u017f x'\u017fy",
    "1 12 123 1234 12345 1234567 v1.2.3 a1b22c333",
    "a/b//c\n/d /\r\n/",
    "!!!\n\n???\r\n\r\n...",
    "\r\n\r \n \t\n x",
    "e\u0301te\u0301 é \u1112\u1161\u11ab \u212b \u03a9\u2126",
    "\u0085x\u0085 \u00a0y\ufeffz \u2003\u3000w",
    "\u200b\u200d\u2060",
    "<|a|> [INST] <<SYS>> </s > <0x0A> <0x4G>",
    "snake_case kebab-case $x^2+y^2=z~|w",
    "'",
    "' ",
    " '",
    "''''",
    "s't",
    "नमस्ते दुनिया क्ष",
    "สวัสดีชาวโลก",
    "שָׁלוֹם",
    "👩‍👩‍👧‍👦🇩🇪👍🏽",
    "日本語テキスト、中文。한국어!",
    "\U0001d400\U0001d7d8 \u0660\u0661",
    "\x00\x01\x1f\x7f",
    "\ufffd\ufffe\uffff\U0010ffff",
    "a" * 300,
    " " * 33 + "x" + " " * 7,
    "\n" * 9,
    "\t" * 5 + "y",
    "",
    "def f(x):\n    return x**2  # squared\n\n\n\nclass A:\n\tpass\n",
    "if(a&&b||!c){d[i]+=e->f;}//x",
    '{"k": [1, 2.5e-3, null]}',
)
TEXTS: tuple[str, ...] = (*(case["text"] for case in _CASES), *_MORE)

_I = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UP, _LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UP}*{_LOW}+{_I}?|[^\r\n\p{{L}}\p{{N}}]?{_UP}+{_LOW}*{_I}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cl100k(digits: str) -> str:
    return (
        rf"{_I}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_BYTE_LEVEL: dict[str, list[Any]] = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _GPT2],
    "llama-bpe": _split(_cl100k("{1,3}")),
    "gpt-4o": _split(_O200K),
    "dbrx": _split(_cl100k("{1,3}")),
    "qwen2": _split(_cl100k("")),
    "gpt-2": [_GPT2],
}
FAMILIES = (*_BYTE_LEVEL, "sentencepiece")


@dataclass(frozen=True)
class Trained:
    metadata: dict[str, object]
    library: Tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self.library.encode(text, add_special_tokens=False).ids)


@cache
def trained(family: str) -> Trained:
    return _sentencepiece() if family == "sentencepiece" else _byte_level(family)


def _byte_level(family: str) -> Trained:
    library = Tokenizer(BPE(ignore_merges=family == "llama-bpe"))
    library.pre_tokenizer = pre_tokenizers.Sequence(_BYTE_LEVEL[family])
    library.decoder = decoders.ByteLevel()
    if family == "qwen2":
        library.normalizer = normalizers.NFC()
    special = ["<|endoftext|>", "<|begin|>", "<|end|>"]
    trainer = BpeTrainer(
        vocab_size=900,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=special,
        show_progress=False,
    )
    library.train_from_iterator(TEXTS * 2, trainer)
    model = json.loads(library.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return Trained(
        _metadata(
            model="gpt2",
            pre=family,
            tokens=tokens,
            token_type=[3 if token in special else 1 for token in tokens],
            merges=[" ".join(pair) for pair in model["merges"]],
            add_bos_token=False,
        ),
        library,
    )


def _sentencepiece() -> Trained:
    """Llama 2's way: control tokens, the bytes, what was merged, characters.  A rare character has no token."""
    control, data = ["<unk>", "<s>", "</s>", "<|end|>"], [f"<0x{byte:02X}>" for byte in range(256)]
    training = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True))
    training.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    training.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    training.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = BpeTrainer(vocab_size=900, limit_alphabet=90, special_tokens=[*control, *data], show_progress=False)
    # Without texts like <|end|>, which would become tokens from text that look special.
    training.train_from_iterator([text for text in TEXTS if "<|" not in text] * 2, trainer)
    document = json.loads(training.to_str())
    document["pre_tokenizer"] = None
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] in control]
    model = document["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    rank = {left + right: rank for rank, (left, right) in reversed([*enumerate(model["merges"])])}
    return Trained(
        _metadata(
            model="llama",
            tokens=tokens,
            scores=[float(-rank.get(token, len(rank) + i)) for i, token in enumerate(tokens)],
            token_type=[_kind(token, control, data) for token in tokens],
            add_bos_token=False,
        ),
        Tokenizer.from_str(json.dumps(document)),
    )


def _kind(token: str, control: Sequence[str], data: Sequence[str]) -> int:
    if token in control:
        return 2 if token == "<unk>" else 3
    return 6 if token in data else 1


def _metadata(**values: object) -> dict[str, object]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}
