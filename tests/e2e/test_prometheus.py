"""A real Prometheus scrapes a real cluster: every panel has data, and its values are those that clients measured.

What needs no cluster is tested in tests/unit/deploy.
"""

from __future__ import annotations

import os
import signal
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from deploy.dashboards.mixed_load import run_mixed, since_sent
from deploy.dashboards.panels import Shown, TimeRange, names, read_dashboard, show
from deploy.prometheus.server import Prometheus, find_prometheus, running_prometheus
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.slo import Outcome, SloCell
from tandem.cli.load.target import find_target, touch
from tandem.metrics import families as f
from tandem.metrics.family import Family
from tandem.settings.slo import BEST_EFFORT, Overload, SloClass
from tests.e2e.test_metrics import ask
from tests.integration.silent_router import PAGE_TOKENS, SilentRouter
from tests.soak import soak

pytestmark = [
    soak,
    pytest.mark.skipif(
        find_prometheus() is None, reason="Prometheus is not installed (Debian: apt-get install prometheus)"
    ),
]

LOAD_S = 120.0
"""The load duration in seconds, in which a stall is too small a share to change a quantile much."""
PROCESSES = 3
RECOVERS_S = 120.0
OTHER_CLOCK_S = 5.0
"""The largest difference in seconds between router and client in TTFT within which a verdict may go either way."""
OTHER_GAP = 0.25
"""The same for a token gap, as a fraction of its target."""
OTHER_RANK = 0.1
"""The same for a quantile, as a share of all values: half of the gaps may be none, of tokens in one message."""
TOLERANCE = 0.01
CLASSES = (
    SloClass("quick", ttft_s=60.0, itl_s=20.0, overload=Overload.DEGRADE),
    SloClass("balanced", ttft_s=60.0, itl_s=0.002, overload=Overload.DEGRADE),
    BEST_EFFORT,
)
"""Service classes whose outcomes are unambiguous on any machine.

Nearly all requests meet the first class, and only answers of one token meet the second: a router that judges all
requests alike is detected, and few requests are so near to a target that router and client may disagree.
"""
TARGETS = {slo.name: SloCell(slo.name, slo.ttft_s, slo.itl_s) for slo in CLASSES}
DCGM = Path(__file__).with_name("dcgm.prom")
"""Sample output of NVIDIA's DCGM exporter for one GPU."""


OF_EXPERTS = "Busiest expert / mean"
"""A panel that is empty for a dense model."""
OF_RANKS = "Collective operations"
"""A panel that is empty for workers of one rank."""


@dataclass
class Watched:
    cluster: Any
    prometheus: Prometheus
    start: float
    end: float
    requests: dict[str, list[RequestRecord]]
    fired: set[str] = field(default_factory=set)
    """Alerts on counters that grew, which resolve when their look-back windows have passed."""

    def grown(self, selected: str, *by: str) -> str:
        """Returns the query for a counter's increase during the load, exact and without extrapolation."""
        return f"sum by ({', '.join(by)}) ({selected} @ {self.end:.3f} - {selected} @ {self.start:.3f})"

    def count(self, selected: str) -> float:
        return self.prometheus.number(self.grown(selected))


@pytest.fixture(scope="module")
def watched(running_cluster: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    cluster = running_cluster(
        dtype="float32",
        page_tokens=PAGE_TOKENS,
        max_step_tokens=128,
        slo_classes=CLASSES,
        hang_deadline_s=0.0,  # the tests suspend processes until an alert fires
    )
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        _exporter() as gpus,
        running_prometheus(cluster.metrics_address, folder, full_windows=False, exporters=[gpus]) as prometheus,
    ):
        target = find_target(cluster.grpc_address)
        touch(target)
        prometheus.await_scrape(PROCESSES)
        start = time.time()
        requests = run_mixed(target, LOAD_S, seed=29, clients=1)
        prometheus.await_scrape(PROCESSES)
        yield Watched(cluster, prometheus, start, time.time(), requests)


