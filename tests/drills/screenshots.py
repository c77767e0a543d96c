"""The pictures of the page in docs/images: the demo model served as users serve it, and a real Chromium.

``make screenshots``. Prints what each race ended with.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

from tests.support.browser import chromium, opened
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "images"
PATIENCE_MS = 120_000
PICTURES = (("race.png", 1200, 1180, False), ("race-dark.png", 1200, 1180, True), ("race-narrow.png", 400, 1000, False))
"""File, width and height of the window, and whether it is dark."""


def main() -> int:
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--max-model-len", "1024"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "serves" in line)
        found = re.search(r"(http://\S+)/v1", line)
        assert found, line
        FOLDER.mkdir(exist_ok=True)
        with chromium() as browser:
            for name, width, height, dark in PICTURES:
                with opened(browser, found.group(1), width=width, height=height, dark=dark) as page:
                    page.get_by_role("button", name="Race").click()
                    page.wait_for_selector("#proof.good, #proof.bad", timeout=PATIENCE_MS)
                    print(f"{name}: {page.inner_text('#proof')}", flush=True)
                    page.screenshot(path=FOLDER / name)
            with opened(browser, f"{found.group(1)}/ui/decisions.html", height=500) as page:
                page.wait_for_selector("tbody tr", timeout=PATIENCE_MS)
                page.screenshot(path=FOLDER / "decisions.png")
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
