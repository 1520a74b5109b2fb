"""Whether workers that decode have room for the prompts that come, or some are to be kept free of answers for them.

Beside answers that bear little between tokens, prompts get what these leave of a step: less with every answer, and from
some number on nothing. A choice that looks at one request spreads answers evenly, until all workers are there at once.
So the fleet is looked at as a whole: where answers spread over all workers would leave next to no room for prompts, as
few workers as can compute them take all of them, and no answer. But where prompts are so few that steps which the class
bears now and then are enough for them, nobody is kept free at the price of answers that the others would not bear.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence

from costs.step_cost import chunk_pairs
from router.fleet_room import FleetRoom
from router.step_forecast import AskedAnswer, PromptForecast
from router.worker_books import WorkerBooks

log = logging.getLogger(__name__)

NOBODY: frozenset[int] = frozenset()
_HALF_LIFE_S = 10.0
"""Half of what is known of how many prompt tokens come is forgotten after so long."""
_WINDOW_S = _HALF_LIFE_S / math.log(2)
_PLENTY = 2.0
"""Room that is wanted ÷ what comes on average: prompts come by chance, and differ in length."""
_ENOUGH = 1.5
"""The same where prompts get a step now and then: what is not computed in these waits, and is computed at the price of
everybody's promise in the end.
"""
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
_LOOK_S = 0.05
"""How often the fleet is looked at."""
_HELD_S = 5.0
"""For how long after the last request of the tightest class nobody else's target counts, and after the last one with
any target workers are kept free.
"""
_KNOWN_S = 1.0
"""Until so much of the past is known, nothing is kept free."""


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

    def look_without_target(self, live: Collection[WorkerBooks]) -> None:
        """A request that bears anything: who is kept free for others is so only as long as such come."""
        any_worker = next(iter(live), None)
        if self.free and any_worker is not None and any_worker.clock() - self._looked_s >= _HELD_S:
            self._keep(NOBODY, live)

    def _choose(self, asked: AskedAnswer, live: Sequence[WorkerBooks], waited_s: float) -> frozenset[int]:
        """Among those that do either; `live` by their idle steps."""
        room = FleetRoom.of(asked, live, self._pairs / max(1.0, self._tokens))
        either = [worker for worker in live if worker.prefills and worker.decodes]
        coming, alone = self._tokens / self._known_s, room.alone
        elsewhere = alone * sum(not worker.decodes for worker in live)
        spread = elsewhere + (len(either) * room.beside_answers if room.decoding else 0.0)
        self._even = coming, spread
        wanted = _COLLAPSED * coming
        if self.free:
            waiting = coming * min(waited_s, _MOST_WAITED_S) + sum(worker.prefill_tokens for worker in either)
            wanted = min(_PLENTY * (coming + waiting / _CLEARED_S), elsewhere + len(self.free) * alone)
        if spread >= wanted or len(either) < 2:
            return NOBODY
        needed = max(1, math.ceil((_PLENTY * coming - elsewhere) / alone))
        if not self.free:
            borne = room.borne_by(room.decoding - needed)
            if borne < _BORNE_MIN or spread >= wanted * borne:
                return NOBODY
        needed = max(1, min(needed, room.decoding - 1))
        while needed > 1 and room.borne_by(room.decoding - needed) < 1.0:
            needed -= 1
        seldom = elsewhere + len(either) * room.seldom
        if seldom >= _ENOUGH * coming and not room.are_plenty(room.decoding - needed):
            return NOBODY
        # Whoever is free stays so, and then who is soonest.
        order = sorted(
            either, key=lambda worker: (worker.slot not in self.free, worker.decode_requests, worker.peer.worker_id)
        )
        return frozenset(worker.slot for worker in order[:needed])

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
