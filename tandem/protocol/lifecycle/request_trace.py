"""The trace of an ended request: its timeline, its token counts and its client's trace context.

It contains neither text nor token ids.
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
    """Return the only value of a header; "" if there are none or several, which W3C Trace Context treats as none."""
    return str(next(iter(values))) if len(values) == 1 else ""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A trace context: 32 hex digits of the trace id, 16 of the caller's span id, "" if the trace begins here."""

    trace_id: str
    parent_id: str = ""
    sampled: bool = True
    """True if the caller records the trace."""

    @classmethod
    def of(cls, traceparent: str) -> TraceContext:
        """Parse a traceparent header; return a new trace context if it is missing or invalid.

        See https://www.w3.org/TR/trace-context/; in later versions only the known fields are read.
        """
        found = _PARENT.fullmatch(traceparent)
        if found is None or (found["more"] and traceparent.startswith("00")):
            return cls.fresh()
        trace, span = found["trace"], found["span"]
        if not int(trace, 16) or not int(span, 16):
            return cls.fresh()
        return cls(trace, span, bool(int(found["flags"], 16) & _SAMPLED))

    @classmethod
    def fresh(cls) -> TraceContext:
        """Return the context of a new trace."""
        return cls(secrets.token_hex(_TRACE_BYTES))


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The trace of one ended answer."""

    request_id: str
    """The client's id of the request."""
    internal_id: str
    """The request's id on workers and in logs."""
    context: TraceContext
    model: str
    operation: str
    """The operation, `chat` or `text_completion`, named as in OpenTelemetry."""
    slo_class: str
    outcome: str
    """The finish reason `stop`, `length` or `abort`, or the code of the request's error."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Seconds from arrival to end."""
        return self.timeline.seconds(LifecycleEvent.RECEIVED, LifecycleEvent.FINISHED) or 0.0

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token that the router sent; None without a token."""
        return self.timeline.seconds(LifecycleEvent.RECEIVED, LifecycleEvent.FIRST_TOKEN)

    def named(self, name: str) -> bool:
        """Return True if `name` is the trace's request id, OpenAI reply id, wire id or trace id."""
        return name in (
            self.request_id,
            *(f"{kind}-{self.request_id}" for kind in _REPLIES),
            self.internal_id,
            self.context.trace_id,
        )
