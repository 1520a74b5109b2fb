"""The router's metrics: verdicts and goodput under a manual clock, and the values of a whole router."""

import math
import time
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.config import RouterConfig
from router.observability.goodput import Goodput
from router.observability.prediction_quality import PlacementRecord
from router.observability.request_outcome import (
    MET,
    GapTracker,
    JointOutcome,
    Outcome,
    PhaseTimes,
    RequestOutcome,
    failed,
    judge,
)
from router.placement.policy import Placement
from router.refusal import Refusal, Refused
from router.requests.live_requests import LiveRequests
from router.requests.metrics import RouterMetrics
from router.requests.picker_metrics import PICKER_PATH
from router.requests.request import Admitted, RoutedRequest
from tandem.capacity.simulation.clock import VirtualClock
from tandem.metrics import families as f
from tandem.metrics.exposition import Exposition
from tandem.net.security.credentials import metrics_key_of
from tandem.protocol.errors import InvalidArgument, TransferFailed, Unavailable
from tandem.protocol.generated.tandem.v1 import inference_pb2
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent, Timeline
from tandem.protocol.lifecycle.placement import TOKEN_SOURCES, PlacementStats, PromptCost
from tandem.protocol.lifecycle.spans import Phase, spans_of
from tandem.protocol.messages import FinishReason, PeerRef, SamplingParams
from tandem.settings.model import ModelSettings
from tandem.settings.slo import BEST_EFFORT, SloClass
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import channel_to, until
from tests.unit.router.test_generate import Client, ask

TIGHT = SloClass("tight", ttft_s=1.0, itl_s=0.025, itl_percent=90.0, worst_gap_s=0.2)
SECOND = 10**9


def pace_of(*gaps: float, target_s: float = 0.025) -> GapTracker:
    return GapTracker.of(target_s, accumulate(gaps, initial=5.0))


def timeline_of(**seconds: float) -> Timeline:
    event_times = tuple(EventTime(LifecycleEvent[name], int(at * SECOND)) for name, at in seconds.items())
    return Timeline(event_times, None, "prefill-0", "decode-0")


WHOLE = {
    "RECEIVED": 0.0, "PLACED": 0.1, "PREFILL_QUEUED": 0.2, "PREFILL_STARTED": 0.5, "TRANSFER_STARTED": 0.6,
    "PREFILL_FINISHED": 0.7, "FIRST_TOKEN": 0.8, "TRANSFER_FINISHED": 0.9, "DECODE_ADMITTED": 0.95,
    "DECODE_STARTED": 1.0, "FINISHED": 2.8,
}  # fmt: skip


def test_phases_of_a_request() -> None:
    times = PhaseTimes.of(spans_of(timeline_of(**WHOLE)))
    seconds = (times.queue_s, times.prefill_s, times.transfer_s, times.decode_s)
    assert seconds == pytest.approx((0.5, 0.2, 0.3, 1.8))
    assert sum(seconds) == pytest.approx(2.8)  # type: ignore[arg-type]
    assert times.stall_s is None
    assert PhaseTimes.of(spans_of(timeline_of(RECEIVED=0.0))) == PhaseTimes(None, None, None, None)


def test_phases_of_a_request_that_was_tried_again(metrics: RouterMetrics) -> None:
    """Its worker dies at 1.5 s, which is detected at 6 s: the ITL target is missed by the stall, not by decode."""
    request = request_of(TIGHT, **{name: at for name, at in WHOLE.items() if name != "FINISHED"})
    metrics.tokens_leave(request, 1)
    metrics.clock.now += 6.0  # type: ignore[attr-defined]
    metrics.tokens_leave(request, 8)
    again = {name: at + 6.0 for name, at in WHOLE.items() if name not in ("RECEIVED", "FIRST_TOKEN")}
    request.event_times += timeline_of(SILENT=1.5, REQUEUED=6.0, **again).event_times
    metrics.finished(request, FinishReason.STOP)
    families = (f.QUEUE_TIME, f.PREFILL_TIME, f.TRANSFER_TIME, f.DECODE_TIME, f.STALL_TIME)
    totals = [metrics.registry.histogram(family).total for family in families]
    assert totals == pytest.approx([0.5 + 0.5, 0.2 + 0.2, 0.3 + 0.3, 0.5 + 1.8, 4.5])
    assert sum(totals) == pytest.approx(metrics.registry.histogram(f.E2E_REQUEST_LATENCY).total)
    assert outcomes(metrics) == {("tight", "missed_itl"): 1, ("tight", "stall"): 1}


