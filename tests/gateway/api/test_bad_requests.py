"""The bad input table: one row per kind of bad request, with the status, message and param that answer it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from gateway.settings import GatewaySettings
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MAX_BODY = 100_000
BIG = 10**30


class Row(NamedTuple):
    """``change`` is merged into a good request (None: the field is taken out); bytes are sent as they are."""

    name: str
    path: str
    change: dict[str, Any] | bytes
    says: str
    param: str | None
    status: int = 400
    code: str = "invalid_value"


MISSING = object()
UNSUPPORTED = "unsupported_parameter"
TYPE = "invalid_type"


def chat(name: str, change: dict[str, Any] | bytes, says: str, param: str | None, code: str = "invalid_value") -> Row:
    return Row(name, CHAT, change, says, param, 404 if code == "model_not_found" else 400, code)


def text(name: str, change: dict[str, Any] | bytes, says: str, param: str | None, code: str = "invalid_value") -> Row:
    return Row(name, TEXT, change, says, param, 400, code)


def schema(
    name: str,
    asked: Any,
    says: str,
    below: str,
    code: str = "invalid_value",
) -> Row:
    """``below``: what follows the schema's own path in the field that is named."""
    json_schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked, "strict": True}}
    return chat(name, {"response_format": json_schema}, says, f"response_format.json_schema.schema{below}", code)


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
LENIENT = 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'
TWO_SCHEMAS = {"type": "json_schema", "schema": {}, "json_schema": {"name": "a", "schema": {}}}


def chain_of(length: int) -> dict[str, Any]:
    """Each definition refers to the next."""
    defs: dict[str, Any] = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, f"{length}": {}}}


def nested(schema: dict[str, Any], levels: int) -> dict[str, Any]:
    return schema if levels == 0 else {"type": "array", "items": nested(schema, levels - 1)}


def nested_list(levels: int) -> list[Any]:
    return [] if levels == 0 else [nested_list(levels - 1)]


def exploding(levels: int) -> dict[str, Any]:
    """Two alternatives of all that is below, in each of two parts, on every level."""
    if levels == 0:
        return {"type": "object", "properties": {"a": {"type": "string"}}}
    either = {"anyOf": [{"properties": {f"b{levels}": {}}}, {"properties": {f"c{levels}": {}}}]}
    return {"allOf": [either, exploding(levels - 1)]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "x", **fields}]}


CALL: dict[str, Any] = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TYPE_OF_IT = "tools[0].function.parameters.type"


