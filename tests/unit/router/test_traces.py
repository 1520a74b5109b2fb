"""Traces of ended requests: kept, exported by OTLP to a receiver in the test, and as long as the client measured."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from router.observability.otlp import _PENDING_MAX, SpanMaker, check_endpoint
from router.observability.recent_traces import Exemplars, TraceStore
from router.requests.answer import AnswerChunk
from router.requests.request import ClientRequest, Options
from tandem.capacity.simulation.clock import VirtualClock
from tandem.metrics import families as f
from tandem.metrics.registry import EXEMPLAR_CHARS, Histogram
from tandem.net.security.credentials import metrics_key_of
from tandem.protocol.conversion import traces_from_json
from tandem.protocol.errors import FailedPrecondition, Internal, InvalidArgument, Unavailable
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent, Timeline
from tandem.protocol.lifecycle.request_trace import RequestTrace, TraceContext
from tandem.protocol.messages import Role
from tandem.settings.cluster import ClusterSettings
from tests.unit.router.conftest import WITHOUT_RECOVERY, Cluster
from tests.unit.router.fake_cluster import FakeWorker, channel_to, until
from tests.unit.router.test_generate import Client, ask

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = ("traceparent", f"00-{TRACE}-{SPAN}-01")
SECOND = 10**9
TRIES, TRIES_MAX = 5, 100
"""The number of requests that are measured, and the most until one was not delayed by other load."""
NEAR_S = 2e-3
PHASES = (f.QUEUE_TIME, f.PREFILL_TIME, f.TRANSFER_TIME, f.DECODE_TIME, f.STALL_TIME)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector on a separate thread."""

    def __init__(self) -> None:
        self.spans: list[trace_pb2.Span] = []
        self.resources: set[str] = set()
        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, _context: Any) -> Any:
        for batch in request.resource_spans:
            self.resources |= {attribute.value.string_value for attribute in batch.resource.attributes}
            self.spans.extend(span for scope in batch.scope_spans for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def stop(self) -> None:
        self._server.stop(None).wait()

    @property
    def roots(self) -> list[trace_pb2.Span]:
        """The spans of whole requests, in order of their start."""
        return sorted((s for s in self.spans if s.kind == s.SPAN_KIND_SERVER), key=lambda s: s.start_time_unix_nano)

    def under(self, root: trace_pb2.Span) -> list[trace_pb2.Span]:
        """Returns the phases of a request, in order."""
        children = [s for s in self.spans if s.parent_span_id == root.span_id and s.trace_id == root.trace_id]
        return sorted(children, key=lambda s: s.start_time_unix_nano)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


@pytest.fixture
def settings(receiver: Receiver) -> dict[str, Any]:
    return {"otlp_endpoint": receiver.endpoint, "traces_kept": 20, **WITHOUT_RECOVERY}


async def flush(cluster: Cluster) -> None:
    exporter: Any = cluster.router._exporter
    assert await asyncio.to_thread(exporter.flush)


class CallTimes:
    """The times at which workers received anything of a request, and sent anything."""

    def __init__(self, *workers: FakeWorker) -> None:
        self.moments: list[int] = []
        for worker in workers:
            for name in ("_check_open", "send"):
                self._note(worker, name)

    def _note(self, worker: FakeWorker, name: str) -> None:
        call = getattr(worker, name)

        def noted(*given: Any) -> None:
            self.moments.append(time.time_ns())
            call(*given)

        setattr(worker, name, noted)

    def check(self, root: trace_pb2.Span, asked: int) -> None:
        """Asserts that the span covers the workers' part and lies within the client's time since `asked`."""
        assert asked <= root.start_time_unix_nano <= self.moments[0]
        assert self.moments[-1] <= root.end_time_unix_nano <= time.time_ns()


def attributes(span: trace_pb2.Span) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in span.attributes
    }


