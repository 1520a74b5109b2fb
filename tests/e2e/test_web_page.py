"""The page at / in a browser, in front of a real cluster: an answer of the model, and the workers as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.browser import needs_browser, sound_page


@needs_browser
async def test_a_chat_and_the_workers(running_cluster: Callable[..., Any]) -> None:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    async with sound_page() as page:
        await page.goto(f"http://{cluster.http_address}/")
        await page.wait_for_selector("#model option", state="attached")
        await page.click("summary:has-text('Options')")
        await page.fill("#temperature", "0")
        await page.fill("#max-tokens", "40")
        await page.fill("#prompt", "What is the capital of France?")
        await page.press("#prompt", "Enter")
        await page.wait_for_selector("article.assistant .note:has-text('first token after')")
        assert "Paris" in (await page.text_content("article.assistant .text") or "")
        rows = page.locator("#cluster-view table").first.locator("tbody tr")
        await rows.first.wait_for()
        shown = {tuple((await row.inner_text()).split()[:3]) for row in await rows.all()}
        assert shown == {("prefill-0", "prefill", "up"), ("decode-0", "decode", "up")}
        assert await page.locator("#cluster-view strong").count() == len(shown), "each worker has a bottleneck"