@contextmanager
def _exporter() -> Iterator[str]:
    """Serves the same metrics at every scrape; yields host:port."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(DCGM.read_bytes())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("name", names())
def test_every_query_has_data(watched: Watched, name: str) -> None:
    time_range = TimeRange(watched.start, watched.end)
    shown = list(show(read_dashboard(name), watched.prometheus, time_range))
    assert len(shown) > 8
    assert {panel.title for panel in shown if panel.empty} == ({OF_EXPERTS, OF_RANKS} if name == "workers" else set())


def folded_row(watched: Watched, dashboard: str, title: str) -> list[Shown]:
    time_range = TimeRange(watched.start, watched.end)
    return list(show(read_dashboard(dashboard), watched.prometheus, time_range, folded_row=title))


def test_the_folded_row_of_hardware_has_data(watched: Watched) -> None:
    shown = folded_row(watched, "workers", "Hardware (NVIDIA's dcgm-exporter)")
    assert len(shown) == 8
    assert {panel.title: panel.empty for panel in shown if panel.empty} == {}
    named = {curve.name for panel in shown for curves in panel.answers for curve in curves}
    assert named == {"node-1 GPU 0", "node-1 GPU 0 sent", "node-1 GPU 0 received"}


def test_the_folded_row_of_speculation_has_data(watched: Watched) -> None:
    """Whether any draft is verified depends on the answers; without any, the shares have no value.

    The cluster has no draft model, whose memory therefore is no series.
    """
    shown = folded_row(watched, "workers", "Speculative decoding")
    assert {panel.title for panel in shown} >= {"Speed-up", "Drafted tokens", "Seconds saved"}
    assert {panel.title for panel in shown if panel.empty} <= {
        "Accepted drafts by position",
        "Accepted drafts by source",
        "Memory of the draft model",
    }


def test_rules_are_loaded_and_no_alert_fires(watched: Watched) -> None:
    """No alert fires but the SLO burn-rate alerts, which depend on this machine's speed."""
    groups = watched.prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 15
    assert [rule["name"] for rule in rules if rule["health"] != "ok" or rule.get("lastError")] == []
    assert {alert for alert in watched.prometheus.firing() if "Burns" not in alert} == set()


def test_goodput_is_what_the_load_generator_counted(watched: Watched, report_line: Callable[[str], None]) -> None:
    """The counts agree within one percent, plus requests so near to a target that router and client may disagree."""
    bounds: dict[str, tuple[int, int]] = {}
    for name, records in watched.requests.items():
        cell, seen = TARGETS[name], since_sent(records)
        strict, lax = (
            SloCell(name, cell.ttft_s + sign * OTHER_CLOCK_S, cell.gap_s * (1 + sign * OTHER_GAP)) for sign in (-1, 1)
        )
        least, most = bounds[name] = _met(seen, strict), _met(seen, lax)
        met = watched.count(f'tandem_slo_requests_total{{slo_class="{name}",outcome="met"}}')
        report_line(
            f"{name}: {met:g} of {len(records)} met by Prometheus, {_met(seen, cell)} by clients ({least} to {most})"
        )
        assert least * (1 - TOLERANCE) <= met <= most * (1 + TOLERANCE)
        assert watched.count(f'tandem_slo_requests_total{{slo_class="{name}"}}') == len(records)
        rejected = sum(cell.judge(record) is Outcome.REJECTED for record in records)
        assert watched.count(f'tandem_slo_requests_total{{slo_class="{name}",outcome="rejected"}}') == rejected
    assert bounds["quick"][0] > 0, "else a router that finds none met would pass"
    assert bounds["balanced"][1] < len(watched.requests["balanced"]), "else one that finds all met would"
    best_effort = watched.requests["best_effort"]
    assert watched.count('tandem_slo_requests_total{slo_class="best_effort",outcome="met"}') == len(best_effort)


def _met(records: list[RequestRecord], cell: SloCell) -> int:
    return sum(cell.judge(record) is Outcome.MET for record in records)


def test_latencies_are_in_the_clients_buckets(watched: Watched, report_line: Callable[[str], None]) -> None:
    """The quantiles of router and clients are in the same or neighbouring histogram buckets."""
    records = [record for group in watched.requests.values() for record in group]
    _compare(
        watched, report_line, f.TIME_TO_FIRST_TOKEN, [record.ttft_s for record in since_sent(records) if record.token_s]
    )
    _compare(watched, report_line, f.INTER_TOKEN_LATENCY, [gap for record in records for gap in record.gaps_s])


def _compare(watched: Watched, report_line: Callable[[str], None], family: Family, seen: list[float]) -> None:
    assert watched.count(f"{family.full_name}_count") == len(seen)
    for part in (0.5, 0.9, 0.99):
        grown = watched.grown(f"{family.full_name}_bucket", "le")
        theirs = watched.prometheus.number(f"histogram_quantile({part}, {grown})")
        ranks = [max(0.0, part - OTHER_RANK), part, min(1.0, part + OTHER_RANK)]
        least, ours, most = (float(np.quantile(seen, rank, method="inverted_cdf")) for rank in ranks)
        at = bisect_left(family.buckets, theirs)
        report_line(
            f"{family.name} p{part * 100:g}: {theirs * 1e3:.1f} ms by Prometheus, {ours * 1e3:.1f} ms by clients"
        )
        lowest, highest = bisect_left(family.buckets, least) - 1, bisect_left(family.buckets, most) + 1
        assert lowest <= at <= highest, (family.name, part, theirs, ours)


