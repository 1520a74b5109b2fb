"""One request in the decode phase: its reservation, its pages and its answer."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tandem.engine.cache.prefix_cache import Prefix
from tandem.engine.steps.sampling_metadata import History
from tandem.protocol.ending import Ending
from tandem.protocol.lifecycle.events import EventTime
from tandem.protocol.messages import Lease, Reservation


class Stage(Enum):
    """The queue that a request is in."""

    LEASED = "leased"
    CHECKING = "checking"
    READY = "ready"
    RUNNING = "running"
    OVER = "over"


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A reservation, and the state of the request that was made for it.

    The queues of a request:

      1. leased    it reads the cached pages of its prompt and has reserved the missing ones; from `AllotPages` on, the
                   pages of the prompt are advertised to one prefill worker
      2. checking  the notice arrived and fits the reservation, and the request owns its pages; their contents are
                   compared with the checksums of what was sent
      3. ready     the KV is correct (DECODE_ADMITTED)
      4. running   it has one row in every step (DECODE_STARTED); its pages come from its reservation, which grows while
                   the pool has pages

    Then it ends: its pages and reservation are released, or the pages are quarantined with the lease, because a
    prefill worker may still write to them. A ready or running request that is preempted ends on this worker; its
    router sends it again. The prefix cache knows the full pages of its prompt from ready on, and those of its answer
    from the end on.

    All fields are guarded by the admission's lock, except `answer`, `event_times` and what describes the launched steps
    of a running request: only the engine thread uses those.
    """

    reservation: Reservation
    lease: Lease
    prompt_pages: int
    """The number of pages that the prompt fills in a group without a sliding window."""
    committed: int
    """Pages that prompt and answer are expected to fill. They count against the worker's limit until the request ends.
    """
    reserved_pages: int
    """Committed pages that the request may still take from the pool (`page_budget.py`)."""
    token_hash: bytes
    """The hash of the prefilled tokens; computed when the lease is granted, as comparing it with the notice must be
    fast."""
    prefix: Prefix
    """The part of the prompt that is in the prefix cache. The request reads `prefix.pages` until it ends."""
    skipped: int
    """The number of the prompt's first pages that are not sent: they are cached here or, with windows, not needed."""
    stage: Stage = Stage.LEASED
    """The queue that the request is in."""
    pages: list[int] = field(default_factory=list)
    """The request's pages as `KvPages` lists them, once its KV is here; before that, the advertised pages."""
    lease_pages: int = 0
    """Reserved pages for the lease that are not advertised yet."""
    held: int = 0
    """Pages that the request reads or owns, and those for its lease."""
    answer: list[int] = field(default_factory=list)
    """The first tokens of `token_ids`; while the request runs, the batch buffers the newest ones."""
    check_until: float = 0.0
    """The time until which the check of the KV must have a result, by the admission's clock."""
    first_draw: int = 1
    """The number of the draw, in the request's random sequence, that gives the token with index 1 of the answer."""
    cancelled: bool = False
    """Cancelled while checking or running; dropped as soon as nothing reads its pages."""
    ended: bool = False
    """Its last token has arrived; a step that was launched before may still use its pages."""
    failed: bool = False
    """It ended with an error, so no other request may read the pages that its answer fills."""
    preempting: bool = False
    """Running, but preempted once the launched steps with a row of it have completed."""
    batch: "Batch | None" = None
    """The batch that it runs in; only the batch sets this field."""
    prompt_tokens: int = field(init=False)
    """The number of tokens of the client's own prompt, without tokens of earlier attempts."""
    ending: Ending = field(init=False)
    """The end conditions of a running request."""
    history: History | None = None
    """The tokens that penalties or a grammar look back on, for a running request with either."""
    adapter: int = 0
    """The number of its adapter, as in `StepRow`."""
    event_times: list[EventTime] = field(default_factory=list)
    """Lifecycle events that were not sent to the router yet."""

    def __post_init__(self) -> None:
        self.prompt_tokens = self.reservation.question_tokens

    @property
    def token_ids(self) -> list[int]:
        """The answer so far: the tokens of earlier attempts, the first token from the notice, and the decoded ones."""
        if self.batch is not None:
            self.batch.flush_tokens(self)
        return self.answer

    @property
    def leaving(self) -> bool:
        """True if the request runs, but will free its pages without further action."""
        return self.cancelled or self.ended or self.preempting

    def stored_from(self, position: int) -> list[int]:
        """Return the tokens from `position` on whose KV is in the pages of a running request.

        The newest token is excluded, because it may not have been fed to the model yet.
        """
        reservation = self.reservation
        return [*reservation.prompt_token_ids[position:], *self.token_ids[reservation.prior_output_tokens : -1]]

    @property
    def next_unread(self) -> int:
        """The position of the newest token that has arrived.

        Rows in flight or to come have this position or a later one.
        """
        return self.prompt_tokens + len(self.token_ids) - 1

    @property
    def in_flight(self) -> int:
        """The number of launched steps with a row of the request whose tokens have not arrived."""
        return 0 if self.batch is None else self.batch.in_flight(self)

    @property
    def key(self) -> tuple[str, str]:
        """The router's id and the request's id, which identify the request on this worker."""
        return self.reservation.router_id, self.reservation.ref.request_id


class Batch(Protocol):
    """The batch that a running request is in, as the request uses it."""

    def flush_tokens(self, request: DecodeRequest) -> None:
        """Append the tokens that have arrived to the request's `answer`."""

    def in_flight(self, request: DecodeRequest) -> int:
        """Return the number of launched steps with a row of the request whose tokens have not arrived."""
