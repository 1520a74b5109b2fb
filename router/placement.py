"""Which prefill worker and which decode worker serve a request, and whether any should take it now."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import NamedTuple

from router.fleet import Fleet
from router.slo import BEST_EFFORT, SloClass
from router.worker_books import WorkerBooks
from wire.messages import PeerRef

STEPS_AHEAD = 2
"""Steps of prompts that may wait at a worker."""


class Mode(StrEnum):
    """Where prompts may be computed."""

    DISAGGREGATED = "disaggregated"
    """By a prefill worker, never by the worker that decodes, unless it is the only one there."""
    COLOCATED = "colocated"
    """By the worker that decodes, in mixed steps, wherever a worker has both halves open."""
    ADAPTIVE = "adaptive"
    """Wherever it costs least by prediction, for each request anew; never both where workers are kept free."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes, in tokens: the prompt, and the most KV it ever stores; `decodes` is False when its first
    token is also its last. `expected_kv_tokens` is the most KV it is expected to store, None = the most there is.

    `digests` name the prompt's full pages (`wire.page_digests`), () = unknown; `waited_s` is its age in seconds.
    """

    prompt_tokens: int
    kv_tokens: int
    decodes: bool
    digests: tuple[bytes, ...] = ()
    slo: SloClass = BEST_EFFORT
    waited_s: float = 0.0
    expected_kv_tokens: int | None = None

    @property
    def room_tokens(self) -> int:
        """What a decode worker must have room for when it begins."""
        return self.kv_tokens if self.expected_kv_tokens is None else self.expected_kv_tokens


class Forecast(NamedTuple):
    """What placement expects of its choice; seconds.

    `ttft_s` is from the choice to the first token, `cost_s` what the choice costs everybody (docs/decisions/0014),
    `runner_up_s` what the next best one would have cost, infinite without one.
    """

    ttft_s: float
    compute_s: float
    """The part of it in which the prompt itself is computed."""
    itl_s: float
    cached_tokens: int
    computed_tokens: int
    prompt_steps: int
    """Steps in which the prompt is computed, and the longest of them as an answer beside it sees it."""
    longest_s: float
    cost_s: float
    runner_up_s: float = math.inf
    answer_tokens: float = 0.0
    """Of the answer, expected."""
    first_gap_s: float = math.inf
    """What the answer bears between its first and its second token, if the first is not held for the second; infinite =
    anything.
    """
    measured: bool = True
    """Whether it rests on steps that were seen; False = on a guess."""


class AnswerOutlook(NamedTuple):
    """What is to be expected of an answer where its class would be kept best; seconds."""

    step_s: float
    """A decode step with it."""
    target_s: float
    """What steps there may take for its class's gaps to be kept (`SloClass.step_target`)."""
    alone_s: float
    """A step there if nothing else ran."""
    fits_s: float
    """Until so many answers there have ended that it would fit, about."""

    @property
    def slow(self) -> bool:
        """Whether others are in its way. A target that it would miss alone limits nothing: turning others away would
        not keep it.
        """
        return self.alone_s <= self.target_s < self.step_s


class Pair(NamedTuple):
    """The chosen workers; no decode worker if none is needed. `forecast` is None of a policy that predicts nothing."""

    prefill: PeerRef
    decode: PeerRef | None
    forecast: Forecast | None = None

    @property
    def local(self) -> bool:
        """Whether one worker does both."""
        return self.prefill == self.decode


