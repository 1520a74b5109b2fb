"""A headless Chromium, which tests drive with Playwright; without either, these tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Page

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_ARGUMENTS = (
    # As root, as in containers and CI, Chromium has no sandbox.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)

needs_browser = pytest.mark.skipif(
    _CHROMIUM is None or find_spec("playwright") is None,
    reason="needs Chromium (on Debian: apt-get install chromium) and Playwright",
)


@asynccontextmanager
async def open_page(width: int = 1280, height: int = 800) -> AsyncIterator[Page]:
    """Open an empty page; assert at the end that no script failed and that the page loaded nothing from elsewhere.

    Messages of failed requests (401, 403) are no failures of scripts.
    """
    from playwright.async_api import async_playwright

    failures: list[str] = []
    hosts: set[str] = set()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=_CHROMIUM, args=list(_ARGUMENTS))
        try:
            page = await browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(30_000)
            page.on("pageerror", lambda error: failures.append(str(error)))
            page.on("console", lambda message: failures.append(message.text) if message.type == "error" else None)
            page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
            yield page
        finally:
            await browser.close()
    assert [text for text in failures if not text.startswith("Failed to load resource")] == []
    assert len(hosts) <= 1, hosts
