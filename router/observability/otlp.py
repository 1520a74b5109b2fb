"""Exports ended requests as OpenTelemetry spans by OTLP/gRPC: a root span, and a child span for each phase.

Spans are made from the timeline when a request has ended; no other module depends on OpenTelemetry. Attributes follow
the semantic conventions for generative AI (`gen_ai.*`); attributes without a conventional name begin with `tandem.`.
Spans contain no text of prompts or answers.

opentelemetry-sdk and its exporter come with `pip install 'tandem-serving[otlp]'`. A separate thread makes the spans,
because that takes some tenths of a millisecond per request, and the SDK's thread sends them. If the collector is absent
or too slow, spans are dropped with a log line: requests never wait.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from tandem.protocol.errors import FailedPrecondition
from tandem.protocol.lifecycle.events import LifecycleEvent
from tandem.protocol.lifecycle.request_trace import RequestTrace
from tandem.protocol.lifecycle.spans import Phase, Span, spans_of
from tandem.settings import router as router_settings
from tandem.version import install_command

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.util.types import AttributeValue

SETTING = "--otlp-endpoint"
_SERVICE = "tandem"
_ENDED_WELL = ("stop", "length", "abort")
_CLOSE_MS = 2000
"""Timeout for sending the last spans, in milliseconds."""
_PENDING_MAX = 1024
"""Maximum number of requests whose spans wait to be made; the spans of further requests are dropped."""

log = logging.getLogger(__name__)


class TraceExporter(Protocol):
    """The interface of an exporter of traces."""

    def export(self, trace: RequestTrace) -> None:
        """Export an ended request; never blocks."""

    def close(self) -> None:
        """Send the remaining spans, with a short timeout; nothing may be exported afterwards."""


def check_endpoint(endpoint: str) -> None:
    """Raise InvalidArgument if `endpoint` is malformed, FailedPrecondition if OpenTelemetry's SDK is missing.

    "" disables the export and is valid.
    """
    router_settings.check_endpoint(SETTING, endpoint)
    if not endpoint:
        return
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        missing = f"{SETTING} needs OpenTelemetry's SDK ({error.name} is not installed)"
        raise FailedPrecondition(f"{missing}; {install_command('otlp')}") from None


def otlp_exporter(endpoint: str, router_id: str) -> TraceExporter:
    """Return an exporter to `endpoint`; the SDK's environment variables (OTEL_EXPORTER_OTLP_HEADERS, …) apply too."""
    check_endpoint(endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    sender = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    return SpanMaker(BatchSpanProcessor(sender), router_id)


class SpanMaker:
    """Turns traces into spans and passes them to `processor`, which it owns.

    Its methods must be called from one thread, the event loop's; it makes the spans in its own thread.
    """

    def __init__(self, processor: SpanProcessor, router_id: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Ids(RandomIdGenerator):
            """An id generator: a trace that begins in the router gets the id `trace_id`, which the router sets."""

            trace_id = 0

            def generate_trace_id(self) -> int:
                return self.trace_id

        self._ids = Ids()
        resource = Resource.create({"service.name": _SERVICE, "service.instance.id": router_id})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tandem.router")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="router-spans")
        self._asked = self._made = 0
        self._dropped = 0

    def export(self, trace: RequestTrace) -> None:
        """Export a trace, unless the client's traceparent says that the trace is not sampled."""
        if not trace.context.sampled:
            return
        if self._asked - self._made >= _PENDING_MAX:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("requests end faster than their spans are made: spans of some requests are dropped")
            return
        self._asked += 1
        self._thread.submit(self._make, trace)

    def _make(self, trace: RequestTrace) -> None:
        try:
            self._spans(trace)
        except Exception:
            log.exception("spans of a request could not be made")
        finally:
            self._made += 1

    def _spans(self, trace: RequestTrace) -> None:
        from opentelemetry import trace as api

        spans = spans_of(trace.timeline)
        if not spans:
            return
        self._ids.trace_id = int(trace.context.trace_id, 16)
        root = self._tracer.start_span(
            f"{trace.operation} {trace.model}",
            context=_parent(trace),
            kind=api.SpanKind.SERVER,
            attributes=_request_attributes(trace),
            start_time=spans[0].begin_nanos,
        )
        first_token = trace.timeline.at(LifecycleEvent.FIRST_TOKEN)
        if first_token is not None:
            root.add_event("first_token", timestamp=first_token)
        if trace.outcome not in _ENDED_WELL:
            root.set_status(api.StatusCode.ERROR, trace.outcome)
        under = api.set_span_in_context(root)
        for span in spans:
            attributes = _phase_attributes(span, trace)
            child = self._tracer.start_span(span.phase, under, attributes=attributes, start_time=span.begin_nanos)
            child.end(span.end_nanos)
        root.end(spans[-1].end_nanos)

    def flush(self) -> bool:
        """Wait until all traces exported so far are sent; return False after a short timeout."""
        self._thread.submit(int).result()
        return self._provider.force_flush(_CLOSE_MS)

    def close(self) -> None:
        """Send the remaining spans, with a short timeout; nothing may be exported afterwards."""
        self._thread.shutdown()
        self._provider.force_flush(_CLOSE_MS)
        self._provider.shutdown()


def _parent(trace: RequestTrace) -> Context:
    from opentelemetry import trace as api
    from opentelemetry.context import Context

    if not trace.context.parent_id:
        return Context()
    caller = api.SpanContext(
        int(trace.context.trace_id, 16),
        int(trace.context.parent_id, 16),
        is_remote=True,
        trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
    )
    return api.set_span_in_context(api.NonRecordingSpan(caller), Context())


def _request_attributes(trace: RequestTrace) -> dict[str, AttributeValue]:
    """Return the attributes of the root span.

    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
    """
    well = trace.outcome in _ENDED_WELL
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": _SERVICE,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": trace.request_id,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": trace.cached_tokens,
        "tandem.slo_class": trace.slo_class,
        "tandem.internal_id": trace.internal_id,
    }
    attributes |= {"gen_ai.response.finish_reasons": (trace.outcome,)} if well else {"error.type": trace.outcome}
    if (placement := trace.timeline.placement) is not None:
        attributes |= {
            **{f"tandem.placement.{name}_tokens": count for name, count in placement.tokens_by_source.items()},
            "tandem.placement.predicted_seconds": placement.predicted.ttft_s,
            "tandem.placement.seconds": placement.ttft_s,
            "tandem.placement.regret_seconds": placement.regret_s,
        }
    if trace.ttft_s is not None:
        attributes["tandem.time_to_first_token"] = trace.ttft_s
    return attributes


def _phase_attributes(span: Span, trace: RequestTrace) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {"tandem.attempt": span.attempt}
    if span.worker:
        attributes["tandem.worker"] = span.worker
    moved = trace.timeline.transfer
    if span.phase is Phase.TRANSFER and span.worker and moved is not None:
        attributes |= {
            "tandem.transfer.bytes": moved.bytes,
            "tandem.transfer.pages": moved.pages,
            "tandem.transfer.backend": moved.backend,
            "tandem.transfer.writing_seconds": moved.duration_nanos / 1e9,
        }
    return attributes
