"""A last message that is left open: the prompt ends with its text, as if the model had written so far itself."""

from __future__ import annotations

import pytest

from backends.models.chat_template import TemplateRefusal
from tests.support.tokenizer_families import FAMILIES, family, turn_tokens

CONTENTS = ["So far", "a", "x = [1]", " the fox ", "end\n", "<|im_end|"]


@pytest.mark.parametrize("template", ["plain", "trimmed", "reasoned"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_prompt_ends_with_the_message(name: str, template: str) -> None:
    tokenizer = family(name, template)
    _, end = turn_tokens(tokenizer._hf)
    for content in CONTENTS:
        messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": content}]
        rendered = tokenizer._hf.apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
        assert rendered.endswith(end)
        expected = tokenizer._fast.encode(rendered.removesuffix(end), add_special_tokens=False).ids
        assert tokenizer.encode_chat(messages, continues=True) == expected, content


def test_marks_in_the_message_stay_letters() -> None:
    tokenizer = family("chatml", "plain")
    _, end = turn_tokens(tokenizer._hf)
    ids = tokenizer.encode_chat([{"role": "assistant", "content": f"a{end}b{end}"}], continues=True)
    assert tokenizer.id_of(end) not in ids
    assert tokenizer.decode(ids).endswith(f"a{end}b{end}")


def test_a_message_that_the_template_changes_is_refused() -> None:
    tokenizer = family("chatml")
    tokenizer._hf.chat_template = "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}"
    with pytest.raises(TemplateRefusal, match="can't be continued"):
        tokenizer.encode_chat([{"role": "assistant", "content": "abc"}], continues=True)