def test_a_first_token_that_a_silent_worker_kept_back(metrics: RouterMetrics) -> None:
    request = request_of(TIGHT, RECEIVED=0.0, PLACED=0.1, SILENT=0.1, REQUEUED=3.0)
    request.event_times += timeline_of(
        PLACED=3.1, PREFILL_STARTED=3.2, PREFILL_FINISHED=3.3, FIRST_TOKEN=3.3
    ).event_times
    metrics.tokens_leave(request, 1)
    request.event_times += timeline_of(PREEMPTED=4.0, FINISHED=9.0).event_times  # later phases do not count for TTFT
    metrics.finished(request, FinishReason.STOP)
    assert outcomes(metrics) == {("tight", "missed_ttft"): 1, ("tight", "stall"): 1}


@pytest.mark.parametrize(
    ("gaps", "ttft_s", "times", "verdict"),
    [
        ((0.02,) * 10, 0.9, PhaseTimes(0.5, 0.4, 0.1, 1.0), MET),
        ((), 0.9, PhaseTimes(0.5, 0.4, None, None), MET),
        ((), None, PhaseTimes(None, None, None, None), MET),
        ((0.02,), 1.1, PhaseTimes(0.7, 0.4, 0.1, 1.0), RequestOutcome(Outcome.MISSED_TTFT, Phase.QUEUE)),
        ((0.02,), 1.1, PhaseTimes(0.3, 0.8, 0.1, 1.0), RequestOutcome(Outcome.MISSED_TTFT, Phase.PREFILL)),
        # One gap in ten may be too long, no matter which.
        ((0.02,) * 9 + (0.05,), 0.9, PhaseTimes(0.5, 0.4, 0.1, 1.0), MET),
        ((0.05,) + (0.02,) * 9, 0.9, PhaseTimes(0.5, 0.4, 0.1, 1.0), MET),
        ((0.02,) * 8 + (0.05,), 0.9, PhaseTimes(0.5, 0.4, 0.1, 1.0), RequestOutcome(Outcome.MISSED_ITL, Phase.DECODE)),
        (
            (0.02,) * 8 + (0.05,) * 2,
            0.9,
            PhaseTimes(0.5, 0.4, 0.1, 1.0),
            RequestOutcome(Outcome.MISSED_ITL, Phase.DECODE),
        ),
        # Without the transfer after the first token it would have been met.
        (
            (0.05,) + (0.02,) * 8,
            0.9,
            PhaseTimes(0.5, 0.4, 0.1, 1.0),
            RequestOutcome(Outcome.MISSED_ITL, Phase.TRANSFER),
        ),
        ((0.05,) + (0.02,) * 8, 0.9, PhaseTimes(0.5, 0.4, None, 1.0), RequestOutcome(Outcome.MISSED_ITL, Phase.DECODE)),
        # Only the worst gap counts.
        ((0.02,) * 9 + (0.3,), 0.9, PhaseTimes(0.5, 0.4, 0.1, 1.0), RequestOutcome(Outcome.MISSED_ITL, Phase.DECODE)),
        ((0.3,) + (0.02,) * 9, 0.9, PhaseTimes(0.5, 0.4, 0.1, 1.0), RequestOutcome(Outcome.MISSED_ITL, Phase.TRANSFER)),
    ],
)
def test_verdicts(gaps: tuple[float, ...], ttft_s: float | None, times: PhaseTimes, verdict: RequestOutcome) -> None:
    assert judge(TIGHT, pace_of(*gaps), ttft_s, times) == verdict
    assert judge(BEST_EFFORT, pace_of(*gaps, target_s=math.inf), ttft_s, times) == MET


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 57])
def test_the_percentile_is_the_load_generators(count: int) -> None:
    """Nearest rank, as `benchmarks.load` computes it from the tokens that clients received."""
    from tandem.cli.load.spread import percentile

    for over in range(count + 1):
        gaps = (0.02,) * (count - over) + (0.05,) * over
        met = percentile(gaps, TIGHT.itl_percent) <= TIGHT.itl_s
        assert (judge(TIGHT, pace_of(*gaps), 0.1, PhaseTimes(0, 0, 0, 0)) == MET) == met


