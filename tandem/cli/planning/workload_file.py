"""The load of `tandem plan --workload`: means of a trace, and its distributions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.load.spread import percentile
from tandem.cli.load.trace import Trace, read_trace
from tandem.protocol.errors import InvalidArgument

if TYPE_CHECKING:
    from tandem.capacity.planner.demand import Demand

OPTION = "--workload"
_PERCENTS = (50, 90, 99)


def read_workload(file: Path) -> Trace:
    """Read a trace. Raises InvalidArgument if it cannot be read or its requests all arrive at once."""
    trace = read_trace(file)
    if not trace.requests or trace.requests[-1].due_s <= 0:
        raise InvalidArgument(OPTION, f"{file.name} has no two requests at different times, so it has no rate")
    return trace


def demand_of(trace: Trace) -> Demand:
    """Return the trace's mean rate and lengths, and the share of prompt tokens that an earlier prompt begins with."""
    from tandem.capacity.planner.demand import Demand

    requests = trace.requests
    prompts, answers = sum(r.prompt_tokens for r in requests), sum(r.new_tokens for r in requests)
    return Demand(
        (len(requests) - 1) / requests[-1].due_s,
        prompts / len(requests),
        answers / len(requests),
        sum(_cached_tokens(trace)) / prompts,
    )


def _cached_tokens(trace: Trace) -> Iterator[int]:
    """Yield the tokens of each prompt that are in a prefix cache without a limit; the last token never is."""
    seen: set[int] = set()
    for request in trace.requests:
        cached, parent, known = 0, 0, True
        for block in request.prompt:
            parent = hash((parent, block.key, block.tokens))
            known = known and parent in seen
            cached += block.tokens if known else 0
            seen.add(parent)
        yield min(cached, request.prompt_tokens - 1)


def workload_lines(trace: Trace, demand: Demand) -> Iterator[str]:
    """Yield lines with the distributions of the trace."""
    gaps = [later.due_s - earlier.due_s for earlier, later in zip(trace.requests, trace.requests[1:], strict=False)]
    yield (
        f"workload  {trace.name}: {len(trace.requests):,} requests, {demand.per_s:.3g} a second, {demand.cached:.0%} of"
        " the prompt tokens in an earlier prompt"
    )
    for name, values in (
        ("prompt tokens", [request.prompt_tokens for request in trace.requests]),
        ("answer tokens", [request.new_tokens for request in trace.requests]),
        ("ms between arrivals", [1e3 * gap for gap in gaps]),
    ):
        yield f"          {name}: mean {sum(values) / len(values):,.0f}, {_percentiles(values)}"


def _percentiles(values: Sequence[float]) -> str:
    return ", ".join(f"P{percent} {percentile(values, percent):,.0f}" for percent in _PERCENTS)
