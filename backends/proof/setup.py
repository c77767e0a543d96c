"""Set up a model and prompts for :mod:`backends.proof.lossless`, as the command line asks."""

from __future__ import annotations

import random
from collections.abc import Sequence

from backends.bench.prompts import PROMPTS
from backends.engine.loading import EngineOptions, load_core
from backends.models.tiny import TINY_MODEL_NAME, TINY_TOKENIZERS
from backends.models.tiny_architectures import TINY_ARCHITECTURES
from backends.models.tokenizer import HfTokenizer
from backends.proof.grammars import RandomGrammars
from backends.proof.lossless import NO_STRAIN, LosslessReport, Progress, Strain, verify_lossless

_LONGEST_ALIKE = 160


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
    strain: Strain = NO_STRAIN,
) -> LosslessReport:
    """Load and compare. ``architecture``, ``tokenizer``: of the tiny model. ``grammar``: most answers must follow one.
    ``strain``: see :class:`Strain`; with its cache, most prompts begin like others.

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
    if strain.cache:
        ids = alike(ids, random.Random(f"{seed} alike"))
    if not grammar:
        return verify_lossless(loaded, ids, seed=seed, max_tokens=max_tokens, progress=progress, strain=strain)
    grammars = RandomGrammars(loaded.grammars, seed)
    return verify_lossless(
        loaded,
        ids,
        seed=seed,
        max_tokens=max_tokens,
        progress=progress,
        open_grammar=grammars.open,
        judge=grammars.judge,
        strain=strain,
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


def alike(prompts: Sequence[tuple[int, ...]], rng: random.Random) -> list[tuple[int, ...]]:
    """As many prompts, all different, most of which begin like one of the few before: with a part of it, or all."""
    found: dict[tuple[int, ...], None] = {}
    recent: list[tuple[int, ...]] = []
    for prompt in prompts:
        if recent and rng.random() < 0.7:
            before = rng.choice(recent[-8:])
            prompt = (before if rng.random() < 0.5 else before[: rng.randint(1, len(before))]) + prompt[
                : rng.randint(1, len(prompt))
            ]
            prompt = prompt[:_LONGEST_ALIKE]
        found.setdefault(prompt)
        recent.append(prompt)
    while len(found) < len(prompts):
        found.setdefault((*rng.choice(recent)[:_LONGEST_ALIKE], *rng.choice(prompts)[-4:]))
    return list(found)