def test_tokens_that_leave_together() -> None:
    pace = GapTracker()
    assert pace.leave(3, 1.0) is None
    assert pace.leave(2, 1.5) == 0.5
    assert (pace.tokens, pace.gaps, pace.mean_gap_s, pace.first_over) == (5, 4, 0.125, False)


@pytest.mark.parametrize(
    ("last", "phase"),
    [("RECEIVED", "queue"), ("PLACED", "prefill"), ("PREFILL_FINISHED", "transfer"), ("DECODE_ADMITTED", "decode")],
)
def test_the_phase_in_which_a_request_failed(last: str, phase: str) -> None:
    names = list(WHOLE)
    seen = {name: WHOLE[name] for name in names[: names.index(last) + 1]}
    assert failed(timeline_of(**seen)) == RequestOutcome(Outcome.FAILED, Phase(phase))
    before = timeline_of(**{**WHOLE, "REQUEUED": 2.9}).event_times
    retried = replace(timeline_of(), event_times=(*before, *timeline_of(**seen).event_times))
    assert failed(retried) == RequestOutcome(Outcome.FAILED, Phase(phase)), "of the last try"


def test_goodput_slides() -> None:
    clock = VirtualClock(100.0)
    goodput = Goodput(["a", "b"], 60.0, clock)
    assert goodput.per_second() == {"a": 0.0, "b": 0.0}
    for _ in range(30):
        goodput.met("a")
        clock.now += 1.0
    assert goodput.per_second() == {"a": 1.0, "b": 0.0}
    clock.now += 30.0
    assert goodput.per_second()["a"] == pytest.approx(0.5, abs=0.02)
    clock.now += 31.0
    goodput.met("b")
    assert goodput.per_second() == {"a": 0.0, "b": pytest.approx(1 / 60)}
    assert sum(len(bins) for bins in goodput._bins.values()) <= 61


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100.0)


@pytest.fixture
def metrics(model: Any, clock: VirtualClock) -> RouterMetrics:
    config = RouterConfig("router-1", ModelSettings(model, ("fake",)), "", slo_classes=(TIGHT, BEST_EFFORT))
    return RouterMetrics(config, clock)


def request_of(slo: SloClass, prompt: int = 7, **event_times: float) -> RoutedRequest:
    admitted = Admitted("r", (1,) * prompt, SamplingParams(8), (), 0, (), slo=slo)
    request = RoutedRequest("r~1", admitted, admitted.queued("r~1", 1, 0.0), cast(Any, None), cast(Any, None), 0.0)
    request.pace.target_s = slo.itl_target(0.01)
    request.event_times = list(timeline_of(**event_times).event_times)
    return request


def outcomes(metrics: RouterMetrics) -> dict[tuple[str, ...], float]:
    """Returns the outcomes with a count above zero."""
    counters = metrics.registry._counters
    cells = {**counters[f.SLO_REQUESTS], **counters[f.SLO_MISSED]}
    return {labels: cell.value for labels, cell in cells.items() if cell.value}


