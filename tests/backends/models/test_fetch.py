"""``medusa-gateway fetch``, against a hub of our own on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from backends.models import fetch
from gateway import cli
from tests.support.paths import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "acme/model": ["config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx"],
    "acme/pickled": ["config.json", "pytorch_model.bin", "tf_model.h5"],
    "acme/heads": ["config.json", "medusa_lm_head.pt"],
}


class Hub(BaseHTTPRequestHandler):
    """The three routes of a model hub that a download needs."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        for name, files in FILES.items():
            if path == f"/api/models/{name}/revision/main":
                return self._json({"id": name, "sha": COMMIT, "siblings": []})
            if path == f"/api/models/{name}/tree/{COMMIT}":
                return self._json(
                    [
                        {"type": "file", "path": f, "size": len(f), "oid": hashlib.sha1(f.encode()).hexdigest()}
                        for f in files
                    ]
                )
            prefix = f"/{name}/resolve/{COMMIT}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in files:
                return self._file(path.removeprefix(prefix))
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        return self.end_headers()

    do_HEAD = do_GET

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), "application/json")

    def _file(self, name: str) -> None:
        self._send(name.encode(), "application/octet-stream", ETag=f'"{hashlib.sha1(name.encode()).hexdigest()}"')

    def _send(self, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(200)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run_fetch(cache: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: the hub's client reads its settings once, at import.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environ = {**inherited, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT), "NO_PROXY": "*", **environ}
    command = [sys.executable, "-m", "gateway", "fetch", *arguments]
    return subprocess.run(command, env=environ, cwd=cache, capture_output=True, text=True, timeout=60, check=False)


def brought(told: str) -> list[list[str]]:
    folders = [Path(line.partition(": ")[2]) for line in told.splitlines()]
    return [sorted(str(path.relative_to(f)) for path in f.rglob("*") if path.is_file()) for f in folders]


def test_model_and_heads_come_from_the_hub_and_are_found_without_it(tmp_path: Path) -> None:
    wanted = ("--model", "acme/model", "--heads", "acme/heads")
    with hub() as url:
        done = run_fetch(tmp_path, *wanted, HF_ENDPOINT=url)
    assert done.returncode == 0, done.stderr
    # The pickle is a second copy of the weights, and nothing here reads ONNX; heads are taken whole.
    assert brought(done.stdout) == [["config.json", "model.safetensors"], ["config.json", "medusa_lm_head.pt"]]
    assert all(line.partition(": ")[2].startswith(str(tmp_path)) for line in done.stdout.splitlines())
    # What `serve` does beside it in a pod: the same cache, and no network.
    again = run_fetch(tmp_path, *wanted, HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr


def test_pickled_weights_are_brought_where_there_are_no_others(tmp_path: Path) -> None:
    with hub() as url:
        done = run_fetch(tmp_path, "--model", "acme/pickled", HF_ENDPOINT=url)
    assert brought(done.stdout) == [["config.json", "pytorch_model.bin"]], done.stderr


def test_what_can_not_be_brought_is_told_in_a_line(tmp_path: Path) -> None:
    with hub() as url:
        done = run_fetch(tmp_path, "--model", "acme/nothing", HF_ENDPOINT=url)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "medusa-gateway: error: acme/nothing can't be brought from the hub: " in done.stderr


def test_local_folders_are_taken_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch", "--model", str(tmp_path), "--heads", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"model: {tmp_path}\nheads: {tmp_path}\n"
    with pytest.raises(fetch.FetchError, match="is no folder"):
        fetch.fetch_model(str(tmp_path / "absent"))
    with pytest.raises(fetch.FetchError, match="is no folder"):
        fetch.fetch_heads("./absent")


def test_all_engines_of_a_backends_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in ("a", "b", "heads")]
    for folder in folders:
        folder.mkdir()
    a, b, heads = folders
    file = tmp_path / "backends.yaml"
    file.write_text(
        "version: 1\nbackends:\n"
        f"  - {{name: one, kind: engine, serves: m, model: {a}}}\n"
        f"  - {{name: two, kind: engine, serves: m, model: {a}}}\n"
        f"  - {{name: three, kind: engine, serves: n, model: {b}, heads: {heads}}}\n"
        "  - {name: four, kind: openai, serves: m, url: 'http://elsewhere/v1'}\n"
    )
    assert cli.main(["fetch", "--backends", str(file)]) == 0
    assert capsys.readouterr().out == f"model: {a}\nmodel: {b}\nheads: {heads}\n"
    assert cli.main(["fetch", "--backends", str(file), "--heads", "x"]) == 2
    file.write_text("version: 1\n")
    assert cli.main(["fetch", "--backends", str(file)]) == 2
    assert "the backends file is refused: " in capsys.readouterr().err


@pytest.mark.model
def test_the_demo_model_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch"]) == 0
    folder = Path(capsys.readouterr().out.removeprefix("model: ").strip())
    assert (folder / "model.safetensors").is_file()
