"""Figures of a load against cases computed by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.sweep import knees, sweep
from tandem.cli.load.record import WRONG_LENGTH, RequestRecord
from tandem.cli.load.report import LoadReport, make_report
from tandem.cli.load.slo import Outcome, SloCell, parse_cell, standard_cells
from tandem.cli.load.spread import LEVELS, Spread, percentile
from tandem.cli.load.workload import Arrival, Block, Workload
from tandem.protocol.errors import InvalidArgument

CELL = SloCell("cell", ttft_s=1.0, gap_s=0.1)
BOUND_S = 0.01


def record(index: int = 0, due_s: float = 0.0, tokens: Sequence[float] = (), **others: object) -> RequestRecord:
    """A complete answer whose tokens arrived at the times `tokens`."""
    made = RequestRecord(
        index, due_s, due_s, tokens[-1] if tokens else due_s, tuple(tokens), len(tokens), len(tokens), "LENGTH"
    )
    return replace(made, **others)  # type: ignore[arg-type]


def report(records: Sequence[RequestRecord], seconds: float = 10.0, cells: Sequence[SloCell] = (CELL,)) -> LoadReport:
    arrivals = tuple(Arrival(r.due_s, (Block(r.index, 4),), max(1, r.asked_tokens)) for r in records)
    return make_report(Workload("w", len(records) / seconds, seconds, 0, arrivals), records, cells, BOUND_S)


def test_percentiles_are_measured_values() -> None:
    values = [30.0, 10.0, 20.0, 40.0]
    assert [percentile(values, p) for p in (0, 25, 26, 50, 75, 99, 100)] == [10, 10, 20, 20, 30, 40, 40]
    assert percentile(range(1, 1001), 99.9) == 999
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 100), 99) == 99, "fewer than a hundred: the worst"


def test_a_spread_and_its_curve() -> None:
    spread = Spread.of([0.4, None, 0.1, 0.2, 0.3])
    assert (spread.count, spread.mean, spread.p50, spread.p99, spread.worst) == (4, pytest.approx(0.25), 0.2, 0.4, 0.4)
    assert len(spread.curve) == len(LEVELS)
    assert (spread.curve[0], spread.curve[-1]) == (0.1, 0.4)
    assert spread.in_ms()["p90"] == 400.0
    assert Spread.of([None]) == Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0, ())


def test_latencies_count_from_when_the_request_was_due() -> None:
    one = record(due_s=2.0, sent_s=2.5, tokens=[3.0, 3.25, 3.25, 4.0], ended_s=4.5)
    assert one.lateness_s == 0.5
    assert one.ttft_s == 1.0
    assert one.gaps_s == (0.25, 0.0, 0.75)
    assert one.tpot_s == pytest.approx(1 / 3)
    assert one.end_to_end_s == 2.5
    assert one.worst_decile_s == 0.75


def test_the_worst_decile_is_a_tenth_rounded_up() -> None:
    moments = [0.0]
    for gap in (*[1.0] * 9, 3.0, 5.0):  # eleven gaps: the worst two
        moments.append(moments[-1] + gap)
    assert record(tokens=moments).worst_decile_s == 4.0


def test_without_tokens_there_is_nothing_to_measure() -> None:
    none, single = record(), record(tokens=[0.5])
    assert (none.ttft_s, none.tpot_s, none.worst_decile_s, none.gaps_s) == (None, None, None, ())
    assert (single.ttft_s, single.tpot_s, single.worst_decile_s) == (0.5, None, None)


@pytest.mark.parametrize(
    ("one", "outcome"),
    [
        (record(tokens=[1.0, 1.05]), Outcome.MET),
        (record(tokens=[1.0]), Outcome.MET),
        (record(tokens=[1.01, 1.02]), Outcome.MISSED_TTFT),
        (record(due_s=0.5, tokens=[1.4, 1.5, 1.7]), Outcome.MISSED_ITL),
        (record(tokens=[1.01, 9.0]), Outcome.MISSED_TTFT),
        (record(error="RESOURCE_EXHAUSTED"), Outcome.REJECTED),
        (record(error="UNAVAILABLE", tokens=[0.1, 0.2]), Outcome.FAILED),
        (record(error=WRONG_LENGTH, tokens=[0.1]), Outcome.FAILED),
    ],
)
def test_a_cell_judges_a_request(one: RequestRecord, outcome: Outcome) -> None:
    assert CELL.judge(one) is outcome


def test_a_cell_forgives_the_gaps_beyond_its_percentile() -> None:
    """Two of a hundred gaps are too long: the 98th percentile meets, the 99th does not."""
    moments = [0.0]
    for number in range(100):
        moments.append(moments[-1] + (0.5 if number in (20, 60) else 0.01))
    one = record(tokens=moments)
    assert SloCell("c", 1.0, 0.1, gap_percent=98).judge(one) is Outcome.MET
    assert SloCell("c", 1.0, 0.1, gap_percent=99).judge(one) is Outcome.MISSED_ITL


def test_goodput_counts_every_request_that_was_due() -> None:
    records = [
        record(0, 0.0, [0.5, 0.55]),
        record(1, 1.0, [1.5, 1.55]),
        record(2, 2.0, [4.0, 4.05]),
        record(3, 3.0, [3.5, 3.9]),
        record(4, 4.0, error="RESOURCE_EXHAUSTED"),
        record(5, 5.0, error="RESOURCE_EXHAUSTED"),
        record(6, 6.0, [6.1], error="UNAVAILABLE"),
        record(7, 9.0, [9.9, 11.0]),
    ]
    made = report(records)
    (score,) = made.scores
    assert score.outcomes == {"met": 2, "missed_ttft": 1, "missed_itl": 2, "rejected": 2, "failed": 1}
    assert score.share == 2 / 8
    assert score.per_s == 2 / 10
    assert made.errors == {"RESOURCE_EXHAUSTED": 2, "UNAVAILABLE": 1}
    assert made.tokens_per_s == 10 / 10, "the last token came after the last arrival's time"
    assert made.finished_per_s == 4 / 10
    assert made.ttft.count == 6
    assert made.end_to_end.count == 5
    result = made.as_result()
    assert (result["requests"], result["finished"], result["answer_tokens"]) == (8, 5, 11)
    assert result["offered_per_s"] == 0.8
    assert result["makespan_s"] == 11.0


def test_records_may_come_in_any_order() -> None:
    records = [record(i, float(i), [i + 0.5]) for i in range(4)]
    assert report(records[::-1]).records == tuple(records)


@pytest.mark.parametrize(("late", "valid"), [(1, True), (2, False)])
def test_a_run_whose_clients_were_late_is_invalid(late: int, valid: bool) -> None:
    """One request in a hundred may be later than the bound."""
    records = [
        record(i, float(i), [i + 0.5], sent_s=i + (2 * BOUND_S if i < late else BOUND_S / 2)) for i in range(100)
    ]
    made = report(records, seconds=100.0)
    assert made.lateness.worst == pytest.approx(2 * BOUND_S)
    assert made.valid is valid
    assert made.as_result()["valid"] is valid


def test_cells() -> None:
    assert standard_cells(0.01) == (
        SloCell("strict", 2.0, 0.02),
        SloCell("balanced", 1.0, 0.025),
        SloCell("quick", 0.3, 0.06),
    )
    assert parse_cell("mine:500:20") == SloCell("mine", 0.5, 0.02, 99.0)
    assert parse_cell("mine:500:20:90") == SloCell("mine", 0.5, 0.02, 90.0)


@pytest.mark.parametrize("text", ["mine", "mine:1", ":1:1", "mine:x:1", "mine:0:1", "mine:1:1:101", "mine:1:1:1:1"])
def test_a_cell_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--slo: "):
        parse_cell(text)


class Cluster:
    """Meets the cell for all requests up to `capacity` requests per second, and for half of them above."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.asked: list[tuple[float, int]] = []

    def __call__(self, rate: float, number: int) -> LoadReport:
        self.asked.append((rate, number))
        count = round(rate * 10)
        late = rate > self.capacity
        return report([record(i, i / rate, [i / rate + (2 if late and i % 2 else 0.5)]) for i in range(count)])


