"""The page at / in a real browser, in front of fake workers: chat, tool calls, stop, keys and the cluster's state."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from router.text.tokenizer import Tokenizer
from tandem.metrics import families as f
from tandem.metrics.exposition import Exposition, merge
from tandem.metrics.registry import Registry
from tandem.protocol.errors import Internal
from tandem.settings.secrets import Secrets
from tests.browser import needs_browser, sound_page
from tests.unit.router.api.test_tool_calls import ANSWER, ARGUMENTS, script
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import until

KEY = "sesame"
HTML = "<img src=x onerror=alert(1)><b>bold</b> & **stars**"
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
)


@pytest.fixture
def settings() -> dict[str, Any]:
    return {
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "api_keys": (KEY,),
        "secrets": Secrets("secret", "eyes"),
    }


@pytest.fixture
def url(cluster: Cluster) -> str:
    return f"http://{cluster.endpoints.http_address}/"


def metrics_text() -> str:
    """Returns the metrics of a router with two waiting requests, of a worker that is up, and of one that is down."""
    router = Registry({"model": "llama", "role": "router", "worker": "router"})
    worker = Registry({"model": "llama", "worker": "prefill-0"})
    controller = Registry({"model": "llama", "worker": "controller"})
    router.read(lambda: {f.REQUESTS_WAITING: 2})
    worker.read(lambda: {f.WORKER_READY: 1, f.KV_USAGE: 0.25})
    up = {("router", "router"): 1.0, ("prefill", "prefill-0"): 1.0, ("decode", "decode-0"): 0.0}
    controller.read(lambda: {f.PROCESS_UP: up, f.TARGET_UP: {("prefill-0",): 1.0}})
    return merge(Exposition(registry).render()[0].decode() for registry in (router, worker, controller))


async def test_the_files_need_no_key_and_name_no_other_host(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        for reply in (await client.get("/"), await client.head("/")):
            assert reply.status_code == 200
            assert reply.headers["content-type"] == "text/html; charset=utf-8"
            assert reply.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")
            assert "unsafe" not in reply.headers["content-security-policy"]
        page = (await client.get("/")).text
        files = re.findall(r'(?:src|href)="(page/[^"]+)"', page)
        files += re.findall(r'from "\./([^"]+)"', (await client.get("/page/page.js")).text)
        assert len(files) == 5
        for name in files:
            reply = await client.get(f"/page/{name.removeprefix('page/')}")
            assert reply.status_code == 200, name
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|style=", reply.text), name
        for path in ("/page/other.js", "/page/..%2fapp.py", "/cluster"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.get("/page/other.js", headers={"authorization": f"Bearer {KEY}"})).status_code == 404


async def test_the_state_of_the_cluster_is_for_readers(cluster: Cluster, url: str) -> None:
    cluster.controller.metrics_text = metrics_text()
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        assert (await client.get("/cluster", headers={"authorization": f"Bearer {KEY}"})).status_code == 403
        reader = {"authorization": "Bearer eyes"}
        view = (await client.get("/cluster", headers=reader)).json()
        assert (view["mode"], view["degraded"], view["waiting"]) == ("adaptive", "", 2)
        assert [(one["worker"], one["state"], one["kv_used"]) for one in view["workers"]] == [
            ("prefill-0", "up", 0.25),
            ("decode-0", "down", 0.0),
        ]
        assert {one["worker"]: one["bottleneck"] for one in view["findings"]} == {
            "prefill-0": "none",
            "decode-0": "down",
        }
        scrapes = cluster.controller.scrapes
        await client.get("/cluster", headers=reader)
        assert cluster.controller.scrapes == scrapes, "readers share a scrape"


async def test_a_controller_that_fails_is_a_clear_error(cluster: Cluster, url: str) -> None:
    cluster.controller.metrics_error = Internal("no figures")
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        reply = await client.get("/cluster", headers={"authorization": "Bearer eyes"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (500, "the controller: no figures")


@needs_browser
async def test_a_chat_with_a_key_and_tools(cluster: Cluster, url: str, tokenizer: Tokenizer) -> None:
    async with sound_page() as page:
        await page.goto(url)
        await page.fill("#api-key input", "wrong")
        await page.click("#api-key button")
        await page.wait_for_selector("#api-key .error:has-text('API key')")
        await page.fill("#api-key input", KEY)
        await page.click("#api-key button")
        await page.wait_for_selector("#api-key", state="hidden")
        assert await page.input_value("#model") == "fake"

        script(cluster, tokenizer, ANSWER)
        await page.click("summary:has-text('Options')")
        await page.fill("#tools", "[")
        await page.fill("#prompt", "Weather?")
        await page.click("#send")
        await page.wait_for_selector("article .error:has-text('the tools are not JSON')")
        assert await page.input_value("#prompt") == "Weather?", "a message that was not sent is not lost"

        await page.fill("#max-tokens", "500")
        await page.fill("#tools", TOOLS)
        await page.press("#prompt", "Enter")
        await page.wait_for_selector("text=Send results")
        answer = page.locator("article.assistant").last
        assert await answer.locator("details pre").text_content() == "Hm."
        assert await answer.locator(".text").text_content() == "Look: "
        assert await answer.locator(".tool pre").all_text_contents() == [ARGUMENTS, "{}"]

        script(cluster, tokenizer, HTML)
        await answer.locator("textarea").first.fill("It rains.")
        await page.click("text=Send results")
        await page.wait_for_selector("article.assistant >> nth=2 >> .note:has-text('stop')")
        last = page.locator("article.assistant").last
        assert await last.locator(".text").text_content() == HTML, "answers are text, not HTML"
        assert await last.locator("img, b").count() == 0
        rendered = tokenizer.decode(cluster.prefill.prefills[-1].prompt_token_ids)
        assert "tool\nIt rains.\n" in rendered
        assert await page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0


@needs_browser
async def test_stop_ends_the_request_and_keeps_what_was_said(cluster: Cluster, url: str, tokenizer: Tokenizer) -> None:
    script(cluster, tokenizer, "word " * 200)
    for worker in cluster.workers:
        worker.switches.held_at = 5
    async with sound_page() as page:
        await page.goto(url)
        await page.fill("#api-key input", KEY)
        await page.click("#api-key button")
        await page.fill("#prompt", "Talk.")
        await page.press("#prompt", "Enter")
        await page.wait_for_selector("article.assistant .text:has-text('word')")
        await page.click("#stop")
        await page.wait_for_selector("article.assistant .note:has-text('stopped')")
        await until(lambda: cluster.decode.aborted, "the request was aborted")
        assert await page.is_visible("#send")
        assert "word" in (await page.text_content("article.assistant .text") or "")
        await page.click("#clear")
        assert await page.locator("article").count() == 0


@needs_browser
async def test_the_cluster_is_shown_to_a_reader_and_follows_it(cluster: Cluster, url: str) -> None:
    cluster.controller.metrics_text = metrics_text()
    async with sound_page() as page:
        await page.goto(url)
        await page.fill("#api-key input", KEY)
        await page.click("#api-key button")
        await page.wait_for_selector("#reader-key .error:has-text('this key has the role tenant')")
        await page.fill("#reader-key input", "eyes")
        await page.click("#reader-key button")
        rows = page.locator("#cluster-view table").first.locator("tbody tr")
        await rows.first.wait_for()
        first, second = [" ".join((await row.inner_text()).split()) for row in await rows.all()]
        assert first.startswith("prefill-0 prefill up 25% ")
        assert second.startswith("decode-0 decode down ")
        assert await page.text_content("#health") == "ready"
        cluster.controller.metrics_error = Internal("no figures")
        await page.wait_for_selector("#cluster-error:has-text('no figures')")
        assert await rows.count() == 2, "the last figures stay"
        cluster.controller.metrics_error = None
        await page.wait_for_selector("#cluster-error", state="hidden")