def test_alerts_fire_for_a_router_that_falls_silent_and_resolve_after_its_end(watched: Watched) -> None:
    """Writable leases over nearly all pages without heartbeats expire, and their pages wait in quarantine.

    A request whose KV is handed over to one of these leases afterwards is rejected.
    """
    cluster, prometheus, seen = watched.cluster, watched.prometheus, set()
    full, lost = {"TandemKvFull"}, {"TandemPagesQuarantined", "TandemWorkerNotReady", "TandemNoDecodeWorker"}
    grown = {"TandemLeasesExpired", "TandemTransferFailures"}
    expected = lost | grown
    with SilentRouter(cluster) as router:
        router.reserve()
        assert not expected & prometheus.firing()
        _await(lambda: full <= prometheus.firing())
        _await(lambda: not cluster.inspect_worker("decode-0").pages_advertised)
        router.start_handoff()
        _await(lambda: expected <= (seen.update(prometheus.firing()) or seen))
    assert not seen & {
        "TandemNoPrefillWorker",
        "TandemProcessDown",
        "TandemKvPoolInconsistent",
        "TandemKvChecksumFailed",
    }
    _await(lambda: not (lost | full) & prometheus.firing())
    watched.fired |= grown


def test_alerts_fire_when_requests_miss_their_targets(watched: Watched) -> None:
    """Requests whose token gap target no machine can meet, one after the other."""
    prometheus, expected = watched.prometheus, {"TandemGoodputBurnsFast", "TandemGoodputBurnsSlowly"}
    _await(lambda: not expected & prometheus.firing())

    def burns() -> bool:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: ask(watched.cluster, 4, slo_class="balanced"), range(8)))
        return expected <= prometheus.firing()

    _await(burns)
    (fast,) = prometheus.at('ALERTS{alertname="TandemGoodputBurnsFast",alertstate="firing"}')
    assert fast.labels["slo_class"] == "balanced"
    watched.fired |= expected


def test_an_alert_fires_for_a_worker_that_hangs_and_resolves_when_it_continues(
    watched: Watched, tmp_path: Path
) -> None:
    """Uses a Prometheus with a scrape timeout longer than the controller waits for the worker that hangs."""
    with running_prometheus(watched.cluster.metrics_address, tmp_path, full_windows=False, every_s=3) as prometheus:
        prometheus.await_scrape(PROCESSES)
        hangs = watched.cluster.worker("prefill").pid
        os.kill(hangs, signal.SIGSTOP)
        try:
            _await(lambda: "TandemProcessNotResponding" in prometheus.firing())
            assert not prometheus.firing() & {
                "TandemControllerUnreachable",
                "TandemNoDecodeWorker",
                "TandemProcessDown",
            }
        finally:
            os.kill(hangs, signal.SIGCONT)
        _await(lambda: "TandemProcessNotResponding" not in prometheus.firing())


def test_an_alert_fires_for_a_suspended_controller_and_resolves_when_it_continues(watched: Watched) -> None:
    """The alert of the test before must have resolved: a controller that waits for a worker looks unreachable, too."""
    prometheus, hangs, expected = watched.prometheus, watched.cluster.controller_pid(), "TandemControllerUnreachable"
    _await(lambda: expected not in prometheus.firing())
    os.kill(hangs, signal.SIGSTOP)
    try:
        _await(lambda: expected in prometheus.firing())
    finally:
        os.kill(hangs, signal.SIGCONT)
    _await(lambda: expected not in prometheus.firing())


@pytest.mark.parametrize(
    ("role", "expected", "other"),
    [
        ("prefill", "TandemNoPrefillWorker", "TandemNoDecodeWorker"),
        ("decode", "TandemNoDecodeWorker", "TandemNoPrefillWorker"),
    ],
)
def test_alerts_fire_for_a_killed_worker_and_resolve_after_its_restart(
    watched: Watched, role: str, expected: str, other: str
) -> None:
    cluster, prometheus = watched.cluster, watched.prometheus
    os.kill(cluster.worker(role).pid, signal.SIGKILL)
    _await(lambda: {expected, "TandemProcessDown"} <= prometheus.firing())
    if role == "prefill":
        assert "TandemProcessRestartsOften" not in prometheus.firing(), "once is daily life"
        _kill_until(cluster, "prefill-0", lambda: "TandemProcessRestartsOften" in prometheus.firing())
        watched.fired.add("TandemProcessRestartsOften")
    assert not prometheus.firing() & {other, "TandemControllerUnreachable", "TandemKvPoolInconsistent"}
    cluster.worker(role)
    _await(lambda: not prometheus.firing() & {expected, "TandemProcessDown"})
    prometheus.await_scrape(PROCESSES)
    assert prometheus.number(f'tandem_process_restarts_total{{worker="{role}-0"}}') > 0


def test_alerts_on_counters_resolve_when_the_counters_stop_growing(watched: Watched) -> None:
    _await(lambda: not watched.fired & watched.prometheus.firing())


def _kill_until(cluster: Any, name: str, condition: Callable[[], bool]) -> None:
    """Kills each new process called `name` as soon as it has started, until `condition` holds."""
    killed = {0}

    def done() -> bool:
        pid = cluster.named(name).pid
        if pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return condition()

    _await(done)


def _await(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + RECOVERS_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
