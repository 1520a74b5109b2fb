"""`tandem why` over a listener that a test opens."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.cli.observe.why import findings, placements, speculation
from tandem.metrics import families as f
from tandem.metrics.exposition import Exposition, merge
from tandem.metrics.registry import Registry
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.metrics.worker_figures import figures_of


class Cluster:
    """A router with three queued requests, and two workers; each scrape is a second of full work for the first."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.router = Registry({"model": "llama", "role": "router", "worker": "router"})
        self.router.read(lambda: {f.REQUESTS_WAITING: 3})
        self.busy = Registry({"model": "llama", "worker": "worker-0"})
        self.busy.read(
            lambda: {
                f.WORKER_READY: 1, f.STEP_BUSY: self.seconds, f.STEP_BYTES: 8e11 * self.seconds, f.DEVICE_FLOPS: 1e14,
                f.STEP_FLOPS: 1e13 * self.seconds, f.DEVICE_BANDWIDTH: 1e12, f.BATCH_LIMIT: 64, f.KV_USAGE: 0.5,
                f.MODEL_INFO: {("8.03 B parameters; attention: 32 layers see all tokens",): 1.0},
            }
        )  # fmt: skip
        self.silent = Registry({"model": "llama", "worker": "worker-1"})
        self.silent.read(lambda: {f.WORKER_READY: 0})

    async def scrape(self, _address: str, _key: str) -> Scrape:
        text = merge(Exposition(registry).render()[0].decode() for registry in (self.router, self.busy, self.silent))
        latest = Scrape(text, self.seconds)
        self.seconds += 1.0
        return latest


async def test_a_row_for_each_worker() -> None:
    cluster, out = Cluster(), io.StringIO()
    interval = ScrapeInterval(await cluster.scrape("", ""), await cluster.scrape("", ""))
    Console(file=out, width=400).print(findings(interval))
    _, busy, silent = out.getvalue().splitlines()
    assert busy.split()[:2] == ["worker-0", "bandwidth"]
    assert "at 10% of the device's arithmetic and 80% of its memory bandwidth" in busy
    assert silent.split()[:3] == ["worker-1", "not", "ready"]
    assert "router" not in {busy.split()[0], silent.split()[0]}


async def test_who_died_or_hangs_has_a_row() -> None:
    """The controller lists them, though they report no metrics."""
    cluster, out = Cluster(), io.StringIO()
    controller = Registry({"model": "llama"})
    kept = {("router", "router"): 1.0, ("both", "worker-0"): 1.0, ("prefill", "dead"): 0.0, ("decode", "hung"): 1.0}
    controller.read(lambda: {f.PROCESS_UP: kept})
    text = merge(Exposition(registry).render()[0].decode() for registry in (cluster.router, cluster.busy, controller))
    Console(file=out, width=400).print(findings(ScrapeInterval(Scrape(text, 0.0), Scrape(text, 1.0))))
    states = {line.split()[0]: line.split()[1] for line in out.getvalue().splitlines()[1:]}
    assert states == {"worker-0": "none", "dead": "down", "hung": "unresponsive"}


async def test_who_has_just_come_waits_for_nothing() -> None:
    cluster = Cluster()
    cluster.busy.read(lambda: {f.REQUESTS_WAITING: 2 * cluster.seconds})
    moments = [await cluster.scrape("", "") for _ in range(3)]
    assert figures_of(ScrapeInterval(moments[0], moments[1]), "worker-0").prompts_waiting == 0
    assert figures_of(ScrapeInterval(moments[1], moments[2]), "worker-0").prompts_waiting == 2
    assert figures_of(ScrapeInterval(moments[0], moments[1]), "worker-0").requests_waiting == 3


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cli.observe.top.scrape", Cluster().scrape)
    done = CliRunner().invoke(app, ["why", "--metrics", "m:1", "--seconds", "0.1"])
    assert done.exit_code == 0, done.output
    assert "bandwidth" in done.output
    assert done.output.startswith("8.03 B parameters\nattention: 32 layers see all tokens\n")


def test_where_prompts_come_from_and_what_they_cost() -> None:
    router = Registry({"model": "llama", "role": "router", "worker": "router"})

    def scraped(seconds: float) -> Scrape:
        return Scrape(Exposition(router).render()[0].decode(), seconds)

    for counter in (router.counter(f.PLACEMENTS), router.counter(f.REGRET)):
        counter.add(0)
    for family in (f.PREDICTED, f.ACTUAL):
        router.counter(family, "ttft").add(0)
    for source, tokens in (("resident", 10), ("reloaded", 0), ("computed", 90)):
        router.counter(f.PLACED_TOKENS, source).add(tokens)
    before = scraped(0.0)
    assert placements(ScrapeInterval(before, before)) == []
    for source, tokens in (("resident", 600), ("reloaded", 300), ("computed", 100)):
        router.counter(f.PLACED_TOKENS, source).add(tokens)
    router.counter(f.PLACEMENTS).add(4)
    router.counter(f.PREDICTED, "ttft").add(0.4)
    router.counter(f.ACTUAL, "ttft").add(0.5)
    router.counter(f.REGRET).add(0.02)
    assert placements(ScrapeInterval(before, scraped(1.0))) == [
        "router: prompt tokens 60% resident, 30% reloaded, 10% computed; first tokens predicted after 100.0 ms,"
        " came after 125.0 ms; mean regret 5.0 ms"
    ]


async def test_what_became_of_drafts() -> None:
    """Each worker that decoded says whether it drafts, and how much of it was right."""
    seconds = 0.0

    def worker(name: str, **drafts: Callable[[], float]) -> Registry:
        registry = Registry({"model": "llama", "worker": name})
        rows = registry.histogram(f.STEP_DECODE_ROWS)
        registry.read(
            lambda: {
                f.WORKER_READY: 1,
                **({} if not drafts else {
                    f.SPECULATION_SPEEDUP: 1.8,
                    f.DRAFTED: {("0",): drafts["drafted"]()},
                    f.DRAFTS_ACCEPTED: {("0",): 0.75 * drafts["drafted"]()},
                    f.SPECULATION_DRAFTING: 0.1 * drafts["drafted"](),
                }),
            }
        )  # fmt: skip
        rows.observe(4)
        decoding.append(rows)
        return registry

    decoding: list[Any] = []
    registries = [worker("off"), worker("idle", drafted=lambda: 8), worker("drafts", drafted=lambda: 40 * seconds)]
    scrapes = []
    for _ in range(2):
        scrapes.append(Scrape(merge(Exposition(source).render()[0].decode() for source in registries), seconds))
        seconds += 1.0
        for rows in decoding:
            rows.observe(4)
    off, idle, drafts = speculation(ScrapeInterval(*scrapes))
    assert "off: speculative decoding: off" in off
    assert "beside 4.0 decoding requests" in idle
    assert "75% of 40 drafts accepted, 1.80 times as fast as without; proposing them took 4.0 s" in drafts
