"""The names of metrics: unique, and as Prometheus wants them."""

from __future__ import annotations

import re

import pytest

from telemetry.catalog import BY_NAME, METRICS, Metric
from tests.support.prometheus_server import prometheus_labels


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_prometheus_names_follow_its_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.prometheus)
    assert metric.prometheus.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(count|sum|bucket|gauge|counter|ms|us)$", metric.prometheus)
    # What has "info" in its name says something by its labels, and is always 1.
    assert metric.prometheus.endswith("_info") == metric.description.startswith("Always 1;")
    assert metric.unit != "1"
    assert metric.description.endswith(".")
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in prometheus_labels(metric))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_histograms_and_only_they_have_ascending_buckets(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_names_are_unique() -> None:
    assert len({metric.prometheus for metric in METRICS}) == len(METRICS) == len(BY_NAME)


def test_latency_is_told_apart_down_to_half_a_millisecond() -> None:
    assert all(BY_NAME[name].buckets[0] == 0.0005 for name in BY_NAME if name.startswith("gen_ai.server."))


def test_long_answers_have_buckets_too() -> None:
    """4,096 tokens at 20 a second, and as much again."""
    assert BY_NAME["gen_ai.server.request.duration"].buckets[-2] > 2 * 4096 / 20