def called(arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return message(role="assistant", tool_calls=[{**CALL, "function": function}])


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def decoding(**fields: Any) -> dict[str, Any]:
    return {"decoding": fields}


ROWS = [
    # Not JSON, or not an object.
    chat("empty body", b"", "empty body is not a request", None, "invalid_json"),
    chat("truncated", b'{"model": "fake', "truncated", None, "invalid_json"),
    chat("not JSON", b"model=fake-model", "not valid JSON", None, "invalid_json"),
    chat(
        "trailing characters",
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}]} {}',
        "trailing characters",
        None,
        "invalid_json",
    ),
    chat("an array", b"[]", "The body must be an object, not an array", None, TYPE),
    chat("null", b"null", "The body must be an object, not null", None, TYPE),
    chat("a byte order mark", b"\xef\xbb\xbf{}", "byte order mark; send UTF-8 without one", None, "invalid_json"),
    chat("invalid UTF-8", b'{"model": "\xff"}', "UTF-8", None, "invalid_json"),
    chat("half a surrogate pair", b'{"model": "\\ud800 and something else"}', "surrogate", None, "invalid_json"),
    chat("NaN", b'{"temperature": NaN}', "NaN and Infinity are not JSON", None, "invalid_json"),
    chat("Infinity", b'{"temperature": -Infinity}', "NaN and Infinity are not JSON", None, "invalid_json"),
    chat(
        "a number past float64",
        b'{"temperature": 1e999}',
        "'temperature' is invalid: Number out of range",
        "temperature",
    ),
    chat(
        "nested too deeply", b'{"tools": ' + b"[" * 9000 + b"]" * 9000 + b"}", "nested too deeply", None, "invalid_json"
    ),
    # Unknown and missing fields.
    chat(
        "unknown field",
        {"colour": "red"},
        "'colour' is not a known field. Leave it out.",
        "colour",
        "unknown_parameter",
    ),
    chat("misspelt field", {"temprature": 1}, "Did you mean 'temperature'?", "temprature", "unknown_parameter"),
    chat("text's field", {"prompt": "x"}, "is a field of POST /v1/completions", "prompt", "unknown_parameter"),
    text("chat's field", {"messages": []}, "a field of POST /v1/chat/completions", "messages", "unknown_parameter"),
    text("chat's no-op field", {"tools": []}, "a field of POST /v1/chat/completions", "tools", "unknown_parameter"),
    chat(
        "a field of another's, and like ours",
        {"length_penaltee": 2},
        "Leave it out",
        "length_penaltee",
        "unknown_parameter",
    ),
    chat("unknown field in a message", message(colour=1), "is not a known", "messages[1].colour", "unknown_parameter"),
    chat("no model", {"model": MISSING}, "'model' is required", "model", "missing_required_parameter"),
    chat("no messages", {"messages": MISSING}, "'messages' is required", "messages", "missing_required_parameter"),
    text("no prompt", {"prompt": MISSING}, "'prompt' is required", "prompt", "missing_required_parameter"),
    chat("model of the wrong type", {"model": 3}, "'model' must be a string, not an integer", "model", TYPE),
    chat("empty model", {"model": ""}, "must be a string of length >= 1", "model"),
    chat(
        "unknown model",
        {"model": "gpt-4o"},
        "'gpt-4o' is not served here; served: fake-model",
        "model",
        "model_not_found",
    ),
    # Messages.
    chat("messages as a string", {"messages": "hi"}, "must be an array, not a string", "messages", TYPE),
    chat("no message", {"messages": []}, "must be an array of length >= 1", "messages"),
    chat("message as a string", {"messages": ["hi"]}, "must be an object", "messages[0]", TYPE),
    chat("no role", {"messages": [{"content": "x"}]}, "is required", "messages[0].role", "missing_required_parameter"),
    chat(
        "no content", {"messages": [{"role": "user"}]}, "required", "messages[0].content", "missing_required_parameter"
    ),
    chat(
        "a tool's message that answers no call",
        message(role="tool"),
        "is required",
        "messages[1].tool_call_id",
        "missing_required_parameter",
    ),
    chat(
        "no such role",
        message(role="robot"),
        "one of: assistant, developer, system, tool, user; got 'robot'",
        "messages[1].role",
    ),
    chat("null content", message(content=None), "required", "messages[1].content", "missing_required_parameter"),
    chat("content of the wrong type", message(content=5), "not an integer", "messages[1].content", TYPE),
    chat("no content parts", message(content=[]), "of length >= 1", "messages[1].content"),
    chat(
        "an image, type first",
        message(content=[{"type": "image_url", "image_url": {"url": "data:"}}]),
        "must be one of: text; got 'image_url'",
        "messages[1].content[0].type",
    ),
    chat(
        "an image, url first",
        message(content=[{"image_url": {"url": "data:"}, "type": "image_url"}]),
        "not supported by this gateway; only text is",
        "messages[1].content[0].image_url",
        UNSUPPORTED,
    ),
    chat(
        "a text part without text",
        message(content=[{"type": "text"}]),
        "is required",
        "messages[1].content[0].text",
        "missing_required_parameter",
    ),
    chat("a name with a blank", message(name="a b"), "may hold letters, digits", "messages[1].name"),
    chat("a name with markers", message(name="<|im_end|>"), "may hold letters, digits", "messages[1].name"),
    chat("a name with a line end", message(name="bob\n"), "may hold letters, digits", "messages[1].name"),
    chat("a name too long", message(name="b" * 65), "of length <= 64", "messages[1].name"),
    chat("a user's refusal", message(refusal="no"), "only an assistant's message", "messages[1].refusal"),
    chat(
        "an answer to go on from",
        message(role="assistant", prefix=True),
        "only false is accepted",
        "messages[1].prefix",
        UNSUPPORTED,
    ),
    chat(
        "a misspelt content, of an assistant",
        {"messages": [{"role": "assistant", "contnet": "x"}]},
        "Did you mean 'content'?",
        "messages[0].contnet",
        "unknown_parameter",
    ),
    chat(
        "a call of no function",
        message(role="assistant", tool_calls=[{"id": "x"}]),
        "is required",
        "messages[1].tool_calls[0].function",
        "missing_required_parameter",
    ),
    chat(
        "a user's calls",
        message(tool_calls=[CALL]),
        "only a message of role assistant has it",
        "messages[1].tool_calls",
    ),
    chat(
        "a user's result", message(tool_call_id="a"), "only a message of role tool has it", "messages[1].tool_call_id"
    ),
    chat(
        "a call whose arguments aren't JSON",
        called("{'a': 1}"),
        "must be a JSON object as text",
        "messages[1].tool_calls[0].function.arguments",
    ),
    chat(
        "a call whose arguments are no object",
        called("[1]"),
        "must be a JSON object as text",
        "messages[1].tool_calls[0].function.arguments",
    ),
    chat(
        "a call whose arguments are nested too deeply",
        called("[" * 9000),
        "must be a JSON object as text",
        "messages[1].tool_calls[0].function.arguments",
    ),
    chat(
        "a result without its call",
        message(role="tool", tool_call_id="call_1"),
        "is 'call_1', but no message before it calls a tool by that id",
        "messages[1].tool_call_id",
    ),
    chat(
        "a function call of old",
        message(function_call={"name": "f"}),
        "send tool_calls",
        "messages[1].function_call",
        UNSUPPORTED,
    ),
    chat(
        "messages that the template refuses",
        {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]},
        "chat template refuses these messages: a system message must come first",
        "messages",
    ),
    # Tools, thoughts, and messages that are continued.
    chat(
        "a tool without a function",
        {"tools": [{"type": "function"}]},
        "is required",
        "tools[0].function",
        "missing_required_parameter",
    ),
    chat("a tool of another kind", {"tools": [{"type": "web_search"}]}, "one of: function", "tools[0].type"),
    chat("a tool's name", {"tools": [tool(name="a b")]}, "may hold letters, digits", "tools[0].function.name"),
    chat("tools beyond count", {"tools": [tool(name=f"t{i}") for i in range(129)]}, "of length <= 128", "tools"),
    chat(
        "a tool named twice",
        {"tools": [tool(), tool()]},
        "'look', which another tool has",
        "tools[1].function.name",
    ),
    chat("a tool that takes a list", {"tools": [tool(parameters={"type": "array"})]}, "must be object", TYPE_OF_IT),
    chat("a choice without tools", {"tool_choice": "required"}, "there are no 'tools'", "tool_choice"),
    chat("a choice of no tool", {"tools": [tool()], "tool_choice": named("see")}, "none of 'tools'", "tool_choice"),
    chat("a choice that is none", {"tools": [tool()], "tool_choice": "any"}, "auto, none, required", "tool_choice"),
    chat(
        "parameters that can't be enforced",
        {"tools": [tool(), tool(name="see", parameters={"not": {}})], "tool_choice": named("see")},
        "is a keyword that can't be enforced",
        "tools[1].function.parameters.not",
        UNSUPPORTED,
    ),
    chat(
        "parameters that refer to nothing",
        {"tools": [tool(parameters={"properties": {"a": {"$ref": "#/$defs/b"}}})], "tool_choice": "required"},
        "no schema of this document is there",
        "tools[0].function.parameters.properties.a.$ref",
    ),
    chat(
        "a format beside tools",
        {"tools": [tool()], "response_format": {"type": "json_object"}},
        "both say what the answer must look like",
        "response_format",
    ),
    chat(
        "a call without an end",
        {"tools": [tool()], "tool_choice": "required", "ignore_eos": True},
        "would write on after the call",
        "ignore_eos",
    ),
    chat(
        "a template's variable that it lacks",
        {"chat_template_kwargs": {"enable_thinking": True}},
        "reads no such name",
        "chat_template_kwargs.enable_thinking",
        UNSUPPORTED,
    ),
    chat(
        "a template's variable of its own field",
        {"chat_template_kwargs": {"messages": []}},
        "has a field of its own",
        "chat_template_kwargs.messages",
        UNSUPPORTED,
    ),
    chat("no effort", {"reasoning_effort": "little"}, "must be one of", "reasoning_effort"),
    chat(
        "a user's message to go on from",
        {"continue_final_message": True},
        "it must be the assistant's, with text",
        "continue_final_message",
    ),
    chat(
        "a call to go on from",
        {"continue_final_message": True, **called("{}")},
        "it must be the assistant's, with text",
        "continue_final_message",
    ),
    chat(
        "a message that begins and goes on",
        {"continue_final_message": True, "add_generation_prompt": True, **message(role="assistant")},
        "send one of them",
        "add_generation_prompt",
    ),
    chat("no beginning", {"add_generation_prompt": False}, "without continue", "add_generation_prompt", UNSUPPORTED),
    text("tools of text", {"tools": [tool()]}, "a field of POST /v1/chat/completions", "tools", "unknown_parameter"),
    # Fields of OpenAI's that are not honoured.
    chat("functions", {"functions": [{"name": "f"}]}, "'functions' is not supported", "functions", UNSUPPORTED),
    # What the answer must look like.
    chat(
        "a format unknown", {"response_format": {"type": "xml"}}, "must be one of: json_object", "response_format.type"
    ),
    chat(
        "a schema that is missing",
        {"response_format": {"type": "json_schema"}},
        "'response_format.json_schema' is required with type json_schema",
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    chat(
        "a schema without a name",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "is required",
        "response_format.json_schema.name",
        "missing_required_parameter",
    ),
    schema("a schema as an array", [], "must be an object or null, not an array", "", TYPE),
    schema("uniqueItems", {"type": "array", "uniqueItems": True}, "can't be enforced", ".uniqueItems", UNSUPPORTED),
    schema("not", {"properties": {"a": {"not": {}}}}, "say what is allowed", ".properties.a.not", UNSUPPORTED),
    schema("a misspelt keyword", {"requierd": ["a"]}, "is no keyword of JSON Schema", ".requierd", UNSUPPORTED),
    schema("a switch of the library's", {"x-guidance": {"lenient": True}, "if": {}}, "anyOf", ".if", UNSUPPORTED),
    schema("a format that isn't known", {"format": "colour"}, "can't be enforced", ".format", UNSUPPORTED),
    schema("a type that isn't one", {"type": "strnig"}, "Invalid type: strnig", ".type"),
    schema("a pattern that isn't one", {"type": "string", "pattern": "("}, "unclosed group", ".pattern"),
    schema("look-ahead", {"type": "string", "pattern": "^(?=a)b$"}, "look-around", ".pattern"),
    schema("a schema that refers to itself only", {"$ref": "#"}, "no text fits it", ""),
    schema("two that refer to each other", LOOP, "no text fits it", ""),
    schema("a reference to nowhere", {"$ref": "#/$defs/a"}, "no schema of this document", ".$ref"),
    schema("a reference elsewhere", {"$ref": "http://127.0.0.1/s"}, "no schema of this document", ".$ref"),
    schema("10,000 enum values", {"enum": list(range(10_000))}, "more than 1000", ".enum"),
    schema("1,001 properties", {"properties": {f"p{i}": {} for i in range(1001)}}, "more than 1000 schemas", ""),
    schema("a chain of 1,001 references", chain_of(1001), "more than 1000 schemas", ""),
    schema("absurd nesting", nested({"type": "string"}, 100), "at most 64 levels", ""),
    schema("a constant nested absurdly", {"const": nested_list(300)}, "can't be carried out", ""),
    schema("no value", {"enum": []}, "Unsatisfiable", ""),
    schema("two types at once", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types", ""),
    chat("half a surrogate", {"guided_json": '{"const": "\\ud800"}'}, "half a surrogate pair", "guided_json"),
    chat("an exploding union", {"guided_json": exploding(12)}, "can't be carried out", "guided_json"),
    chat("a grammar too long", {"guided_grammar": "start: " + '"a" ' * 3000}, "at most 8192", "guided_grammar"),
    chat("a schema as text that is no JSON", {"guided_json": "{"}, "not valid JSON", "guided_json", "invalid_json"),
    chat("a schema as text that is none", {"guided_json": "[]"}, "must be a JSON schema", "guided_json", TYPE),
    chat("a regular expression that is none", {"guided_regex": "["}, "unclosed character class", "guided_regex"),
    chat("a regular expression too long", {"regex": "a" * 9000}, "at most 8192", "regex"),
    chat("no choices", {"guided_choice": []}, "array of length >= 1", "guided_choice"),
    chat("choices that aren't text", {"guided_choice": [1]}, "must be a string", "guided_choice[0]", TYPE),
    chat("5,000 choices", {"guided_choice": ["a"] * 5000}, "from 1 to 1000", "guided_choice"),
    chat("a grammar that is none", {"guided_grammar": "garbage("}, "Expected token", "guided_grammar"),
    chat("a grammar without a beginning", {"grammar": 'a ::= "x"'}, "No 'root' rule", "grammar"),
    chat("a grammar that never ends", {"grammar": 'root ::= root "x"'}, "no text fits it", "grammar"),
    chat("a grammar that would be ignored", {"ebnf": LENIENT}, "may not hold 'x-guidance'", "ebnf", UNSUPPORTED),
    chat(
        "two formats",
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "'response_format' and 'guided_regex' both say what the answer must look like; send one of them.",
        "guided_regex",
    ),
    chat(
        "two formats in one",
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "has regex and choice; send exactly one",
        "structured_outputs.choice",
    ),
    chat("no format in one", {"structured_outputs": {}}, "says nothing; send exactly one", "structured_outputs"),
    chat(
        "vLLM's white space",
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "is not supported",
        "structured_outputs.whitespace_pattern",
        UNSUPPORTED,
    ),
    chat("two schemas", {"response_format": TWO_SCHEMAS}, "two schemas", "response_format.schema"),
    chat(
        "a schema for free text",
        {"response_format": {"type": "text", "schema": {}}},
        "goes with type json_schema",
        "response_format.schema",
    ),
    chat("no end", {"guided_regex": "a", "ignore_eos": True}, "'ignore_eos' would write on after", "ignore_eos"),
    text("a choice too many, of text", {"guided_choice": ["a"], "grammar": 'start: "a"'}, "both say", "grammar"),
    chat("audio", {"audio": {"voice": "alloy"}}, "'audio' is not supported", "audio", UNSUPPORTED),
    chat("modalities", {"modalities": ["audio"]}, "is not supported", "modalities", UNSUPPORTED),
    chat("prediction", {"prediction": {"type": "content"}}, "is not supported", "prediction", UNSUPPORTED),
    chat("reasoning effort", {"reasoning_effort": "low"}, "is not supported", "reasoning_effort", UNSUPPORTED),
    chat("store", {"store": True}, "only false is accepted", "store", UNSUPPORTED),
    chat("store that equals False but isn't", {"store": 0}, "only false is accepted", "store", UNSUPPORTED),
    chat("service tier", {"service_tier": "flex"}, "is not supported", "service_tier", UNSUPPORTED),
    text("echo streamed", {"echo": True, "stream": True}, "'echo' is not supported with stream", "echo", UNSUPPORTED),
    text("no tokens and no echo", {"max_tokens": 0}, "'max_tokens' 0 asks for nothing", "max_tokens"),
    text("suffix", {"suffix": "end"}, "'suffix' is not supported", "suffix", UNSUPPORTED),
    text("best_of", {"best_of": 3}, "'best_of' other than n is not supported", "best_of", UNSUPPORTED),
    # Sampling.
    chat("temperature too high", {"temperature": 2.1}, "'temperature' must be <= 2", "temperature"),
    chat("temperature too low", {"temperature": -0.1}, "'temperature' must be >= 0", "temperature"),
    chat("temperature as a string", {"temperature": "1"}, "a number or null, not a string", "temperature", TYPE),
    chat("temperature as a boolean", {"temperature": True}, "a number or null, not true or false", "temperature", TYPE),
    chat("top_p 0", {"top_p": 0}, "'top_p' must be > 0", "top_p"),
    chat("top_p over 1", {"top_p": 1.5}, "'top_p' must be <= 1", "top_p"),
    chat("top_k negative", {"top_k": -2}, "'top_k' must be >= -1", "top_k"),
    chat("top_k fractional", {"top_k": 1.5}, "an integer or null, not a number", "top_k", TYPE),
    chat("min_p over 1", {"min_p": 2}, "'min_p' must be <= 1", "min_p"),
    chat("presence_penalty", {"presence_penalty": 3}, "'presence_penalty' must be <= 2", "presence_penalty"),
    chat("frequency_penalty", {"frequency_penalty": -3}, "'frequency_penalty' must be >= -2", "frequency_penalty"),
    chat("repetition_penalty 0", {"repetition_penalty": 0}, "must be > 0", "repetition_penalty"),
    chat("repetition_penalty", {"repetition_penalty": 11}, "must be <= 10", "repetition_penalty"),
    chat("bias over 100", {"logit_bias": {"4": 1, "5": 101}}, "'logit_bias.5' must be <= 100", "logit_bias.5"),
    chat("bias of the wrong type", {"logit_bias": {"5": "much"}}, "a number, not a string", "logit_bias.5", TYPE),
    chat(
        "metadata of the wrong type",
        {"metadata": {"b": "x", "a": 1}},
        "'metadata.a' must be a string, not an integer",
        "metadata.a",
        TYPE,
    ),
    chat("bias as an array", {"logit_bias": [1]}, "must be an object or null, not an array", "logit_bias", TYPE),
    chat("bias for a word", {"logit_bias": {"word": 1}}, "token ids in decimal, not 'word'", "logit_bias", TYPE),
    chat("bias for a negative id", {"logit_bias": {"-1": 1}}, "token ids in decimal, not '-1'", "logit_bias", TYPE),
    chat("bias for an id twice", {"logit_bias": {"07": 1}}, "token ids in decimal, not '07'", "logit_bias", TYPE),
    chat("bias past the vocabulary", {"logit_bias": {"260": 1}}, "the vocabulary ends at 259", "logit_bias"),
    chat("bias too large", {"logit_bias": {str(i): 1 for i in range(20)}}, "has 20 entries; at most 10", "logit_bias"),
    chat("seed past int64", {"seed": 2**63}, "'seed' must be <= 9223372036854775807", "seed"),
    chat("seed below int64", {"seed": -BIG}, "'seed' must be >= -9223372036854775808", "seed"),
    chat("seed fractional", {"seed": 1.5}, "an integer or null, not a number", "seed", TYPE),
    chat("n 0", {"n": 0}, "'n' must be >= 1", "n"),
    chat("n 17", {"n": 17}, "'n' must be <= 16", "n"),
    chat("more sequences than places", {"n": 16}, "asks for 16 sequences (prompts x n)", "n"),
    # Length.
    chat("max_tokens 0", {"max_tokens": 0}, "'max_tokens' must be >= 1", "max_tokens"),
    chat("max_tokens huge", {"max_tokens": BIG}, "must be <= 2147483647", "max_tokens"),
    chat(
        "two limits",
        {"max_tokens": 5, "max_completion_tokens": 6},
        "'max_tokens' (5) and 'max_completion_tokens' (6) differ",
        "max_tokens",
    ),
    chat(
        "limit past the context",
        {"max_completion_tokens": 510},
        "This model's maximum context length is 512 tokens. However, you requested 514 tokens: 4 in the prompt, and "
        "'max_completion_tokens' is 510. The prompt is too long for that; lower it to at most 508.",
        "max_completion_tokens",
        "context_length_exceeded",
    ),
    chat(
        "messages longer than the context",
        {"messages": [{"role": "user", "content": "x" * 600}]},
        "This model's maximum context length is 512 tokens. However, you requested ",
        "messages",
        "context_length_exceeded",
    ),
    text(
        "prompt longer than the context",
        {"prompt": "x" * 512},
        "prompt is too long",
        "prompt",
        "context_length_exceeded",
    ),
    chat("min over max", {"min_tokens": 9, "max_tokens": 8}, "at most 8 tokens may be generated", "min_tokens"),
    chat("min_tokens negative", {"min_tokens": -1}, "'min_tokens' must be >= 0", "min_tokens"),
    chat("ignore_eos", {"ignore_eos": 1}, "must be true or false or null, not an integer", "ignore_eos", TYPE),
    # Stops.
    chat("empty stop", {"stop": ""}, "must be a string of length >= 1", "stop"),
    chat("empty stop in a list", {"stop": ["a", ""]}, "must be a string of length >= 1", "stop[1]"),
    chat("stop of the wrong type", {"stop": 5}, "a string or an array or null", "stop", TYPE),
    chat("too many stops", {"stop": ["x"] * 17}, "'stop' must be an array of length <= 16", "stop"),
    chat("stop id negative", {"stop_token_ids": [-1]}, "must be >= 0", "stop_token_ids[0]"),
    chat("stop id past the vocabulary", {"stop_token_ids": [5, 999]}, "token id 999", "stop_token_ids"),
    # Logprobs.
    chat("top_logprobs alone", {"top_logprobs": 3}, "'top_logprobs' needs logprobs: true", "top_logprobs"),
    chat("top_logprobs over 20", {"logprobs": True, "top_logprobs": 21}, "must be <= 20", "top_logprobs"),
    chat("chat logprobs as a number", {"logprobs": 5}, "must be true or false or null", "logprobs", TYPE),
    text("completion logprobs as a boolean", {"logprobs": True}, "must be an integer or null", "logprobs", TYPE),
    text("completion logprobs over 20", {"logprobs": 21}, "'logprobs' must be <= 20", "logprobs"),
    # Streaming.
    chat("stream as a string", {"stream": "yes"}, "must be true or false or null, not a string", "stream", TYPE),
    chat("options without stream", {"stream_options": {"include_usage": True}}, "stream: true", "stream_options"),
    chat(
        "unknown stream option",
        {"stream": True, "stream_options": {"includeUsage": True}},
        "'include_usage'",
        "stream_options.includeUsage",
        "unknown_parameter",
    ),
    chat(
        "obfuscation",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "is not supported",
        "stream_options.include_obfuscation",
        UNSUPPORTED,
    ),
    # Prompts.
    text("prompt of the wrong type", {"prompt": 5}, "must be a string or an array, not an integer", "prompt", TYPE),
    text("no prompts", {"prompt": []}, "must be an array of length >= 1", "prompt"),
    text("empty prompt", {"prompt": ""}, "'prompt' has no tokens", "prompt"),
    text("empty prompt among others", {"prompt": ["x", ""]}, "has no tokens", "prompt[1]"),
    text("no token ids", {"prompt": [[1], []]}, "has no tokens", "prompt[1]"),
    text("mixed prompts", {"prompt": ["x", 5]}, "mixes strings, token ids", "prompt", TYPE),
    text("token id past the vocabulary", {"prompt": [1, 260]}, "the vocabulary ends at 259", "prompt"),
    text("token id negative", {"prompt": [-1]}, "must be >= 0", "prompt[0]"),
    text("token id in a list, of the wrong type", {"prompt": [[1, "x"]]}, "not a string", "prompt[0][1]", TYPE),
    # Decoding.
    chat("decoding as a string", {"decoding": "medusa"}, "must be an object or null", "decoding", TYPE),
    chat("unknown decoding field", decoding(head=2), "Did you mean 'heads'?", "decoding.head", "unknown_parameter"),
    chat("unknown method", decoding(method="eagle"), "one of: auto, medusa, vanilla; got 'eagle'", "decoding.method"),
    chat("no heads", decoding(heads=0), "'decoding.heads' must be >= 1", "decoding.heads"),
    chat("more heads than there are", decoding(heads=5), "is 5, but fake-model has 4 heads", "decoding.heads"),
    chat("tree that can't be read", decoding(tree="4,2"), "is not a branching such as 4x2x1", "decoding.tree"),
    chat("tree with a width of 0", decoding(tree="4x0"), "at least 1", "decoding.tree"),
    chat("tree too large", decoding(tree="16x16x16"), "more than 256 nodes", "decoding.tree"),
    chat(
        "tree deeper than the model's heads", decoding(tree="1x1x1x1x1"), "5 levels deep, but only 4", "decoding.tree"
    ),
    chat(
        "tree deeper than the heads asked for",
        decoding(heads=2, tree="2x1x1"),
        "or raise decoding.heads",
        "decoding.tree",
    ),
    chat("tree without paths", decoding(tree=[]), "of length >= 1", "decoding.tree"),
    chat("tree with an empty path", decoding(tree=[[]]), "of length >= 1", "decoding.tree[0]"),
    chat("tree with a child before its parent", decoding(tree=[[0, 0]]), "list the parent first", "decoding.tree"),
    chat("tree with a path twice", decoding(tree=[[0], [0]]), "listed twice", "decoding.tree"),
    chat("tree with a negative rank", decoding(tree=[[-1]]), "must be >= 0", "decoding.tree[0][0]"),
    chat("tree with a huge rank", decoding(tree=[[BIG]]), "must be <= 255", "decoding.tree[0][0]"),
    chat("acceptance", decoding(acceptance="lossy"), "one of: exact, typical", "decoding.acceptance"),
    chat(
        "vanilla with a tree",
        decoding(method="vanilla", tree="2x1"),
        "has no effect with method vanilla",
        "decoding.tree",
    ),
    chat("vanilla with lookup", decoding(method="vanilla", lookup=True), "has no effect", "decoding.lookup"),
    chat("vanilla with heads", decoding(method="vanilla", heads=1), "has no effect", "decoding.heads"),
    chat(
        "vanilla with typical acceptance",
        decoding(method="vanilla", acceptance="typical"),
        "must be exact",
        "decoding.acceptance",
    ),
    chat("deadline 0", decoding(deadline_ms=0), "'decoding.deadline_ms' must be >= 1", "decoding.deadline_ms"),
    # What HTTP itself refuses.
    Row("body too large", CHAT, b'{"model": "' + b"x" * MAX_BODY, "larger than", None, 413, "request_too_large"),
    Row(
        "no such route",
        "/v1/embeddings",
        {},
        "No such route: POST /v1/embeddings. This gateway generates text only",
        None,
        404,
        "not_found",
    ),
    Row("another's API", "/api/chat", {}, "not Ollama's own", None, 404, "not_found"),
    Row("a base URL without /v1", "/chat/completions", {}, "base URLs end in /v1", None, 404, "not_found"),
    Row("a route of nobody's", "/v1/nothing", {}, "see /schema/openapi.json", None, 404, "not_found"),
    Row("wrong verb", "/v1/models", {}, "POST is not allowed on /v1/models", None, 405, "method_not_allowed"),
]


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    settings = GatewaySettings(max_concurrent=4, max_queue=6, max_logit_bias=10, max_body_bytes=MAX_BODY)
    with running_gateway(settings) as live:
        yield live


@pytest.fixture(scope="module")
def http(gateway: LiveGateway) -> Iterator[httpx.Client]:
    yield gateway.http


def send(http: httpx.Client, path: str, change: dict[str, Any] | bytes) -> httpx.Response:
    if isinstance(change, bytes):
        return http.post(path, content=change, headers={"content-type": "application/json"})
    good: dict[str, Any] = {"model": MODEL}
    good |= {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return http.post(path, json={name: value for name, value in (good | change).items() if value is not MISSING})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_bad_request(http: httpx.Client, gateway: LiveGateway, row: Row) -> None:
    response = send(http, row.path, row.change)
    assert response.status_code == row.status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert row.says in error["message"]
    assert (error["param"], error["code"]) == (row.param, row.code)
    assert error["type"] == "invalid_request_error"
    assert gateway.state.admission.in_flight == 0, "a refused request kept its place"


def test_the_engine_saw_none_of_them(gateway: LiveGateway) -> None:
    assert gateway.decoder.submitted == []


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"content-type": "text/plain"}, "must be application/json, not 'text/plain'"),
        ({"content-type": "application/x-www-form-urlencoded"}, "not 'application/x-www-form-urlencoded'"),
        ({"content-type": "multipart/form-data"}, "not 'multipart/form-data'"),
        ({}, "but there is none"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "Content-Encoding 'gzip' is not supported"),
    ],
)
def test_unsupported_media_type(http: httpx.Client, headers: dict[str, str], says: str) -> None:
    response = http.post(CHAT, content=b"{}", headers=headers)
    assert response.status_code == 415
    assert says in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "unsupported_media_type"


