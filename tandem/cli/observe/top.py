"""`tandem top`: a live view of the cluster, from the metrics of all processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.connection.options import Metrics, MetricsKey, MetricsKeyFile, metrics_server
from tandem.cli.plain_errors import plain_errors

if TYPE_CHECKING:
    from tandem.metrics.scrape import Scrape

_FIRST_S = 1.0
"""Seconds between the first two scrapes; the first view shows the activity between these."""


@plain_errors
def top(
    *,
    metrics: Metrics = "",
    metrics_key: MetricsKey = "",
    metrics_key_file: MetricsKeyFile = "",
    interval: Annotated[float, typer.Option(min=0.1, help="Refresh interval in seconds.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
) -> None:
    """Show rates, latencies, goodput, batches, KV pages and transfers of the running cluster."""
    import asyncio
    import contextlib

    address, key = metrics_server(metrics, metrics_key, metrics_key_file)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(address, key, interval, once=once))


async def _watch(address: str, key: str, interval: float, *, once: bool) -> None:
    import asyncio
    import sys

    from rich.console import Console
    from rich.live import Live

    from tandem.cli.observe.status import WIDE
    from tandem.cli.observe.top_view import picture
    from tandem.metrics.scrape import ScrapeInterval

    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    before = await scrape(address, key)
    await asyncio.sleep(_FIRST_S)
    now = await scrape(address, key)
    if once:
        console.print(picture(ScrapeInterval(before, now)))
        return
    with Live(picture(ScrapeInterval(before, now)), console=console, screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval)
            before, now = now, await scrape(address, key)
            live.update(picture(ScrapeInterval(before, now)), refresh=True)


async def scrape(address: str, key: str) -> Scrape:
    """Scrape the metrics of all processes of the cluster."""
    import time

    from tandem.metrics.metrics_server import METRICS_PATH, fetch
    from tandem.metrics.scrape import Scrape

    return Scrape(await fetch(address, METRICS_PATH, key, timeout_s=5.0), time.monotonic())
