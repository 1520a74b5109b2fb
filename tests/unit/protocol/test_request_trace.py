"""The traceparent header of a client, parsed as W3C specifies."""

import pytest

from tandem.protocol.lifecycle.request_trace import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01-what-will-come", True),
    ],
)
def test_what_a_client_sends_goes_on(header: str, sampled: bool) -> None:
    assert TraceContext.of(header) == TraceContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_is_not_w3cs_begins_a_trace(header: str) -> None:
    first, second = TraceContext.of(header), TraceContext.of(header)
    assert first.trace_id != TRACE
    assert first.trace_id != second.trace_id
    assert len(first.trace_id) == 32
    assert (first.parent_id, first.sampled) == ("", True)