def test_a_request_from_its_first_token_to_its_end(metrics: RouterMetrics, clock: VirtualClock) -> None:
    request = request_of(TIGHT, **{name: at for name, at in WHOLE.items() if name != "FINISHED"})
    for tokens, gap in ((1, 0.0), (4, 0.02), (0, 0.0), (1, 0.01)):
        clock.now += gap
        metrics.tokens_leave(request, tokens)
    request.event_times.append(EventTime(LifecycleEvent.FINISHED, int(2.8 * SECOND)))
    request.cached_tokens = 16
    metrics.finished(request, FinishReason.STOP)
    metrics.finished(request, FinishReason.STOP)
    metrics.left(request)
    registry = metrics.registry
    assert (registry.histogram(f.TIME_TO_FIRST_TOKEN).count, registry.histogram(f.TIME_TO_FIRST_TOKEN).total) == (
        1,
        0.8,
    )
    gaps = registry.histogram(f.INTER_TOKEN_LATENCY)
    assert (gaps.count, gaps.counts[0]) == (5, 3)
    assert gaps.total == pytest.approx(0.03)
    assert registry.histogram(f.TIME_PER_OUTPUT_TOKEN).total == pytest.approx(0.006)
    assert registry.histogram(f.E2E_REQUEST_LATENCY).total == pytest.approx(2.8)
    assert registry.histogram(f.DECODE_TIME).count == 1
    assert registry.counter(f.GENERATION_TOKENS).value == 6
    assert (registry.counter(f.PROMPT_TOKENS).value, registry.counter(f.CACHED_PROMPT_TOKENS).value) == (7, 7)
    assert registry.counter(f.REQUEST_SUCCESS, "stop").value == 1
    assert outcomes(metrics) == {("tight", "met"): 1}


def test_placement_counts_from_the_reception_as_the_metric_does() -> None:
    """It counted from the end of the tokenization: a request could be late before its clock began."""
    now = time.time_ns()
    event_times = EventTime(LifecycleEvent.RECEIVED, now - 3 * 10**9), EventTime(LifecycleEvent.TOKENIZED, now)
    admitted = Admitted("r", (1,), SamplingParams(8), (), 0, event_times)
    (request,) = LiveRequests(cast(Any, SimpleNamespace(decode=str, eos_token_ids=())), time.monotonic).make(
        admitted, JointOutcome()
    )
    assert time.monotonic() - request.queued.arrived_s == pytest.approx(3.0, abs=0.5)
    ahead = Admitted("r", (1,), SamplingParams(8), (), 0, (EventTime(LifecycleEvent.RECEIVED, now + 10**12),))
    assert ahead.waited_s == 0.0, "the wall clock was set back"


def test_ends_that_are_not_good(metrics: RouterMetrics) -> None:
    early, late, broken = (request_of(TIGHT, RECEIVED=0.0, PLACED=0.1) for _ in range(3))
    early.event_times = [EventTime.now(LifecycleEvent.RECEIVED)]
    metrics.left(early)  # before any target was missed
    assert outcomes(metrics) == {}
    metrics.finished(late, FinishReason.ABORT)  # long after every target
    assert outcomes(metrics) == {("tight", "missed_ttft"): 1, ("tight", "queue"): 1}
    metrics.failed(broken, TransferFailed("gone"))
    assert outcomes(metrics)[("tight", "failed")] == outcomes(metrics)[("tight", "prefill")] == 1
    assert metrics.registry.counter(f.REQUEST_FAILURES, "TRANSFER_FAILED").value == 1
    assert metrics.registry.counter(f.REQUEST_SUCCESS, "abort").value == 2
    assert metrics.goodput.per_second()["tight"] == 0


def test_tokens_sent_after_a_failure_are_in_its_trace(metrics: RouterMetrics) -> None:
    request = request_of(TIGHT, RECEIVED=0.0, PLACED=0.1)
    metrics.failed(request, TransferFailed("gone"))
    assert metrics.registry.counter(f.REQUEST_FAILURES, "TRANSFER_FAILED").value == 1
    metrics.tokens_leave(request, 3)
    metrics.left(request)
    metrics.left(request)
    (trace,) = metrics.traces.newest()
    assert (trace.outcome, trace.completion_tokens) == ("TRANSFER_FAILED", 3)
    assert metrics.registry.counter(f.REQUEST_FAILURES, "TRANSFER_FAILED").value == 1
    assert metrics.registry.counter(f.REQUEST_SUCCESS, "abort").value == 0


