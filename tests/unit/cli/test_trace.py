"""`tandem trace` over a listener that the test opens: one request is drawn, slow ones are listed."""

import asyncio
import io
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.cli.observe.trace import drawn, listed
from tandem.metrics.metrics_server import TRACES_PATH, MetricsServer
from tandem.protocol.conversion import traces_to_json
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent, Timeline, TransferStats
from tandem.protocol.lifecycle.placement import PlacementStats, PromptCost
from tandem.protocol.lifecycle.request_trace import RequestTrace, TraceContext

MS = 10**6
ARRIVED = 1_763_000_000 * 1000 * MS
KEY = "operator"
EVENTS_MS = {
    LifecycleEvent.RECEIVED: 0,
    LifecycleEvent.PLACED: 10,
    LifecycleEvent.PREFILL_STARTED: 20,
    LifecycleEvent.TRANSFER_STARTED: 60,
    LifecycleEvent.PREFILL_FINISHED: 100,
    LifecycleEvent.FIRST_TOKEN: 102,
    LifecycleEvent.TRANSFER_FINISHED: 110,
    LifecycleEvent.DECODE_ADMITTED: 111,
    LifecycleEvent.DECODE_STARTED: 120,
    LifecycleEvent.FINISHED: 400,
}
_ONCE = (LifecycleEvent.RECEIVED, LifecycleEvent.FIRST_TOKEN, LifecycleEvent.FINISHED)
TIMELINE = Timeline(
    tuple(EventTime(event, ARRIVED + at * MS) for event, at in EVENTS_MS.items()),
    TransferStats(3_000_000, 6, "nixl", 12 * MS),
    "prefill-0",
    "decode-0",
)
TRACE = RequestTrace(
    "req[red]-1", "req[red]-1~77", TraceContext("ab" * 16), "llama", "chat", "quick", "stop", 300, 28, 16, TIMELINE
)


def lines(picture: RenderableType) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=200).print(picture)
    return [line.split() for line in out.getvalue().splitlines() if line.split()]


def test_a_placement_is_explained() -> None:
    cost = PromptCost(64, 192, 44, 0.010, 0.030, 0.020)
    placed = replace(TIMELINE, placement=PlacementStats(64, 128, 108, cost, 0.092, 0.0125))
    rows = [" ".join(row) for row in lines(drawn(replace(TRACE, timeline=placed)))]
    assert "prompt tokens: 64 resident, 128 reloaded, 108 computed; predicted 64, 192, 44" in rows
    assert (
        "placement to first token: 92.0 ms; predicted 50.0 ms (10.0 waiting, 30.0 reloading, 20.0 computing);"
        " regret 12.5 ms"
    ) in rows


def test_a_request_is_drawn() -> None:
    head, _, *rest = lines(drawn(TRACE))
    assert head[0] == "req[red]-1"
    assert " ".join(head[2:]) == "chat llama class quick stop 400.0 ms 300 prompt tokens (16 cached), 28 answered"
    figures = {row[0]: row[1:4] for row in rest[:4]}
    assert figures == {
        "queue": ["0.0", "20.0", "-"],
        "prefill": ["20.0", "80.0", "prefill-0"],
        "transfer": ["100.0", "20.0", "prefill-0"],
        "decode": ["120.0", "280.0", "decode-0"],
    }
    assert [" ".join(row) for row in rest[4:]] == [
        "first token after 102.0 ms",
        "3.00 MB in 6 pages by nixl, 12.0 ms of writing, from 40.0 ms before the prompt's end",
        f"in logs req[red]-1~77 trace {'ab' * 16}",
    ]


def test_a_request_that_was_tried_again() -> None:
    """The transfer is the last attempt's; the silence of the first one is a phase."""
    later = {**EVENTS_MS, LifecycleEvent.TRANSFER_STARTED: 70}
    again = [EventTime(event, ARRIVED + (at + 1000) * MS) for event, at in later.items() if event not in _ONCE]
    first = TIMELINE.event_times[:-1]
    lost = (
        EventTime(LifecycleEvent.SILENT, ARRIVED + 150 * MS),
        EventTime(LifecycleEvent.REQUEUED, ARRIVED + 1005 * MS),
    )
    event_times = (*first, *lost, *again, EventTime(LifecycleEvent.FINISHED, ARRIVED + 1400 * MS))
    _, _, *rest = lines(drawn(replace(TRACE, timeline=replace(TIMELINE, event_times=event_times))))
    assert [(row[0], row[2].rstrip(")"), *row[3:5]) for row in rest[:8]] == [
        ("queue", "1", "0.0", "20.0"), ("prefill", "1", "20.0", "80.0"), ("transfer", "1", "100.0", "20.0"),
        ("decode", "1", "120.0", "30.0"), ("stall", "1", "150.0", "855.0"), ("queue", "2", "1005.0", "15.0"),
        ("prefill", "2", "1020.0", "80.0"), ("transfer", "2", "1100.0", "20.0"),
    ]  # fmt: skip
    assert "from 30.0 ms before the prompt's end" in " ".join(rest[10])


def test_bars_lie_on_one_axis() -> None:
    """Each bar begins where the previous one ends, and the last one ends at the event."""
    out = io.StringIO()
    Console(file=out, width=200).print(drawn(TRACE))
    bars = [line for line in out.getvalue().splitlines() if "█" in line]
    ends = [line.rstrip().rfind("█") for line in bars]
    begins = [line.find("█") for line in bars]
    assert all(abs(begin - end) <= 2 for begin, end in zip(begins[1:], ends[:-1], strict=True))
    assert ends[-1] - begins[0] == pytest.approx(60, abs=2)
    assert (ends[-1] - begins[-1]) / (ends[1] - begins[1]) == pytest.approx(280 / 80, rel=0.2)


def test_a_list_has_a_line_for_each() -> None:
    _, row = lines(listed([TRACE]))
    assert row[0] == "req[red]-1"
    assert row[2:] == ["quick", "stop", "400.0", "102.0", "20.0", "80.0", "20.0", "280.0", "0.0", "300", "28"]


@pytest.fixture
def listener() -> Iterator[str]:
    """Serves one request's trace from an event loop of its own."""
    loop = asyncio.new_event_loop()

    async def page(_accept: str) -> tuple[bytes, str]:
        return traces_to_json([TRACE], 512).encode(), "application/json"

    served = MetricsServer({TRACES_PATH: page}, frozenset({KEY}))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(served.open("127.0.0.1"), loop).result()
    asyncio.run_coroutine_threadsafe(served.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_command(listener: str) -> None:
    asked = ["--router", listener, "--metrics-key", KEY]
    for arguments, words in ((["req[red]-1"], "decode-0"), (["--slow"], "first token ms"), ([], "total ms")):
        done = CliRunner().invoke(app, ["trace", *arguments, *asked])
        assert done.exit_code == 0, done.output
        assert words in done.output
        assert "req[red]-1" in done.output
    assert CliRunner().invoke(app, ["trace", "--slow", "req", *asked]).exit_code == 2
    assert CliRunner().invoke(app, ["trace", "--slow", "--router", listener]).exit_code == 4


def test_a_request_that_is_no_longer_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object, **__: object) -> str:
        return traces_to_json([], 512)

    monkeypatch.setattr("tandem.metrics.metrics_server.fetch", nothing)
    done = CliRunner().invoke(app, ["trace", "gone", "--router", "r:1"])
    assert done.exit_code == 1
    assert "the 512 newest" in " ".join((done.output + done.stderr).split())
