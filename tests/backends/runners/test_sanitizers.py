"""The kernels are clean under the sanitizers, in half a minute; ``make test-sanitize`` does only this."""

from __future__ import annotations

import pytest

from tests.support.engine_helpers import native_or_skip
from tests.support.sanitize import SANITIZERS, run, unavailable


@pytest.mark.parametrize("name", SANITIZERS)
def test_kernels_are_clean(name: str) -> None:
    native_or_skip()
    if reason := unavailable():
        pytest.skip(reason)
    result = run(name)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]
