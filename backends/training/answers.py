"""Stage one of self-distillation: the backbone answers the prompts."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from backends.training.backbone import Backbone
from backends.training.dataset import AnswersError, read_jsonl


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Records with id, label and prompt. Raises :class:`AnswersError` for one that lacks id or prompt."""
    prompts = list(read_jsonl(path))
    for number, record in enumerate(prompts, start=1):
        if not isinstance(record.get("prompt"), str) or "id" not in record:
            raise AnswersError(f"{path}: record {number} needs id and prompt")
    return prompts


@torch.inference_mode()
def generate_answers(
    backbone: Backbone,
    prompts: Sequence[dict[str, Any]],
    path: Path,
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 192,
    max_prompt_tokens: int = 512,
    batch_size: int = 48,
    seed: int = 0,
    progress: Callable[[int], object] = lambda answers: None,
) -> None:
    """Append the backbone's answers to ``path`` (.jsonl.gz), skipping prompts answered there already.

    Each prompt is one user message under the model's chat template; ``temperature`` 0 is greedy. Longer prompts than
    ``max_prompt_tokens`` are left out. ``progress`` is called with the answers of each finished batch.
    """
    done = list(read_jsonl(path)) if path.exists() else []
    _rewrite(path, done)
    answered = {record["id"] for record in done}
    batches = _batches(backbone, [p for p in prompts if p["id"] not in answered], max_prompt_tokens, batch_size, seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    ends = backbone.end_token_ids
    padding = ends[0] if ends else 0
    for number, batch in enumerate(batches):
        longest = max(len(ids) for _, ids in batch)
        input_ids = torch.tensor([[padding] * (longest - len(ids)) + ids for _, ids in batch])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for _, ids in batch])
        torch.manual_seed(seed * 1_000_003 + len(done) + number)
        output = backbone.model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=padding,
            **sampling,
        )
        with gzip.open(path, "at", encoding="utf-8") as file:
            for (prompt, ids), row in zip(batch, output[:, longest:].tolist(), strict=True):
                end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                record = {
                    "id": prompt["id"],
                    "label": prompt.get("label", ""),
                    "prompt_ids": ids,
                    "answer_ids": row[:end],
                }
                file.write(json.dumps(record) + "\n")
        progress(len(batch))


def _rewrite(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """A killed run leaves a torn gzip member behind, after which nothing could be read: start from a clean copy."""
    staged = path.with_name(f".{path.name}.tmp")
    with gzip.open(staged, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    os.replace(staged, path)


def _batches(
    backbone: Backbone, prompts: Sequence[dict[str, Any]], max_prompt_tokens: int, batch_size: int, seed: int
) -> list[list[tuple[dict[str, Any], list[int]]]]:
    """Prompts of like length together, so that little is padding; batches shuffled, so that any first part is fair."""
    tokenized = []
    for prompt in prompts:
        message = [{"role": "user", "content": prompt["prompt"]}]
        text = backbone.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids = backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= max_prompt_tokens:
            tokenized.append((prompt, ids))
    tokenized.sort(key=lambda item: len(item[1]))
    batches = [tokenized[begin : begin + batch_size] for begin in range(0, len(tokenized), batch_size)]
    random.Random(seed).shuffle(batches)
    return batches
