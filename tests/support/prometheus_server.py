"""A real Prometheus that scrapes a gateway in a test. Skips where Debian's package can't be had."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from telemetry.catalog import Metric
from tests.support.debian import binary
from tests.support.fakes import PATIENCE_S
from tests.support.ports import free_port


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str
    http: httpx.Client

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query. Raises for an expression that Prometheus refuses."""
        response = self.http.get("/api/v1/query", params={"query": expression})
        assert response.status_code == 200, response.text
        return response.json()["data"]["result"]

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """The series, as soon as there are any."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.query(expression)):
            assert time.monotonic() < deadline, f"{expression} has no series; targets: {self.targets()}"
            threading.Event().wait(0.1)
        return found

    def targets(self) -> list[dict[str, Any]]:
        return self.http.get("/api/v1/targets").json()["data"]["activeTargets"]


@contextmanager
def running_prometheus(
    folder: Path,
    gateway_url: str,
    *,
    every: str = "250ms",
    namespaces: Mapping[str, str] | None = None,
    rules: Path | None = None,
    targets: Path | None = None,
) -> Iterator[Prometheus]:
    """Prometheus with its data in ``folder``, scraping ``gateway_url``'s /metrics.

    ``namespaces``: pods by namespace, each of which is this gateway. ``rules``: a rule file. ``targets``: a file that
    says what to scrape instead, read again when it changes.
    """
    program, port = binary("prometheus"), free_port()
    config = folder / "prometheus.yml"
    address = [urlsplit(gateway_url).netloc]
    jobs: list[dict[str, Any]] = [
        {
            "job_name": f"gateway-{namespace}" if namespace else "medusa-gateway",
            "static_configs": [{"targets": address, "labels": {"namespace": namespace, "pod": pod} if pod else {}}],
        }
        for namespace, pod in (namespaces or {"": ""}).items()
    ]
    if targets is not None:
        jobs = [{"job_name": "gateway", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}]
    # JSON is YAML.
    found: dict[str, Any] = {"global": {"scrape_interval": every, "evaluation_interval": every}, "scrape_configs": jobs}
    if rules is not None:
        found["rule_files"] = [str(rules)]
    config.write_text(json.dumps(found))
    command = [str(program), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            _wait_ready(http, process)
            yield Prometheus(url, http)
    finally:
        process.kill()
        process.communicate()


def _wait_ready(http: httpx.Client, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        if process.poll() is not None:
            raise AssertionError(f"prometheus ended: {process.communicate()[0][-2000:]}")
        try:
            if http.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "prometheus did not get ready"
        threading.Event().wait(0.05)


def prometheus_labels(metric: Metric) -> set[str]:
    """The labels of ``metric`` as Prometheus names them."""
    return {label.replace(".", "_") for label in metric.labels}
