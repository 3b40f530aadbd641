"""A headless Chromium for tests that open pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, sync_playwright


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser of GRAPHKV_CHROMIUM, else `chromium` on the PATH, else Playwright's own; skips if there is none."""
    with sync_playwright() as playwright:
        found = os.environ.get("GRAPHKV_CHROMIUM") or shutil.which("chromium")
        if not found and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no browser: apt-get install chromium, or playwright install chromium, or set GRAPHKV_CHROMIUM")
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"{found or 'the Chromium of Playwright'} does not start: {error.message.splitlines()[0]}")
        yield browser
        browser.close()
