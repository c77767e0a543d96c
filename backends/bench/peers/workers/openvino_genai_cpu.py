"""OpenVINO GenAI's pipeline with continuous batching, stepped in this process."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

_BLOCK = 32
"""Tokens of a block of its KV cache on the CPU."""


class Peer:
    """``options["lookup"]``: speculate by n-grams of the prompt. Weights are read from a GGUF file."""

    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-options["kv_tokens"] // _BLOCK)
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs = options["context"], 16
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options["threads"]}
        self._lookup = bool(options.get("lookup"))
        if self._lookup:
            properties["prompt_lookup"] = True
        source = options["gguf"]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(source, scheduler, "CPU", properties, {})
        self._eos = set(options["eos"])
        self._open: dict[int, Any] = {}
        self._requests = 0
        self.facts = {"version": f"openvino-genai {version('openvino-genai')}", "weights": options["weights"]}

    def start(self, index: int, ids: list[int], max_tokens: int, mode: str) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.stop_token_ids = max_tokens, False, self._eos
        if self._lookup:
            config.num_assistant_tokens, config.max_ngram_size = 4, 3
        tensor = openvino.Tensor(np.array([ids], dtype=np.int64))
        self._open[index] = self._pipeline.add_request(self._requests, tensor, config)
        self._requests += 1

    def step(self) -> list[tuple[int, list[int], bool]]:
        self._pipeline.step()
        emitted = []
        for index, handle in list(self._open.items()):
            new: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    new += output.generated_ids
            ended = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            if ended:
                if handle.get_status() != openvino_genai.GenerationStatus.FINISHED:
                    raise RuntimeError(f"OpenVINO ended a request as {handle.get_status()}")
                del self._open[index]
            if new or ended:
                emitted.append((index, new, ended))
        return emitted
