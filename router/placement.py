"""Which prefill worker and which decode worker serve a request, and whether any should take it now."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from wire.ending import pages_for
from wire.messages import PeerRef, Role


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A live worker as placement sees it: its size and its load, by its own report or this router's books, whichever
    is larger.
    """

    peer: PeerRef
    role: Role
    max_step_tokens: int
    max_batch_requests: int
    page_tokens: int
    pages_total: int
    prefill_idle: bool
    """Whether none of this router's prompts is being computed there."""
    prefill_tokens: int
    """Prompt tokens not yet computed."""
    decode_requests: int
    """Requests placed there for decoding."""
    pages_used: int
    """Pages promised or in use."""
    refusing: bool
    """Whether it turned a request away a moment ago, or says that it is not ready."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes, in tokens: the prompt, and the most KV it ever stores; `decodes` is False when its first
    token is also its last.
    """

    prompt_tokens: int
    kv_tokens: int
    decodes: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """The chosen workers; no decode worker if none is needed."""

    prefill: PeerRef
    decode: PeerRef | None


class Placement(ABC):
    """Chooses workers for the request at the head of the queue."""

    @abstractmethod
    def choose(self, need: Need, workers: Sequence[WorkerView]) -> Pair | None:
        """A pair that has room now; None = bind later, the request waits."""


class LeastLoaded(Placement):
    """The prefill worker with the fewest prompt tokens before it, the decode worker with the largest free share.

    A prefill worker has room while less than `steps_ahead` of its steps wait there: enough that its device never
    idles, little enough that a request is not bound to a worker that turns out slow.
    """

    def __init__(self, steps_ahead: int = 2) -> None:
        self._steps_ahead = steps_ahead

    def choose(self, need: Need, workers: Sequence[WorkerView]) -> Pair | None:
        prefills = [w for w in workers if self._takes_prefill(w, need)]
        if not prefills:
            return None
        prefill = min(prefills, key=lambda w: (w.prefill_tokens, w.role is Role.BOTH, w.decode_requests))
        if not need.decodes:
            return Pair(prefill.peer, None)
        decodes = [w for w in workers if self._takes_decode(w, need)]
        if not decodes:
            return None
        decode = max(decodes, key=lambda w: (1 - w.pages_used / w.pages_total, -w.decode_requests, -w.prefill_tokens))
        return Pair(prefill.peer, decode.peer)

    def _takes_prefill(self, worker: WorkerView, need: Need) -> bool:
        room = worker.prefill_idle or worker.prefill_tokens < self._steps_ahead * worker.max_step_tokens
        fits = pages_for(need.prompt_tokens, worker.page_tokens) <= worker.pages_total
        return worker.role.prefills and not worker.refusing and room and fits

    @staticmethod
    def _takes_decode(worker: WorkerView, need: Need) -> bool:
        free = worker.pages_total - worker.pages_used
        room = worker.decode_requests < worker.max_batch_requests
        return (
            worker.role.decodes
            and not worker.refusing
            and room
            and pages_for(need.kv_tokens, worker.page_tokens) <= free
        )
