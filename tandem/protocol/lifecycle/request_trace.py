"""The trace of an ended request: its events, its token counts and its client's trace context.

A trace contains neither text nor token ids.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from tandem.protocol.lifecycle.events import LifecycleEvent, Timeline

TRACEPARENT = "traceparent"
"""The name of the HTTP header and gRPC metadata key of W3C Trace Context."""

_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_REPLIES = ("chatcmpl", "cmpl")
_SAMPLED = 1
_TRACE_BYTES = 16


def only(values: Collection[str | bytes]) -> str:
    """Return the only one of a header's `values`; "" if there is none or more than one.

    W3C Trace Context treats several values as none.
    """
    return str(next(iter(values))) if len(values) == 1 else ""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A W3C trace context: the trace id (32 hex digits), and the caller's span id (16 hex digits).

    `parent_id` is "" if the trace begins with this request.
    """

    trace_id: str
    parent_id: str = ""
    sampled: bool = True
    """True if the caller records this trace."""

    @classmethod
    def of(cls, traceparent: str) -> TraceContext:
        """Parse a traceparent header; return a new trace context if it is missing or invalid.

        See https://www.w3.org/TR/trace-context/; in later versions only the known fields are read.
        """
        match = _PARENT.fullmatch(traceparent)
        if match is None or (match["more"] and traceparent.startswith("00")):
            return cls.fresh()
        trace, span = match["trace"], match["span"]
        if not int(trace, 16) or not int(span, 16):
            return cls.fresh()
        return cls(trace, span, bool(int(match["flags"], 16) & _SAMPLED))

    @classmethod
    def fresh(cls) -> TraceContext:
        """Return the context of a new trace."""
        return cls(secrets.token_hex(_TRACE_BYTES))


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The trace of one ended answer."""

    request_id: str
    """The request's id that the client sees."""
    internal_id: str
    """The request's id in messages to workers and in logs."""
    context: TraceContext
    model: str
    operation: str
    """The kind of request, `chat` or `text_completion`, named as in OpenTelemetry."""
    slo_class: str
    outcome: str
    """The finish reason `stop`, `length` or `abort`, or the error code of a failed request."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Seconds from the request's arrival to its end."""
        return self.timeline.seconds(LifecycleEvent.RECEIVED, LifecycleEvent.FINISHED) or 0.0

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival to the first token that the router sent; None if it sent no token."""
        return self.timeline.seconds(LifecycleEvent.RECEIVED, LifecycleEvent.FIRST_TOKEN)

    def named(self, name: str) -> bool:
        """Return True if `name` is the trace's request id, OpenAI reply id, internal id or trace id."""
        return name in (
            self.request_id,
            *(f"{kind}-{self.request_id}" for kind in _REPLIES),
            self.internal_id,
            self.context.trace_id,
        )
