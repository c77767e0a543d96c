"""This gateway's engine, stepped without HTTP as the other peers are."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from backends.engine.loading import EngineOptions, load_core
from backends.types import DecodingPlan, GenerationRequest, SamplingParams

_PLANS = {"adaptive": DecodingPlan(), "vanilla": DecodingPlan(method="vanilla", num_heads=0)}


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        names = ("model", "heads", "dtype", "quantize", "threads")
        engine = EngineOptions(
            **{name: options[name] for name in names if options.get(name) is not None},
            max_model_len=options["context"],
            max_running=16,
            kv_tokens=options["kv_tokens"],
        )
        loaded = load_core(engine)
        if loaded.core.runner.kind == "native":
            torch.set_num_threads(1)
        self._core = loaded.core
        self.facts = {
            "version": f"torch {torch.__version__}, transformers {transformers.__version__}",
            "weights": loaded.info.dtype if engine.quantize is None else engine.quantize,
            "runner": loaded.core.runner.kind,
        }

    def start(self, index: int, ids: list[int], max_tokens: int, mode: str) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self._core.add(GenerationRequest(str(index), tuple(ids), sampling, _PLANS[mode]))

    def step(self) -> list[tuple[int, list[int], bool]]:
        emitted = []
        for request_id, chunk in self._core.step():
            if chunk.error is not None:
                raise RuntimeError(chunk.error)
            emitted.append((int(request_id), list(chunk.token_ids), chunk.finish_reason is not None))
        return emitted
