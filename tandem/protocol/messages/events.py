"""The output that a worker sends to routers after its steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from tandem.protocol.lifecycle.events import EventTime, TransferStats
from tandem.protocol.messages.finish import ErrorDetail, FinishReason
from tandem.protocol.messages.load import WorkerLoad
from tandem.protocol.messages.references import RequestRef
from tandem.protocol.messages.sampling import PromptLogprobs, TokenLogprobs
from tandem.protocol.prefixes import PrefixChanges


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """The output of one step for one request; `first_index` is the position of `token_ids[0]` in the answer, from 0.

    `logprobs` has one entry per token if the request asks for them, and is empty otherwise.
    """

    ref: RequestRef
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: ErrorDetail | None = None
    event_times: tuple[EventTime, ...] = ()
    transfer: TransferStats | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    preempted: bool = False
    """True if the attempt was preempted after `first_index` tokens of the answer; the next attempt continues there."""
    prompt_logprobs: PromptLogprobs | None = None
    """The log probabilities of the prompt, sent with the first token of the answer; None if they are not requested."""
    reloaded_tokens: int = 0
    """The part of `cached_tokens` whose KV was loaded from a tier of the prefix cache for this prompt."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a router's requests whose output is nothing but tokens, in columns with one entry per request.

    The output of a usual step is thus a single message, for any number of requests.
    """

    request_ids: Sequence[str]
    attempts: Sequence[int]
    indices: Sequence[int]
    """The position of each request's first token in its answer, from 0."""
    token_ids: Sequence[int]
    """The tokens of all requests, concatenated in the order of the requests."""
    counts: Sequence[int] = ()
    """The number of tokens of each request; empty = one token each."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.request_ids)

    def rows(self) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
        """Iterate over the requests: id, attempt, position of the first token, tokens."""
        row_tokens: Iterator[tuple[int, ...]] = zip(self.token_ids, strict=True)
        if self.counts:
            tokens = iter(self.token_ids)
            row_tokens = (tuple(islice(tokens, count)) for count in self.counts)
        return zip(self.request_ids, self.attempts, self.indices, row_tokens, strict=True)

    def events(self) -> Iterator[RequestEvent]:
        """Iterate over the requests, each as a `RequestEvent` with the same content."""
        for request_id, attempt, index, token_ids in self.rows():
            yield RequestEvent(RequestRef(request_id, attempt), index, token_ids)


@dataclass(frozen=True, slots=True)
class RoutedEvent:
    """An event, and the id of the router to which it is sent."""

    router_id: str
    event: RequestEvent


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Tokens, and the id of the router to which they are sent."""

    router_id: str
    tokens: StepTokens


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of one or more steps for one router; the `events` precede the `tokens`."""

    step: int
    events: tuple[RequestEvent, ...]
    load: WorkerLoad
    prefixes: tuple[PrefixChanges, ...] = ()
    tokens: tuple[StepTokens, ...] = ()

    def each(self) -> Iterator[RequestEvent]:
        """Iterate over all events; the `tokens` are converted to events."""
        return chain(self.events, *(some.events() for some in self.tokens))
