"""One gateway that serves the demo model, for all files that only ask it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest

ANSWER_S = 600.0
"""What an answer may take where two dozen programs want each core; else it takes seconds."""


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Without /v1. A process of its own on a free port, ended by SIGTERM, whose exit status is checked."""
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--max-model-len", "1024"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "serves" in line)
        found = re.search(r"http://\S+(?=/v1)", line)
        assert found, line
        yield found.group()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=ANSWER_S, max_retries=0) as opened:
        yield opened
