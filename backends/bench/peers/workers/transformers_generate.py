"""``generate`` of transformers: static batches, padded on the left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        dtype = getattr(torch, options.get("dtype") or "bfloat16")
        self._model: Any = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype)
        self._model.eval()
        found = self._model.generation_config.eos_token_id
        self._eos = set(found if isinstance(found, list) else [found])
        self.facts = {
            "version": f"torch {torch.__version__}, transformers {transformers.__version__}",
            "weights": str(dtype).removeprefix("torch."),
        }

    def batch(self, prompts: list[list[int]], max_tokens: int, on_step: Callable[[list[int | None]], None]) -> None:
        width, pad = max(map(len, prompts)), min(self._eos)
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=sorted(self._eos), pad_token_id=pad
        )
        streamer = _Rows(len(prompts), self._eos, on_step)
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=mask, generation_config=config, streamer=streamer)


class _Rows(BaseStreamer):
    """Hands over each step's tokens, but for those of answers that have ended, which are padding."""

    def __init__(self, rows: int, eos: set[int], on_step: Callable[[list[int | None]], None]) -> None:
        self._open, self._eos, self._on_step, self._prompts_came = [True] * rows, eos, on_step, False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompts_came:
            self._prompts_came = True
            return
        tokens = value.tolist()
        self._on_step([token if is_open else None for token, is_open in zip(tokens, self._open, strict=True)])
        self._open = [o and token not in self._eos for o, token in zip(self._open, tokens, strict=True)]

    def end(self) -> None:
        pass
