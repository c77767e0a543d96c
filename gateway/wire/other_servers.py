"""Fields of other servers' APIs that are not honoured here: one table, of which docs/api.md has a copy.

Clients send them as constants. A value that asks for nothing passes; any other is refused by name, with what to do
instead. What is honoured (``top_k``, ``min_tokens``, ...) is in ``gateway.wire.requests``.

``python -m gateway.wire.other_servers`` prints the table for docs/api.md.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from gateway.wire.no_op import RequestStruct, no_op, no_op_fields

_THE_FORM = "use response_format"
_THE_TEMPLATE = "the model's own chat template is used as it is; leave it out"
_ALL_IS_SHOWN = "an answer has only what docs/api.md lists; leave it out"
_NO_SUCH_SAMPLER = "leave it out, or use temperature, top_p, top_k, min_p and the penalties"
_OFF = "off"
_OF_NO_EFFECT = "the default of something that is off"


class OtherServersFields(RequestStruct, kw_only=True):
    """vLLM's, SGLang's, llama.cpp's, TGI's, Ollama's and some hosts' fields, in that order."""

    # Sampling.
    use_beam_search: Annotated[Any, no_op(False, why=_OFF)] = None
    num_beams: Annotated[Any, no_op(1, why=_OFF)] = None
    length_penalty: Annotated[Any, no_op(1, why="neutral; only for beam search")] = None
    early_stopping: Annotated[Any, no_op(False, why="only for beam search")] = None
    do_sample: Annotated[Any, no_op(instead="temperature 0 is greedy, any other samples")] = None
    typical_p: Annotated[Any, no_op(1, why=_OFF, instead=_NO_SUCH_SAMPLER)] = None
    typ_p: Annotated[Any, no_op(1, why=_OFF, instead=_NO_SUCH_SAMPLER)] = None
    tfs_z: Annotated[Any, no_op(1, why=_OFF, instead=_NO_SUCH_SAMPLER)] = None
    top_a: Annotated[Any, no_op(0, why=_OFF, instead=_NO_SUCH_SAMPLER)] = None
    mirostat: Annotated[Any, no_op(0, why=_OFF, instead=_NO_SUCH_SAMPLER)] = None
    mirostat_tau: Annotated[Any, no_op(5, why=_OF_NO_EFFECT, instead=_NO_SUCH_SAMPLER)] = None
    mirostat_eta: Annotated[Any, no_op(0.1, why=_OF_NO_EFFECT, instead=_NO_SUCH_SAMPLER)] = None
    dynatemp_range: Annotated[Any, no_op(0, why=_OFF, instead=_NO_SUCH_SAMPLER)] = None
    dynatemp_exponent: Annotated[Any, no_op(1, why=_OF_NO_EFFECT, instead=_NO_SUCH_SAMPLER)] = None
    xtc_probability: Annotated[Any, no_op(0, why=_OFF, instead=_NO_SUCH_SAMPLER)] = None
    xtc_threshold: Annotated[Any, no_op(0.1, why=_OF_NO_EFFECT, instead=_NO_SUCH_SAMPLER)] = None
    dry_multiplier: Annotated[Any, no_op(0, why=_OFF, instead=_NO_SUCH_SAMPLER)] = None
    dry_base: Annotated[Any, no_op(1.75, why=_OF_NO_EFFECT, instead=_NO_SUCH_SAMPLER)] = None
    dry_allowed_length: Annotated[Any, no_op(2, why=_OF_NO_EFFECT, instead=_NO_SUCH_SAMPLER)] = None
    dry_penalty_last_n: Annotated[Any, no_op(-1, why=_OF_NO_EFFECT, instead=_NO_SUCH_SAMPLER)] = None
    dry_sequence_breakers: Annotated[Any, no_op(instead=_NO_SUCH_SAMPLER)] = None
    samplers: Annotated[Any, no_op(instead=_NO_SUCH_SAMPLER)] = None
    repeat_penalty: Annotated[Any, no_op(1, why="neutral", instead="use repetition_penalty")] = None
    repeat_last_n: Annotated[Any, no_op(-1, why="penalties look at the whole text")] = None
    penalize_nl: Annotated[Any, no_op(True, why="penalties look at every token")] = None
    no_repeat_ngram_size: Annotated[Any, no_op(0, why=_OFF)] = None
    penalty_alpha: Annotated[Any, no_op(0, why=_OFF)] = None
    diversity_penalty: Annotated[Any, no_op(0, why=_OFF)] = None
    encoder_repetition_penalty: Annotated[Any, no_op(1, why="neutral")] = None
    random_seed: Annotated[Any, no_op(instead="use seed")] = None
    num_return_sequences: Annotated[Any, no_op(1, why="the default of n", instead="use n")] = None
    logits_processors: Annotated[Any, no_op([], why="none")] = None
    custom_logit_processor: Annotated[Any, no_op(instead="use logit_bias")] = None
    bad_words: Annotated[Any, no_op([], why="none", instead="use logit_bias")] = None
    allowed_token_ids: Annotated[Any, no_op(instead="use logit_bias")] = None
    watermark: Annotated[Any, no_op(False, why=_OFF)] = None
    # Length and ends.
    max_new_tokens: Annotated[Any, no_op(instead="use max_tokens")] = None
    max_tokens_to_sample: Annotated[Any, no_op(instead="use max_tokens")] = None
    max_length: Annotated[Any, no_op(instead="use max_tokens")] = None
    n_predict: Annotated[Any, no_op(-1, why="no limit but max_tokens", instead="use max_tokens")] = None
    num_predict: Annotated[Any, no_op(-1, why="no limit but max_tokens", instead="use max_tokens")] = None
    min_new_tokens: Annotated[Any, no_op(0, why=_OFF, instead="use min_tokens")] = None
    stop_sequences: Annotated[Any, no_op([], why="none", instead="use stop")] = None
    stop_regex: Annotated[Any, no_op([], why="none", instead="use stop")] = None
    include_stop_str_in_output: Annotated[Any, no_op(False, why="the text ends before the stop")] = None
    no_stop_trim: Annotated[Any, no_op(False, why="the text ends before the stop")] = None
    t_max_predict_ms: Annotated[Any, no_op(0, why=_OFF, instead="use decoding.deadline_ms")] = None
    # The prompt.
    add_generation_prompt: Annotated[Any, no_op(True, why="an answer is always asked for")] = None
    continue_final_message: Annotated[Any, no_op(False, why="a text is always continued", instead="send a chat")] = None
    chat_template: Annotated[Any, no_op(instead=_THE_TEMPLATE)] = None
    chat_template_kwargs: Annotated[Any, no_op({}, why="none", instead=_THE_TEMPLATE)] = None
    enable_thinking: Annotated[Any, no_op(instead="use chat_template_kwargs")] = None
    documents: Annotated[Any, no_op([], why="none", instead="put them into a message")] = None
    mm_processor_kwargs: Annotated[Any, no_op({}, why="none")] = None
    system: Annotated[Any, no_op(instead="send a message of role system")] = None
    template: Annotated[Any, no_op(instead=_THE_TEMPLATE)] = None
    raw: Annotated[Any, no_op(False, why="the default", instead="use /v1/completions for a prompt as it is")] = None
    tool_prompt: Annotated[Any, no_op()] = None
    safe_prompt: Annotated[Any, no_op(False, why=_OFF, instead="send a message of role system")] = None
    transforms: Annotated[Any, no_op([], why="none")] = None
    truncate: Annotated[Any, no_op(instead="shorten the prompt")] = None
    truncate_prompt_tokens: Annotated[Any, no_op(instead="shorten the prompt")] = None
    prompt_truncate_len: Annotated[Any, no_op(instead="shorten the prompt")] = None
    context_length_exceeded_behavior: Annotated[
        Any, no_op("error", why="what happens here", instead="shorten the prompt")
    ] = None
    num_ctx: Annotated[Any, no_op(instead="the operator sets the context (serve --max-model-len)")] = None
    # The form of the answer.
    guided_decoding_backend: Annotated[Any, no_op("auto", "guidance", why="what is used")] = None
    guided_whitespace_pattern: Annotated[Any, no_op()] = None
    response_schema: Annotated[Any, no_op(instead=_THE_FORM)] = None
    format: Annotated[Any, no_op("", why="none", instead=_THE_FORM)] = None
    # What is shown.
    skip_special_tokens: Annotated[Any, no_op(True, why="special tokens are never shown")] = None
    spaces_between_special_tokens: Annotated[Any, no_op(True, why="special tokens are never shown")] = None
    detokenize: Annotated[Any, no_op(True, why="answers are text")] = None
    return_full_text: Annotated[Any, no_op(False, why="the answer is given without its prompt")] = None
    prompt_logprobs: Annotated[Any, no_op()] = None
    n_probs: Annotated[Any, no_op(0, why=_OFF, instead="use logprobs")] = None
    top_n_tokens: Annotated[Any, no_op(0, why=_OFF, instead="use logprobs")] = None
    post_sampling_probs: Annotated[Any, no_op(False, why="log probabilities are the model's own")] = None
    return_tokens_as_token_ids: Annotated[Any, no_op(False, why=_OFF)] = None
    return_token_ids: Annotated[Any, no_op(False, why=_OFF, instead=_ALL_IS_SHOWN)] = None
    return_tokens: Annotated[Any, no_op(False, why=_OFF, instead=_ALL_IS_SHOWN)] = None
    return_hidden_states: Annotated[Any, no_op(False, why=_OFF, instead=_ALL_IS_SHOWN)] = None
    return_progress: Annotated[Any, no_op(False, why=_OFF, instead=_ALL_IS_SHOWN)] = None
    timings_per_token: Annotated[Any, no_op(False, why=_OFF, instead=_ALL_IS_SHOWN)] = None
    details: Annotated[Any, no_op(False, why=_OFF, instead=_ALL_IS_SHOWN)] = None
    decoder_input_details: Annotated[Any, no_op(False, why=_OFF, instead=_ALL_IS_SHOWN)] = None
    raw_output: Annotated[Any, no_op(False, why=_OFF, instead=_ALL_IS_SHOWN)] = None
    usage: Annotated[Any, no_op(instead="use stream_options.include_usage; unstreamed answers always have it")] = None
    # Reasoning.
    include_reasoning: Annotated[Any, no_op(True, why="nothing of an answer is left out")] = None
    separate_reasoning: Annotated[Any, no_op(False, why="thoughts stay in the text")] = None
    stream_reasoning: Annotated[Any, no_op(True, why="all is streamed")] = None
    reasoning_format: Annotated[Any, no_op("none", "raw", why="thoughts stay in the text")] = None
    reasoning: Annotated[Any, no_op()] = None
    thinking: Annotated[Any, no_op()] = None
    think: Annotated[Any, no_op()] = None
    # Where and when it runs.
    priority: Annotated[Any, no_op(0, why="the default: first come, first served")] = None
    cache_prompt: Annotated[Any, no_op(True, False, why="no answer depends on a cache")] = None
    keep_alive: Annotated[Any, no_op(instead="models stay loaded; leave it out")] = None
    n_keep: Annotated[Any, no_op(0, why=_OF_NO_EFFECT)] = None
    id_slot: Annotated[Any, no_op(-1, why="any")] = None
    request_id: Annotated[Any, no_op(instead="send it as the header x-request-id")] = None
    rid: Annotated[Any, no_op(instead="send it as the header x-request-id")] = None
    lora_path: Annotated[Any, no_op(instead="name the model that is wanted in model")] = None
    adapter_id: Annotated[Any, no_op(instead="name the model that is wanted in model")] = None
    models: Annotated[Any, no_op(instead="name one in model")] = None
    provider: Annotated[Any, no_op(instead="the operator decides which backend answers; leave it out")] = None
    route: Annotated[Any, no_op(instead="the operator decides which backend answers; leave it out")] = None
    plugins: Annotated[Any, no_op([], why="none")] = None
    kv_transfer_params: Annotated[Any, no_op()] = None
    vllm_xargs: Annotated[Any, no_op({}, why="none")] = None
    session_params: Annotated[Any, no_op()] = None
    options: Annotated[Any, no_op({}, why="none", instead="send each option as a field of its own")] = None


def as_markdown() -> str:
    """The table as docs/api.md has it."""
    lines = ["| field | accepted, and why it asks for nothing | anything else is refused |", "|---|---|---|"]
    for name, accepted, why, instead in no_op_fields(OtherServersFields):
        values = ", ".join(f"`{msgspec.json.encode(each).decode()}`" for each in accepted)
        lines.append(f"| `{name}` | {f'{values}: {why}' if values else ''} | {instead or 'leave it out'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
