"""What becomes of templates that fail, and of a BOS token that a client sends."""

from __future__ import annotations

import pytest

from backends.models.tokenizer import HfTokenizer
from backends.types import ModelInfo
from gateway.wire.errors import InvalidRequest
from gateway.wire.prompts import encode_messages
from tests.support.tokenizer_families import FAMILIES, family

INFO = ModelInfo("m", 4096, 260, 0, "float32", "cpu")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", 'can only concatenate str (not "int") to str'),
        ("{{ messages[0].nothing.more }}", "'dict object' has no attribute 'nothing'"),
        ("{{ messages[7].content }}", "list object has no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content | nonsense }}", "No filter named 'nonsense'."),
        ("{% for m in messages %}", "Unexpected end of template."),
        ("{{ messages[0].content.format(**{}) + {}['a']['b'] }}", "'dict object' has no attribute 'a'"),
    ],
)
async def test_a_template_that_fails_refuses_the_messages_in_its_own_words(template: str, words: str) -> None:
    tokenizer = HfTokenizer(FAMILIES["byte-level"]())
    tokenizer._hf.chat_template = template
    for content in ("hi", "<|end|>"):
        with pytest.raises(InvalidRequest) as caught:
            await encode_messages(tokenizer, [{"role": "user", "content": content}], 2048, INFO)
        assert caught.value.param == "messages"
        assert words in str(caught.value) or "unsupported operand type(s) for +: 'str' and 'int'" in str(caught.value)
        assert str(caught.value).count("template refuses") == 1
        assert "Traced" not in str(caught.value)


async def test_a_model_without_a_template_says_where_to_go() -> None:
    tokenizer = HfTokenizer(FAMILIES["chatml"]())
    with pytest.raises(InvalidRequest, match=r"^m has no chat template; use /v1/completions"):
        await encode_messages(tokenizer, [{"role": "user", "content": "hi"}], 2048, INFO)


def test_a_prompt_that_begins_with_bos_gets_no_second_one() -> None:
    tokenizer = family("byte-fallback")
    bos = tokenizer._hf.bos_token_id
    assert tokenizer.encode("ab")[0] == bos
    assert tokenizer.encode("<s>ab").count(bos) == 1
    assert tokenizer.encode("<s><s>ab").count(bos) == 2
    assert tokenizer.encode("") == [bos]
    assert family("chatml").encode("<|im_end|>ab").count(family("chatml")._hf.eos_token_id) == 1