def test_a_chunked_body_is_measured_as_it_comes(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b"x" * (MAX_BODY // 10)

    response = http.post(CHAT, content=pieces(), headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_405_says_what_is_allowed(http: httpx.Client) -> None:
    assert "POST" in http.get(CHAT).headers["allow"]


NO_OPS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tools": None, "tool_choice": None, "functions": None, "function_call": None, "response_format": None}),
    (CHAT, {"tools": [], "tool_choice": "none", "functions": [], "function_call": "auto", "parallel_tool_calls": True}),
    (CHAT, {"response_format": {"type": "text"}, "modalities": ["text"], "store": False, "service_tier": "auto"}),
    (CHAT, {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}),
    (CHAT, {"temperature": None, "top_p": None, "n": None, "stop": None, "seed": None, "max_tokens": None}),
    (CHAT, {"logit_bias": {}, "stop": [], "stop_token_ids": [], "decoding": {}, "stream": False, "logprobs": False}),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 5}),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}]},
    ),
    (CHAT, {"tools": [tool()], "tool_choice": "none", "response_format": {"type": "json_object"}, "max_tokens": 4}),
    (CHAT, {"tools": [tool(description="looks", parameters={}, strict=True)], "parallel_tool_calls": False}),
    (CHAT, {"chat_template_kwargs": {}, "reasoning_effort": "none", "add_generation_prompt": True}),
    (CHAT, {"continue_final_message": False, "messages": [{"role": "assistant", "content": "x"}]}),
    (CHAT, {"logprobs": False, "top_logprobs": 0}),
    (CHAT, {"logprobs": None, "top_logprobs": 0}),
    (CHAT, {"top_logprobs": 0}),
    (CHAT, {"top_k": -1}),
    (CHAT, {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": None, "tool_calls": []}]}),
    (CHAT, {"messages": [{"role": "user", "content": "A"}, {"role": "assistant"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": []}]}),
    (CHAT, {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]}),
    (TEXT, {"echo": False, "suffix": None, "best_of": 1, "user": "u"}),
    (TEXT, {"n": 2, "best_of": 2, "suffix": ""}),
]


@pytest.mark.parametrize(("path", "change"), NO_OPS)
def test_values_that_ask_for_nothing_are_accepted(http: httpx.Client, path: str, change: dict[str, Any]) -> None:
    response = send(http, path, change)
    assert response.status_code == 200, response.text
