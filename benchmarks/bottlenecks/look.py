"""Scrapes all metrics twice during a load, and runs the diagnosis of `tandem why` on them."""

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.bottlenecks.loads import Load, Stage
from tandem.cli.load.report import LoadReport
from tandem.cli.load.run import LoadSettings, run_load
from tandem.cli.load.target import Target, wait_until_idle
from tandem.cli.observe.top import scrape
from tandem.metrics import families as f
from tandem.metrics.bottlenecks import Diagnosis, Figures, diagnose
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.metrics.worker_figures import figures_of
from tandem.protocol.errors import Unavailable

_BEGINS_WITHIN_S = 60.0
_POLL_S = 0.1
_IDLE_WITHIN_S = 30.0
_CLIENTS = 2
_CUT_OFF_S = 0.5
"""Seconds from the end of an observation until running requests are cancelled; their answers are not needed."""


@dataclass(frozen=True, slots=True)
class Listener:
    """The address of a cluster's metrics, and its key."""

    address: str
    key: str

    async def scrape(self) -> Scrape:
        """Scrapes all metrics of the cluster."""
        return await scrape(self.address, self.key)


@dataclass(frozen=True, slots=True)
class Finding:
    """The diagnosis of the worker whose bottleneck is known."""

    load: Load
    worker: str
    figures: Figures
    diagnosis: Diagnosis
    tokens_per_s: dict[str, float]
    """Tokens per second that the worker computed, by phase."""

    @property
    def right(self) -> bool:
        """True if the diagnosis names the load's bottleneck."""
        return self.diagnosis.bottleneck is self.load.bottleneck

    def as_result(self) -> dict[str, object]:
        """Returns the finding for JSON."""
        it = self.figures
        return {
            "load": self.load.name,
            "requests": self.load.requests,
            "prompt_tokens": self.load.prompt,
            "new_tokens": self.load.answer,
            "worker": self.worker,
            "expected": self.load.bottleneck.value,
            "named": self.diagnosis.bottleneck.value,
            "mbu": round(it.bandwidth, 4),
            "mfu": round(it.compute, 4),
            "busy": round(it.busy, 4),
            "kv_used": round(it.kv_used, 4),
            "transferring": round(it.transferring, 2),
            "decoding": round(it.decoding, 2),
            "requests_waiting": it.requests_waiting,
            "tokens_per_s": self.tokens_per_s,
            "because": self.diagnosis.because,
            "change": self.diagnosis.change,
        }


def read(load: Load, worker: str, interval: ScrapeInterval) -> Finding:
    """Returns the figures and the diagnosis that `tandem why` would show."""
    figures = figures_of(interval, worker)
    rates = {
        phase: round(interval.rate(f.STEP_TOKENS, worker=worker, phase=phase), 1) for phase in ("prefill", "decode")
    }
    return Finding(load, worker, figures, diagnose(figures), rates)


def under(load: Load, stage: Stage, target: Target, listener: Listener, seed: int) -> ScrapeInterval:
    """Runs the load on an idle cluster and scrapes twice during it.

    Unavailable if the load does not reach the router.
    """
    wait_until_idle(target, _IDLE_WITHIN_S)
    workload = load.workload(stage.load_s, seed)
    settings = LoadSettings(clients=_CLIENTS, drain_s=_CUT_OFF_S)
    with ThreadPoolExecutor(1, "load") as pool:
        running = pool.submit(run_load, target, workload, (), settings)
        interval = asyncio.run(_look(load, stage, listener, running))
        running.result()
    return interval


async def _look(load: Load, stage: Stage, listener: Listener, running: Future[LoadReport]) -> ScrapeInterval:
    give_up = time.monotonic() + _BEGINS_WITHIN_S
    while _requests(await listener.scrape()) < load.begun:
        if running.done() or time.monotonic() > give_up:
            running.result(timeout=0)  # a failure of the load explains more
            raise Unavailable("the load has not reached the router")
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(stage.settle_s)
    before = await listener.scrape()
    await asyncio.sleep(stage.look_s)
    return ScrapeInterval(before, await listener.scrape())


def _requests(now: Scrape) -> float:
    """Returns the number of requests at the router, waiting or running."""
    return now.total(f.REQUESTS_RUNNING, role="router") + now.total(f.REQUESTS_WAITING, role="router")
