"""The metrics of one process: every family matches its description, and Prometheus' parser reads all of them."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.metrics import families as f
from tandem.metrics.exposition import Exposition, merge
from tandem.metrics.family import Family, Kind, counter, gauge, histogram
from tandem.metrics.registry import Registry
from tandem.protocol.generate import ROOT

LABELS = {"model": "m", "role": "decode", "worker": "decode-0"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SURFACE = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_transfer_time_seconds", "request_decode_time_seconds", "num_requests_running", "num_requests_waiting",
    "kv_cache_usage_ratio", "prefix_cache_queries_tokens_total", "prefix_cache_hits_tokens_total",
    "request_success_total", "num_preemptions_total", "admission_rejections_total", "kv_transfer_seconds",
    "kv_transfer_bytes_total", "kv_transfer_failures_total", "kv_transfer_expired_leases_total",
    "kv_transfer_bandwidth_bytes_per_second", "engine_step_seconds", "model_bandwidth_utilization_ratio",
    "model_flops_utilization_ratio", "slo_requests_total",
)  # fmt: skip
"""Names that dashboards and autoscalers made for other servers use."""


def full_registry() -> Registry:
    """Returns a registry with a cell of every family."""
    registry = Registry(LABELS)
    for family in f.FAMILIES:
        values = [f"a {label}" for label in family.labels]
        if family.kind is Kind.COUNTER:
            registry.counter(family, *values).add(2)
        elif family.kind is Kind.HISTOGRAM:
            registry.histogram(family, *values).observe(0.003, 2)
    gauges = {x: {tuple(f"a {label}" for label in x.labels): 0.5} for x in f.FAMILIES if x.kind is Kind.GAUGE}
    registry.read(lambda: gauges)
    return registry


def test_the_names_of_the_field() -> None:
    assert {f"tandem_{name}" for name in SURFACE} <= {family.full_name for family in f.FAMILIES}


def test_each_name_says_its_unit_and_is_used_once() -> None:
    names = [family.name for family in f.FAMILIES]
    assert len(names) == len(set(names)) == len(vars(f)["FAMILIES"])
    for family in f.FAMILIES:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name)
        assert (family.kind is Kind.COUNTER) == family.name.endswith("_total")
        assert (family.kind is Kind.HISTOGRAM) == bool(family.buckets)
        assert family.help.endswith((".", ".)"))
        assert all(a < b for a, b in pairwise(family.buckets))
    assert f.INTER_TOKEN_LATENCY.buckets[0] == 0.0005
    with pytest.raises(ValueError, match="must end in _total"):
        counter("things", "Things.")


@pytest.mark.parametrize("accept", ["", "text/plain", OPENMETRICS])
def test_prometheus_reads_every_family(accept: str) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

    text, content_type = Exposition(full_registry()).render(accept)
    assert content_type.startswith("application/openmetrics-text" if accept == OPENMETRICS else "text/plain")
    read = openmetrics if accept == OPENMETRICS else text_string_to_metric_families
    samples = {sample.name: sample for metric in read(text.decode()) for sample in metric.samples}
    for family in f.FAMILIES:
        sample = samples[family.full_name + ("_count" if family.kind is Kind.HISTOGRAM else "")]
        assert sample.value == (0.5 if family.kind is Kind.GAUGE else 2)
        assert sample.labels == LABELS | {label: f"a {label}" for label in family.labels}
    assert samples["process_resident_memory_bytes"].labels == LABELS


def test_where_observations_go() -> None:
    """A value on a bound belongs to the bucket below it, one beyond all bounds to the last bucket."""
    registry = Registry(LABELS)
    family = histogram("h_seconds", "H.", (1.0, 2.0))
    spread = registry.histogram(family)
    for value, times in ((1.0, 1), (1.5, 3), (2.0, 1), (9.0, 2)):
        spread.observe(value, times)
    assert (spread.counts, spread.count, spread.total) == ([1, 4, 2], 7, 25.5)
    text = Exposition(registry).render()[0].decode()
    buckets = re.findall(r'tandem_h_seconds_bucket{le="([^"]+)",[^}]*} ([0-9.]+)', text)
    assert buckets == [("1.0", "1.0"), ("2.0", "5.0"), ("+Inf", "7.0")]
    assert registry.histogram(family) is spread


def test_a_cell_must_fit_its_family() -> None:
    registry = Registry(LABELS)
    for family, values in (
        (f.PREEMPTIONS, ("x",)),
        (f.KV_USAGE, ()),
        (f.REQUEST_SUCCESS, ()),
        (f.TIME_TO_FIRST_TOKEN, ()),
    ):
        with pytest.raises(ValueError, match=family.name):
            registry.counter(family, *values)


def test_several_processes_as_one() -> None:
    """Each family's head appears once, followed by all series, also those of a single process."""

    def text(worker: str, *families: Family) -> str:
        registry = Registry({"worker": worker})
        registry.read(lambda: dict.fromkeys(families, 1.0))
        return Exposition(registry).render()[0].decode()

    alone = gauge("alone", "One has it.")
    merged = merge([text("a", f.KV_USAGE), "", text("b", f.KV_USAGE, alone)])
    metrics = {metric.name: metric for metric in text_string_to_metric_families(merged)}
    assert [sample.labels["worker"] for sample in metrics["tandem_kv_cache_usage_ratio"].samples] == ["a", "b"]
    assert [sample.labels["worker"] for sample in metrics["tandem_alone"].samples] == ["b"]
    assert merged.count("# TYPE tandem_kv_cache_usage_ratio gauge\n") == 1


def test_the_handbook_names_every_metric() -> None:
    handbook = (Path(ROOT) / "docs" / "operations" / "metrics.md").read_text()
    missing = [family.full_name for family in f.FAMILIES if f"`{family.name}" not in handbook]
    assert not missing
