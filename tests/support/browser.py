"""A real Chromium for tests of the page, driven by Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.debian import binary

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips, with the reason, where there is no Chromium."""
    program = binary("chromium")
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> Iterator[Page]:
    """A page of a fresh visitor. What it reports as an error fails the test, a refused script or style too."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
    )
    page = context.new_page()
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda line: found.append(line.text) if "Content Security" in line.text else None)
    try:
        page.goto(url)
        yield page
        assert found == []
    finally:
        context.close()
