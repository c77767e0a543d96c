"""Answers that a backbone can read, and its hidden states over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from backends.training.backbone import Backbone
from backends.training.data.dataset import (
    Answer,
    AnswersError,
    HiddenStates,
    cache_hidden_states,
    load_hidden_states,
    read_answers,
)
from backends.training.progress import progress_bar


def read_own_answers(backbone: Backbone, files: Sequence[Path], log: Callable[[str], object]) -> list[Answer]:
    """Answers that ``backbone`` can read. Raises :class:`AnswersError`."""
    longest = getattr(backbone.model.config, "max_position_embeddings", None)
    return read_answers(files, vocab_size=backbone.vocab_size, max_length=longest, log=log)


def held_out_answers(backbone: Backbone, files: Sequence[Path], log: Callable[[str], object]) -> list[Answer]:
    """What heads are evaluated on: the share that training leaves out. Raises :class:`AnswersError` if it is empty."""
    held_out = [answer for answer in read_own_answers(backbone, files, log) if answer.held_out]
    if not held_out:
        raise AnswersError("none of these answers is in the held-out 5%; bring more")
    return held_out


def collect_states(
    backbone: Backbone, answers: Sequence[Answer], folder: Path, *, log: Callable[[str], object]
) -> HiddenStates:
    """Hidden states of all ``answers``, from the cache in ``folder`` as far as it reaches."""
    started = time.monotonic()
    total = sum(len(answer.answer_ids) for answer in answers)
    with progress_bar(total, "hidden states", "token") as advance:
        cache_hidden_states(
            backbone.model, answers, folder, backbone_fingerprint=backbone.fingerprint, progress=advance
        )
    log(f"hidden states ready after {time.monotonic() - started:.0f} s")
    return load_hidden_states(
        folder, answers, hidden_size=backbone.hidden_size, backbone_fingerprint=backbone.fingerprint
    )