class Placement(ABC):
    """Chooses workers for the request at the head of the queue."""

    @abstractmethod
    def choose(self, need: Need, fleet: Fleet) -> Pair | None:
        """A pair that has room now; None = bind later, the request waits."""

    def could_serve(self, need: Need, fleet: Fleet) -> bool:
        """Whether live workers that this policy may choose are large enough for it, and fit together, however much they
        have to do.
        """
        prefills, decodes = large_enough(need, fleet)
        return bool(prefills) and (not need.decodes or any_pair(prefills, decodes, fleet, alone=True))

    def foresee(self, need: Need, fleet: Fleet) -> Forecast | None:
        """What is to be expected where the first token would come soonest, whether there is room or not; None = this
        policy predicts nothing.
        """
        return None

    def foresee_answer(self, need: Need, fleet: Fleet, ahead: int, wait_s: float) -> AnswerOutlook | None:
        """What is to be expected where its target would be kept best, for an answer that begins in `wait_s` seconds,
        after so many others; None = nothing was measured, or this policy predicts nothing.
        """
        return None

    def change_mode(self, mode: Mode) -> None:  # noqa: B027 - a policy that knows no modes has nothing to change
        """Choose by this mode from now on."""

    def learn_answer(self, tokens: int) -> None:  # noqa: B027 - a policy that predicts nothing learns nothing
        """An answer was so long."""


def takes_prefill(worker: WorkerBooks, need: Need) -> bool:
    """Whether a prompt may go there: while less than `STEPS_AHEAD` of its steps wait there, enough that its device
    never idles, little enough that a request is not bound to a worker that turns out slow.
    """
    room = worker.prefill_idle or worker.prefill_tokens < STEPS_AHEAD * worker.max_step_tokens
    return room and can_prefill(worker, need)


def can_prefill(worker: WorkerBooks, need: Need) -> bool:
    """Whether it could take the prompt if nothing else were there."""
    return worker.prefills and need.prompt_tokens <= worker.kv_tokens_total and not worker.refusing


def takes_decode(worker: WorkerBooks, need: Need) -> bool:
    """Whether there is room for the expected answer, in the batch and in pages, and ever for the longest one."""
    room = worker.decode_requests < worker.max_batch_requests and need.room_tokens <= worker.kv_tokens_free
    return room and can_decode(worker, need)


def can_decode(worker: WorkerBooks, need: Need) -> bool:
    """Whether it could decode the answer if nothing else were there."""
    return worker.decodes and need.kv_tokens <= worker.answer_tokens_total and not worker.refusing


def large_enough(need: Need, fleet: Fleet) -> tuple[list[WorkerBooks], list[WorkerBooks]]:
    """Live workers that could hold the prompt, and those that could hold the answer, if nothing else were there."""
    ready = [worker for worker in fleet.live if not worker.info.not_ready]
    prefills = [each for each in ready if each.prefills and need.prompt_tokens <= each.kv_tokens_total]
    return prefills, [each for each in ready if each.decodes and need.kv_tokens <= each.answer_tokens_total]


def any_pair(prefills: Iterable[WorkerBooks], decodes: Collection[WorkerBooks], fleet: Fleet, *, alone: bool) -> bool:
    """Whether some of these may do a request together, or one of them `alone`."""
    pairs = product(prefills, decodes)
    return any(alone if one is other else fleet.misfits.fit(one.peer, other.peer) for one, other in pairs)


def takes_both(worker: WorkerBooks, need: Need) -> bool:
    """Whether the whole request may go there."""
    return takes_decode(worker, need) and takes_prefill(worker, need)


class LeastLoaded(Placement):
    """The prefill worker with the fewest prompt tokens before it, the decode worker with the largest free share. It
    looks at every worker and predicts nothing.
    """

    def choose(self, need: Need, fleet: Fleet) -> Pair | None:
        prefills = [w for w in fleet.live if takes_prefill(w, need)]
        if not prefills:
            return None
        prefills.sort(key=lambda w: (w.prefill_tokens, w.decodes, w.decode_requests))
        if not need.decodes:
            return Pair(prefills[0].peer, None)
        decodes = [w for w in fleet.live if takes_decode(w, need)]
        decodes.sort(key=lambda w: (w.pages_used / w.pages_total, w.decode_requests, w.prefill_tokens))
        for prefill, decode in product(prefills, decodes):
            if prefill is decode or fleet.misfits.fit(prefill.peer, decode.peer):
                return Pair(prefill.peer, decode.peer)
        return None
