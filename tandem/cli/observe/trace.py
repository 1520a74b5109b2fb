"""`tandem trace`: the timeline of one request, or a list of the recent and slow requests that the router remembers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.cli.connection.options import MetricsKey, MetricsKeyFile
from tandem.cli.plain_errors import plain_errors
from tandem.protocol.lifecycle.events import LifecycleEvent
from tandem.protocol.lifecycle.request_trace import RequestTrace
from tandem.protocol.lifecycle.spans import Phase, last_attempt, seconds_by_phase, spans_of

if TYPE_CHECKING:
    from tandem.protocol.lifecycle.placement import PlacementStats
    from tandem.protocol.lifecycle.request_trace import RequestTrace

_BAR_COLUMNS = 60
_COLORS = {
    Phase.QUEUE: "yellow",
    Phase.PREFILL: "cyan",
    Phase.TRANSFER: "magenta",
    Phase.DECODE: "green",
    Phase.STALL: "red",
}
_NONE = "-"


def drawn(trace: RequestTrace) -> RenderableType:
    """Return the view of one request: a head line, a table of its phases, and notes such as its KV transfer."""
    table = Table(box=None, pad_edge=False)
    for column in ("phase", "at ms", "took ms", "worker", ""):
        table.add_column(column, justify="right" if column.endswith("ms") else "left", no_wrap=True)
    spans = spans_of(trace.timeline)
    attempts = max((span.attempt for span in spans), default=1)
    for span in spans:
        name = span.phase if attempts == 1 else f"{span.phase} (attempt {span.attempt})"
        begin_s = (span.begin_nanos - spans[0].begin_nanos) / 1e9
        bar = Bar(trace.seconds, begin_s, begin_s + span.seconds, width=_BAR_COLUMNS, color=_COLORS[span.phase])
        table.add_row(name, _ms(begin_s), _ms(span.seconds), span.worker or _NONE, bar)
    return Group(_head(trace), table, *_notes(trace), Text())


def listed(traces: list[RequestTrace]) -> Table:
    """Return a table with one row per request, in the given order."""
    table = Table(box=None, pad_edge=False)
    left = ("request", "arrived", "class", "outcome")
    for column in (*left, "total ms", "first token ms", *Phase, "prompt", "answer"):
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for trace in traces:
        took = seconds_by_phase(spans_of(trace.timeline))
        table.add_row(
            Text(trace.request_id),
            _clock(trace),
            trace.slo_class,
            trace.outcome,
            _ms(trace.seconds),
            _ms(trace.ttft_s),
            *(_ms(took.get(phase, 0.0)) for phase in Phase),
            str(trace.prompt_tokens),
            str(trace.completion_tokens),
        )
    return table


def _head(trace: RequestTrace) -> Text:
    parts = (
        trace.request_id,
        _clock(trace),
        f"{trace.operation} {trace.model}",
        f"class {trace.slo_class}",
        trace.outcome,
        f"{_ms(trace.seconds)} ms",
        f"{trace.prompt_tokens} prompt tokens ({trace.cached_tokens} cached), {trace.completion_tokens} answered",
    )
    return Text("   ".join(parts), style="bold")


def _notes(trace: RequestTrace) -> list[Text]:
    lines = [f"first token after {_ms(trace.ttft_s)} ms" if trace.ttft_s is not None else "no token left the router"]
    if (placement := trace.timeline.placement) is not None:
        lines += _placement_notes(placement)
    timeline = last_attempt(trace.timeline)
    moved = timeline.transfer
    if moved is not None:
        ahead = timeline.seconds(LifecycleEvent.TRANSFER_STARTED, LifecycleEvent.PREFILL_FINISHED)
        overlap = f", from {_ms(ahead)} ms before the prompt's end" if ahead is not None and ahead > 0 else ""
        wrote = f"{_ms(moved.duration_nanos / 1e9)} ms of writing"
        lines.append(f"{moved.bytes / 1e6:.2f} MB in {moved.pages} pages by {moved.backend}, {wrote}{overlap}")
    lines.append(f"in logs {trace.internal_id}   trace {trace.context.trace_id}")
    return [Text(line, style="dim") for line in lines]


def _placement_notes(placement: PlacementStats) -> Iterator[str]:
    """Yield where the KV of the prompt came from, and the cost that was predicted for it and that it had."""
    predicted = placement.predicted
    wait, reload, compute = (_ms(seconds) for seconds in (predicted.wait_s, predicted.reload_s, predicted.compute_s))
    parts = f"{wait} waiting, {reload} reloading, {compute} computing"
    yield (
        f"prompt tokens: {placement.resident_tokens} resident, {placement.reloaded_tokens} reloaded,"
        f" {placement.computed_tokens} computed; predicted {predicted.resident_tokens},"
        f" {predicted.reloaded_tokens}, {predicted.computed_tokens}"
    )
    yield (
        f"placement to first token: {_ms(placement.ttft_s)} ms; predicted {_ms(predicted.ttft_s)} ms ({parts});"
        f" regret {_ms(placement.regret_s)} ms"
    )


def _clock(trace: RequestTrace) -> str:
    arrived = trace.timeline.at(LifecycleEvent.RECEIVED)
    return _NONE if arrived is None else f"{datetime.fromtimestamp(arrived / 1e9):%H:%M:%S}"


def _ms(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds * 1e3:.1f}"


@plain_errors
def trace(
    request_id: Annotated[
        str, typer.Argument(help="Id of the request or of its trace; default: list the newest requests.")
    ] = "",
    *,
    slow: Annotated[bool, typer.Option("--slow", help="List the slowest remembered requests.")] = False,
    router: Annotated[
        str,
        typer.Option(
            "--router", envvar="TANDEM_HTTP", help="The router's HTTP host:port; default: the running cluster's."
        ),
    ] = "",
    metrics_key: MetricsKey = "",
    metrics_key_file: MetricsKeyFile = "",
) -> None:
    """Show the phases of a request and their durations."""
    import asyncio
    import sys

    from rich.console import Console

    from tandem.cli.connection.secret_files import one_key
    from tandem.cli.observe.status import WIDE
    from tandem.protocol.errors import InvalidArgument, NotFound

    if slow and request_id:
        raise InvalidArgument("--slow", "lists requests; leave out the id, or the option")
    key = one_key("--metrics-key-file", metrics_key, metrics_key_file)
    traces, kept = asyncio.run(_ask(request_id, slow, router, key))
    if request_id and not traces:
        remembered = f"the router remembers the {kept} newest that have ended, and slow ones"
        raise NotFound(f"no request or trace {request_id!r} is known; {remembered}")
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    if not request_id:
        console.print(listed(traces))
        return
    for request_trace in traces:
        console.print(drawn(request_trace))


async def _ask(request_id: str, slow: bool, router: str, key: str) -> tuple[list[RequestTrace], int]:
    from urllib.parse import quote

    from tandem.cli.connection.state import newest
    from tandem.metrics.metrics_server import TRACES_PATH, fetch
    from tandem.protocol.conversion import traces_from_json

    if not router:
        running = newest()
        router, key = running.operations or running.http.removeprefix("http://"), key or running.metrics_key
    query = f"?id={quote(request_id, safe='')}" if request_id else "?slow" if slow else ""
    return traces_from_json(await fetch(router, TRACES_PATH + query, key, timeout_s=5.0))
