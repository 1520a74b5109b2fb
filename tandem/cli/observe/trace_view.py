"""The timeline of a request for the terminal, a bar per phase on one time axis, and lists of requests."""

from datetime import datetime

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.protocol.lifecycle.request_trace import RequestTrace
from tandem.protocol.lifecycle.spans import Phase, last_attempt, seconds_by_phase, spans_of
from tandem.protocol.lifecycle.timeline import Edge

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
    """Returns one request: its identity, its phases, and its transfer."""
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
    """Returns a table with one line per request, in their order."""
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
    timeline = last_attempt(trace.timeline)
    moved = timeline.transfer
    if moved is not None:
        ahead = timeline.seconds(Edge.TRANSFER_STARTED, Edge.PREFILL_FINISHED)
        overlap = f", from {_ms(ahead)} ms before the prompt's end" if ahead is not None and ahead > 0 else ""
        wrote = f"{_ms(moved.duration_nanos / 1e9)} ms of writing"
        lines.append(f"{moved.bytes / 1e6:.2f} MB in {moved.pages} pages by {moved.backend}, {wrote}{overlap}")
    lines.append(f"in logs {trace.wire_id}   trace {trace.context.trace_id}")
    return [Text(line, style="dim") for line in lines]


def _clock(trace: RequestTrace) -> str:
    arrived = trace.timeline.at(Edge.RECEIVED)
    return _NONE if arrived is None else f"{datetime.fromtimestamp(arrived / 1e9):%H:%M:%S}"


def _ms(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds * 1e3:.1f}"
