"""Scrapes every process of a real cluster after some requests: all names are exported, and the values are right."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from tandem.engine.steps.draft_groups import DRAFTS_MAX
from tandem.metrics.families import (
    AUDIT_RECORDS,
    AUDIT_RECORDS_LOST,
    FAMILIES,
    SPECULATION_MODEL_BYTES,
    STEP_COLLECTIVES,
    STEP_ENERGY,
    TIER_BYTES,
    TIER_CAPACITY,
    TIER_FAILURES,
    TIER_PAGES,
    TIER_SECONDS,
    TIER_USED,
    TLS_CERTIFICATE_EXPIRES,
)
from tandem.metrics.metrics_server import fetch
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc

PROMPT = "Zanzibar's lighthouse keeper counted seventeen albatrosses before breakfast, and wrote down every one. " * 2
ANSWER_TOKENS = (1, 5, 12)
FORMATS = {"text/plain": text_string_to_metric_families, "application/openmetrics-text; version=1.0.0": open_metrics}
PLANNED_WITHIN_S = 60.0
SETTLES_S = 0.3
SERIES_MAX = 60
"""The largest number of label sets of one metric family on one process."""


@dataclass
class Scraped:
    """Samples by name, each a (labels, value) pair."""

    samples: dict[str, list[tuple[dict[str, str], float]]]

    @classmethod
    def of(cls, text: str, parser: Callable[[str], Iterable[Any]] = text_string_to_metric_families) -> Scraped:
        samples = defaultdict(list)
        for family in parser(text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
        return cls(samples)

    def total(self, name: str, **labels: str) -> float:
        values = [value for have, value in self.samples[f"tandem_{name}"] if labels.items() <= have.items()]
        assert values, f"no {name} {labels}"
        return sum(values)


def scrape(cluster: Any) -> Scraped:
    """Scrapes the metrics of the whole cluster."""
    return Scraped.of(asyncio.run(fetch(cluster.metrics_address, "/metrics", timeout_s=60.0)))


def ask(cluster: Any, tokens: int, **fields: Any) -> None:
    options = inference_pb2.GenerationOptions(max_tokens=tokens, temperature=0, ignore_eos=True, **fields)
    request = inference_pb2.GenerateRequest(text=PROMPT, options=options)
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        assert list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60))


def outcome(cluster: Any, tokens: int, **fields: Any) -> str:
    """Returns `done`, or the status code of the rejection."""
    try:
        ask(cluster, tokens, **fields)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "done"


def complete(cluster: Any) -> Scraped:
    """Sends requests until all families are exported; the planner's appear last, after a window with requests in it."""
    deadline_s = time.monotonic() + PLANNED_WITHIN_S
    while True:
        ask(cluster, 2)
        scraped = scrape(cluster)
        if not missing(scraped) or time.monotonic() > deadline_s:
            return scraped


@dataclass
class Traffic:
    before: Scraped
    after: Scraped
    cluster: Any

    def grown(self, name: str, **labels: str) -> float:
        return self.after.total(name, **labels) - self.before.total(name, **labels)


@pytest.fixture(scope="module")
def traffic(running_cluster: Callable[..., Any]) -> Traffic:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    complete(cluster)
    before = scrape_when_idle(cluster)
    for tokens in ANSWER_TOKENS:
        ask(cluster, tokens, slo_class="best_effort")
    with pytest.raises(grpc.RpcError):
        ask(cluster, 4, slo_class="no such class")
    with pytest.raises(grpc.RpcError):
        ask(cluster, 10**6)
    return Traffic(before, scrape_when_idle(cluster), cluster)


def scrape_when_idle(cluster: Any) -> Scraped:
    """Returns the metrics when two scrapes agree: those of a step follow its tokens, which clients may have before."""
    scraped = scrape(cluster)
    while True:
        time.sleep(SETTLES_S)
        again = scrape(cluster)
        if again.total("engine_step_tokens_total") == scraped.total("engine_step_tokens_total"):
            return again
        scraped = again


def test_every_family_is_there(traffic: Traffic) -> None:
    assert not missing(traffic.after)


def missing(scraped: Scraped) -> set[str]:
    """Returns the families that are missing.

    A dense model is expected, and a cluster without GPU, certificate, audit log, draft model and groups of ranks.
    """
    wanted = {family.full_name for family in FAMILIES if "expert" not in family.labels}
    tiers = (TIER_BYTES, TIER_CAPACITY, TIER_FAILURES, TIER_PAGES, TIER_SECONDS, TIER_USED)
    absent = (
        *(AUDIT_RECORDS, AUDIT_RECORDS_LOST, SPECULATION_MODEL_BYTES, STEP_COLLECTIVES, STEP_ENERGY),
        TLS_CERTIFICATE_EXPIRES,
        *tiers,
    )
    wanted -= {family.full_name for family in absent}
    return wanted - {name.removesuffix("_count") for name in scraped.samples}


