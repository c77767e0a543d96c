"""What runs in a peer's process: loads of requests, times, and the real worker of transformers."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.bench.peers.contestants import _WORKERS
from backends.bench.peers.process import WorkerFailed, WorkerProcess
from backends.bench.peers.workers import main
from backends.bench.peers.workers.own import Peer as OwnPeer
from backends.bench.peers.workers.transformers_generate import Peer as TransformersPeer
from backends.models.tiny import TINY_MODEL_NAME, tiny_model

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


class Stepped:
    """Answers with the prompt's own ids, one a step; none has an answer in its first step."""

    def __init__(self) -> None:
        self.open: dict[int, list[int]] = {}
        self.most = 0

    def start(self, index: int, ids: list[int], max_tokens: int, mode: str) -> None:
        self.open[index] = ids[:max_tokens]
        self.most = max(self.most, len(self.open))

    def step(self) -> list[tuple[int, list[int], bool]]:
        told = [(index, left[:1], len(left) == 1) for index, left in self.open.items()]
        self.open = {index: left[1:] for index, left in self.open.items() if len(left) > 1}
        return told


class Streaming:
    def __init__(self) -> None:
        self._lock, self._flying, self.most = threading.Lock(), 0, 0
        self._both = threading.Barrier(2)

    def stream(self, ids: list[int], max_tokens: int, mode: str, on_tokens: Callable[[list[str]], None]) -> None:
        with self._lock:
            self._flying += 1
            self.most = max(self.most, self._flying)
        self._both.wait(10)
        for each in ids[:max_tokens]:
            on_tokens([str(each)])
        with self._lock:
            self._flying -= 1


@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_as_many_requests_of_a_stepped_peer_are_in_flight_as_asked_for(concurrency: int) -> None:
    peer = Stepped()
    answers = main.run_stepped(peer, PROMPTS, 3, concurrency, "")
    assert [answer["tokens"] for answer in answers] == [ids[:3] for ids in PROMPTS]
    assert peer.most == min(concurrency, len(PROMPTS))
    for answer in answers:
        times = [answer["sent"], *(at for at, _ in answer["chunks"])]
        assert times == sorted(times)
        assert sum(count for _, count in answer["chunks"]) == len(answer["tokens"])


def test_a_streaming_peer_is_asked_by_as_many_threads() -> None:
    peer = Streaming()
    answers = main.run_threaded(peer, PROMPTS, 2, 2, "")
    assert [answer["tokens"] for answer in answers] == [[str(each) for each in ids[:2]] for ids in PROMPTS]
    assert peer.most == 2


def test_an_error_in_a_thread_is_the_runs() -> None:
    class Broken:
        def stream(self, *order: Any) -> None:
            raise RuntimeError("no more memory")

    with pytest.raises(RuntimeError, match="no more memory"):
        main.run_threaded(Broken(), PROMPTS, 2, 2, "")


def test_batches_are_static_and_drop_what_ended() -> None:
    class Batched:
        def batch(self, prompts: list[list[int]], max_tokens: int, on_step: Callable[[list[int | None]], None]) -> None:
            assert len(prompts) <= 3
            for step in range(max_tokens):
                on_step([ids[step] if step < len(ids) else None for ids in prompts])

    answers = main.run_batched(Batched(), PROMPTS, 4, 3, "")
    assert [answer["tokens"] for answer in answers] == PROMPTS


def test_what_libraries_print_does_not_get_between_the_answers(tmp_path: Path) -> None:
    adapter = tmp_path / "noisy.py"
    adapter.write_text(
        "print('welcome')\n"
        "class Peer:\n"
        "    facts = {'version': '1'}\n"
        "    def __init__(self, options):\n"
        "        print('loading', options)\n"
        "        if options['fail']: raise ValueError('no such file')\n"
    )
    command = [sys.executable, str(_WORKERS / "main.py"), str(adapter)]
    worker = WorkerProcess(command, os.environ)
    try:
        answer = worker.ask({"do": "load", "options": {"fail": False}}, 20.0)
        assert answer["facts"] == {"version": "1"} and answer["memory_mb"] > 1
        with pytest.raises(WorkerFailed, match="ValueError: no such file"):
            worker.ask({"do": "load", "options": {"fail": True}}, 20.0)
    finally:
        worker.close()


def test_transformers_worker_answers_what_generate_does(tmp_path: Path) -> None:
    model: Any = tiny_model(dtype=torch.float32)
    model.generation_config.eos_token_id = 7
    model.save_pretrained(tmp_path)
    threads = torch.get_num_threads()
    peer = TransformersPeer({"model": str(tmp_path), "threads": threads, "dtype": "float32"})
    prompts = [[10, 11, 12], [13], [14, 15]]
    answers = main.run_batched(peer, prompts, 12, 2, "")
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            out = peer._model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=7)
        assert answer["tokens"] == out[0, len(prompt) :].tolist()
        assert len(answer["chunks"]) == len(answer["tokens"])
    json.dumps(answers)


def test_own_worker_answers_the_same_adaptive_and_vanilla() -> None:
    threads = torch.get_num_threads()
    try:
        peer = OwnPeer({"model": TINY_MODEL_NAME, "context": 128, "kv_tokens": 2048, "threads": 1})
        prompts = [[10, 11, 12], [13, 14, 15, 16]]
        runs = [main.run_stepped(peer, prompts, 16, 2, mode) for mode in ("vanilla", "adaptive")]
    finally:
        torch.set_num_threads(threads)
    vanilla, adaptive = ([answer["tokens"] for answer in run] for run in runs)
    assert vanilla == adaptive and all(0 < len(tokens) <= 16 for tokens in vanilla)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_sleeping_worker_ends_with_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("class Peer:\n    facts = {}\n    def __init__(self, options): pass\n")
    program = (
        "import os, signal, sys\n"
        "from backends.bench.peers.process import WorkerProcess\n"
        "worker = WorkerProcess(sys.argv[1:], os.environ)\n"
        "worker.ask({'do': 'load', 'options': {}}, 20.0)\n"
        "print(worker.pid, flush=True)\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-c", program, sys.executable, str(_WORKERS / "main.py"), str(tmp_path / "idle.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        asleep = os.pidfd_open(int(bench.stdout.readline()))
        try:
            bench.kill()
            # Readable once the process is gone.
            assert select.select([asleep], [], [], 10.0)[0] == [asleep]
        finally:
            os.close(asleep)
