"""The benchmark of the router: what it counts is complete; no timing."""

from __future__ import annotations

import argparse
import multiprocessing as mp
import time
from pathlib import Path

import pytest

from benchmarks.router import streams as benchmark
from benchmarks.router.streams import UNCOALESCED, many_streams, measure_all, running
from benchmarks.router.token_source import age_of, token_of
from tests.soak import soak
from tests.unit.router import conftest

model = conftest.model


@pytest.mark.parametrize("age_s", [0.0, 0.003, 1.5, 3.9])
@pytest.mark.parametrize("sent", [0.0, 3.9999, 1234.5678])
def test_the_age_of_a_token_comes_from_its_id(sent: float, age_s: float) -> None:
    assert age_of(token_of(sent), sent + age_s) == pytest.approx(age_s, abs=2e-4)


@soak
def test_every_token_is_read_by_both_protocols(model: Path) -> None:
    with running(model, 0.002, UNCOALESCED) as router:
        before = time.monotonic()
        by_grpc = router.read("grpc", 5, 20, keep_ages=True)
        by_http = router.read("http", 3, 20)
        elapsed_s = time.monotonic() - before
        usage = router.usage()
    assert (by_grpc.answers, by_grpc.tokens) == (5, 100)
    assert len(by_grpc.ages_s) == by_grpc.messages <= 100
    assert all(age < elapsed_s for age in by_grpc.ages_s)
    assert (by_http.answers, by_http.tokens) == (3, 60)
    assert 3 <= by_http.messages <= 60
    assert usage.cpu_s > 0
    assert usage.rss_bytes > 1 << 20


@soak
def test_more_calls_at_once_than_grpc_keeps_pending_are_all_answered(model: Path) -> None:
    """GRPC cancelled some of them, without a reason, above a thousand calls that no handler had taken yet."""
    figures = many_streams(model, 1100, 3, 2)
    assert figures["complete_share"] == 1.0
    assert figures["stream_tokens_read"] == 2 * 1100 * 3


@soak
def test_all_figures_are_measured_also_beside_clients_that_do_not_read(model: Path) -> None:
    asked = argparse.Namespace(answers=4, tokens=20, streams=6, stream_tokens=8, rounds=2)
    figures = measure_all(asked, model)
    assert figures["complete_share"] == figures["complete_beside_unread_share"] == 1.0
    assert {"grpc_messages_per_s_core", "http_messages_per_s_core", "coalesced_tokens_per_s_core"} <= figures.keys()
    assert figures["age_ms_p50"] <= figures["age_ms_p99"]


def _dies(*_: object) -> None:
    raise SystemExit(1)


@soak
def test_a_router_that_dies_ends_the_benchmark(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "run_router", _dies)
    with pytest.raises(EOFError), running(model, 0.01, {}):
        pass
    assert not mp.active_children()
