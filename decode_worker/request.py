"""One request in the decode half."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tandem.engine.cache.prefix_cache import Prefix
from tandem.engine.steps.sampling_metadata import History
from tandem.protocol.ending import Ending
from tandem.protocol.lifecycle.timeline import EdgeStamp
from tandem.protocol.messages import Lease, Reservation


class Stage(Enum):
    """The queue a request is in."""

    LEASED = "leased"
    CHECKING = "checking"
    READY = "ready"
    RUNNING = "running"
    OVER = "over"


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A reservation and what became of it so far.

    Its queues:
      1. leased    it reads what the prefix cache has of its prompt, and has a promise of the pages that are missing;
                   from `AllotPages` on, those of the prompt are advertised to one prefill worker
      2. checking  the notice arrived and fits, the pages are its own; what they hold is compared with what was sent
      3. ready     the KV is right (DECODE_ADMITTED)
      4. running   one row of every step (DECODE_STARTED); its pages grow from the promise, and beyond it while there
                   are any
    then over: pages and promise are given back, or quarantined with the lease that a prefill worker may still write. A
    ready or running request that gives way to an older one is over as well, here; its router sends it once more.
    Full pages are known to the prefix cache from then on, those of the prompt since it was ready.

    All fields are guarded by the admission's lock, but for `answer`, `edges` and what follows the launched
    steps of a running request, which the engine thread alone touches.
    """

    reservation: Reservation
    lease: Lease
    prompt_pages: int
    """The number of pages that the prompt fills in a group without a window."""
    committed: int
    """Pages that prompt and answer are expected to fill, counted against the worker's limit until it is over."""
    reserved_pages: int
    """The part of them that it may still take from the pool (`page_budget.py`)."""
    token_hash: bytes
    """The hash of the prefilled tokens: made when there is time, compared when there is none."""
    prefix: Prefix
    """The part of the prompt that the prefix cache knows; this request reads `prefix.pages` until it is over."""
    skipped: int
    """The number of the prompt's first pages that nobody sends, as they are here or, with windows, not needed."""
    stage: Stage = Stage.LEASED
    pages: list[int] = field(default_factory=list)
    """Its pages as `KvPages` lists them, once its KV is here; before that, those that are advertised."""
    lease_pages: int = 0
    """Claimed pages for the lease, not yet advertised."""
    held: int = 0
    """Pages that it reads or owns, and those for the lease."""
    answer: list[int] = field(default_factory=list)
    """The beginning of `token_ids`: while it runs, the batch keeps the newest."""
    check_until: float = 0.0
    """The time at which the check of its pages is late, by the admission's clock."""
    first_draw: int = 1
    """Number of the random draw of answer token 1."""
    cancelled: bool = False
    """Checking or running, but to be dropped when its pages are no longer read."""
    ended: bool = False
    """Its last token is here; a step that was launched before may still use its pages."""
    failed: bool = False
    """It ended with an error: nobody else may read the pages that its answer fills."""
    preempting: bool = False
    """Running, but preempted once the launched steps with a row of it are over."""
    batch: "Batch | None" = None
    """The batch it runs in, which alone changes this."""
    prompt_tokens: int = field(init=False)
    """The number of tokens of the client's own prompt."""
    ending: Ending = field(init=False)
    """The end conditions of a running request."""
    history: History | None = None
    """The tokens that penalties or a grammar look back on, for a running request with either."""
    adapter: int = 0
    """The number of its adapter, as in `StepRow`."""
    edges: list[EdgeStamp] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_tokens = self.reservation.question_tokens

    @property
    def token_ids(self) -> list[int]:
        """The answer so far: tokens of earlier attempts, the one of the notice, and those that followed."""
        if self.batch is not None:
            self.batch.flush_tokens(self)
        return self.answer

    @property
    def leaving(self) -> bool:
        """True if it runs, but its pages will be free without any further action."""
        return self.cancelled or self.ended or self.preempting

    def stored_from(self, position: int) -> list[int]:
        """Return the tokens of a running request from `position` on whose KV is in its pages.

        The newest token is excluded, as it may not have been fed.
        """
        reservation = self.reservation
        return [*reservation.prompt_token_ids[position:], *self.token_ids[reservation.answered : -1]]

    @property
    def next_unread(self) -> int:
        """The position of the newest token that has arrived, whose row is the oldest that is in flight or to come."""
        return self.prompt_tokens + len(self.token_ids) - 1

    @property
    def in_flight(self) -> int:
        """The number of launched steps with a row of it whose tokens have not arrived."""
        return 0 if self.batch is None else self.batch.in_flight(self)

    @property
    def key(self) -> tuple[str, str]:
        """The router's id and the request's id, which identify the request on this worker."""
        return self.reservation.router_id, self.reservation.ref.request_id


class Batch(Protocol):
    """The batch that a running request is in."""

    def flush_tokens(self, request: DecodeRequest) -> None:
        """Append the tokens that have arrived to the request's `answer`."""

    def in_flight(self, request: DecodeRequest) -> int:
        """The number of launched steps with a row of it whose tokens have not arrived."""
