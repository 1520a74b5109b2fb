"""Whether workers that decode have room for the prompts that come, or some are to be kept free of answers for them.

Beside answers that bear little between tokens, prompts get what these leave of a step: less with every answer, and from
some number on nothing. A choice that looks at one request spreads answers evenly, until all workers are there at once.
So the fleet is looked at as a whole: where answers spread over all workers would leave next to no room for prompts, as
few workers as can compute them take all of them, and no answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence

from costs.chunks import Beside, chunks
from costs.step_cost import chunk_pairs
from router.step_forecast import AskedAnswer, PromptForecast
from router.worker_books import WorkerBooks

log = logging.getLogger(__name__)

NOBODY: frozenset[int] = frozenset()
_HALF_LIFE_S = 10.0
"""Half of what is known of how many prompt tokens come is forgotten after so long."""
_WINDOW_S = _HALF_LIFE_S / math.log(2)
_PLENTY = 2.0
"""Room that is wanted ÷ what comes on average: prompts come by chance, and differ in length."""
_COLLAPSED = 0.5
"""Room beside answers ÷ what comes, below which workers are kept free. Where steps may be long, room shrinks slowly,
and workers that do both serve more; where they may not, it is gone at some number of answers.
"""
_BORNE_MIN = 0.5
"""Part of the answers that those which are not kept free have to bear: the gate turns away what is too much for them,
where even shares would leave everybody's promise to the prompts.
"""
_CLEARED_S = 1.0
"""Within so long what waits should be computed, beside what comes."""
_MOST_WAITED_S = 2.0
"""Of a request's age: a retried one is older than what waits."""
_DOUBT = 1.2
"""Room beside answers that is gone where steps take so much longer than predicted is none."""
_CHANCE = 2.0
"""Standard deviations of the number of answers: they come and end by chance."""
_LOOK_S = 0.05
"""How often the fleet is looked at."""
_HELD_S = 5.0
"""For how long after the last request of the tightest class nobody else's target counts."""
_KNOWN_S = 1.0
"""Until so much of the past is known, nothing is kept free."""
_SHORTEST_S = 1e-9


