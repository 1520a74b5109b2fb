"""Overload of a cluster of real processes on the CPU: `python -m tests.load.overload`.

Measures how many requests per second the cluster completes, offers it ten times as many for a minute, half of them over
HTTP and half over gRPC, and then half as many. The JSON in benchmarks/results has the outcomes of both loads: requests
that were admitted and kept their targets, the time of rejections, and the recovery, which is the time from the end of
the overload until the last request that was rejected or missed its targets. The exit code is 1 if a limit that
docs/reliability.md names was exceeded.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, run_facts, save_result
from router.observability.request_outcome import Outcome
from tandem.cli.load.client import Share
from tandem.cli.load.http_client import HttpShare
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.run import LoadSettings, run_clients, run_load, shares_of
from tandem.cli.load.slo import SloCell
from tandem.cli.load.spread import Spread
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.target import Target, find_target
from tandem.cli.load.workload import Arrival, Workload
from tandem.settings.slo import BEST_EFFORT, SloClass, with_defaults
from tests.load.small_cluster import small_cluster
from tests.running_cluster import RunningCluster

CLASS = SloClass("interactive", ttft_s=1.0, itl_s=0.1, itl_percent=95)
CELL = SloCell(CLASS.name, CLASS.ttft_s, CLASS.itl_s, CLASS.itl_percent)
LENGTHS = Synthetic(Lengths(128, 0.5), Lengths(64, 0.3))
TIMES_CAPACITY = 10.0
RECOVERY_LOAD = 0.5
"""The load after the overload, as a multiple of the capacity."""
CAPACITY_REQUESTS = 256
MET_SHARE_MIN, REJECTED_P99_S, RECOVERY_S = 0.99, 0.1, 5.0
"""The limits: share of the admitted requests that keep their targets, 99th percentile of rejections, recovery."""
DRAIN_S = 60.0


def settings() -> dict[str, Any]:
    """Returns the cluster's settings: every request has the targets of `CLASS`."""
    return {"slo_classes": with_defaults([CLASS]), "default_slo_class": CLASS.name}


def capacity(target: Target, requests: int, seed: int) -> float:
    """Returns the number of requests per second that the cluster completes when all are sent at once, without targets.

    The requests are sent twice, because the first ones include the costs of a cluster's first steps.
    """
    alone = LoadSettings(clients=1, drain_s=10 * DRAIN_S, slo_class=BEST_EFFORT.name)
    for number in range(2):
        drawn = LENGTHS.at(float(requests), 2.0, seed + number).arrivals[:requests]
        burst = Workload("burst", requests, 1.0, seed + number, tuple(replace(one, due_s=0.0) for one in drawn))
        report = run_load(target, burst, (CELL,), alone)
        assert not report.errors, report.errors
    return len(report.records) / report.makespan_s


def overload_then_half(rate: float, seconds: float, after_s: float, seed: int) -> Workload:
    """Returns the requests of the overload for `seconds`, and those of the load that follows it for `after_s`."""
    over = LENGTHS.at(TIMES_CAPACITY * rate, seconds, seed)
    half = LENGTHS.at(max(RECOVERY_LOAD * rate, 2 / after_s), after_s, seed + 1)
    # The keys of their prompts are numbers from 0 on in both, and equal keys would be equal prompts.
    later = (
        Arrival(
            one.due_s + seconds, tuple(replace(b, key=b.key + len(over.arrivals)) for b in one.prompt), one.new_tokens
        )
        for one in half.arrivals
    )
    return Workload("overload", over.rate, seconds + after_s, seed, (*over.arrivals, *later))


def send(cluster: RunningCluster, target: Target, workload: Workload) -> dict[str, list[RequestRecord]]:
    """Sends the requests in turn over gRPC and HTTP, from one client process each; returns the records by protocol."""
    workload = workload.fitted(target.context)
    over_grpc, through_http = shares_of(target, workload, LoadSettings(clients=2, drain_s=DRAIN_S))
    url = f"http://{cluster.http_address.removeprefix('http://')}/v1"
    model = str(target.view.model.model)
    over_http = HttpShare(
        url, model, "", workload.seed, target.vocab_size, through_http.arrivals, through_http.deadline_s
    )
    shares: list[Share] = [over_grpc, over_http]
    results = run_clients(shares)
    numbers = {index for index, _ in over_grpc.arrivals}
    records = [record for result in results for record in result.records]
    return {
        "grpc": [record for record in records if record.index in numbers],
        "http": [record for record in records if record.index not in numbers],
    }


