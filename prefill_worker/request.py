"""One prompt in the prefill half."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from engine.cache.prefix_cache import Prefix
from engine.steps.batch import Draw, History, StepRow
from prefill_worker.progress import Progress
from wire.errors import Internal
from wire.messages import PageChecksum, PeerRef, PrefillTask, TransferNotice
from wire.tracing.timeline import Edge, EdgeStamp


class Abortable(Protocol):
    """What hands a prompt over, and can be told that nobody waits for it."""

    def abort(self) -> None: ...


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """A task and what became of it so far.

    Its queues:
      1. waiting       no pages yet (PREFILL_QUEUED)
      2. computing     has pages for the whole prompt, the first of them perhaps cached ones, which it only reads; the
                       rest is packed into steps in chunks (PREFILL_STARTED), pages of finished chunks are already
                       being written to the decode worker
      3. handing over  all is computed, the first token is out (PREFILL_FINISHED) and others may read its full pages;
                       the last pages are on their way
    then `forget`: the pages are free or cached. The handoff ends every request, finished or not; nobody else frees.

    All fields are guarded by the half's lock; `progress` belongs to the event loop.
    """

    task: PrefillTask
    pages_needed: int
    local: bool
    """Whether the KV is built straight in the pages this very worker's decode half allotted; the lease owns them."""
    progress: Progress
    prefix: Prefix
    """What of the prompt the prefix cache knows; `prefix.pages` are read by this request until it is forgotten."""
    token_hash: bytes = b""
    """Of the tokens of a local prompt."""
    arrival: int = 0
    """The number of prompts that the queue had taken when it came."""
    handoff: Abortable | None = None
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens of the prompt whose KV was in cached pages: never computed."""
    computed: int = 0
    """Tokens of the prompt whose KV is in the pages."""
    launched: int = 0
    """Tokens that are cached, computed or in a step that was launched."""
    in_flight: int = 0
    """Launched steps with a chunk of it that have not ended; 0: the engine does not touch its pages now."""
    withdrawn: bool = False
    edges: list[EdgeStamp] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return len(self.task.prompt_token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that no step was launched for."""
        return self.prompt_tokens - self.launched

    def next_chunk(self, budget: int) -> StepRow:
        """A row of at most `budget` tokens, which are launched now; with a draw if they are the last ones."""
        if self.launched == self.cached:
            self.edges.append(EdgeStamp.now(Edge.PREFILL_STARTED))
        start, chunk = self.launched, min(budget, self.remaining)
        draw = self._first_draw() if chunk == self.remaining else None
        self.launched += chunk
        self.in_flight += 1
        return StepRow(self.task.prompt_token_ids[start : start + chunk], start, self.pages, draw)

    def _first_draw(self) -> Draw:
        task = self.task
        history = History(task.question, task.answer) if task.sampling.penalized else None
        return Draw(task.sampling, task.answered, history)


def make_notice(
    request: PrefillRequest,
    me: PeerRef,
    first_token_id: int,
    *,
    token_hash: bytes,
    skipped: int,
    checksums: tuple[PageChecksum, ...] = (),
) -> TransferNotice:
    """The notice that tells a decode worker of a prompt whose KV it has. The prompt's first `skipped` pages were there
    already.
    """
    task = request.task
    if task.destination is None:
        raise Internal(f"{task.ref.request_id} has no lease to be handed over under")
    return TransferNotice(
        lease=task.destination.lease,
        prefill=me,
        token_hash=token_hash,
        pages=request.pages_needed,
        first_token_id=first_token_id,
        next_draw=task.answered + 1,
        checksums=checksums,
        skipped=skipped,
    )
