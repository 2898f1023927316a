"""Chat templates: the demo model's prompts to the letter, and what a hostile or broken template can do (an error)."""

import asyncio
import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from stepwell.errors import BadFile, BadRequest
from stepwell.gpu.source import FileSource
from stepwell.text.backends import rust_backend
from stepwell.text.chat import render_chat
from stepwell.text.tokenizer import Tokenizer
from stepwell.weights.gguf import read_gguf
from tests.support.demo_model import demo_model_path
from tests.support.paths import DATA

ORACLE = json.loads((DATA / "smollm2-oracle.json").read_text())
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("name", ORACLE["prompts"])
def test_demo_prompts_equal_the_oracle(name: str) -> None:
    metadata: Any = asyncio.run(read_gguf(FileSource(demo_model_path()))).metadata
    expected = ORACLE["prompts"][name]
    user = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", expected["prompt"], re.DOTALL)
    prompt = render_chat(metadata["tokenizer.chat_template"], [{"role": "user", "content": text} for text in user])
    assert prompt == expected["prompt"]
    assert Tokenizer(metadata, rust_backend).encode(prompt) == expected["prompt_ids"]


def test_messages_and_names_reach_the_template() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{{ tools is none and documents is none }}"
    )
    messages = [{"role": "system", "content": "<b>"}, {"role": "user", "content": "a & b"}]
    assert (
        render_chat(template, messages, bos_token="<s>", eos_token="</s>")
        == "<s>[system] <b></s>\n[user] a & b</s>\n[assistant]True"
    )
    assert render_chat(template, HELLO, add_generation_prompt=False) == "[user] Hello\nTrue"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if true %}\nx\n{% endif %}\ny", "x\ny"),  # trim_blocks
        ("a\n   {% if true %}\nb\n   {% endif %}\n", "a\nb\n"),  # lstrip_blocks
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}", "Hello"),
        ("{{ unknown }}.", "."),
        ("{{ raise_exception.__globals__ }}.", "."),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        (
            "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(15) }}",
            "1514131211109876543210",
        ),
    ],
)
def test_settings_are_those_of_transformers(template: str, text: str) -> None:
    assert render_chat(template, HELLO) == text


def test_the_date_is_today() -> None:
    before = datetime.now(UTC).astimezone().strftime("%Y-%m-%d")
    shown = render_chat("{{ strftime_now('%Y-%m-%d') }}", HELLO)
    assert shown in {before, datetime.now(UTC).astimezone().strftime("%Y-%m-%d")}


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(BadRequest, match="refuses these messages: roles must alternate"):
        render_chat("{{ raise_exception('roles must alternate') }}", HELLO)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\nb {% if %}", "in line 2: Expected an expression"),
        ("\n\n{% unknown %}", "in line 3: Encountered unknown tag"),
        ("\n{{ messages.x.y }}", "in line 2: 'list object' has no attribute 'x'"),
        ("\n\n\n{{ 1 / 0 }}", "in line 4: division by zero"),
        ("{{ messages[0].content + 1 }}", "in line 1: can only concatenate str"),
        ("\n{{ ''.__class__.__mro__ }}", "in line 2: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ raise_exception.__globals__.items() }}", "'__globals__' of 'function' object is unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "access to attribute '__class__' of 'int' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{% include 'x' %}", "no loader for this environment"),
        ("\n{% for i in range(100001) %}{% endfor %}", "in line 2: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n\n{{ f() }}", "calls nest deeper than 20"),
        ("{{ " + "[" * 2000 + "]" * 2000 + " }}", "recursion"),
        ("{% if true %}" * 2000 + "{% endif %}" * 2000, "recursion"),
        ("{{ 'x' * 4000001 }}", "writes more than 4,000,000 characters"),
        ("{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", "writes more than 4,000,000 characters"),
    ],
)
def test_a_template_that_fails_is_a_bad_file_with_its_line(template: str, words: str) -> None:
    with pytest.raises(BadFile) as caught:
        render_chat(template, HELLO)
    assert words in str(caught.value)


def test_a_failed_template_leaves_nothing_behind() -> None:
    for _ in range(3):
        with pytest.raises(BadFile, match="deeper than 20"):
            render_chat("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", HELLO)
    assert render_chat("{{ messages[0].content.upper() }}", HELLO) == "HELLO"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ([{"role": "user"}], "messages[0]: content is None"),
        ([*HELLO, {"content": "x"}], "messages[1]: role is None"),
        ([{"role": "user", "content": 1}], "messages[0]: content is 1"),
        (["hello"], "messages[0] is 'hello'"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        render_chat("x", messages)
    assert words in str(caught.value)
