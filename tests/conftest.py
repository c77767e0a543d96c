"""How many tests run side by side: ``make test`` asks pytest-xdist for as many as this machine can carry. And which
examples hypothesis tries: the same in each run, so that a run fails by what was changed and not by chance."""

from __future__ import annotations

import sys

import pytest
from hypothesis import settings

from backends.runners.cpu_cores import usable_cores

# Times of single examples say nothing on a machine that is shared.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)  # Other examples each time: `make test-search`.
settings.load_profile("repeatable")

MOST_WORKERS = 4
"""Each loads torch, models and servers of its own: over 1 GB."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """0, which is one process without workers, where there is one core."""
    cores = usable_cores()
    return min(cores, MOST_WORKERS) if cores > 1 else 0


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws from torch does not depend on the tests before it in its process."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
