"""Set up a model and prompts for :mod:`backends.lossless`, as the command line asks."""

from __future__ import annotations

import random
from dataclasses import replace

from backends.bench_prompts import PROMPTS
from backends.loading import EngineOptions, LoadedCore, build_core, load_core
from backends.lossless import LosslessReport, Progress, verify_lossless
from backends.tokenizer import HfTokenizer


def prove(
    *,
    model: str | None,
    heads: str | None,
    tiny: bool,
    dtype: str,
    device: str,
    runner: str,
    prompts: int,
    max_tokens: int,
    seed: int,
    progress: Progress,
) -> LosslessReport:
    """Load and compare. Raises OSError or ValueError for what the user can mend."""
    options = EngineOptions(model=model, heads=heads, device=device, dtype=dtype, runner=runner, max_model_len=1024)
    loaded = _tiny(options) if tiny else load_core(options)
    ids = random_prompts(loaded.tokenizer, prompts, random.Random(seed), longest=40 if tiny else 120)
    return verify_lossless(loaded, ids, seed=seed, max_tokens=max_tokens, progress=progress)


def random_prompts(tokenizer: HfTokenizer, count: int, rng: random.Random, *, longest: int) -> list[tuple[int, ...]]:
    """Different prompts in every class: pieces of the bench prompts, with a number that makes each one its own."""
    texts = [prompt for prompts in PROMPTS.values() for prompt in prompts]
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        text = f"{rng.randrange(10**6)} {rng.choice(texts)}"
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        start = 0 if rng.random() < 0.7 else rng.randrange(max(1, len(ids) // 2))
        found[tuple(ids[start : start + rng.randint(4, longest)])] = None
    return list(found)


def _tiny(options: EngineOptions) -> LoadedCore:
    import torch

    from backends.tiny import tiny_heads, tiny_model, tiny_tokenizer

    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    # Steps of microseconds are not worth waking a second thread for.
    options = replace(options, threads=1)
    return build_core(tiny_model(dtype=dtype), tiny_tokenizer(), tiny_heads(), options, name="tiny")
