"""Writes docs/pictures/page.png, the router's page after a chat: `python -m deploy.page_picture URL`.

The URL is that of a running cluster, which should be under some load (`tandem bench`), so that its figures are not 0.
"""

import asyncio
import sys
from pathlib import Path

from deploy.browser import open_page

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "page.png"
_PROMPTS = ("Why is the sky blue? Answer in one sentence.", "And why is it red in the evening? One sentence again.")
_FOLLOWS_MS = 7000
"""Time in which the figures of the cluster follow the load, in milliseconds."""


async def take_picture(url: str, picture: Path) -> None:
    """Chat with the cluster at `url` in a browser, and write the picture."""
    async with open_page(1440, 860) as page:
        await page.goto(url)
        for number, prompt in enumerate(_PROMPTS):
            await page.fill("#prompt", prompt)
            await page.press("#prompt", "Enter")
            await page.wait_for_selector(f"article.assistant >> nth={number} >> .note:has-text('stop')")
        await page.wait_for_selector("#cluster-view table")
        await page.wait_for_timeout(_FOLLOWS_MS)
        await page.screenshot(path=picture)


if __name__ == "__main__":
    asyncio.run(take_picture(sys.argv[1], PICTURE))
