"""``/metrics`` as Debian's Prometheus sees it: scraped without errors, and without a finding of promtool."""

from __future__ import annotations

import subprocess
from pathlib import Path

from telemetry.catalog import METRICS
from telemetry.service import Telemetry
from tests.support.debian import binary
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway
from tests.support.prometheus_server import prometheus_labels, running_prometheus


def traffic(live: LiveGateway) -> None:
    """A little of everything: classes, both methods, a refusal."""
    for name in ("code", "chat"):
        for method in ("auto", "vanilla"):
            live.client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=12,
                extra_body={"decoding": {"class": name, "method": method}},
            )
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "stream": True}
    live.http.post("/v1/chat/completions", json=body)
    live.http.post("/v1/chat/completions", json={})


def telemetry() -> Telemetry:
    return Telemetry.from_environment({}, version="1", instance="replica")


def test_promtool_has_nothing_to_say() -> None:
    program = binary("promtool")
    with running_gateway(telemetry=telemetry()) as live:
        traffic(live)
        text = live.http.get("/metrics").raise_for_status().text
    checked = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_real_prometheus_scrapes_every_metric(tmp_path: Path) -> None:
    with running_gateway(telemetry=telemetry()) as live, running_prometheus(tmp_path, live.url) as prometheus:
        traffic(live)
        # Need a server for statistics, an alert or a price in the policy, upstreams, keys, a deadline.
        elsewhere = {"medusa_redis_up", "medusa_redis_latency", "medusa_alert_state", "medusa_deadline_cuts"}
        elsewhere |= {"medusa_backend_breaker_state", "medusa_backend_requests", "medusa_cost_saved"}
        elsewhere |= {"medusa_tenant_time_saved", "medusa_tenant_cost_saved"}
        elsewhere |= {"medusa_keys_rejected", "medusa_keys_info", "medusa_limits_decided_locally"}
        for metric in METRICS:
            if metric.name in elsewhere:
                continue
            suffix = "_bucket" if metric.kind == "histogram" else ""
            for series in prometheus.wait_for(metric.prometheus + suffix):
                labels = set(series["metric"]) - {"__name__", "job", "instance", "le"}
                assert labels <= prometheus_labels(metric), metric.name
        (target,) = prometheus.targets()
        assert (target["health"], target["lastError"]) == ("up", "")
        prometheus.wait_for('sum(speculative_emitted_tokens_total{class="code"}) >= 24')
        quantile = "histogram_quantile(0.5, sum by (le) (gen_ai_server_time_to_first_token_seconds_bucket))"
        assert float(prometheus.wait_for(quantile)[0]["value"][1]) > 0
