"""A step's output as events, one for each request."""

from decode_worker.batch_snapshot import DecodedStep
from tandem.protocol.messages import RoutedEvent


def events_of(completed: DecodedStep) -> list[RoutedEvent]:
    """The events of a step, plain tokens included."""
    plain = (RoutedEvent(some.router_id, event) for some in completed.plain_tokens() for event in some.tokens.events())
    return [*completed.events, *plain]
