"""The page in a real Chromium, on a real server; and what is served of it to whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gateway.ui.files import ui_files
from tests.support.access_helpers import entry, keyed_gateway, new_key, write_keys
from tests.support.browser import chromium, opened
from tests.support.live_gateway import MODEL, LiveGateway, running_gateway

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    with running_gateway() as live:
        yield live


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def test_browsers_get_the_page_and_clients_the_pointer(gateway: LiveGateway) -> None:
    page = gateway.http.get("/", headers=HTML)
    assert page.headers["content-type"].startswith("text/html") and "<h1>Race</h1>" in page.text
    assert gateway.http.get("/ui").text == page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]
    for accept in ("*/*", "application/json"):
        assert gateway.http.get("/", headers={"accept": accept}).json()["models"] == [MODEL]
    for name, file in ui_files().items():
        assert gateway.http.get(f"/ui/{name}").content == file.content
    for name in ("nothing.js", "..%2ffiles.py", "files.py"):
        assert gateway.http.get(f"/ui/{name}").status_code == 404


def test_the_page_has_nothing_from_elsewhere() -> None:
    for name, file in ui_files().items():
        text = file.content.decode().replace("http://www.w3.org/", "")
        assert "http://" not in text and "https://" not in text, name
        assert "<script>" not in text and " style=" not in text and " onclick=" not in text, name


def test_a_race_ends_with_the_proof(gateway: LiveGateway, browser: Browser) -> None:
    with opened(browser, gateway.url) as page:
        page.get_by_role("button", name="Race").click()
        page.wait_for_selector("#proof.good")
        assert "identical: 40 tokens" in page.inner_text("#proof")
        assert page.inner_text("#plain .answer") == page.inner_text("#adaptive .answer") != ""
        assert page.locator("#plain .answer .head-1").count() == 0
        assert page.locator("#adaptive .answer .head-1").count() > 3
        assert page.locator("#adaptive-steps rect").count() > 10
        # By keyboard alone: a token tells where it came from.
        page.focus("#adaptive .answer")
        page.keyboard.press("ArrowRight")
        assert "by head 1: step 1, depth 1, chance 0.50" in page.inner_text("#adaptive .about")
        page.get_by_role("button", name="Play both from the start").click()
        page.wait_for_selector("#start:enabled")
        assert "40 tokens in" in page.inner_text("#adaptive .about")


def test_what_differs_is_not_called_identical(gateway: LiveGateway, browser: Browser) -> None:
    event = {"choices": [{"index": 0, "delta": {"content": "x"}}], "decoding": {}}
    asked: list[int] = []

    def answer(route: object) -> None:
        asked.append(len(asked))
        token = {"id": asked[-1], "end": 1, "source": "model", "depth": 0, "chance": None}
        step = {"choice": 0, "step": 1, "rows": 1, "nodes": 0, "ms": 1.0, "tokens": [token]}
        said = json.dumps({**event, "decoding": {"trace": [step]}})
        route.fulfill(body=f"data: {said}\n\ndata: [DONE]\n\n", content_type="text/event-stream")  # type: ignore[attr-defined]

    with opened(browser, gateway.url) as page:
        page.route("**/v1/chat/completions", answer)
        page.get_by_role("button", name="Race").click()
        page.wait_for_selector("#proof.bad")
        assert "different from token 1 on" in page.inner_text("#proof")


def test_a_refusal_is_shown_in_the_gateways_words(gateway: LiveGateway, browser: Browser) -> None:
    with opened(browser, gateway.url, width=360, dark=True) as page:
        # Nothing hangs over the edge of a narrow window.
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.fill("#prompt", "x" * 5000)
        page.get_by_role("button", name="Race").click()
        page.wait_for_selector("#proof.bad")
        assert "the prompt is too long. Shorten it." in page.inner_text("#proof")


def test_with_keys_the_page_asks_for_one(browser: Browser, tmp_path: Path) -> None:
    key = new_key()
    write_keys(tmp_path / "keys.yaml", entry("visitor", key))
    with keyed_gateway(tmp_path / "keys.yaml") as live, opened(browser, live.url) as page:
        page.wait_for_selector("#keys:not([hidden])")
        assert MODEL not in page.content()
        page.fill("#key", key)
        page.get_by_role("button", name="Use the key").click()
        page.wait_for_selector("#keys", state="hidden")
        assert page.input_value("#model") == MODEL


def test_a_thousand_decisions_and_one_as_a_whole(browser: Browser) -> None:
    with running_gateway() as live:
        ask = {"model": MODEL, "messages": [{"role": "user", "content": "secret words"}], "max_tokens": 2}
        ids = [live.http.post("/v1/chat/completions", json=ask).json()["id"] for _ in range(3)]
        log = live.state.controller.decisions
        for number in range(997):
            log.add(replace(log.latest(1)[0], request_id=f"copy-{number}"))
        with opened(browser, f"{live.url}/ui/decisions.html", width=360) as page:
            page.wait_for_selector("tbody tr")
            assert page.locator("tbody tr").count() == 1000
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            page.fill("#filter", "copy-7")
            assert page.locator("tbody tr").count() == 111
            page.get_by_role("button", name="Refresh").click()
            page.fill("#filter", ids[2])
            assert page.locator("tbody tr").count() == 1
            page.get_by_role("button", name=ids[2]).click()
            page.wait_for_selector("dialog[open]")
            assert "Medusa heads" in page.inner_text("#whole-reason")
            assert "secret words" not in page.content()
            page.keyboard.press("Escape")
            page.wait_for_selector("dialog", state="hidden")