def test_refusals(metrics: RouterMetrics) -> None:
    for error, reason, missed in (
        (Refused(Refusal.QUEUE_FULL, "full"), "queue_full", {"rejected", "queue"}),
        (Refused(Refusal.SLO_ITL, "crowded"), "slo_itl", {"rejected", "decode"}),
        (Refused(Refusal.SLO_TTFT, "late"), "slo_ttft", {"rejected", "queue"}),
        (Unavailable("nobody"), "no_worker", {"failed", "queue"}),
        (InvalidArgument("prompt", "is wrong"), "invalid", set()),
    ):
        before = outcomes(metrics)
        metrics.refused("tight", error)
        metrics.refused("of the client's making", error)
        assert metrics.registry.counter(f.ADMISSION_REJECTIONS, reason).value == 2
        grown = {key for key, value in outcomes(metrics).items() if value > before.get(key, 0)}
        assert grown == {("tight", family) for family in missed}


LATE, SLOW = RequestOutcome(Outcome.MISSED_TTFT, Phase.QUEUE), RequestOutcome(Outcome.MISSED_ITL, Phase.DECODE)
BROKEN = RequestOutcome(Outcome.FAILED, Phase.TRANSFER)


@pytest.mark.parametrize(
    ("answers", "joint"),
    [
        ((MET, MET, MET), MET),
        ((MET, SLOW, MET), SLOW),
        ((SLOW, MET, LATE), LATE),
        ((LATE, BROKEN, None), BROKEN),
        ((MET, None, MET), None),
        ((None, SLOW, None), SLOW),
        ((None,), None),
    ],
)
def test_a_request_is_judged_once_by_its_worst_answer(
    answers: tuple[RequestOutcome | None, ...], joint: RequestOutcome | None
) -> None:
    request = JointOutcome(len(answers))
    assert [request.add(answer) for answer in answers] == [*(None for _ in answers[1:]), joint]


def test_every_code_begins_at_zero(metrics: RouterMetrics) -> None:
    """The codes of error subclasses are included."""
    text = Exposition(metrics.registry).render()[0].decode()
    assert value_of(text, "tandem_request_failures_total", code="ROLE_CLOSED") == 0
    assert 'code="ROLE_CLOSED"' in text


def test_predictions_and_regret(metrics: RouterMetrics) -> None:
    cost = PromptCost(5, 40, 10, 0.0, 0.1, 0.1)
    prediction = Placement(PeerRef("p", 1), None, 0.2, 0.01, 45, 10, 0.3, 0.35, cost)
    record = PlacementRecord("r", "p", "d", "tight", prediction, 0.4, 0.02, cached_tokens=25, reloaded_tokens=20)
    assert record.stats == PlacementStats(5, 20, 30, cost, 0.4, record.regret_s)
    metrics.placed(record)
    metrics.placed(replace(record, itl_s=None, ttft_s=0.2))
    registry = metrics.registry
    assert registry.counter(f.PLACEMENTS).value == 2
    assert registry.counter(f.REGRET).value == pytest.approx(0.15)
    assert [registry.counter(f.PLACED_TOKENS, source).value for source in TOKEN_SOURCES] == [10, 40, 60]
    assert registry.counter(f.PREDICTED, "ttft").value == pytest.approx(0.4)
    assert registry.counter(f.ACTUAL, "ttft").value == pytest.approx(0.6)
    assert registry.counter(f.ACTUAL, "itl").value == pytest.approx(0.02)
    assert registry.histogram(f.PREDICTION_ERROR, "itl").total == pytest.approx(0.5)


async def scrape(cluster: Cluster, key: str = "", path: str = "/metrics") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(f"http://{cluster.endpoints.http_address}{path}", headers=headers)


