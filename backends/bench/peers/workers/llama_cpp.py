"""llama.cpp's server inside this process, through xllamacpp; no HTTP between."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import xllamacpp  # type: ignore[import-not-found]


class Peer:
    """``options["lookup"]``: a kind of its own prompt lookup, such as "NGRAM_SIMPLE"; its defaults draft late, after 12
    tokens that occurred before, so lengths are set to those that this gateway and vLLM use."""

    def __init__(self, options: dict[str, Any]) -> None:
        params = make_params(options)
        self._server = xllamacpp.Server(params)
        self.facts = {"version": f"xllamacpp {version('xllamacpp')}", "weights": options["weights"]}

    def stream(self, ids: list[int], max_tokens: int, mode: str, on_tokens: Callable[[list[str]], None]) -> None:
        told = 0

        def on_chunk(chunk: dict[str, Any]) -> None:
            nonlocal told
            if "choices" not in chunk:
                raise RuntimeError(str(chunk))
            text = chunk["choices"][0]["text"]
            usage = chunk.get("usage")
            # A chunk is a token, unless a character took several or the last one has no text: the end says how many.
            count = usage["completion_tokens"] - told if usage else 1
            told += count
            if count > 0:
                on_tokens([text, *[""] * (count - 1)])

        order = {"prompt": ids, "max_tokens": max_tokens, "temperature": 0.0, "stream": True, "cache_prompt": False}
        self._server.handle_completions(order, on_chunk)


def make_params(options: dict[str, Any]) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = options["gguf"]
    params.n_ctx, params.n_parallel, params.kv_unified = options["kv_tokens"], 16, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    params.hostnames, params.port = ["127.0.0.1"], options.get("port", 0)
    params.warmup, params.verbosity = False, -1
    # Every prompt is read, as by the others.
    params.cache_prompt, params.cache_ram_mib = False, 0
    if lookup := options.get("lookup"):
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{lookup}")]
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 3, 4
        params.speculative.ngram_map_k.size_n, params.speculative.ngram_map_k.size_m = 3, 4
    return params
