"""Stage one of self-distillation: the backbone answers the prompts, decoded by the project's own engine."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backends.engine.core import EngineCore
from backends.json_lines import read_objects
from backends.models.tokenizer import HfTokenizer
from backends.training.data.dataset import AnswersError, parse_answer, record_id, record_text
from backends.types import DecodingPlan, GenerationRequest, SamplingParams

# Finished answers are written together: a gzip member of one line hardly compresses.
_ANSWERS_PER_WRITE = 32
_GZIP = b"\x1f\x8b"
_EXAMPLE = '{"id": "1", "prompt": "..."}'


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Records with id, a string of its own for each, and prompt; label, licence and source are strings where given.

    Raises :class:`AnswersError` naming file and line of one that isn't so, and for a file without any.
    """
    prompts = []
    lines: dict[str, int] = {}
    for number, record in read_objects(path, AnswersError):
        where = f"{path}:{number}"
        if "id" not in record or not isinstance(record.get("prompt"), str):
            raise AnswersError(f'{where}: needs "id" and "prompt" (a string), such as {_EXAMPLE}')
        prompt_id = record_id(where, record)
        if prompt_id in lines:
            raise AnswersError(f"{where}: id {prompt_id!r} is that of line {lines[prompt_id]} too; give each its own")
        lines[prompt_id] = number
        for name in ("label", "licence", "source"):
            record_text(where, record, name)
        prompts.append({**record, "id": prompt_id})
    if not prompts:
        raise AnswersError(f"{path}: no prompts in it; write lines such as {_EXAMPLE}")
    return prompts


def generate_answers(
    core: EngineCore,
    tokenizer: HfTokenizer,
    prompts: Sequence[dict[str, Any]],
    path: Path,
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 192,
    max_prompt_tokens: int = 512,
    seed: int = 0,
    progress: Callable[[int], object] = lambda tokens: None,
) -> int:
    """Append the model's answers to ``path`` (.jsonl.gz), skipping prompts answered there already.

    Each prompt is one user message under the model's chat template, or has its ``prompt_ids`` already; ``temperature``
    0 is greedy, and sampling is seeded by the prompt's id, so that a resumed run gives the same answers. Prompts over
    ``max_prompt_tokens``, or too long for the context, are left out; how many is returned. The order is shuffled: any
    first part of the file is a fair sample.
    ``progress`` is called with the tokens of each finished answer. Raises :class:`AnswersError` for a ``path`` that
    holds something else.
    """
    done = _answered(path) if path.exists() else []
    _rewrite(path, done)
    answered = {str(record["id"]) for record in done}
    waiting = [prompt for prompt in prompts if str(prompt["id"]) not in answered]
    left_out = 0
    random.Random(seed).shuffle(waiting)
    plan = DecodingPlan(method="vanilla", num_heads=0, reason="distillation")
    asked: dict[str, dict[str, Any]] = {}
    finished: list[dict[str, Any]] = []
    while waiting or core.has_work:
        while waiting and len(asked) < core.config.max_running:
            prompt = waiting.pop()
            ids = prompt.get("prompt_ids") or tokenizer.encode_chat([{"role": "user", "content": prompt["prompt"]}])
            if len(ids) > max_prompt_tokens or len(ids) + max_new_tokens > core.config.max_model_len:
                left_out += 1
                continue
            request_id = str(prompt["id"])
            asked[request_id] = {
                "id": prompt["id"],
                "label": prompt.get("label", ""),
                "prompt_ids": ids,
                "answer_ids": [],
                "temperature": temperature,
            }
            sampling = SamplingParams(
                temperature=temperature, seed=_seed_of(request_id, seed), max_tokens=max_new_tokens
            )
            core.add(GenerationRequest(request_id, tuple(ids), sampling, plan))
        for request_id, chunk in core.step():
            record = asked[request_id]
            record["answer_ids"].extend(chunk.token_ids)
            if chunk.finish_reason is None:
                continue
            if chunk.finish_reason == "error":
                raise RuntimeError(f"the engine failed on prompt {request_id}: {chunk.error}")
            finished.append(asked.pop(request_id))
            progress(len(record["answer_ids"]))
        if len(finished) >= _ANSWERS_PER_WRITE:
            _append(path, finished)
            finished = []
    _append(path, finished)
    return left_out


def _answered(path: Path) -> list[dict[str, Any]]:
    """What an earlier run has written. Anything else, such as the prompts themselves, must not be written over."""
    done = []
    try:
        for number, record in read_objects(path, AnswersError, torn_end=True):
            parse_answer(f"{path}:{number}", record)
            done.append(record)
        if not done and path.read_bytes()[:2] not in (b"", _GZIP):
            raise AnswersError(f"{path} holds no answers")
    except AnswersError as error:
        raise AnswersError(f"{error}; to write answers, give the name of a new file") from None
    return done


def _seed_of(request_id: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{request_id}".encode()).digest()[:4], "big")


def _rewrite(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """A killed run leaves a torn gzip member behind, after which nothing could be read: start from a clean copy."""
    staged = path.with_name(f".{path.name}.tmp")
    staged.unlink(missing_ok=True)
    _append(staged, records)
    os.replace(staged, path)


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    with gzip.open(path, "at", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
