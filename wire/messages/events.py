"""What steps bring to requests, on its way from a worker to the routers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

from wire.messages.load import WorkerLoad
from wire.messages.references import RequestRef
from wire.messages.sampling import TokenLogprobs
from wire.prefixes import PrefixChanges
from wire.tracing.timeline import EdgeStamp, TransferStats


class FinishReason(IntEnum):
    """Why a generation ended, numbered as in `tandem.v1.FinishReason`."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """A failure on the wire: the code of a `TandemError`, its sentence and its retry hint in seconds."""

    code: str
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """What happened to one request in a step; `token_ids[0]` is token number `first_index` of the answer.

    `logprobs` has one entry for each token if its sampling asks for them, else none.
    """

    ref: RequestRef
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: ErrorDetail | None = None
    edges: tuple[EdgeStamp, ...] = ()
    transfer: TransferStats | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    preempted: bool = False
    """The attempt ends here, `first_index` tokens of the answer are there: to be computed again behind these."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """One more token for each of many requests of a router, of which there is nothing else to tell: columns of equal
    length, so that a step's usual news is one message, however many requests it is of.
    """

    request_ids: Sequence[str]
    attempts: Sequence[int]
    indices: Sequence[int]
    """Each token's number in its answer, from 0."""
    token_ids: Sequence[int]

    def __len__(self) -> int:
        """Requests."""
        return len(self.token_ids)

    def events(self) -> Iterator[RequestEvent]:
        """The same, request by request."""
        columns = zip(self.request_ids, self.attempts, self.indices, self.token_ids, strict=True)
        for request_id, attempt, index, token_id in columns:
            yield RequestEvent(RequestRef(request_id, attempt), index, (token_id,))


@dataclass(frozen=True, slots=True)
class RoutedEvent:
    """An event on its way out of a worker, and the router it is for."""

    router_id: str
    event: RequestEvent


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The same of tokens."""

    router_id: str
    tokens: StepTokens


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What one step, or several, brought for one router: `events`, and behind them `tokens`."""

    step: int
    events: tuple[RequestEvent, ...]
    load: WorkerLoad
    prefixes: tuple[PrefixChanges, ...] = ()
    tokens: tuple[StepTokens, ...] = ()

    def each(self) -> Iterator[RequestEvent]:
        """Everything, request by request."""
        return chain(self.events, *(some.events() for some in self.tokens))
