"""`tandem top` over listeners that a test opens: one picture, from the figures of several processes."""

import asyncio
import io
from collections.abc import Iterator

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.cli.observe.top_view import picture
from tandem.metrics import families as f
from tandem.metrics.exposition import TEXT, Exposition, merge
from tandem.metrics.metrics_server import METRICS_PATH, MetricsServer
from tandem.metrics.registry import Registry
from tandem.metrics.scrape import Scrape, ScrapeInterval

KEY = "operator"


class Cluster:
    """A router, a prefill worker that is down and a decode worker with a slow transport, two seconds apart."""

    def __init__(self) -> None:
        self.router = Registry({"model": "llama", "role": "router", "worker": "router"})
        self.decode = Registry({"model": "llama", "worker": "decode-0"})
        self.controller = Registry({"model": "llama", "worker": "controller"})
        up = {("router", "router"): 1.0, ("prefill", "prefill-0"): 0.0, ("decode", "decode-0"): 1.0}
        restarts = {("router",): 0.0, ("prefill-0",): 3.0, ("decode-0",): 0.0}
        self.controller.read(
            lambda: {f.PROCESS_UP: up, f.PROCESS_RESTARTS: restarts, f.TARGET_UP: {("decode-0",): 1.0}}
        )
        self.router.read(lambda: {f.REQUESTS_RUNNING: 5, f.REQUESTS_WAITING: 2, f.GOODPUT: {("quick",): 1.25}})
        self.decode.read(
            lambda: {
                f.REQUESTS_RUNNING: 4, f.REQUESTS_WAITING: 0, f.KV_USAGE: 0.5, f.BANDWIDTH_UTILIZATION: 0.9,
                f.FLOPS_UTILIZATION: 0.1, f.TRANSPORT_WARNINGS: 1, f.WORKER_READY: 1,
            }
        )  # fmt: skip
        self.work(0)

    def work(self, times: int) -> None:
        router, decode = self.router, self.decode
        router.histogram(f.TIME_TO_FIRST_TOKEN).observe(0.25, times)
        router.histogram(f.INTER_TOKEN_LATENCY).observe(0.009, 10 * times)
        router.counter(f.GENERATION_TOKENS).add(11 * times)
        router.counter(f.REQUEST_SUCCESS, "stop").add(times)
        router.counter(f.SLO_REQUESTS, "quick", "met").add(times)
        router.counter(f.SLO_REQUESTS, "quick", "missed_itl").add(times / 2)
        router.counter(f.SLO_MISSED, "quick", "transfer").add(times / 2)
        router.counter(f.SLO_REQUESTS, "unused", "met")
        decode.histogram(f.STEP_SECONDS, "decode").observe(0.008, 10 * times)
        decode.counter(f.STEP_TOKENS, "decode").add(40 * times)

    def text(self) -> str:
        boards = (self.controller, self.router, self.decode)
        return merge(Exposition(registry).render()[0].decode() for registry in boards)


def test_a_picture() -> None:
    cluster = Cluster()
    before = Scrape(cluster.text(), 0.0)
    cluster.work(4)
    out = io.StringIO()
    Console(file=out, width=200).print(picture(ScrapeInterval(before, Scrape(cluster.text(), 2.0))))
    lines = {line.split()[0]: line.split() for line in out.getvalue().splitlines() if line.split()}
    assert "2 of 3 processes up   5 running, 2 waiting   2.0 requests/s, 22 tokens/s" in " ".join(
        out.getvalue().splitlines()[0].split(" ")
    )
    assert lines["Service"][1:4] == ["classes", "since", "the"]
    assert lines["Latencies"][-2:] == ["2", "s"]
    assert lines["quick"] == ["quick", "1.25", "67%", "4", "0", "2", "0", "0", "transfer", "2"]
    assert "unused" not in lines
    assert lines["first"] == ["first", "token", "250.0", "250.0", "299.0", "4"]
    assert lines["between"][2:3] == ["9.0"]
    assert lines["queue"] == ["queue", "-", "-", "-", "0"]
    assert lines["decode-0"] == [
        "decode-0", "decode", "slow", "transport", "4", "0", "80", "0", "8.0", "0", "50", "-", "90", "10", "0.0", "0",
    ]  # fmt: skip
    assert lines["prefill-0"][:3] == ["prefill-0", "prefill", "down"]
    assert lines["prefill-0"][-1] == "3"


def test_a_step_that_began_before_the_interval_does_not_make_a_worker_busier_than_always() -> None:
    cluster = Cluster()
    cluster.decode.counter(f.STEP_BUSY)
    before = Scrape(cluster.text(), 0.0)
    cluster.decode.counter(f.STEP_BUSY).add(3.0)
    out = io.StringIO()
    Console(file=out, width=200).print(picture(ScrapeInterval(before, Scrape(cluster.text(), 2.0))))
    (line,) = [line.split() for line in out.getvalue().splitlines() if line.startswith("decode-0")]
    assert line[9] == "100"


@pytest.fixture
def listener() -> Iterator[str]:
    """Serves metrics from an event loop of its own."""
    cluster, loop = Cluster(), asyncio.new_event_loop()

    async def page(_accept: str) -> tuple[bytes, str]:
        cluster.work(1)
        return cluster.text().encode(), TEXT

    import threading

    served = MetricsServer({METRICS_PATH: page}, frozenset({KEY}))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(served.open("127.0.0.1"), loop).result()
    asyncio.run_coroutine_threadsafe(served.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_once_prints_one_picture(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cli.observe.top._FIRST_S", 0.01)
    done = CliRunner().invoke(app, ["top", "--metrics", listener, "--metrics-key", KEY, "--once"])
    assert done.exit_code == 0, done.output
    assert done.output.count("2 of 3 processes up") == 1
    assert "slow transport" in done.output


def test_without_the_key_it_says_so(listener: str) -> None:
    done = CliRunner().invoke(app, ["top", "--metrics", listener, "--once"])
    assert done.exit_code == 4
    assert "401 send 'Authorization: Bearer <metrics key>'" in done.output + done.stderr