def test_a_sweep_ends_after_the_knee() -> None:
    cluster = Cluster(capacity=5.0)
    reports = sweep(cluster, 2.0)
    assert cluster.asked == [(2.0, 0), (3.0, 1), (4.5, 2), (6.75, 3)]
    assert knees(reports) == {"cell": 4.5}
    assert reports[-1].scores[0].share == pytest.approx(0.5, abs=0.01)


def test_a_sweep_goes_on_while_one_cell_is_kept() -> None:
    """One cell is never met, the other up to 5 requests per second."""
    cells = (SloCell("never", 1e-9, 1.0), CELL)
    cluster = Cluster(capacity=5.0)
    reports = sweep(lambda rate, number: report(cluster(rate, number).records, cells=cells), 4.0)
    assert [rate for rate, _ in cluster.asked] == [4.0, 6.0]
    assert knees(reports) == {"never": 0.0, "cell": 4.0}


def test_a_sweep_keeps_what_it_has_where_a_trace_ends() -> None:
    cluster = Cluster(capacity=1e9)

    def of_a_trace(rate: float, number: int) -> LoadReport:
        if rate > 3:
            raise InvalidArgument("--rates", "the trace has no more")
        return cluster(rate, number)

    assert len(sweep(of_a_trace, 1.0)) == 3
    assert [rate for rate, _ in cluster.asked] == [1.0, 1.5, 2.25]
    with pytest.raises(InvalidArgument, match="no more"):
        sweep(of_a_trace, 4.0)


def test_a_sweep_that_finds_no_knee_ends_too() -> None:
    cluster = Cluster(capacity=1e9)
    assert len(sweep(cluster, 0.1)) == 16


def test_a_cell_that_is_never_kept_has_no_knee() -> None:
    cluster = Cluster(capacity=0.5)
    assert knees([cluster(rate, number) for number, rate in enumerate((2.0, 1.0))]) == {"cell": 0.0}


def test_rejections_are_summarized_apart() -> None:
    """The time runs from sending; a hint counts only for a rejection, and other errors are none."""
    records = [
        record(0, sent_s=0.1, ended_s=0.15, error="HTTP 429", retry_after_s=1.0),
        record(1, sent_s=0.0, ended_s=0.02, error="RESOURCE_EXHAUSTED"),
        record(2, sent_s=0.0, ended_s=9.0, error="HTTP 503", retry_after_s=1.0),
        record(3, tokens=[0.5]),
    ]
    result = report(records).as_result()
    assert result["rejected_ms"] == Spread.of([0.05, 0.02]).in_ms()
    assert result["rejected_with_hint"] == 1