def seconds(span: trace_pb2.Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / SECOND


async def test_spans_add_up_to_what_clients_measure(cluster: Cluster, receiver: Receiver) -> None:
    """The phases of a request fill its span without a gap, and the span is the time that its client measured.

    The difference is at most the duration of an empty call plus 2 ms, for the request with the least delay.
    """
    cluster.decode.switches.step_s = 2e-3
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        client = Client(channel)
        empty_s: list[float] = []
        ways_s: list[float] = []
        await client.run(ask(2))
        observed = CallTimes(cluster.prefill, cluster.decode)
        while len(ways_s) < TRIES or (min(ways_s) >= NEAR_S + min(empty_s) and len(ways_s) < TRIES_MAX):
            observed.moments.clear()
            asked = time.time_ns()
            await client.stub.GetServerInfo(pb.GetServerInfoRequest())
            empty_s.append((time.time_ns() - asked) / SECOND)
            asked = time.time_ns()
            await client.run(ask(3 + len(ways_s) % TRIES))
            waited_s = (time.time_ns() - asked) / SECOND
            await flush(cluster)
            root, phases = receiver.roots[-1], receiver.under(receiver.roots[-1])
            assert [span.name for span in phases] == ["queue", "prefill", "transfer", "decode"]
            assert sum(map(seconds, phases)) == pytest.approx(seconds(root), abs=1e-9)
            observed.check(root, asked)
            ways_s.append(waited_s - sum(map(seconds, phases)))
        assert min(ways_s) < NEAR_S + min(empty_s), (ways_s, empty_s)


async def test_spans_of_a_request_whose_worker_dies_add_up(cluster: Cluster, receiver: Receiver) -> None:
    """Each attempt has its own phases, without the silence; together they are the time that the client measured."""
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        client = Client(channel)
        await client.run(ask(2))
        live = cluster.router._dispatcher._live
        for number in range(TRIES):
            doomed = cluster.decode
            doomed.switches.mute_after = 4
            observed, asked = CallTimes(cluster.prefill, doomed), time.time_ns()
            running = asyncio.create_task(client.run(ask(12, prompt=[5, number])))
            await until(lambda: [request.assembler.count for request in live.values()] == [4], "four tokens are out")
            heir = await FakeWorker(f"decode-{number + 1}", Role.DECODE, token="secret").start()
            heir.switches.step_s = 1e-3
            later = CallTimes(heir)
            await cluster.members(cluster.prefill, doomed, heir)
            await asyncio.sleep(0.1)
            await doomed.kill()
            await running
            await flush(cluster)
            root, phases = receiver.roots[-1], receiver.under(receiver.roots[-1])
            attempts = [(span.name, attributes(span)["tandem.attempt"]) for span in phases]
            assert [attempt for attempt in attempts if attempt[0] != "queue"] == [
                ("prefill", 1), ("transfer", 1), ("decode", 1), ("stall", 1),
                ("prefill", 2), ("transfer", 2), ("decode", 2),
            ]  # fmt: skip
            stall = next(span for span in phases if span.name == "stall")
            assert 0.1 < seconds(stall) < seconds(root)
            assert "tandem.transfer.bytes" not in attributes(phases[attempts.index(("transfer", 1))])
            assert "tandem.transfer.bytes" in attributes(phases[attempts.index(("transfer", 2))])
            assert sum(map(seconds, phases)) == pytest.approx(seconds(root), abs=1e-9)
            observed.moments += later.moments
            observed.check(root, asked)
            await cluster.members(cluster.prefill, heir)
        metrics = cluster.router._dispatcher.metrics.registry
        whole = sum(metrics.histogram(phase).total for phase in PHASES)
        assert whole == pytest.approx(metrics.histogram(f.E2E_REQUEST_LATENCY).total)
        assert metrics.histogram(f.STALL_TIME).count >= TRIES


async def test_a_span_says_what_conventions_ask_for(cluster: Cluster, receiver: Receiver) -> None:
    cluster.prefill.switches.cached_tokens = 2
    cluster.decode.switches.step_s = 2e-3
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        call = Client(channel).stub.Generate(ask(5), metadata=(HEADER,))
        messages = [message async for message in call]
    await flush(cluster)
    (root,) = receiver.roots
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
    assert root.name == "text_completion fake"
    values = attributes(root)
    assert values[gen_ai_attributes.GEN_AI_OPERATION_NAME] == "text_completion"
    assert values[gen_ai_attributes.GEN_AI_PROVIDER_NAME] == "tandem"
    assert values[gen_ai_attributes.GEN_AI_REQUEST_MODEL] == values[gen_ai_attributes.GEN_AI_RESPONSE_MODEL] == "fake"
    assert values[gen_ai_attributes.GEN_AI_RESPONSE_ID] == messages[0].request_id
    assert values[gen_ai_attributes.GEN_AI_USAGE_INPUT_TOKENS] == 4
    assert values[gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS] == 5
    assert values[gen_ai_attributes.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == 2
    (reason,) = values[gen_ai_attributes.GEN_AI_RESPONSE_FINISH_REASONS].values
    assert reason.string_value == "length"
    assert [event.name for event in root.events] == ["first_token"]
    by_name = {span.name: attributes(span) for span in receiver.under(root)}
    assert by_name["prefill"]["tandem.worker"] == "prefill-0"
    assert by_name["transfer"]["tandem.transfer.backend"] == "fake"
    assert by_name["decode"]["tandem.worker"] == "decode-0"
    assert {"tandem", "router-0"} <= receiver.resources


async def test_http_failures_and_what_a_client_does_not_record(cluster: Cluster, receiver: Receiver) -> None:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", trust_env=False) as http:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        done = await http.post("/v1/chat/completions", json=body, headers=dict((HEADER,)))
        quiet = await http.post("/v1/chat/completions", json=body, headers={"traceparent": HEADER[1][:-1] + "0"})
        assert (done.status_code, quiet.status_code) == (200, 200)
        cluster.prefill.switches.prefill_error = Internal("broken")
        assert (await http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3})).status_code == 500
        cluster.prefill.switches.prefill_error = None
        kept, most = traces_from_json((await http.get("/traces")).text)
        (mine,) = traces_from_json((await http.get("/traces", params={"id": done.json()["id"]})).text)[0]
        assert mine.context == TraceContext(TRACE, SPAN)
    await flush(cluster)
    prior_output_tokens, failed = receiver.roots
    assert (prior_output_tokens.trace_id.hex(), prior_output_tokens.name) == (TRACE, "chat fake")
    assert attributes(failed)["error.type"] == "INTERNAL"
    assert failed.status.code == failed.status.STATUS_CODE_ERROR
    assert not failed.parent_span_id
    assert [kept_trace.outcome for kept_trace in kept] == ["INTERNAL", "length", "length"]
    assert [kept_trace.context.sampled for kept_trace in kept] == [True, False, True]
    assert failed.trace_id.hex() == kept[0].context.trace_id
    assert most == 20


