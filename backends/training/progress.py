"""A progress bar, where the ``train`` extra is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: int, what: str, unit: str, *, initial: int = 0) -> Iterator[Callable[..., None]]:
    """A tqdm bar where tqdm is installed (the ``train`` extra), nothing otherwise."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count, note="": None
        return
    with tqdm(total=total, initial=initial, desc=what, unit=unit, mininterval=2.0) as bar:

        def advance(count: int, note: str = "") -> None:
            if note:
                bar.set_postfix_str(note, refresh=False)
            bar.update(count)

        yield advance
