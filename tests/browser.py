"""Pages in a headless Chromium, for tests; without it, these tests are skipped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from deploy.browser import INSTALLED, open_page

if TYPE_CHECKING:
    from playwright.async_api import Page

needs_browser = pytest.mark.skipif(not INSTALLED, reason="Chromium or Playwright is not installed")


@asynccontextmanager
async def sound_page() -> AsyncIterator[Page]:
    """Open an empty page; assert at the end that no script failed, and that the page loaded nothing from elsewhere.

    A request that was rejected (401, 403) is no failure of a script.
    """
    failures: list[str] = []
    hosts: set[str] = set()
    async with open_page() as page:
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda message: failures.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        yield page
    assert [text for text in failures if not text.startswith("Failed to load resource")] == []
    assert len(hosts) == 1, hosts