async def test_a_failed_answer_s_trace_has_the_tokens_that_its_client_got(cluster: Cluster) -> None:
    """Regression: tokens not yet delivered when the failure was recorded were missing, and the first one's time."""
    cluster.decode.switches.break_after = 6
    prompt = ClientRequest("slow", "fake", (5, 6, 7), Options(max_tokens=20), EventTime.now(LifecycleEvent.RECEIVED))
    choices = cluster.router._dispatcher.submit(await cluster.router._validator.admit(prompt))
    await until(lambda: choices.answers[0].over, "it failed before its client has read anything")
    kept = cluster.router._dispatcher.metrics.traces.newest
    _, event = await choices.next()
    assert isinstance(event, AnswerChunk)
    got = len(event.token_ids)
    with pytest.raises(Unavailable, match="went away"):
        await choices.next()
    (trace,) = kept()
    choices.close()
    assert kept() == [trace]
    assert got >= 5
    assert (trace.outcome, trace.completion_tokens) == ("UNAVAILABLE", got)
    events = [stamp.event for stamp in trace.timeline.event_times]
    assert events[-2:] == [LifecycleEvent.FIRST_TOKEN, LifecycleEvent.FINISHED]


async def test_a_failed_answer_whose_client_left_has_a_trace(cluster: Cluster) -> None:
    cluster.prefill.switches.prefill_error = Internal("broken")
    prompt = ClientRequest("gone", "fake", (5, 6, 7), Options(max_tokens=20), EventTime.now(LifecycleEvent.RECEIVED))
    choices = cluster.router._dispatcher.submit(await cluster.router._validator.admit(prompt))
    await until(lambda: choices.answers[0].over, "it failed")
    choices.close()
    (trace,) = cluster.router._dispatcher.metrics.traces.newest()
    assert trace.outcome == "INTERNAL"


