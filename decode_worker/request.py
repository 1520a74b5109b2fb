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
    """A request in the decode phase, with the reservation that it was created for.

    The queues of a request:

      1. leased    it reads the cached pages of its prompt and has reserved the missing ones; after `AllocatePages`,
                   the pages of the prompt are advertised to one prefill worker
      2. checking  the notice arrived and matches the reservation, and the request owns its pages; their contents are
                   compared with the checksums of what was sent
      3. ready     the KV is correct (DECODE_ADMITTED)
      4. running   it has one row in every step (DECODE_STARTED); its pages come from its reservation, which grows while
                   the pool has pages

    Then it ends: its pages and reservation are released, or the pages are quarantined with the lease, because a prefill
    worker may still write to them. A ready or running request that is preempted ends on this worker, and its router
    sends it again. The full pages of its prompt are in the prefix cache from the moment it is ready; those of its
    answer are added when it ends.

    All fields are guarded by the admission's lock, except `answer`, `event_times` and the fields that describe the
    launched steps of a running request: only the engine thread uses those.
    """

    reservation: Reservation
    lease: Lease
    prompt_pages: int
    """The number of pages that the prompt fills in a group without a sliding window."""
    committed: int
    """The number of pages that prompt and answer are expected to fill.

    They count against the worker's limit until the request ends.
    """
    reserved_pages: int
    """The number of committed pages that the request may still take from the pool (`page_budget.py`)."""
    token_hash: bytes
    """The hash of the prefilled tokens.

    Computed when the lease is granted, because comparing it with the notice must be fast.
    """
    prefix: Prefix
    """The part of the prompt that is in the prefix cache. The request reads `prefix.pages` until it ends."""
    skipped: int
    """The number of leading prompt pages that are not sent: they are cached here or have left the sliding window."""
    stage: Stage = Stage.LEASED
    """The queue that the request is in."""
    pages: list[int] = field(default_factory=list)
    """The request's pages once its KV has arrived, listed as by `KvPages`; before that, the advertised pages."""
    lease_pages: int = 0
    """The number of reserved pages that are kept for the lease and not advertised yet."""
    held: int = 0
    """The number of pages that the request reads or owns, including those for its lease."""
    answer: list[int] = field(default_factory=list)
    """The leading tokens of `token_ids`; while the request runs, the batch buffers the newest tokens."""
    check_until: float = 0.0
    """The deadline for the result of the KV check, by the admission's clock."""
    first_draw: int = 1
    """The index, in the request's random sequence, of the random number for the answer token with index 1."""
    cancelled: bool = False
    """True if the request was cancelled while checking or running; it is dropped once nothing reads its pages."""
    ended: bool = False
    """True if the last token has arrived; a step that was launched earlier may still use the request's pages."""
    failed: bool = False
    """True if the request ended with an error; the pages that its answer fills are then not added to the cache."""
    preempting: bool = False
    """True if the running request is preempted once the launched steps with its rows have completed."""
    batch: "Batch | None" = None
    """The batch in which the request runs; only the batch sets this field."""
    prompt_tokens: int = field(init=False)
    """The number of tokens of the client's own prompt, without tokens of earlier attempts."""
    ending: Ending = field(init=False)
    """The end conditions of a running request."""
    history: History | None = None
    """The tokens that penalties or a grammar depend on, for a running request that has either."""
    adapter: int = 0
    """The number of the request's adapter, as in `StepRow`."""
    event_times: list[EventTime] = field(default_factory=list)
    """Lifecycle events that have not been sent to the router yet."""

    def __post_init__(self) -> None:
        self.prompt_tokens = self.reservation.original_prompt_tokens

    @property
    def token_ids(self) -> list[int]:
        """The answer so far: the tokens of earlier attempts, the first token from the notice, and the decoded ones."""
        if self.batch is not None:
            self.batch.flush_tokens(self)
        return self.answer

    @property
    def leaving(self) -> bool:
        """True if the running request will free its pages: it was cancelled, has ended or is being preempted."""
        return self.cancelled or self.ended or self.preempting

    def stored_from(self, position: int) -> list[int]:
        """Return the tokens of a running request, from `position` on, whose KV is in its pages.

        The newest token is excluded, because it may not have been fed to the model yet.
        """
        reservation = self.reservation
        return [*reservation.prompt_token_ids[position:], *self.token_ids[reservation.prior_output_tokens : -1]]

    @property
    def next_unread(self) -> int:
        """The position of the newest token that has arrived; no row in flight or later has a lower position."""
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
    """The part of the running batch that a request uses."""

    def flush_tokens(self, request: DecodeRequest) -> None:
        """Append the tokens that have arrived to the request's `answer`."""

    def in_flight(self, request: DecodeRequest) -> int:
        """Return the number of launched steps with a row of the request whose tokens have not arrived."""
