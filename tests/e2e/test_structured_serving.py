"""Structured output on the real model: ``medusa-gateway serve`` as users start it, and the official client."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import BadRequestError, LengthFinishReasonError, OpenAI
from pydantic import BaseModel, Field

from tests.e2e.test_demo_serving import MODEL

pytestmark = pytest.mark.model


class Ingredient(BaseModel):
    ingredient_name: str = Field(max_length=20)
    grams: int = Field(ge=0, le=2000)


class Recipe(BaseModel):
    """A short recipe."""

    recipe_name: str = Field(max_length=30)
    difficulty: Literal["easy", "medium", "hard"]
    ingredients: list[Ingredient] = Field(min_length=1, max_length=2)
    vegetarian: bool


ASKED: list[Any] = [{"role": "user", "content": "Give me a short recipe for pancakes as JSON."}]


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_parse_gives_the_same_object_with_speculation_and_without(client: OpenAI, settings: dict[str, Any]) -> None:
    said = {}
    for method in ("medusa", "vanilla"):
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=ASKED,
            response_format=Recipe,
            max_tokens=160,
            extra_body={"decoding": {"method": method}},
            **settings,
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Recipe)
        said[method] = choice.message.content, answer.usage.completion_tokens
        decoding: dict[str, Any] = answer.decoding  # type: ignore[attr-defined]
        if method == "medusa":
            assert decoding["accepted_grammar_tokens"] > 10
            assert decoding["drafted_grammar_tokens"] >= decoding["accepted_grammar_tokens"]
            assert decoding["lossless"] is True
    assert said["medusa"] == said["vanilla"]


def test_a_streamed_answer_and_its_cut(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASKED, response_format=Recipe, temperature=0) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Recipe)
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Recipe, temperature=0, max_tokens=8)


def test_json_mode_and_other_servers_ways(client: OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        format_ = {"response_format": fields.pop("response_format")} if "response_format" in fields else {}
        answer = client.chat.completions.create(
            model=MODEL, messages=ASKED, temperature=0.7, seed=1, max_tokens=60, **format_, extra_body=fields
        )
        return answer.choices[0]

    assert ask(response_format={"type": "json_object"}).message.content.startswith("{")
    assert ask(guided_choice=["yes", "no"]).message.content in ("yes", "no")
    assert ask(structured_outputs={"regex": "[a-c]{3}"}).message.content in {
        a + b + c for a in "abc" for b in "abc" for c in "abc"
    }
    assert ask(grammar='root ::= "it is " ("hot" | "cold")').message.content in ("it is hot", "it is cold")
    # Inside a document, stop strings are data.
    schema = {"type": "object", "properties": {"a": {"const": "END of it"}}, "required": ["a"]}
    whole = ask(guided_json={**schema, "additionalProperties": False}, stop=["END", "{", '"'])
    assert json.loads(whole.message.content) == {"a": "END of it"}
    assert whole.finish_reason == "stop"
    text = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=20, extra_body={"guided_regex": " [A-Z][a-z]{2,9}"}
    )
    assert text.choices[0].text.startswith(" ")
    with pytest.raises(BadRequestError, match="uniqueItems"):
        ask(guided_json={"type": "array", "uniqueItems": True})
