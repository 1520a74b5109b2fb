"""`tandem why`: the bottleneck of each worker, derived from the metrics of all processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.connection.options import Metrics, MetricsKey, MetricsKeyFile, metrics_server
from tandem.cli.plain_errors import plain_errors

if TYPE_CHECKING:
    from rich.table import Table

    from tandem.metrics.bottlenecks import Diagnosis
    from tandem.metrics.scrape import Scrape, ScrapeInterval


@plain_errors
def why(
    *,
    metrics: Metrics = "",
    metrics_key: MetricsKey = "",
    metrics_key_file: MetricsKeyFile = "",
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds to measure.")] = 5.0,
) -> None:
    """Name each worker's bottleneck under the present load, and the change that would help most."""
    import sys

    from rich.console import Console

    from tandem.cli.observe.status import WIDE

    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    interval = scraped_interval(seconds, metrics, metrics_key, metrics_key_file)
    for line in models(interval.now):
        console.print(line, markup=False)
    console.print(findings(interval))
    for line in (*speculation(interval), *placements(interval)):
        console.print(line, markup=False)


def scraped_interval(
    seconds: float, metrics: str = "", metrics_key: str = "", metrics_key_file: str = ""
) -> ScrapeInterval:
    """Return the change of the cluster's metrics over `seconds` seconds from now."""
    import asyncio

    from tandem.cli.observe.top import scrape
    from tandem.metrics.scrape import ScrapeInterval

    address, key = metrics_server(metrics, metrics_key, metrics_key_file)

    async def measure() -> ScrapeInterval:
        before = await scrape(address, key)
        await asyncio.sleep(seconds)
        return ScrapeInterval(before, await scrape(address, key))

    return asyncio.run(measure())


def models(now: Scrape) -> list[str]:
    """Return the lines that describe the model, as the workers report them."""
    from tandem.metrics import families as f

    summaries = now.values(f.MODEL_INFO, "summary")
    return list(dict.fromkeys(line for summary in summaries for line in summary.split("; ") if line))


def findings(interval: ScrapeInterval) -> Table:
    """Return a table with one row per worker: its bottleneck, the figures behind it, and the recommended change."""
    from rich.table import Table
    from rich.text import Text

    from tandem.metrics.cluster_view import findings as findings_of

    table = Table(box=None, pad_edge=False)
    for column in ("worker", "bottleneck", "because", "what would help"):
        table.add_column(column, no_wrap=column in ("worker", "bottleneck"))
    for finding in findings_of(interval):
        table.add_row(finding.worker, Text(finding.bottleneck, style="bold"), finding.because, finding.change)
    return table


def diagnoses(interval: ScrapeInterval) -> Iterator[tuple[str, Diagnosis]]:
    """Yield the id and the diagnosis of each worker that is ready."""
    from tandem.metrics import families as f
    from tandem.metrics.bottlenecks import diagnose
    from tandem.metrics.cluster_view import workers_of
    from tandem.metrics.worker_figures import figures_of

    for name in workers_of(interval.now):
        if interval.now.total(f.WORKER_READY, worker=name):
            yield name, diagnose(figures_of(interval, name))


def speculation(interval: ScrapeInterval) -> list[str]:
    """Return one line about speculative decoding for each worker that decoded."""
    from tandem.metrics import families as f
    from tandem.metrics.cluster_view import workers_of

    lines, now = [], interval.now
    for name in workers_of(now):
        requests = interval.mean(f.STEP_DECODE_ROWS, worker=name)
        if not requests:
            continue
        drafted = interval.grown(f.DRAFTED, worker=name)
        if name not in now.values(f.SPECULATION_SPEEDUP, "worker"):
            said = "off, as --speculate says (auto: it is off on GPUs)"
        elif not drafted:
            said = f"no drafts: nothing matched, or none would pay beside {requests:.1f} decoding requests"
        else:
            accepted = interval.grown(f.DRAFTS_ACCEPTED, worker=name) / drafted
            said = f"{accepted:.0%} of {drafted:.0f} drafts accepted"
            said += f", {now.total(f.SPECULATION_SPEEDUP, worker=name):.2f} times as fast as without"
            if proposing_s := interval.grown(f.SPECULATION_DRAFTING, worker=name):
                said += f"; proposing them took {proposing_s:.1f} s"
        lines.append(f"{name}: speculative decoding: {said}")
    return lines


def placements(interval: ScrapeInterval) -> list[str]:
    """Return a line about the sources of the prompts' KV and about predictions; none without placements."""
    from tandem.metrics import families as f
    from tandem.protocol.lifecycle.placement import TOKEN_SOURCES

    placed = interval.grown(f.PLACEMENTS)
    tokens = {source: interval.grown(f.PLACED_TOKENS, source=source) for source in TOKEN_SOURCES}
    if not placed or not (prompt_tokens := sum(tokens.values())):
        return []
    sources = ", ".join(f"{count / prompt_tokens:.0%} {source}" for source, count in tokens.items())
    predicted_s, actual_s = (interval.grown(family, quantity="ttft") / placed for family in (f.PREDICTED, f.ACTUAL))
    return [
        f"router: prompt tokens {sources}; first tokens predicted after {predicted_s * 1e3:.1f} ms, came after"
        f" {actual_s * 1e3:.1f} ms; mean regret {interval.grown(f.REGRET) / placed * 1e3:.1f} ms"
    ]
