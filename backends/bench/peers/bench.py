"""From what the user asks for to the report of ``bench peers``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backends.bench.peers.contestants import CONTESTANTS, VANILLA, Place
from backends.bench.peers.environments import peers_folder
from backends.bench.peers.report import make_report
from backends.bench.peers.run import PeersOptions, measure
from backends.bench.prompts import PROMPTS
from backends.models.demo import prepare_demo_model
from backends.models.tokenizer import HfTokenizer
from backends.runners.cpu_cores import cpu_name, usable_cores


@dataclass(frozen=True, slots=True)
class PeersRequest:
    """``prompts``: texts by class; None: the project's own. ``threads`` None: one for each core."""

    options: PeersOptions
    model: str | None = None
    heads: str | None = None
    dtype: str | None = None
    cpu: str = "native"
    threads: int | None = None
    prompts: Mapping[str, Sequence[str]] | None = None
    folder: Path | None = None


def run_peers(request: PeersRequest, progress: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """``{machine, reference, contestants, cells, skipped, rounds, ...}``; see :func:`make_report`.

    Raises ValueError for contestants that are not known, or a model or prompts that can't be used.
    """
    options = request.options
    if unknown := [name for name in options.contestants if name not in CONTESTANTS]:
        raise ValueError(f"there is no contestant {unknown[0]!r}; there are: {', '.join(CONTESTANTS)}")
    began = time.perf_counter()
    place = place_of(request, progress)
    tokenizer = HfTokenizer.from_pretrained(place.model)
    texts = request.prompts or PROMPTS
    classes, left_out = encode_classes(tokenizer, texts, options, place)
    text = tuple(tokenizer.encode("\n".join(line for each in texts.values() for line in each)))
    measured = measure(options, place, classes, text, progress)
    reference = VANILLA if VANILLA in options.contestants else options.contestants[0]
    return {
        "machine": {"cpu": cpu_name(), "threads": place.threads, "instructions": request.cpu},
        "model": place.model.name,
        "date": datetime.now(UTC).date().isoformat(),
        "max_tokens": options.max_tokens,
        "prompts_too_long": left_out,
        **make_report(measured, reference, tokenizer.decode),
        "seconds": round(time.perf_counter() - began),
    }


def place_of(request: PeersRequest, progress: Callable[[str], object]) -> Place:
    """Raises ValueError for a model that is no folder here."""
    model = prepare_demo_model(progress) if request.model is None else Path(request.model)
    if not model.is_dir():
        raise ValueError(f"--model {request.model}: the peers need a folder on this machine; fetch it first")
    return Place(
        model=model,
        demo=request.model is None,
        eos=_eos(model),
        threads=request.threads or usable_cores(),
        folder=request.folder or peers_folder(),
        cpu=request.cpu,
        heads=request.heads,
        dtype=request.dtype,
    )


def encode_classes(
    tokenizer: HfTokenizer, texts: Mapping[str, Sequence[str]], options: PeersOptions, place: Place
) -> tuple[dict[str, list[tuple[int, ...]]], int]:
    """Each prompt as a user's only message; and how many are left out, as they don't fit beside the others in flight.

    Raises ValueError for a class of which nothing is left.
    """
    most = min(place.context, place.kv_tokens // max(options.concurrencies)) - options.max_tokens
    classes: dict[str, list[tuple[int, ...]]] = {}
    left_out = 0
    for name, lines in texts.items():
        encoded = [tuple(tokenizer.encode_chat([{"role": "user", "content": line}])) for line in lines]
        classes[name] = [ids for ids in encoded if len(ids) <= most]
        left_out += len(encoded) - len(classes[name])
        if not classes[name]:
            raise ValueError(f"no prompt of class {name} has at most {most} tokens, which is what there is room for")
    return classes, left_out


def choose(options: PeersOptions, **given: Any) -> PeersOptions:
    """``options`` with what the user gave; None is what they did not."""
    return replace(options, **{name: value for name, value in given.items() if value is not None})


def _eos(model: Path) -> list[int]:
    """Ids that end an answer, as the model's files name them."""
    from transformers import GenerationConfig

    found: Any = GenerationConfig.from_pretrained(model).eos_token_id
    return found if isinstance(found, list) else [found]