def test_the_figures_are_true(traffic: Traffic) -> None:
    requests, tokens = len(ANSWER_TOKENS), sum(ANSWER_TOKENS)
    assert traffic.grown("time_to_first_token_seconds_count") == requests
    assert traffic.grown("e2e_request_latency_seconds_count") == requests
    assert traffic.grown("request_success_total", finished_reason="length") == requests
    assert traffic.grown("generation_tokens_total") == tokens
    assert traffic.grown("inter_token_latency_seconds_count") == tokens - requests
    assert traffic.grown("slo_requests_total", slo_class="best_effort", outcome="met") == requests
    assert traffic.grown("slo_requests_total") == requests
    assert traffic.grown("admission_rejections_total", reason="invalid") == 2
    assert traffic.grown("admission_rejections_total") == 2
    drafted, accepted = (traffic.grown(f"speculation_{kind}_tokens_total") for kind in ("draft", "accepted"))
    computed = traffic.grown("engine_step_tokens_total", phase="decode") - (drafted - accepted)
    # Drafts behind the end of an answer are computed and not counted.
    assert tokens - requests <= computed <= tokens - requests + requests * DRAFTS_MAX
    assert traffic.grown("request_queue_time_seconds_count") == requests
    handed_over = sum(tokens > 1 for tokens in ANSWER_TOKENS)
    assert traffic.grown("kv_transfer_seconds_count") == handed_over
    assert traffic.grown("kv_transfer_bytes_total") > 0
    assert traffic.grown("kv_transfer_writing_seconds_total") > 0
    assert traffic.grown("request_transfer_time_seconds_count") == handed_over
    assert traffic.grown("kv_transfer_failures_total") == 0
    assert traffic.grown("prefix_cache_hits_tokens_total") > 0
    assert traffic.grown("placements_total") == requests
    assert traffic.after.total("goodput_requests_per_second", slo_class="best_effort") > 0


def test_the_router_judges_what_clients_saw(running_cluster: Callable[..., Any]) -> None:
    """Each request has exactly one outcome, a rejection REJECTED, however many SLOs this machine can meet."""
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    before = scrape(cluster)
    seen = [outcome(cluster, 3, slo_class=name) for name in ("strict", "balanced", "quick") for _ in range(2)]
    growth = Traffic(before, scrape(cluster), cluster).grown
    judged = sum(growth("slo_requests_total", outcome=outcome) for outcome in ("met", "missed_ttft", "missed_itl"))
    assert judged == seen.count("done")
    assert growth("slo_requests_total", outcome="rejected") == seen.count("RESOURCE_EXHAUSTED")
    assert growth("slo_requests_total", outcome="met") == judged + seen.count("RESOURCE_EXHAUSTED") - growth(
        "slo_missed_total"
    )
    for name in ("strict", "balanced", "quick"):
        assert growth("slo_requests_total", slo_class=name) == 2


def test_gauges_make_sense(traffic: Traffic) -> None:
    after, cluster = traffic.after, traffic.cluster
    for member in cluster.members():
        me = {"worker": member.peer.worker_id}
        pages = after.total("kv_pages", **me) - after.total("kv_pages", state="reserved", **me)
        assert pages == member.pages_total
        assert 0 < after.total("model_bandwidth_utilization_ratio", **me) < 10
        assert 0 < after.total("model_flops_utilization_ratio", **me) < 10
        assert after.total("worker_ready", **me) == after.total("process_up", role=member.role, **me) == 1
        assert after.total("worker_info", role=member.role, device=member.device, dtype="float32", **me) == 1
        assert after.total("kv_transport_info", **me) == 1
        assert after.total("engine_graph_steps_total", graph="hit", **me) == 0
    assert all(labels["transport"].startswith("UCX") for labels, _ in after.samples["tandem_kv_transport_info"])
    kept = (cluster.router(), *cluster.workers())
    assert after.total("metrics_target_up") == after.total("process_up") == len(kept) == 3
    assert after.total("process_restarts_total") == sum(process.restarts for process in kept)
    assert after.total("num_requests_running", role="router") == after.total("num_requests_waiting", role="router") == 0


def test_cardinality_is_bounded(traffic: Traffic) -> None:
    """Label values are processes, enums and settings; nothing that clients send creates a series or appears in one."""
    for name, samples in traffic.after.samples.items():
        series = defaultdict(set)
        for labels, _ in samples:
            series[labels.get("worker")].add(tuple(value for key, value in labels.items() if key != "le"))
            assert set(labels) <= {"model", "role", "worker", "le", *_own_labels(name)}, name
        assert max(map(len, series.values())) <= SERIES_MAX, name
    assert len(traffic.before.samples) == len(traffic.after.samples)
    before, after = (sum(map(len, scraped.samples.values())) for scraped in (traffic.before, traffic.after))
    assert after == before


def _own_labels(name: str) -> tuple[str, ...]:
    return next((family.labels for family in FAMILIES if name.startswith(family.full_name)), ())


def test_discovery_names_processes_that_answer(traffic: Traffic) -> None:
    groups = json.loads(asyncio.run(fetch(traffic.cluster.metrics_address, "/sd", timeout_s=60.0)))
    assert {group["labels"]["__meta_tandem_worker"] for group in groups} == {"router", "prefill-0", "decode-0"}
    merged = traffic.after.samples
    for group in groups:
        (target,) = group["targets"]
        for accept, parser in FORMATS.items():
            own = Scraped.of(get(target, accept), parser)
            assert own.samples.keys() <= merged.keys() | {"tandem_metrics_target_up"}
            assert {labels["worker"] for samples in own.samples.values() for labels, _ in samples} == {
                group["labels"]["__meta_tandem_worker"]
            }
    assert traffic.cluster.http_address in {target for group in groups for target in group["targets"]}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(traffic.cluster.metrics_address, "text/plain", "/nothing")


def get(address: str, accept: str, path: str = "/metrics") -> str:
    request = urllib.request.Request(f"http://{address}{path}", headers={"accept": accept})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
        return str(reply.read().decode())


def test_no_prompt_in_any_log(traffic: Traffic) -> None:
    for name in ("router", "controller", "prefill-0", "decode-0"):
        assert "lighthouse" not in traffic.cluster.log(name)
    assert "serves" in traffic.cluster.log("router")
