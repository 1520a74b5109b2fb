"""`tandem why`: what keeps each worker from doing more, from every process's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.plain_errors import plain_errors

if TYPE_CHECKING:
    from rich.table import Table

    from telemetry.scrape import Stretch


@plain_errors
def why(
    *,
    metrics: Annotated[
        str,
        typer.Option("--metrics", envvar="TANDEM_METRICS", help="host:port of the metrics; default: the running ones."),
    ] = "",
    metrics_key: Annotated[
        str, typer.Option(envvar="TANDEM_METRICS_KEY", help="Key that opens them; default: the running cluster's.")
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to look.")] = 5.0,
) -> None:
    """Name each worker's binding wall under the present load, and the change that would help most."""
    import asyncio
    import sys

    from rich.console import Console

    from cli.status import WIDE
    from cli.top import metrics_door, scrape
    from telemetry.scrape import Stretch

    address, key = metrics_door(metrics, metrics_key)

    async def look() -> Stretch:
        before = await scrape(address, key)
        await asyncio.sleep(seconds)
        return Stretch(before, await scrape(address, key))

    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    console.print(findings(asyncio.run(look())))


def findings(stretch: Stretch) -> Table:
    """One worker a row: its wall, the figures that say so, the change."""
    from rich.table import Table
    from rich.text import Text

    from telemetry import families as f
    from telemetry.walls import diagnose
    from telemetry.worker_figures import figures_of

    table = Table(box=None, pad_edge=False)
    for column in ("worker", "wall", "because", "what would help"):
        table.add_column(column, no_wrap=column in ("worker", "wall"))
    for name in stretch.now.values(f.WORKER_READY, "worker"):
        if not stretch.now.total(f.WORKER_READY, worker=name):
            table.add_row(name, "not ready", "it takes nothing new", "`tandem status` and its log say why")
            continue
        found = diagnose(figures_of(stretch, name))
        table.add_row(name, Text(found.wall, style="bold"), found.because, found.change)
    return table
