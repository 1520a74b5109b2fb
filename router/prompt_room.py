"""Whether workers that decode have room for the prompts that come, or some are to be kept free of answers for them.

Beside answers that bear little between tokens, prompts get what these leave of a step: less with every answer, and from
some number on nothing. A choice that looks at one request spreads answers evenly, until all workers are there at once.
So the fleet is looked at as a whole: where answers spread over all workers would leave less room than prompts need, as
few workers as can compute them take all of them, and no answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from costs.chunks import Beside, chunks
from costs.step_cost import chunk_pairs
from router.step_forecast import AskedAnswer, PromptForecast
from router.worker_books import WorkerBooks

HALF_LIFE_S = 10.0
"""Half of what is known of how many prompt tokens come is forgotten after so long."""
HEADROOM = 2.0
"""Room that is wanted ÷ what comes on average: prompts come by chance, and differ in length."""
CLEARED_S = 1.0
"""Within so long what waits should be computed, beside what comes."""
COLLAPSED = 0.5
"""Room beside answers ÷ what comes, below which workers are kept free. Where steps may be long, room shrinks slowly,
and workers that do both serve more; where they may not, it is gone at some number of answers.
"""
CHANCE = 2.0
"""Standard deviations of the number of answers: they come and end by chance."""
_LOOK_S = 0.05
"""How often the fleet is looked at."""
_KNOWN_S = 1.0
"""Until so much of the past is known, nothing is kept free."""
_WINDOW_S = HALF_LIFE_S / math.log(2)
_NOBODY: frozenset[int] = frozenset()


class PromptRoom:
    """Learns from what is placed how many prompt tokens come. Workers count as alike."""

    def __init__(self) -> None:
        self.free = _NOBODY
        """Numbers of the workers that are kept free, as of the last look."""
        self._tokens = self._pairs = 0.0
        self._known_s = 0.0
        self._at_s = self._looked_s = -math.inf

    def note(self, prompt: PromptForecast) -> None:
        """It was placed."""
        self._forget(prompt.worker.clock())
        self._tokens += prompt.computed
        self._pairs += chunk_pairs(prompt.computed, prompt.cached)

    def look(self, asked: AskedAnswer, live: Collection[WorkerBooks], waited_s: float = 0.0) -> frozenset[int]:
        """Numbers of the workers where no answer of that class should be decoded; mostly none. The request that asks
        has waited for so long already, and so have others.
        """
        now = next(iter(live)).clock() if live else self._looked_s
        if now - self._looked_s >= _LOOK_S or (self.free and not self.free <= {worker.slot for worker in live}):
            self._looked_s = now
            self._forget(now)
            either = [worker for worker in live if worker.prefills and worker.decodes and not worker.refusing]
            known = self._known_s >= _KNOWN_S and len(either) > 1
            self.free = self._choose(asked, either, waited_s) if known else _NOBODY
        return self.free

    def _choose(self, asked: AskedAnswer, workers: Sequence[WorkerBooks], waited_s: float) -> frozenset[int]:
        """Among those that do either."""
        like, count = workers[0], len(workers)
        target_s, pairs = like.gap_target(asked.slo), self._pairs / max(1.0, self._tokens)
        coming = self._tokens / self._known_s
        wanted = COLLAPSED * coming
        if self.free:
            waiting = coming * waited_s + sum(worker.prefill_tokens for worker in workers)
            wanted = HEADROOM * (coming + waiting / CLEARED_S)
        running = 1 + sum(worker.decode_requests for worker in workers)
        context = asked.prompt_tokens + int(asked.tokens) // 2 + sum(worker.decode_context for worker in workers)
        most = 1 + CHANCE / math.sqrt(running)
        spread = _room(like, _share(most * running, most * context, count, target_s), pairs)
        if count * spread >= wanted:
            return _NOBODY
        needed = math.ceil(HEADROOM * coming / _room(like, Beside(0, 0), pairs))
        if self.free:
            needed = min(needed, count - 1)
        else:
            if needed >= count:
                return _NOBODY
            rows, held, _ = _share(running, context, count - needed, target_s)
            if like.cost.decode_step_seconds(rows, held) > target_s:
                return _NOBODY
        # Whoever is free stays so, and then who is soonest.
        order = sorted(workers, key=lambda worker: (worker.slot not in self.free, worker.decode_requests, worker.slot))
        return frozenset(worker.slot for worker in order[:needed])

    def _forget(self, now: float) -> None:
        fade = 2.0 ** ((self._at_s - now) / HALF_LIFE_S) if self._at_s < now else 1.0
        self._tokens *= fade
        self._pairs *= fade
        if self._at_s > -math.inf:
            self._known_s = self._known_s * fade + _WINDOW_S * (1.0 - fade)
        self._at_s = max(self._at_s, now)


def _share(rows: float, context: float, workers: int, target_s: float) -> Beside:
    """What one of so many workers has of the answers."""
    return Beside(math.ceil(rows / workers), int(context / workers), (target_s,))


def _room(worker: WorkerBooks, beside: Beside, pairs: float) -> float:
    """Prompt tokens a second, each with so many attention pairs, that break no target."""
    cost, (rows, context, targets) = worker.cost, beside
    each = chunks(cost, worker.info.duty, worker.max_step_tokens, beside, pairs)
    step_s = cost.mixed_step_seconds(each.tokens, each.tokens * pairs, rows, context)
    if rows and step_s > targets[0]:
        return 0.0
    return each.tokens / (step_s + each.pause * cost.decode_step_seconds(rows, context))
