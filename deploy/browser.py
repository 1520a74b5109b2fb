"""A headless Chromium that opens pages of this host, driven with Playwright: for tests, and for pictures of pages."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.async_api import Page

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
INSTALLED = _CHROMIUM is not None and find_spec("playwright") is not None
"""True if Chromium and Playwright are installed; on Debian: `apt-get install chromium`, `pip install playwright`."""
_ARGUMENTS = (
    # As root, as in containers and CI, Chromium has no sandbox.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@asynccontextmanager
async def open_page(width: int = 1280, height: int = 800) -> AsyncIterator[Page]:
    """Open an empty page, and close the browser at the end."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=_CHROMIUM, args=list(_ARGUMENTS))
        try:
            page = await browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(30_000)
            yield page
        finally:
            await browser.close()
