"""Rules that span fields or need to know the model, and the translation into :class:`SamplingParams`. Pure."""

from __future__ import annotations

from backends.sampling.splitmix import GOLDEN_GAMMA, splitmix64
from backends.types import ModelInfo, SamplingParams
from gateway.settings import GatewaySettings
from gateway.wire.errors import InvalidRequest
from gateway.wire.requests import ChatCompletionRequest, CompletionRequest, GenerationFields


def sampling_params(
    body: GenerationFields,
    info: ModelInfo,
    settings: GatewaySettings,
    logprobs: int | None,
) -> SamplingParams:
    """Everything about sampling except seed and ``max_tokens``, which differ between prompts and choices.

    Raises :class:`InvalidRequest` naming the field.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' is only allowed with stream: true.", param="stream_options")
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=_logit_bias(body.logit_bias or {}, info.vocab_size, settings.max_logit_bias),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop=_stop_strings(body.stop),
        stop_token_ids=_in_vocabulary(tuple(body.stop_token_ids or ()), info.vocab_size, "stop_token_ids"),
        logprobs=logprobs,
        prompt_logprobs=isinstance(body, CompletionRequest) and bool(body.echo) and logprobs is not None,
    )


def chat_logprobs(body: ChatCompletionRequest) -> int | None:
    """How many alternatives per position: None means no logprobs at all, 0 only those of the chosen tokens."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs logprobs: true beside it.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def refuse_best_of(body: CompletionRequest) -> None:
    """``best_of`` samples more than it returns; only the value that returns all it samples is a no-op."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(
            "'best_of' other than n is not supported by this gateway; leave it out.",
            param="best_of",
            code="unsupported_parameter",
        )


def check_echo(body: CompletionRequest) -> None:
    """Raises :class:`InvalidRequest` for what can't be echoed, and for an answer of no tokens without an echo."""
    if body.echo and body.stream:
        raise InvalidRequest(
            "'echo' is not supported with stream: true; leave one of them out.",
            param="echo",
            code="unsupported_parameter",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("'max_tokens' 0 asks for nothing without echo: true.", param="max_tokens")


def requested_max_tokens(body: GenerationFields) -> tuple[str, int] | None:
    """The limit the client named, with the name it used; None when it named none."""
    newer = body.max_completion_tokens if isinstance(body, ChatCompletionRequest) else None
    if newer is not None and body.max_tokens is not None and newer != body.max_tokens:
        raise InvalidRequest(
            f"'max_tokens' ({body.max_tokens}) and 'max_completion_tokens' ({newer}) differ; send one of them.",
            param="max_tokens",
        )
    if newer is not None:
        return "max_completion_tokens", newer
    # An echo without an answer is the answer of one token, which is left out.
    return None if body.max_tokens is None else ("max_tokens", body.max_tokens or 1)


def token_budget(
    requested: tuple[str, int] | None,
    min_tokens: int,
    prompt_tokens: int,
    info: ModelInfo,
    settings: GatewaySettings,
    prompt_field: str = "prompt",
) -> int:
    """``max_tokens`` for one prompt: what was asked for, else the rest of the context window up to the default."""
    room = info.max_model_len - prompt_tokens
    if room < 1:
        raise overlong_prompt(info, str(prompt_tokens), prompt_field)
    if requested is None:
        budget = min(room, max(settings.default_max_tokens, min_tokens))
    else:
        name, budget = requested
        if budget > room:
            raise InvalidRequest(
                f"{_context_words(info)} {prompt_tokens + budget} tokens: {prompt_tokens} in the prompt, and '{name}' "
                f"is {budget}. The prompt is too long for that; lower it to at most {room}.",
                param=name,
                code="context_length_exceeded",
            )
    if min_tokens > budget:
        raise InvalidRequest(
            f"'min_tokens' is {min_tokens}, but at most {budget} tokens may be generated.", param="min_tokens"
        )
    return budget


def overlong_prompt(info: ModelInfo, tokens: str, prompt_field: str) -> InvalidRequest:
    """The refusal of a prompt that leaves no room for an answer. ``tokens``: how many it has, or at least how many."""
    return InvalidRequest(
        f"{_context_words(info)} {tokens} tokens in the prompt, and at least one must be left for the answer: the "
        "prompt is too long. Shorten it.",
        param=prompt_field,
        code="context_length_exceeded",
    )


def _context_words(info: ModelInfo) -> str:
    """How a refusal of what does not fit begins. LiteLLM knows it by these words of OpenAI's, and LangChain, which does
    not always see the code, by "prompt is too long"."""
    return f"This model's maximum context length is {info.max_model_len} tokens. However, you requested"


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of n choices: the request's own for the first, well-mixed int64 values for the others."""
    if choice == 0:
        return seed
    mixed = splitmix64(seed + (choice - 1) * GOLDEN_GAMMA)
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))


def _in_vocabulary(ids: tuple[int, ...], vocab_size: int, param: str) -> tuple[int, ...]:
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(
            f"'{param}' has token id {max(ids)}, but the vocabulary ends at {vocab_size - 1}.", param=param
        )
    return ids


def _logit_bias(bias: dict[str, float], vocab_size: int, most: int) -> dict[int, float]:
    if len(bias) > most:
        raise InvalidRequest(f"'logit_bias' has {len(bias)} entries; at most {most} are allowed.", param="logit_bias")
    read: dict[int, float] = {}
    for key, value in bias.items():
        # isdecimal alone would let other scripts' digits in, which int() reads; "01" beside "1" would be one id twice.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
            raise InvalidRequest(
                f"'logit_bias' keys are token ids in decimal, not '{key[:50]}'.",
                param="logit_bias",
                code="invalid_type",
            )
        token_id = int(key)
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"'logit_bias' has token id {token_id}, but the vocabulary ends at {vocab_size - 1}.",
                param="logit_bias",
            )
        read[token_id] = value
    return read
