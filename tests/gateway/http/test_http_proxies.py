"""Behind real proxies: what reached the application is what the proxy says it passed on, whatever a client sends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.settings import GatewaySettings
from tests.support.access_helpers import CHAT, chat
from tests.support.debian import binary
from tests.support.fakes import PATIENCE_S
from tests.support.live_gateway import running_gateway
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.wire import Echo, Wire, echoing
from tests.support.wire_cases import CASES, Seen, get

NGINX = """
{user}
worker_processes 1; daemon off; pid {folder}/pid; error_log stderr crit;
events {{ worker_connections 256; }}
http {{
  log_format passed '$request_method $request_uri $upstream_status';
  access_log {folder}/passed passed;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_header_timeout 300ms; client_body_timeout 300ms; client_max_body_size 8m;
  upstream gateway {{ server 127.0.0.1:{gateway}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{port};
    proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection "upgrade";
    proxy_request_buffering {buffering}; proxy_next_upstream off;
    location / {{ proxy_pass http://gateway; }}
    location /admin {{ return 403; }}
  }}
}}
"""
"""With the usual lines for WebSockets, and connections that are kept."""

HAPROXY = """
global
    log stdout format raw local0
    hard-stop-after 1s
defaults
    mode http
    log global
    log-format "%HM %HU %ST %s"
    option http-keep-alive
    http-reuse always
    timeout connect 5s
    timeout client 300ms
    timeout server 60s
frontend f
    bind 127.0.0.1:{port}
    http-request deny if {{ path_beg /admin }}
    default_backend gateway
backend gateway
    server gateway 127.0.0.1:{gateway}
"""

REPLICAS = """
{user}
worker_processes 1; daemon off; pid {folder}/pid; error_log stderr crit;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream replicas {{ server 127.0.0.1:{gateway}; server 127.0.0.1:{other}; keepalive 16; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://replicas;
{lines}
    }}
  }}
}}
"""

Requests = Counter[tuple[str, bytes]]
"""How often each method and target."""


class Proxy:
    """One of the two, in front of an :class:`Echo`."""

    def __init__(self, kind: str, folder: Path, gateway: int, *, config_text: str = "", **options: Any) -> None:
        self.kind, self.folder, self.port = kind, folder, free_port()
        config = folder / "config"
        text = config_text or (NGINX if kind == "nginx" else HAPROXY)
        # As root it would become somebody else, who may not write here.
        user = "user root;" if os.geteuid() == 0 else ""
        options = {"buffering": "on", **options}
        config.write_text(text.format(folder=folder, port=self.port, gateway=gateway, user=user, **options))
        self._log = folder / "passed"
        if kind == "nginx":
            command = [binary("nginx"), "-e", "stderr", "-p", str(folder), "-c", str(config)]
            self._process = subprocess.Popen(command)
        else:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen([binary("haproxy"), "-db", "-f", str(config)], stdout=log)
        self._wait()

    def _wait(self) -> None:
        with httpx.Client(transport=httpx.HTTPTransport(retries=50)) as client:
            assert client.get(f"http://127.0.0.1:{self.port}/echo/ready").status_code in (200, 404)

    def passed(self) -> tuple[Requests, Requests]:
        """Stops it, and gives what it passed on, and what of that was answered and not refused by us."""
        self.stop()
        passed: Requests = Counter()
        answered: Requests = Counter()
        for line in self._log.read_text().splitlines():
            method, target, status, *server = line.split(" ")
            if status == "-" or server not in ([], ["gateway"]):
                continue
            # haproxy passes the absolute form on as it came.
            request = method, re.sub(r"(?i)^http://localhost", "", target).encode()
            passed[request] += 1
            answered[request] += status in ("200", "404", "415")
        return passed, answered

    def stop(self) -> None:
        # Both let the connections end first, and write their lines.
        self._process.send_signal(signal.SIGQUIT if self.kind == "nginx" else signal.SIGUSR1)
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()


@contextmanager
def behind(kind: str, folder: Path, **options: str) -> Iterator[tuple[Proxy, Echo]]:
    binary(kind)
    with echoing(GatewaySettings(body_timeout_s=1)) as echo:
        proxy = Proxy(kind, folder, echo.port, **options)
        try:
            yield proxy, echo
        finally:
            proxy.stop()


@pytest.mark.parametrize("kind", ["nginx", "haproxy"])
def test_the_table_through_a_proxy(kind: str, tmp_path: Path) -> None:
    """Its own opinion on each case may differ from ours; then it refuses, or passes on what is the same to both."""

    def send(case_bytes: bytes) -> None:
        with Wire(proxy.port, patience_s=2) as wire:
            # Some wait for more, on either side.
            wire.send(case_bytes + get(b"Connection: close", target=b"/echo/last"))
            with suppress(TimeoutError):
                wire.rest()

    with behind(kind, tmp_path) as (proxy, echo):
        with ThreadPoolExecutor(64) as pool:
            list(pool.map(send, [case.sent for case in CASES]))
        passed, answered = proxy.passed()
        seen = Counter((method, target) for method, target, _ in echo.seen)
        assert answered <= seen <= passed, "it saw all that was passed on, and nothing else"
        assert seen["GET", b"/echo/last"] > 40, "those that are good were passed on"


@pytest.mark.parametrize("buffering", ["on", "off"])
def test_a_websocket_upgrade_hides_no_request_from_nginx(buffering: str, tmp_path: Path) -> None:
    """nginx keeps others from /admin, and passes on what looks like a body to it."""
    attack = b"GET /admin/policy HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with behind("nginx", tmp_path, buffering=buffering) as (proxy, echo):
        url = f"http://127.0.0.1:{proxy.port}"
        headers = {"connection": "upgrade", "upgrade": "websocket", "content-type": "application/json"}
        with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
            assert client.get("/admin/policy").status_code == 403
            # How much of it comes in one packet with the headers is up to nginx.
            hidden = [b"\r\n" * padding + attack for padding in (0, 10, 20_000, 100_000, 200_000, 400_000)]
            for body in hidden:
                assert client.post(CHAT, content=body).status_code == 400
                assert client.post("/echo", content=body).status_code == 200
            good = client.post(CHAT, content=json.dumps(chat()).encode())
            assert good.json()["choices"][0]["message"]["content"]
        chats: Seen = ("POST", CHAT.encode(), b"")
        expected = [each for body in hidden for each in (chats, ("POST", b"/echo", body))]
        assert [each for each in echo.seen if each[1] != b"/echo/ready"] == [*expected, chats]


def test_the_lines_for_nginx_in_the_documentation_hide_a_drain(tmp_path: Path) -> None:
    """docs/operations.md's own, so that they stay right."""
    binary("nginx")
    page = (ROOT / "docs" / "operations.md").read_text()
    block = re.search(r"```nginx\n(.*?)```", page, re.DOTALL)
    assert block is not None
    with running_gateway() as one, running_gateway() as two:
        ports = [int(each.url.rpartition(":")[2]) for each in (one, two)]
        proxy = Proxy("nginx", tmp_path, ports[0], config_text=REPLICAS, other=ports[1], lines=block[1])
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{proxy.port}", timeout=PATIENCE_S) as client:
                one.decoder.hold(at_step=1)
                two.decoder.hold(at_step=1)
                with (
                    client.stream("POST", CHAT, json=chat(stream=True)) as first,
                    client.stream("POST", CHAT, json=chat(stream=True)) as second,
                ):
                    assert [len(each.decoder.submitted) for each in (one, two)] == [1, 1]
                    assert one.loop is not None
                    one.loop.call_soon_threadsafe(one.server.begin_drain)
                    one.in_loop(asyncio.sleep(0))
                    two.decoder.release()
                    answers = [client.post(CHAT, json=chat()).status_code for _ in range(20)]
                    assert answers == [200] * 20
                    one.decoder.release()
                    for each in (first, second):
                        assert "data: [DONE]" in each.read().decode()
        finally:
            proxy.stop()
