"""Set up a model and prompts for :mod:`backends.proof.lossless`, as the command line asks."""

from __future__ import annotations

import random

from backends.bench.prompts import PROMPTS
from backends.engine.loading import EngineOptions, load_core
from backends.models.tiny import TINY_MODEL_NAME, TINY_TOKENIZERS
from backends.models.tiny_architectures import TINY_ARCHITECTURES
from backends.models.tokenizer import HfTokenizer
from backends.proof.grammars import RandomGrammars
from backends.proof.lossless import LosslessReport, Progress, verify_lossless


def prove(
    *,
    model: str | None,
    heads: str | None,
    tiny: bool,
    architecture: str | None = None,
    tokenizer: str | None = None,
    quantize: str | None = None,
    dtype: str,
    device: str,
    runner: str,
    prompts: int,
    max_tokens: int,
    seed: int,
    progress: Progress,
    grammar: bool = False,
) -> LosslessReport:
    """Load and compare. ``architecture``, ``tokenizer``: of the tiny model. ``grammar``: most answers must follow one.

    Raises OSError or ValueError for what the user can mend.
    """
    options = EngineOptions(
        model=(f"{TINY_MODEL_NAME}:{architecture}" if architecture else TINY_MODEL_NAME) if tiny else model,
        heads=heads,
        device=device,
        dtype=dtype,
        runner=runner,
        quantize=quantize,
        max_model_len=1024,
        # Steps of microseconds are not worth waking a second thread for.
        threads=1 if tiny else None,
        tiny_tokenizer=tokenizer or "byte-level",
    )
    loaded = load_core(options)
    ids = random_prompts(loaded.tokenizer, prompts, random.Random(seed), longest=40 if tiny else 120)
    if not grammar:
        return verify_lossless(loaded, ids, seed=seed, max_tokens=max_tokens, progress=progress)
    grammars = RandomGrammars(loaded.grammars, seed)
    return verify_lossless(
        loaded,
        ids,
        seed=seed,
        max_tokens=max_tokens,
        progress=progress,
        open_grammar=grammars.open,
        judge=grammars.judge,
    )


def architectures(asked: str | None) -> list[str | None]:
    """Names for :func:`prove`, one after another: "all" stands for every tiny architecture."""
    return list(TINY_ARCHITECTURES) if asked == "all" else [asked]


def tokenizers(asked: str | None) -> list[str | None]:
    """Likewise of the tiny tokenizers. Raises ValueError for one that there isn't."""
    if asked not in (None, "all", *TINY_TOKENIZERS):
        raise ValueError(f"no tiny tokenizer {asked!r}; there are {', '.join(TINY_TOKENIZERS)}")
    return list(TINY_TOKENIZERS) if asked == "all" else [asked]


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
