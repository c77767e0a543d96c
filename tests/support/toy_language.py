"""A tiny model that has learnt something: sentences over invented words, where the next letters can be foreseen."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import torch

from backends.heads.format import backbone_fingerprint
from backends.models.tiny import tiny_model, tiny_tokenizer
from backends.training.backbone import Backbone
from backends.training.data.dataset import Answer

# Few letters, so that a word is known only from several of them.
_rng = random.Random(7)
WORDS = tuple("".join(_rng.choice("abcdefgh") for _ in range(6)) for _ in range(24))


def sentence(rng: random.Random, words: int) -> str:
    """Each word leaves three choices for the next."""
    at = rng.randrange(len(WORDS))
    spoken = []
    for _ in range(words):
        spoken.append(WORDS[at])
        at = (at * 5 + rng.choice((1, 2, 7))) % len(WORDS)
    return " ".join(spoken)


def toy_model() -> Any:
    """The tiny model after a few seconds of training to go on with a sentence; each call gives a copy of its own."""
    return copy.deepcopy(_trained())


def toy_backbone() -> Backbone:
    model = toy_model()
    return Backbone("toy", model, tiny_tokenizer(), backbone_fingerprint(model))


def toy_prompts(training: int, held_out: int) -> list[dict[str, str]]:
    """So many prompts that are trained on, then so many that are kept out, as :class:`Answer` says by their ids."""
    rng = random.Random(3)
    every = [{"id": f"p{i}", "label": ("code", "chat")[i % 2], "prompt": sentence(rng, 2)} for i in range(1200)]
    kept = [p for p in every if Answer(p["id"], "", (), ()).held_out]
    return [p for p in every if p not in kept][:training] + kept[:held_out]


@cache
def _trained(steps: int = 120, seed: int = 0) -> Any:
    tokenizer, rng = tiny_tokenizer(), random.Random(seed)
    model = tiny_model(seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.08)
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.15)
    for _ in range(steps):
        batch = []
        for _ in range(16):
            words = sentence(rng, 10).split(" ")
            question = tokenizer.encode_chat([{"role": "user", "content": " ".join(words[:2])}])
            batch.append((question + tokenizer.encode(" ".join(words[2:])))[:56])
        ids = torch.tensor(batch)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False)