def value_of(text: str, name: str, **labels: str) -> float:
    samples = [sample for metric in text_string_to_metric_families(text) for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


async def test_a_whole_router(cluster: Cluster) -> None:
    """Two successes, one success after a failed transfer of its worker, one abort by the client, two rejections."""
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        client = Client(channel)
        await client.run(ask(max_tokens=5))
        cluster.prefill.switches.fail_transfers = 1
        await client.run(ask(max_tokens=3))
        cluster.prefill.switches.silent_prefill = True
        call = client.stub.Generate(ask(max_tokens=3))
        await until(lambda: cluster.router._dispatcher.running == 1, "it runs")
        call.cancel()
        await until(lambda: cluster.router._dispatcher.running == 0, "it ended")
        with pytest.raises(grpc.aio.AioRpcError):
            await client.run(ask(max_tokens=0))
        with pytest.raises(grpc.aio.AioRpcError, match="maximum context length"):
            await client.run(inference_pb2.GenerateRequest(text="x" * (3 << 20)))
    text = (await scrape(cluster)).text
    assert value_of(text, "tandem_time_to_first_token_seconds_count") == 2
    assert value_of(text, "tandem_request_success_total", finished_reason="length") == 2
    assert value_of(text, "tandem_request_success_total", finished_reason="abort") == 1
    assert value_of(text, "tandem_request_retries_total") == 1
    assert value_of(text, "tandem_generation_tokens_total") == 8
    assert value_of(text, "tandem_inter_token_latency_seconds_count") == 6
    assert value_of(text, "tandem_admission_rejections_total", reason="invalid") == 2
    assert value_of(text, "tandem_offered_requests_total") == 3
    admitted = value_of(text, "tandem_prompt_tokens_total")
    assert value_of(text, "tandem_offered_prompt_tokens_total") == 1.5 * admitted > 0
    assert value_of(text, "tandem_offered_answer_tokens_total") == 5 + 3 + 3
    assert value_of(text, "tandem_slo_requests_total") == 2
    assert value_of(text, "tandem_slo_requests_total", slo_class="best_effort", outcome="met") == 2
    assert value_of(text, "tandem_goodput_requests_per_second", slo_class="best_effort") > 0
    labels = {"model": "fake", "role": "router", "worker": "router"}
    assert value_of(text, "tandem_num_requests_running", **labels) == 0
    cluster.prefill.switches.silent_prefill = False


class TestKeys:
    """Metrics are the operator's: a tenant's API key does not give access."""

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_keys": ("tenant",), "metrics_key": "operator"}

    async def test_who_reads(self, cluster: Cluster) -> None:
        for key, status in (
            ("", 401),
            ("tenant", 403),
            ("operator", 200),
            ("secret", 401),
            (metrics_key_of("secret"), 200),
        ):
            assert (await scrape(cluster, key)).status_code == status
        assert "metrics key" in (await scrape(cluster, "")).text
        assert "has the role tenant" in (await scrape(cluster, "tenant")).text
        assert (await scrape(cluster, "operator", "/v1/models")).status_code == 403
        assert (await scrape(cluster, "tenant", "/v1/models")).status_code == 200

    async def test_a_picker_without_a_key(self, cluster: Cluster) -> None:
        assert (await scrape(cluster, "", PICKER_PATH)).status_code == 401
        assert (await scrape(cluster, "operator", PICKER_PATH)).status_code == 200


class TestPicker:
    """What an endpoint picker reads of a cluster whose operators let it."""

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_keys": ("tenant",), "metrics_key": "operator", "open_picker_metrics": True}

    async def test_it_reads_the_load_of_the_cluster(self, cluster: Cluster) -> None:
        cluster.prefill.switches.silent_prefill = True
        async with channel_to(cluster.endpoints.grpc_address, "tenant") as channel:
            call = Client(channel).stub.Generate(ask(max_tokens=3))
            await until(lambda: cluster.router._dispatcher.running == 1, "it runs")
            text = (await scrape(cluster, "", PICKER_PATH)).text
            decode = cluster.router._dispatcher.pool.link(cluster.decode.info.peer).state
            used = 1 - decode.pages_free / cluster.decode.pages_total
            call.cancel()
        assert value_of(text, "vllm:num_requests_running", model_name="fake") == 1
        assert value_of(text, "vllm:num_requests_waiting", model_name="fake") == 0
        assert value_of(text, "vllm:kv_cache_usage_perc") == pytest.approx(used)
        assert used > 0
        size = {"block_size": str(cluster.decode.page_tokens), "num_gpu_blocks": str(cluster.decode.pages_total)}
        assert value_of(text, "vllm:cache_config_info", **size) == 1
        assert "lora_requests_info" not in text
        assert "tandem_slo_requests_total" not in text, "the open page has nothing else"
        assert (await scrape(cluster)).status_code == 401
        cluster.prefill.switches.silent_prefill = False