@dataclass(frozen=True, slots=True)
class Part:
    """The outcomes of the overload, or of the load that follows it."""

    records: Sequence[RequestRecord]

    @property
    def outcomes(self) -> Counter[Outcome]:
        return Counter(CELL.judge(record) for record in self.records)

    @property
    def met_share(self) -> float:
        """The share of the admitted requests that kept their targets."""
        admitted = len(self.records) - self.outcomes[Outcome.REJECTED]
        return self.outcomes[Outcome.MET] / max(1, admitted)

    @property
    def rejected(self) -> list[RequestRecord]:
        return [record for record in self.records if record.rejected]

    def as_result(self) -> dict[str, Any]:
        errors = Counter(record.error for record in self.records if record.error)
        whole = [record for record in self.records if not record.error]
        return {
            "requests": len(self.records),
            "outcomes": {outcome.value: count for outcome, count in self.outcomes.items()},
            "errors": dict(errors),
            "met_share_of_admitted": round(self.met_share, 4),
            "ttft_ms": _without_curve(Spread.of(record.ttft_s for record in whole)),
            "gap_ms": _without_curve(Spread.of(gap for record in whole for gap in record.gaps_s)),
            "rejected_ms": _without_curve(Spread.of(record.ended_s - record.sent_s for record in self.rejected)),
            "rejected_without_hint": sum(not record.retry_after_s for record in self.rejected),
            "late_ms": _without_curve(Spread.of(record.lateness_s for record in self.records)),
        }


def _without_curve(spread: Spread) -> dict[str, object]:
    return {name: value for name, value in spread.in_ms().items() if name != "curve"}


def recovery_s(later: Sequence[RequestRecord], ended_s: float) -> float:
    """Returns the time from the end of the overload until the last request that was rejected or missed its targets."""
    bad = [record.due_s for record in later if CELL.judge(record) is not Outcome.MET]
    return max(bad, default=ended_s) - ended_s


def overload(cluster: RunningCluster, seconds: float, after_s: float, requests: int, seed: int) -> dict[str, Any]:
    """Measures the capacity, overloads the cluster, and returns the outcomes as JSON."""
    target = find_target(cluster.grpc_address)
    rate = capacity(target, requests, seed)
    print(f"{rate:.1f} requests/s; {TIMES_CAPACITY * rate:.0f} follow for {seconds:g} s", flush=True)
    by_protocol = send(cluster, target, overload_then_half(rate, seconds, after_s, seed + 2))
    cluster.assert_idle_and_sound()
    records = sorted((one for some in by_protocol.values() for one in some), key=lambda one: one.due_s)
    during = Part([one for one in records if one.due_s < seconds])
    after = Part([one for one in records if one.due_s >= seconds])
    return {
        "capacity_per_s": round(rate, 2),
        "offered_per_s": round(len(during.records) / seconds, 2),
        "seconds": seconds,
        "targets": CELL.as_result(),
        "overload": during.as_result(),
        "rejected_ms_by_protocol": {
            name: _without_curve(Spread.of(one.ended_s - one.sent_s for one in some if one.rejected))
            for name, some in by_protocol.items()
        },
        "after": after.as_result(),
        "recovery_s": round(recovery_s(after.records, seconds), 3),
    }


def violations(result: dict[str, Any]) -> list[str]:
    """Returns what is wrong whatever the machine: other errors than rejections, and rejections without a hint."""
    wrong = []
    for part in ("overload", "after"):
        others = {
            kind: n for kind, n in result[part]["errors"].items() if kind not in ("HTTP 429", "RESOURCE_EXHAUSTED")
        }
        if others:
            wrong.append(f"{part}: errors other than rejections: {others}")
        if missing := result[part]["rejected_without_hint"]:
            wrong.append(f"{part}: {missing} rejections say nothing about when to try again")
    if not result["overload"]["outcomes"].get(Outcome.REJECTED.value):
        wrong.append("nothing was rejected")
    if not result["overload"]["outcomes"].get(Outcome.MET.value):
        wrong.append("no request was served")
    return wrong


def missed_limits(result: dict[str, Any]) -> list[str]:
    """Returns the limits of time that the run exceeded."""
    wrong = []
    during = result["overload"]
    if during["met_share_of_admitted"] < MET_SHARE_MIN:
        wrong.append(f"{during['met_share_of_admitted']:.1%} of the admitted requests kept their targets")
    if during["rejected_ms"]["p99"] > 1e3 * REJECTED_P99_S:
        wrong.append(f"rejections took {during['rejected_ms']['p99']:g} ms in the 99th percentile")
    if result["recovery_s"] > RECOVERY_S:
        wrong.append(f"the recovery took {result['recovery_s']:g} s")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load.overload")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--after-seconds", type=float, default=20.0, help="of half the capacity, after the overload")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and token ids")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    with small_cluster(**settings()) as cluster:
        result = overload(cluster, options.seconds, options.after_seconds, CAPACITY_REQUESTS, options.seed)
    print(
        save_result("overload", {**run_facts("cpu"), "dtype": "float32", "seed": options.seed, **result}, options.out)
    )
    wrong = violations(result) + missed_limits(result)
    print("\n".join(wrong or ["every limit was kept"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
