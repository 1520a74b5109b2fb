"""The report of a load: latencies, throughput, goodput, errors, and whether the load was sent on time."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.observability.request_outcome import Outcome
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.slo import SloCell
from tandem.cli.load.spread import Spread
from tandem.cli.load.workload import Workload


@dataclass(frozen=True, slots=True)
class CellScore:
    """The number of a load's requests by outcome, for one SLO cell; rejected requests are included."""

    cell: SloCell
    outcomes: Mapping[Outcome, int]
    per_s: float
    """Goodput: requests that met the cell's limits, divided by the workload's seconds."""

    @property
    def share(self) -> float:
        """The share of all requests that met the cell's limits."""
        return self.outcomes[Outcome.MET] / sum(self.outcomes.values())


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The results of one workload at one rate; times are in seconds.

    Each latency summarizes only the requests that have it: a rejected request has no TTFT, so it counts in `errors` and
    in `scores`, but not in `ttft`.
    """

    workload: Workload
    records: tuple[RequestRecord, ...]
    errors: Mapping[str, int]
    scores: tuple[CellScore, ...]
    ttft: Spread
    gaps: Spread
    tpot: Spread
    worst_decile: Spread
    end_to_end: Spread
    """End-to-end latency of complete answers."""
    rejected: Spread
    """Time from sending a request until the server has rejected it for lack of capacity."""
    lateness: Spread
    lateness_bound_s: float
    client_cpu_share: float
    """CPU use of the busiest client, as a share of one core."""

    @property
    def valid(self) -> bool:
        """True if the clients sent at least 99 % of the requests on time, so that the server got the planned load."""
        return self.lateness.p99 <= self.lateness_bound_s

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens that arrived during the workload's `seconds`, per second; later ones do not count."""
        seconds = self.workload.seconds
        shares = ((record, sum(moment <= seconds for moment in record.token_s)) for record in self.records)
        return sum(record.tokens * arrived / len(record.token_s) for record, arrived in shares if arrived) / seconds

    @property
    def finished_per_s(self) -> float:
        """Complete answers that ended during the workload's `seconds`, per second; later ones do not count."""
        seconds = self.workload.seconds
        return sum(not record.error and record.ended_s <= seconds for record in self.records) / seconds

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the load to the end of its last request."""
        return max(record.ended_s for record in self.records)

    def as_result(self) -> dict[str, object]:
        """Return the report as JSON, without the records; latencies are in milliseconds."""
        workload, records = self.workload, self.records
        whole = [record for record in records if not record.error]
        messages = sum(record.chunks for record in records)
        tokens = sum(record.tokens for record in records)
        return {
            "rate": workload.rate,
            "seconds": workload.seconds,
            "requests": len(records),
            "offered_per_s": round(len(records) / workload.seconds, 4),
            "finished": len(whole),
            "finished_per_s": round(self.finished_per_s, 4),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "makespan_s": round(self.makespan_s, 3),
            "prompt_tokens": sum(record.prompt_tokens for record in whole),
            "cached_tokens": sum(record.cached_tokens for record in whole),
            "answer_tokens": tokens,
            "tokens_per_chunk": round(tokens / messages, 3) if messages else 0.0,
            "clipped": workload.clipped,
            "errors": dict(self.errors),
            "served_by": dict(Counter(f"{r.prefill_worker}>{r.decode_worker}" for r in whole)),
            "goodput": {score.cell.name: _score(score) for score in self.scores},
            "ttft_ms": self.ttft.in_ms(),
            "gap_ms": self.gaps.in_ms(),
            "tpot_ms": self.tpot.in_ms(),
            "worst_decile_gap_ms": self.worst_decile.in_ms(),
            "end_to_end_ms": self.end_to_end.in_ms(),
            "rejected_ms": self.rejected.in_ms(),
            "rejected_with_hint": sum(record.rejected and record.retry_after_s > 0 for record in records),
            "lateness_ms": self.lateness.in_ms(),
            "lateness_bound_ms": self.lateness_bound_s * 1e3,
            "client_cpu_share": round(self.client_cpu_share, 3),
            "valid": self.valid,
        }


def _score(score: CellScore) -> dict[str, object]:
    counts = {outcome.value: score.outcomes[outcome] for outcome in Outcome}
    return {"per_s": round(score.per_s, 4), "share": round(score.share, 4), **counts}


def score_cell(cell: SloCell, records: Sequence[RequestRecord], seconds: float) -> CellScore:
    """Count the outcomes of a workload's requests for `cell`; `seconds` is the workload's duration."""
    outcomes = Counter(cell.judge(record) for record in records)
    return CellScore(cell, {outcome: outcomes[outcome] for outcome in Outcome}, outcomes[Outcome.MET] / seconds)


def make_report(
    workload: Workload,
    records: Sequence[RequestRecord],
    cells: Sequence[SloCell],
    lateness_bound_s: float,
    client_cpu_share: float = 0.0,
) -> LoadReport:
    """Build the report. `records` has one record per arrival, in any order."""
    ordered = tuple(sorted(records, key=lambda record: record.index))
    return LoadReport(
        workload,
        ordered,
        errors=dict(Counter(record.error for record in ordered if record.error)),
        scores=tuple(score_cell(cell, ordered, workload.seconds) for cell in cells),
        ttft=Spread.of(record.ttft_s for record in ordered),
        gaps=Spread.of(gap for record in ordered for gap in record.gaps_s),
        tpot=Spread.of(record.tpot_s for record in ordered),
        worst_decile=Spread.of(record.worst_decile_s for record in ordered),
        end_to_end=Spread.of(record.end_to_end_s for record in ordered if not record.error),
        rejected=Spread.of(record.ended_s - record.sent_s for record in ordered if record.rejected),
        lateness=Spread.of(record.lateness_s for record in ordered),
        lateness_bound_s=lateness_bound_s,
        client_cpu_share=client_cpu_share,
    )
