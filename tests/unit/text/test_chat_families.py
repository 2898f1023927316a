"""Conversations of every family: templates with the means of theirs, the prompt, its ids, and BOS exactly once."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from stepwell.errors import BadRequest
from stepwell.text.backends import rust_backend
from stepwell.text.chat import render_chat
from stepwell.text.detokenizer import Detokenizer
from stepwell.text.tokenizer import Tokenizer
from tests.support.tiny_vocabulary import tiny_metadata, tiny_sentencepiece

LLAMA_2 = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system, turns = messages[0]['content'], messages[1:] -%}
{%- else -%}
    {%- set system, turns = none, messages -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if turn['role'] != ['user', 'assistant'][loop.index0 % 2] -%}
        {{- raise_exception('user and assistant must take turns') -}}
    {%- elif turn['role'] == 'user' -%}
        {{- bos_token + '[INST] ' -}}
        {%- if loop.first and system is not none -%}
            {{- '<<SYS>>\\n' + system.strip() + '\\n<</SYS>>\\n\\n' -}}
        {%- endif -%}
        {{- turn['content'].strip() + ' [/INST]' -}}
    {%- else -%}
        {{- ' ' + turn['content'] | trim + ' ' + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""
LLAMA_3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set day = date_string | default(strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024') %}
{%- macro turn(role, text) %}
{{- '<|start_header_id|>' ~ role ~ '<|end_header_id|>\\n\\n' ~ text | trim ~ '<|eot_id|>' }}
{%- endmacro %}
{%- if messages[0].role == 'system' %}
    {{- turn('system', 'Today: ' ~ day[:0] ~ '\\n' ~ messages[0].content) }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- turn(message.role, message['content']) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
PHI_3 = """\
{% for message in messages %}
{% if message['role'] in ('system', 'user', 'assistant') and message['content'] %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
"""
PHI_4_MINI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not "
    "none %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}{{ '<|' + message['role'] + '|>' + "
    "message['content'] + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% else %}{{ eos_token }}{% endif %}"
)
QWEN_2 = (
    "{% set ns = namespace(system=messages[0]['role'] == 'system') %}{% for message in messages %}"
    "{% if loop.first and not ns.system %}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>%s\\n%s<|im_end|>\\n' | format(message.role, message.content) }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template, the tokens it writes, and what the prompt of CONVERSATION is."""

    template: str
    prompt: str
    pre: str | None  # None: SentencePiece
    special: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None
    architecture: str = "llama"
    keys: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> Tokenizer:
        """A vocabulary of the bytes, the special tokens and, of SentencePiece, the space."""
        if self.pre is None:
            metadata = tiny_sentencepiece(["▁"], special=self.special, **self.keys)
        else:
            named = {"bos_token_id": self.bos, "eos_token_id": self.eos}
            ids = {key: 256 + self.special.index(token) for key, token in named.items() if token is not None}
            metadata = tiny_metadata(special=self.special, pre=self.pre, **ids, **self.keys)
        return Tokenizer({"general.architecture": self.architecture, **metadata}, rust_backend)


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Ünï 12?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "  why\n"},
]
FAMILIES = {
    "llama-2": Family(
        LLAMA_2,
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nÜnï 12? [/INST] Yes. </s><s>[INST] why [/INST]",
        pre=None,
        keys={"add_bos_token": True},
    ),
    "llama-3": Family(
        LLAMA_3,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday: \nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nÜnï 12?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nwhy<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        pre="llama-bpe",
        special=("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "phi-3": Family(
        PHI_3,
        "<|system|>\nBe brief.<|end|>\n<|user|>\nÜnï 12?<|end|>\n<|assistant|>\nYes.<|end|>\n"
        "<|user|>\n  why\n<|end|>\n<|assistant|>\n",
        pre=None,
        special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        architecture="phi3",
    ),
    "phi-4-mini": Family(
        PHI_4_MINI,
        "<|system|>Be brief.<|end|><|user|>Ünï 12?<|end|><|assistant|>Yes.<|end|><|user|>  why\n<|end|><|assistant|>",
        pre="gpt-4o",
        special=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>"),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        architecture="phi3",
        keys={"add_bos_token": False},
    ),
    "qwen-2": Family(
        QWEN_2,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nÜnï 12?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\n  why\n<|im_end|>\n<|im_start|>assistant\n",
        pre="qwen2",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos="<|endoftext|>",
        eos="<|im_end|>",
        keys={"add_bos_token": False},
    ),
}


def render(family: Family, messages: list[dict[str, str]], **options: Any) -> str:
    tokenizer = family.tokenizer()
    return render_chat(
        family.template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, **options
    )


def expected_ids(family: Family, text: str) -> list[int]:
    """Special tokens and bytes, by the layout of the tiny vocabularies."""
    if family.pre is None:
        names = {"<s>": 1, "</s>": 2} | {name: 260 + i for i, name in enumerate(family.special)}
    else:
        names = {name: 256 + i for i, name in enumerate(family.special)}
    ids: list[int] = []
    for part in filter(None, re.split("(" + "|".join(map(re.escape, names)) + ")", text)):
        if part in names:
            ids.append(names[part])
        elif family.pre is not None:
            ids += part.encode()
        else:
            after_phi_3_token = family.architecture == "phi3" and ids
            prefixed = " " + (part.lstrip() if after_phi_3_token else part)
            ids += [259 if byte == 0x20 else 3 + byte for byte in prefixed.encode()] if prefixed != " " else []
    return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt(name: str) -> None:
    assert render(FAMILIES[name], CONVERSATION) == FAMILIES[name].prompt


@pytest.mark.parametrize(
    ("name", "bos_of_template", "bos_of_tokenizer"),
    [
        ("llama-2", [1], []),
        ("llama-3", [256], []),
        ("phi-3", [], [1]),
        ("phi-4-mini", [], []),
        ("qwen-2", [], []),
    ],
)
def test_ids_with_one_bos_where_the_family_has_it(
    name: str, bos_of_template: list[int], bos_of_tokenizer: list[int]
) -> None:
    family = FAMILIES[name]
    written = expected_ids(family, family.prompt)
    assert written[:1] == bos_of_template or not bos_of_template
    ids = family.tokenizer().encode(family.prompt)
    assert ids == [*bos_of_tokenizer, *written]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_of_the_prompt_show_only_on_request(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    ids = tokenizer.encode(family.prompt)
    shown = {}
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer, skip_special=skip)
        shown[skip] = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    if family.pre is not None:
        assert shown[False] == family.prompt
    assert not re.search(r"<\||</?s>", shown[True])
    assert re.sub(r"\s", "", shown[True]) == re.sub(r"\s|<\|.*?\|>|</?s>", "", family.prompt)


def test_turns_end_a_generation() -> None:
    ends = {
        "llama-2": "</s>",
        "llama-3": "<|eot_id|>",
        "phi-3": "<|end|>",
        "phi-4-mini": "<|end|>",
        "qwen-2": "<|im_end|>",
    }
    for name, end in ends.items():
        tokenizer = FAMILIES[name].tokenizer()
        assert tokenizer.encode(end)[-1] in tokenizer.eog_ids


def test_without_a_generation_prompt_or_a_system_message() -> None:
    user = CONVERSATION[1:2]
    assert render(FAMILIES["phi-4-mini"], user, add_generation_prompt=False) == "<|user|>Ünï 12?<|end|><|endoftext|>"
    assert render(FAMILIES["llama-2"], user) == "<s>[INST] Ünï 12? [/INST]"
    assert render(FAMILIES["qwen-2"], user).startswith("<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\n")


def test_llama_2_refuses_a_conversation_out_of_turn() -> None:
    with pytest.raises(BadRequest, match="must take turns"):
        render(FAMILIES["llama-2"], CONVERSATION[1:2] * 2)
