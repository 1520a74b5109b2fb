"""One prompt in the prefill half."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefill_worker.progress import Progress
from wire.messages import PrefillTask
from wire.timeline import EdgeStamp

if TYPE_CHECKING:
    from prefill_worker.handoff import Handoff


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """A task and what became of it so far.

    Its queues:
      1. waiting       no pages yet (PREFILL_QUEUED)
      2. computing     owns pages for the whole prompt; its chunks are packed into steps (PREFILL_STARTED), pages of
                       finished chunks are already being written to the decode worker
      3. handing over  all is computed and the first token is out (PREFILL_FINISHED); the last pages are on their way
    then `forget`: the pages are free. The handoff ends every request, finished or not; nobody else frees.

    All fields are guarded by the half's lock; `progress` belongs to the event loop.
    """

    task: PrefillTask
    pages_needed: int
    local: bool
    """Whether the KV is built straight in the pages this very worker's decode half allotted; the lease owns them."""
    progress: Progress
    handoff: Handoff | None = None
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens of the prompt whose KV is in the pages."""
    launched: int = 0
    """Tokens that are computed or in a step that was launched."""
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