async def test_an_exemplar_leads_to_its_request(cluster: Cluster) -> None:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        request = ask(3)
        request.request_id = "an/id?of=the client's"[:10]
        await Client(channel).run(request)
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", trust_env=False) as http:
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        families = list(text_string_to_metric_families((await http.get("/metrics", headers=accept)).text))
        for name in ("tandem_time_to_first_token_seconds", "tandem_e2e_request_latency_seconds"):
            (family,) = (candidate for candidate in families if candidate.name == name)
            (sample,) = (candidate for candidate in family.samples if candidate.exemplar is not None)
            assert sample.exemplar is not None
            assert sample.exemplar.labels["request_id"] == "an/id?of=t"
            for wanted in sample.exemplar.labels.values():
                (kept_trace,) = traces_from_json((await http.get("/traces", params={"id": wanted})).text)[0]
                assert kept_trace.timeline.at(LifecycleEvent.FINISHED)
                assert kept_trace.prompt_tokens == 4
        assert len(traces_from_json((await http.get("/traces?slow")).text)[0]) == 1
        assert traces_from_json((await http.get("/traces?id=nobody")).text)[0] == []


class TestKeys:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_keys": ("client",), "metrics_key": "operator"}

    async def test_traces_are_the_operators(self, cluster: Cluster) -> None:
        async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", trust_env=False) as http:
            of_token = metrics_key_of("secret")
            for key, status in (("client", 403), ("", 401), ("operator", 200), ("secret", 401), (of_token, 200)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                assert (await http.get("/traces?slow", headers=headers)).status_code == status


class TestByDefault:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {}

    async def test_nothing_is_exported(self, cluster: Cluster) -> None:
        """No exporter is configured, but requests are kept."""
        assert cluster.router._exporter is None
        assert cluster.config.otlp_endpoint == ClusterSettings.of(Path("m")).router.otlp_endpoint == ""
        async with channel_to(cluster.endpoints.grpc_address) as channel:
            await Client(channel).run(ask(2))
        book = cluster.router._dispatcher.metrics.traces
        assert [kept_trace.outcome for kept_trace in book.newest()] == ["length"]


def trace(number: int, length_s: float, name: str = "") -> RequestTrace:
    event_times = (
        EventTime(LifecycleEvent.RECEIVED, 0),
        EventTime(LifecycleEvent.FIRST_TOKEN, int(length_s * SECOND / 2)),
    )
    timeline = Timeline((*event_times, EventTime(LifecycleEvent.FINISHED, int(length_s * SECOND))), None, "p", "d")
    named = name or f"r{number}"
    context = TraceContext(f"{number:032x}")
    return RequestTrace(named, f"{named}~{number}", context, "m", "chat", "quick", "stop", 3, 4, 0, timeline)


def book_of(clock: VirtualClock, kept: int = 5) -> tuple[TraceStore, Histogram]:
    bounds = (0.1, 1.0, 10.0)
    first_tokens, whole = Histogram(bounds), Histogram(bounds)
    exemplars = [Exemplars(histogram, 60.0, clock) for histogram in (first_tokens, whole)]
    return TraceStore(kept, exemplars[0], exemplars[1]), whole


def test_slow_requests_outlive_thousands_of_fast_ones() -> None:
    clock = VirtualClock(1000.0)
    book, whole = book_of(clock)
    for number in range(3000):
        clock.now += 0.1
        slow = {100: 5.0, 101: 7.0, 102: 6.0}.get(number, 0.05)
        book.add(trace(number, slow), whole=True)
    (slow_trace,) = book.find("r101")
    assert slow_trace.seconds == 7.0
    assert book.find(f"{101:032x}") == book.find("r101~101") == [slow_trace]
    assert book.find("r100") == []
    assert book.slow()[0] is slow_trace
    example = whole.exemplars[whole.place(7.0)]
    assert example is not None
    assert (example.value, example.labels["request_id"]) == (7.0, "r101")
    assert [kept_trace.request_id for kept_trace in book.newest()] == [f"r{number}" for number in range(2999, 2994, -1)]
    assert len(book._all()) <= 5 + 2 * 4


def test_the_slowest_of_a_window_stands_until_a_later_window_has_one() -> None:
    clock = VirtualClock(1000.0)
    book, whole = book_of(clock, kept=1)
    clock.now = 60.0
    for number, length in ((1, 5.0), (2, 7.0), (3, 6.0)):
        book.add(trace(number, length), whole=True)
        book.add(trace(9, 0.05), whole=True)
    assert [kept_trace.request_id for kept_trace in book.slow()[:1]] == ["r2"]
    clock.now = 119.0
    book.add(trace(4, 5.5), whole=True)
    assert book.slow()[0].request_id == "r2"
    clock.now = 121.0
    book.add(trace(5, 4.0), whole=True)
    example = whole.exemplars[whole.place(4.0)]
    assert example is not None
    assert example.labels["request_id"] == "r5"


def test_an_exemplar_fits_into_openmetrics_whatever_its_client_calls_it() -> None:
    book, whole = book_of(VirtualClock(1000.0))
    book.add(trace(1, 5.0, "x" * 128), whole=True)
    example = whole.exemplars[whole.place(5.0)]
    assert example is not None
    assert sum(map(len, (*example.labels, *example.labels.values()))) <= EXEMPLAR_CHARS
    assert book.find(example.labels["trace_id"])


def test_an_answer_cut_short_is_no_example_of_whole_ones() -> None:
    book, whole = book_of(VirtualClock(1000.0))
    book.add(replace(trace(1, 5.0), outcome="abort"), whole=False)
    assert whole.exemplars == [None] * 4
    assert book.find("r1")


def test_who_makes_spans_does_not_pile_them_up(caplog: pytest.LogCaptureFixture) -> None:
    held, made = threading.Event(), InMemorySpanExporter()
    maker = SpanMaker(SimpleSpanProcessor(made), "router-0")
    maker._thread.submit(held.wait)
    for number in range(_PENDING_MAX + 5):
        maker.export(trace(1 + number, 0.5))
    held.set()
    assert maker.flush()
    roots = [span for span in made.get_finished_spans() if span.parent is None]
    assert len(roots) == _PENDING_MAX
    assert caplog.text.count("spans of some requests are dropped") == 1
    maker.export(trace(7, 0.5))
    maker.close()
    assert len([span for span in made.get_finished_spans() if span.parent is None]) == _PENDING_MAX + 1


def test_endpoints_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("collector:4317", "http://collector", "ftp://collector:4317", "http://collector:port"):
        with pytest.raises(InvalidArgument, match="--otlp-endpoint"):
            check_endpoint(endpoint)
    check_endpoint("")
    check_endpoint("http://collector:4317")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(FailedPrecondition, match="tandem-serving\\[otlp\\]"):
        check_endpoint("http://collector:4317")
