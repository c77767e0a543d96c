"""How many tests run side by side: ``make test`` asks pytest-xdist for as many as this machine can carry."""

from __future__ import annotations

import pytest

from backends.runners.cpu_cores import usable_cores

MOST_WORKERS = 4
"""Each loads torch, models and servers of its own: over 1 GB."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """0, which is one process without workers, where there is one core."""
    cores = usable_cores()
    return min(cores, MOST_WORKERS) if cores > 1 else 0
