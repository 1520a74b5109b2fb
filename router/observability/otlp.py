"""Ended requests as OpenTelemetry spans, by OTLP/gRPC: one of the whole request, and under it one for each phase.

Made from the timeline when a request is over; nothing else in Tandem knows of OpenTelemetry. Attributes are those of
its semantic conventions for generative AI (`gen_ai.*`), what these have no name for begins with `tandem.`. Names of
spans and attributes hold no text of prompts or answers.

opentelemetry-sdk and its exporter come with `pip install 'tandem[otlp]'`. Spans are made on a thread, as that takes
some tenths of a millisecond for each request, and sent by the SDK's own; where nobody listens, or not fast enough, they
are dropped and the log says so: requests never wait.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from wire.errors import FailedPrecondition, InvalidArgument
from wire.tracing.request_trace import RequestTrace
from wire.tracing.spans import Phase, Span, spans_of
from wire.tracing.timeline import Edge

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.util.types import AttributeValue

SETTING = "--otlp-endpoint"
_SERVICE = "tandem"
_ENDED_WELL = ("stop", "length", "abort")
_CLOSE_MS = 2000
"""How long the last spans may take to leave, in milliseconds."""
_PENDING_MAX = 1024
"""Requests whose spans are not made yet, beyond which further ones are dropped."""

log = logging.getLogger(__name__)


class TraceExporter(Protocol):
    """Who sends traces elsewhere."""

    def export(self, trace: RequestTrace) -> None:
        """A request has ended; does not wait."""

    def close(self) -> None:
        """Send what is left; waits a moment. Nothing is exported afterwards."""


def check_endpoint(endpoint: str) -> None:
    """InvalidArgument if nothing could be sent there, FailedPrecondition if what sends is not installed; an empty one
    is none.
    """
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        usable = False
    if not usable:
        raise InvalidArgument(SETTING, f"{endpoint!r} must be http://HOST:PORT or https://HOST:PORT")
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        missing = f"{SETTING} needs OpenTelemetry's SDK ({error.name} is not installed)"
        raise FailedPrecondition(f"{missing}; pip install 'tandem[otlp]'") from None


def otlp_exporter(endpoint: str, router_id: str) -> TraceExporter:
    """Sends to `endpoint`; the exporter's environment variables (OTEL_EXPORTER_OTLP_HEADERS, …) hold too."""
    check_endpoint(endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    sender = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    return SpanMaker(BatchSpanProcessor(sender), router_id)


class SpanMaker:
    """Makes spans of traces and hands them to `processor`, which it owns. Its methods belong to one thread, spans to
    one of its own.
    """

    def __init__(self, processor: SpanProcessor, router_id: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Ids(RandomIdGenerator):
            """A trace that begins here has the id by which the router knows it."""

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
        """What its client does not record (the flag of its traceparent says so) is left out."""
        if not trace.context.sampled:
            return
        if self._asked - self._made >= _PENDING_MAX:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("requests end faster than spans of them are made: some have none from now on")
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
        first_token = trace.timeline.at(Edge.FIRST_TOKEN)
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
        """Wait until what was exported so far has left; False if it does not within a moment."""
        self._thread.submit(int).result()
        return self._provider.force_flush(_CLOSE_MS)

    def close(self) -> None:
        """See `TraceExporter`."""
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
    """https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/"""
    well = trace.outcome in _ENDED_WELL
    found: dict[str, AttributeValue] = {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": _SERVICE,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": trace.request_id,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": trace.cached_tokens,
        "tandem.slo_class": trace.slo_class,
        "tandem.wire_id": trace.wire_id,
    }
    found |= {"gen_ai.response.finish_reasons": (trace.outcome,)} if well else {"error.type": trace.outcome}
    if trace.ttft_s is not None:
        found["tandem.time_to_first_token"] = trace.ttft_s
    return found


def _phase_attributes(span: Span, trace: RequestTrace) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {"tandem.attempt": span.attempt}
    if span.worker:
        found["tandem.worker"] = span.worker
    moved = trace.timeline.transfer
    if span.phase is Phase.TRANSFER and span.worker and moved is not None:
        found |= {
            "tandem.transfer.bytes": moved.bytes,
            "tandem.transfer.pages": moved.pages,
            "tandem.transfer.backend": moved.backend,
            "tandem.transfer.writing_seconds": moved.duration_nanos / 1e9,
        }
    return found