class PromptRoom:
    """Learns from what is placed how many prompt tokens come. Workers that were measured count as alike."""

    def __init__(self) -> None:
        self.free = NOBODY
        """Numbers of the workers that are kept free, as of the last look."""
        self._tokens = self._pairs = 0.0
        self._known_s = 0.0
        self._at_s = self._looked_s = self._asked_s = -math.inf
        self._target_s = math.inf
        self._even = 0.0, 0.0
        """Prompt tokens a second: those that come, and those that even shares leave room for."""

    def note(self, prompt: PromptForecast) -> None:
        """It was placed."""
        self._forget(prompt.worker.clock())
        self._tokens += prompt.computed
        self._pairs += chunk_pairs(prompt.computed, prompt.cached)

    def look(self, asked: AskedAnswer, live: Collection[WorkerBooks], waited_s: float = 0.0) -> None:
        """A request that asks for such an answer has waited for so long, and so have others."""
        any_worker = next(iter(live), None)
        if any_worker is None or (now := any_worker.clock()) - self._looked_s < _LOOK_S:
            return
        target_s = any_worker.gap_target(asked.slo)
        if target_s > self._target_s and now - self._asked_s < _HELD_S:
            return
        self._target_s, self._asked_s, self._looked_s = target_s, now, now
        self._forget(now)
        measured = sorted(
            (worker for worker in live if worker.cost.parameters.observed and not worker.info.not_ready),
            key=lambda worker: worker.idle_step_s,
        )
        known = measured and self._known_s >= _KNOWN_S
        self._keep(self._choose(asked, measured, waited_s) if known else NOBODY, live)

    def _choose(self, asked: AskedAnswer, live: Sequence[WorkerBooks], waited_s: float) -> frozenset[int]:
        """Among those that do either; `live` by their idle steps."""
        like = live[len(live) // 2]
        either = [worker for worker in live if worker.prefills and worker.decodes]
        decoding = [worker for worker in live if worker.decodes]
        count, target_s = len(either), like.gap_target(asked.slo)
        pairs = self._pairs / max(1.0, self._tokens)
        alone = _room(like, Beside(0, 0), pairs)
        coming = self._tokens / self._known_s
        elsewhere = alone * sum(not worker.decodes for worker in live)
        running = 1 + sum(worker.decode_requests for worker in decoding)
        context = asked.prompt_tokens + int(asked.tokens) // 2 + sum(worker.decode_context for worker in decoding)

        def bear(workers: int) -> float:
            """The part of what is decoded that so many could."""
            return _part_borne(like, _share(running, context, workers, target_s))

        most = 1 + _CHANCE / math.sqrt(running)
        spread = elsewhere
        if decoding:
            tight_s = target_s / _DOUBT
            spread += count * _room(like, _share(most * running, most * context, len(decoding), tight_s), pairs)
        self._even = coming, spread
        wanted = _COLLAPSED * coming
        if self.free:
            waiting = coming * min(waited_s, _MOST_WAITED_S) + sum(worker.prefill_tokens for worker in either)
            wanted = min(_PLENTY * (coming + waiting / _CLEARED_S), elsewhere + len(self.free) * alone)
        if spread >= wanted:
            return NOBODY
        needed = max(1, math.ceil((_PLENTY * coming - elsewhere) / alone))
        if not self.free:
            borne = bear(len(decoding) - needed) if needed < len(decoding) else 0.0
            if borne < _BORNE_MIN or spread >= wanted * borne:
                return NOBODY
        needed = max(1, min(needed, len(decoding) - 1))
        while needed > 1 and bear(len(decoding) - needed) < 1.0:
            needed -= 1
        # Whoever is free stays so, and then who is soonest.
        order = sorted(
            either, key=lambda worker: (worker.slot not in self.free, worker.decode_requests, worker.peer.worker_id)
        )
        return frozenset(worker.slot for worker in order[:needed]) if count > 1 else NOBODY

    def _keep(self, chosen: frozenset[int], live: Collection[WorkerBooks]) -> None:
        if chosen != self.free:
            names = sorted(worker.peer.worker_id for worker in live if worker.slot in chosen)
            told = ", ".join(names) or "nobody", *self._even
            log.info("kept free of answers for prompts: %s (%.0f tokens/s of them come, even shares leave %.0f)", *told)
        self.free = chosen

    def _forget(self, now: float) -> None:
        fade = 2.0 ** ((self._at_s - now) / _HALF_LIFE_S) if self._at_s < now else 1.0
        self._tokens *= fade
        self._pairs *= fade
        if self._at_s > -math.inf:
            self._known_s = self._known_s * fade + _WINDOW_S * (1.0 - fade)
        self._at_s = max(self._at_s, now)


def _share(rows: float, context: float, workers: int, target_s: float) -> Beside:
    """What one of so many workers has of the answers."""
    return Beside(math.ceil(rows / workers), int(context / workers), (target_s,))


def _part_borne(worker: WorkerBooks, share: Beside) -> float:
    """How much of its share one worker could decode within the target: the first row costs most."""
    rows, context, (target_s,) = share
    step_s = worker.cost.decode_step_seconds(rows, context)
    one_s = worker.cost.decode_step_seconds(1, context // rows)
    in_time = 1.0 if step_s <= target_s else max(0.0, target_s - one_s) / (step_s - one_s)
    return min(in_time, worker.max_batch_requests / rows)


def _room(worker: WorkerBooks, beside: Beside, pairs: float) -> float:
    """Prompt tokens a second, each with so many attention pairs, that break no target."""
    cost, (rows, context, targets) = worker.cost, beside
    each = chunks(cost, worker.info.duty, worker.max_step_tokens, beside, pairs)
    step_s = cost.mixed_step_seconds(each.tokens, each.tokens * pairs, rows, context)
    if rows and step_s > targets[0]:
        return 0.0
    return each.tokens / max(step_s + each.pause * cost.decode_step_seconds(rows, context), _SHORTEST_S)
