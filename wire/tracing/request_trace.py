"""What a router remembers of a request that has ended: its timeline, its counts and its place in its client's trace.

No text, no token ids.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from wire.tracing.timeline import Edge, Timeline

TRACEPARENT = "traceparent"
"""The header and the metadata key, as W3C Trace Context names it."""

_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_REPLIES = ("chatcmpl", "cmpl")
_SAMPLED = 1
_TRACE_BYTES = 16


def only(values: Collection[str | bytes]) -> str:
    """The value of a header that a caller sent once; "" where it sent none or several, which W3C Trace Context counts
    as none.
    """
    return str(next(iter(values))) if len(values) == 1 else ""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace: 32 hex digits of the trace, 16 of the caller's span, "" where a trace begins here."""

    trace_id: str
    parent_id: str = ""
    sampled: bool = True
    """Whether its caller records it."""

    @classmethod
    def of(cls, traceparent: str) -> TraceContext:
        """What a caller sent; a trace of its own where that is nothing or not W3C's.

        https://www.w3.org/TR/trace-context/: of later versions what is known of them is read.
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
        """Where a trace begins."""
        return cls(secrets.token_hex(_TRACE_BYTES))


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One answer's life, ended."""

    request_id: str
    """Its client's."""
    wire_id: str
    """Its name among workers, by which logs know it."""
    context: TraceContext
    model: str
    operation: str
    """`chat` or `text_completion`, as OpenTelemetry names them."""
    slo_class: str
    outcome: str
    """`stop`, `length` or `abort`; else the code of its error."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """From its arrival to its end."""
        return self.timeline.seconds(Edge.RECEIVED, Edge.FINISHED) or 0.0

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token leaving the router; None if none did."""
        return self.timeline.seconds(Edge.RECEIVED, Edge.FIRST_TOKEN)

    def named(self, name: str) -> bool:
        """Whether somebody who says `name` means it: request id, also as OpenAI's replies have it, name among workers,
        or trace id.
        """
        return name in (
            self.request_id,
            *(f"{kind}-{self.request_id}" for kind in _REPLIES),
            self.wire_id,
            self.context.trace_id,
        )
