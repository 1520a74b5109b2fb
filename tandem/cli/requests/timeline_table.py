"""The durations of one request's phases, as a table for the terminal."""

from dataclasses import dataclass

from rich.table import Table

from tandem.client import Answer
from tandem.protocol.lifecycle.events import LifecycleEvent, Timeline
from tandem.protocol.lifecycle.spans import Phase, last_attempt, seconds_by_phase, spans_of


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: a name, a duration or rate as text, and a remark."""

    name: str
    figure: str
    note: str


def timeline_rows(answer: Answer) -> list[Row]:
    """Return the rows queue, prefill, predicted, transfer, first token, hand-over, inter-token, rate and total.

    The row predicted is left out without a placement, for example after a retry. A phase that did not occur shows "-".
    The rows cover all attempts of the request, except that transfer covers only the last attempt.
    """
    timeline, tokens = answer.timeline, answer.completion_tokens
    took, last = seconds_by_phase(spans_of(timeline)), last_attempt(timeline)
    after_first = timeline.seconds(LifecycleEvent.FIRST_TOKEN, LifecycleEvent.FINISHED)
    gap = after_first / (tokens - 1) if after_first is not None and tokens > 1 else None
    return [
        Row("queue", _ms(took.get(Phase.QUEUE)), "router and prefill worker, until the first chunk begins"),
        Row("prefill", _ms(took.get(Phase.PREFILL)), _prefill_note(answer)),
        *_placement_rows(timeline),
        Row("transfer", _ms(_transfer_s(last)), _transfer_note(last)),
        Row(
            "first token",
            _ms(timeline.seconds(LifecycleEvent.RECEIVED, LifecycleEvent.FIRST_TOKEN)),
            "from the request's arrival",
        ),
        Row("hand-over", _ms(took.get(Phase.TRANSFER)), _decode_note(timeline)),
        *(
            [Row("stall", _ms(took[Phase.STALL]), "workers were silent, until others took over")]
            if Phase.STALL in took
            else ()
        ),
        Row("inter-token", _ms(gap), "mean"),
        Row("rate", "-" if not gap else f"{1 / gap:.1f} tokens/s", f"{tokens} tokens"),
        Row("total", _ms(timeline.seconds(LifecycleEvent.RECEIVED, LifecycleEvent.FINISHED)), ""),
    ]


def timeline_table(answer: Answer) -> Table:
    """Return `timeline_rows` as a rich table."""
    table = Table(title="Where the time went", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in timeline_rows(answer):
        table.add_row(row.name, row.figure, row.note)
    return table


def _placement_rows(timeline: Timeline) -> list[Row]:
    """Return the predicted time to the first token, with the tokens by the source of their KV and the regret."""
    if (placement := timeline.placement) is None:
        return []
    tokens = ", ".join(f"{count} {source}" for source, count in placement.tokens_by_source.items())
    took = f"from placement to first token, took {_ms(placement.ttft_s)}"
    note = f"{took}; prompt tokens: {tokens}; regret {_ms(placement.regret_s)}"
    return [Row("predicted", _ms(placement.predicted.ttft_s), note)]


def _transfer_s(timeline: Timeline) -> float | None:
    if timeline.transfer is not None:
        return timeline.transfer.duration_nanos / 1e9
    return timeline.seconds(LifecycleEvent.TRANSFER_STARTED, LifecycleEvent.TRANSFER_FINISHED)


def _prefill_note(answer: Answer) -> str:
    seconds = last_attempt(answer.timeline).seconds(LifecycleEvent.PREFILL_STARTED, LifecycleEvent.PREFILL_FINISHED)
    rate = f", {answer.prompt_tokens / seconds:.0f} tokens/s" if seconds else ""
    where = f" on {answer.timeline.prefill_worker}" if answer.timeline.prefill_worker else ""
    return f"{answer.prompt_tokens} tokens{rate}{where}"


def _transfer_note(timeline: Timeline) -> str:
    moved = timeline.transfer
    if moved is None:
        return "no KV moved"
    what = f"{moved.bytes / 1e6:.2f} MB in {moved.pages} pages by {moved.backend}"
    overlap = timeline.seconds(LifecycleEvent.TRANSFER_STARTED, LifecycleEvent.PREFILL_FINISHED)
    if overlap is not None and overlap > 0:
        # A transfer waits for prefill chunks most of the time, so bytes over its duration would not be the transport's
        # rate.
        after = timeline.seconds(LifecycleEvent.PREFILL_FINISHED, LifecycleEvent.TRANSFER_FINISHED)
        return f"{what}, overlaps prefill" + (f", {_ms(after)} of it after" if after is not None and after > 0 else "")
    return what + (f", {moved.bytes / moved.duration_nanos:.2f} GB/s" if moved.duration_nanos else "")


def _decode_note(timeline: Timeline) -> str:
    return f"to {timeline.decode_worker}" if timeline.decode_worker else ""


def _ms(seconds: float | None) -> str:
    """Format a duration: in milliseconds below ten seconds, else in seconds; "-" for None."""
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"
