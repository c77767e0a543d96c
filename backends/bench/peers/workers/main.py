"""One peer in a process of its own: ``python main.py ADAPTER``; orders and answers are JSON lines on stdin and stdout.

Runs in any environment, so it needs nothing but Python's own library; ``ADAPTER`` is the file that knows the peer. It
has a class ``Peer``, made with the options of the order ``load``, with ``facts`` to report and one of these:

- ``start(index, ids, max_tokens, mode)`` and ``step() -> [(index, new, ended)]``: an engine that is stepped;
- ``stream(ids, max_tokens, mode, on_tokens)``, which calls ``on_tokens(new)`` and returns at the end: called in as many
  threads as requests are in flight;
- ``batch(prompts, max_tokens, on_step)``, which calls ``on_step([new_id or None, ...])``: static batches.

New tokens are ids, or pieces of text where a peer tells no ids.

Orders: ``{"do": "load", "options": {...}}`` and ``{"do": "run", "prompts": [[id, ...]], "max_tokens", "concurrency",
"mode"}``. Answers: ``{"ok": true, ...}`` or ``{"ok": false, "error"}``. Times are in seconds since the run began.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1

Answers = list[dict[str, Any]]
"""``sent``: when the request was handed over; ``chunks``: ``[time, number of tokens]``; ``tokens``: ids, or text."""


def run_stepped(peer: Any, prompts: list[list[int]], max_tokens: int, concurrency: int, mode: str) -> Answers:
    clock = _clock()
    answers: Answers = []
    open_answers: set[int] = set()
    while len(answers) < len(prompts) or open_answers:
        while len(answers) < len(prompts) and len(open_answers) < concurrency:
            index = len(answers)
            answers.append({"sent": clock(), "chunks": [], "tokens": []})
            open_answers.add(index)
            peer.start(index, prompts[index], max_tokens, mode)
        for index, new, ended in peer.step():
            _add(answers[index], clock(), new)
            if ended:
                open_answers.discard(index)
    return answers


def run_threaded(peer: Any, prompts: list[list[int]], max_tokens: int, concurrency: int, mode: str) -> Answers:
    clock = _clock()
    answers: Answers = [{"sent": 0.0, "chunks": [], "tokens": []} for _ in prompts]
    waiting = iter(range(len(prompts)))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors:
                with lock:
                    index = next(waiting, None)
                if index is None:
                    return
                answers[index]["sent"] = clock()
                answer = answers[index]
                peer.stream(prompts[index], max_tokens, mode, lambda new, answer=answer: _add(answer, clock(), new))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers


def run_batched(peer: Any, prompts: list[list[int]], max_tokens: int, concurrency: int, mode: str) -> Answers:
    clock = _clock()
    answers: Answers = []
    for first in range(0, len(prompts), concurrency):
        batch: Answers = [{"sent": clock(), "chunks": [], "tokens": []} for _ in prompts[first : first + concurrency]]

        def on_step(new: list[int | None], batch: Answers = batch) -> None:
            at = clock()
            for answer, token in zip(batch, new, strict=True):
                if token is not None:
                    _add(answer, at, [token])

        peer.batch(prompts[first : first + concurrency], max_tokens, on_step)
        answers += batch
    return answers


def _add(answer: dict[str, Any], at: float, new: list[Any]) -> None:
    if new:
        answer["chunks"].append([at, len(new)])
        answer["tokens"] += new


def _clock() -> Callable[[], float]:
    began = time.perf_counter()
    return lambda: time.perf_counter() - began


def peak_memory_mb() -> float | None:
    """The most memory that this process and those it started have held, each at its peak; None without ``/proc``."""
    try:
        return round(sum(_peak_kb(pid) for pid in _family(os.getpid())) / 1024, 1)
    except OSError:
        return None


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def _peak_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


class Worker:
    def __init__(self, adapter: Path) -> None:
        self._adapter = adapter
        self._peer: Any = None

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "load":
            self._peer = _load(self._adapter).Peer(order["options"])
            return {"facts": self._peer.facts, "memory_mb": peak_memory_mb()}
        kinds = {"start": run_stepped, "stream": run_threaded, "batch": run_batched}
        run = next(function for method, function in kinds.items() if hasattr(self._peer, method))
        answers = run(self._peer, order["prompts"], order["max_tokens"], order["concurrency"], order["mode"])
        return {"answers": answers, "memory_mb": peak_memory_mb()}


def _load(adapter: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"peer_{adapter.stem}", adapter)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def end_with_parent() -> None:
    """Have Linux end this process when the one that started it is gone: asleep, it would never notice."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def main() -> None:
    end_with_parent()
    # Libraries print what they like; it must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(Path(sys.argv[1]))
    for line in sys.stdin:
        try:
            answer = {"ok": True, **worker.obey(json.loads(line))}
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
    # Some libraries hang or crash while they are taken down; nothing is left to be lost.
    sys.stderr.flush()
    os._exit(0)
