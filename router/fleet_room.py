"""What a fleet could do if its answers were shared evenly: the prompts it could compute beside them, and how many of
them fewer workers would bear. Workers that were measured count as alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costs.chunks import PATIENCE, Beside, Chunks, chunks, seldom_chunks, steady_chunks
from router.step_forecast import AskedAnswer
from router.worker_books import WorkerBooks

_DOUBT = 1.2
"""Room beside answers that is gone where steps take so much longer than predicted is none."""
_CHANCE = 2.0
"""Standard deviations of the number of answers: they come and end by chance."""
_SHORTEST_S = 1e-9


@dataclass(frozen=True, slots=True)
class FleetRoom:
    """As one look at the fleet found it; rooms are prompt tokens a second."""

    like: WorkerBooks
    """Any of its workers."""
    asked: AskedAnswer
    """Whose class's targets count."""
    pairs: float
    """Attention pairs of a prompt token, on average."""
    decoding: int
    """Workers that decode."""
    answers: int
    context: int
    """Of these answers, in tokens."""

    @classmethod
    def of(cls, asked: AskedAnswer, live: Sequence[WorkerBooks], pairs: float) -> FleetRoom:
        """With the answer that is asked for; `live` are rising by their idle steps."""
        decoding = [worker for worker in live if worker.decodes]
        answers = 1 + sum(worker.decode_requests for worker in decoding)
        context = asked.prompt_tokens + int(asked.tokens) // 2 + sum(worker.decode_context for worker in decoding)
        return cls(live[len(live) // 2], asked, pairs, len(decoding), answers, context)

    @property
    def alone(self) -> float:
        """Of a worker without answers."""
        return self._room(self._chunks(Beside(0, 0)), Beside(0, 0))

    @property
    def beside_answers(self) -> float:
        """Of one of all that decode, in every step; none where a few answers more or longer steps would leave none."""
        beside = self._share(self.decoding, self._target_s / _DOUBT, self._at_most)
        each = self._chunks(beside)
        if self._step_s(each, beside) > beside.targets[0]:
            return 0.0
        return self._room(each, beside)

    @property
    def seldom(self) -> float:
        """Of one of all that decode, in steps so rare that the class bears them whatever they take; none if it bears
        none.
        """
        slo, like = self.asked.slo, self.like
        beside = self._share(self.decoding, self._target_s)
        steady = steady_chunks(like.cost, like.info.duty, like.max_step_tokens, beside.rows) is not None
        if steady or slo.gaps_allowed * (PATIENCE + 1) < 1 or slo.worst_gap_s < math.inf:
            return 0.0
        return self._room(seldom_chunks(like.max_step_tokens - beside.rows), beside)

    def borne_by(self, workers: int) -> float:
        """The part of the answers that so many could decode within the target: the first of each costs most."""
        return self._borne(self._share(workers, self._target_s)) if workers > 0 else 0.0

    def are_plenty(self, workers: int) -> bool:
        """Whether the gate would let so many, at least one, have all answers, and a few more."""
        step_s = self.like.step_target(self.asked.slo)
        return self._borne(self._share(workers, step_s, self._at_most)) >= 1.0

    @property
    def _target_s(self) -> float:
        return self.like.gap_target(self.asked.slo)

    @property
    def _at_most(self) -> float:
        """Times as many answers as there are that there may well be."""
        return 1.0 + _CHANCE / math.sqrt(self.answers)

    def _share(self, workers: int, target_s: float, times: float = 1.0) -> Beside:
        """What one of so many workers has of `times` the answers."""
        rows = math.ceil(times * self.answers / workers)
        return Beside(rows, int(times * self.context / workers), (target_s,))

    def _borne(self, share: Beside) -> float:
        rows, context, (target_s,) = share
        cost = self.like.cost
        step_s = cost.decode_step_seconds(rows, context)
        one_s = cost.decode_step_seconds(1, context // rows)
        in_time = 1.0 if step_s <= target_s else max(0.0, target_s - one_s) / max(step_s - one_s, _SHORTEST_S)
        return min(in_time, self.like.max_batch_requests / rows)

    def _chunks(self, beside: Beside) -> Chunks:
        return chunks(self.like.cost, self.like.info.duty, self.like.max_step_tokens, beside, self.pairs)

    def _step_s(self, each: Chunks, beside: Beside) -> float:
        tokens = each.tokens
        return self.like.cost.mixed_step_seconds(tokens, tokens * self.pairs, beside.rows, beside.context_tokens)

    def _room(self, each: Chunks, beside: Beside) -> float:
        pause_s = each.pause * self.like.cost.decode_step_seconds(beside.rows, beside.context_tokens)
        return each.tokens / max(self._step_s(each, beside) + pause_s, _SHORTEST_S)
