"""Placement by predicted cost: the pair of workers that keeps everybody waiting least and breaks fewest targets.

Why these terms, and what they leave out: docs/decisions/0014-placement.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from router.candidates import Candidate, Holders, first
from router.cheapest import Cheapest
from router.fleet import Fleet
from router.long_gaps import spare_gaps
from router.placement import (
    AnswerOutlook,
    Forecast,
    Mode,
    Need,
    Pair,
    Placement,
    any_pair,
    can_decode,
    can_prefill,
    large_enough,
    takes_both,
    takes_decode,
    takes_prefill,
)
from router.prompt_room import NOBODY, PromptRoom
from router.step_forecast import AnswerForecast, AskedAnswer, PromptForecast, answer_outlook
from router.worker_books import WorkerBooks

_BEST = 2
"""Workers of each kind that are looked at because little waits there."""
_HITS = 2
"""And those that are looked at because they hold most of the prompt, and more than these."""
_ANSWER_GUESS, _ANSWER_PART = 256.0, 0.02
"""Tokens of an answer before any ended, and the weight of the newest in their mean."""


class CostPlacement(Placement):
    """Looks at a few workers in the order of their load, and at those that hold most of the prompt."""

    def __init__(self, mode: Mode = Mode.ADAPTIVE, *, best: int = _BEST, hits: int = _HITS) -> None:
        """`best` workers of each kind are looked at because little waits there, `hits` because of what they hold."""
        self._mode = mode
        self._best, self._hits = best, hits
        self._answer = _ANSWER_GUESS
        self._room = PromptRoom()

    def choose(self, need: Need, fleet: Fleet) -> Pair | None:
        if not need.decodes:
            return self._prompt_alone(need, fleet)
        if self._alone(fleet):
            return self._one_worker(need, fleet)
        free = self._kept_free(need, fleet)
        pair = self._two_workers(need, fleet, self._best, free)
        if pair is None and free and not _soon(need, fleet, free):
            free = NOBODY
            pair = self._two_workers(need, fleet, self._best, free)
        if pair is None and fleet.misfits:
            # Those that were looked at may be of one release here, of another there.
            pair = self._two_workers(need, fleet, len(fleet.live), free)
        return pair

    def could_serve(self, need: Need, fleet: Fleet) -> bool:
        if not need.decodes:
            return super().could_serve(need, fleet)
        prefills, decodes = large_enough(need, fleet)
        if self._alone(fleet):
            return any(each.decodes and need.kv_tokens <= each.answer_tokens_total for each in prefills)
        return any_pair(prefills, decodes, fleet, alone=self._local(fleet))

    def foresee(self, need: Need, fleet: Fleet) -> Forecast | None:
        free = self._kept_free(need, fleet) if need.decodes and need.slo.has_targets else NOBODY
        workers = first(_for_prompts(fleet, free), can_prefill, need, 1)
        if not workers:
            workers = first(fleet.prefills, can_prefill, need, 1)
        prompts = _prompts(need, Holders(need, fleet, 1).beside(workers, can_prefill))
        if not prompts:
            return None
        soonest = min(prompts, key=lambda prompt: prompt.ttft_s)
        return _forecast(soonest, 0.0, soonest.ttft_s, math.inf)

    def foresee_answer(self, need: Need, fleet: Fleet, ahead: int, wait_s: float) -> AnswerOutlook | None:
        free = self._kept_free(need, fleet)
        decodes = (each for each in fleet.decodes if each.slot not in free and each.cost.parameters.observed)
        others = ahead / max(1, len(fleet.decodes) - len(free))
        asked = self._asked(need)
        outlooks = [
            answer_outlook(worker, asked, others, wait_s, self._answer)
            for worker in first(decodes, can_decode, need, self._best)
        ]
        # Who could not keep it alone says nothing of the others.
        able = [each for each in outlooks if each.alone_s <= each.target_s] or outlooks
        return min(able, key=lambda each: each.step_s / each.target_s, default=None)

    def change_mode(self, mode: Mode) -> None:
        self._mode = mode

    def learn_answer(self, tokens: int) -> None:
        self._answer += _ANSWER_PART * (tokens - self._answer)

    def _alone(self, fleet: Fleet) -> bool:
        """Whether one worker has to do all of a request."""
        return self._mode is Mode.COLOCATED and fleet.colocates

    def _local(self, fleet: Fleet) -> bool:
        """Whether one may."""
        return self._mode is not Mode.DISAGGREGATED or len(fleet.live) == 1

    def _prompt_alone(self, need: Need, fleet: Fleet) -> Pair | None:
        """A prompt whose first token is the last."""
        workers = first(fleet.prefills, takes_prefill, need, self._best)
        if not workers:
            return None
        candidates = Holders(need, fleet, self._hits).beside(workers, takes_prefill)
        prompt, *others = sorted(_prompts(need, candidates), key=lambda prompt: prompt.cost_s)
        runner_up_s = others[0].cost_s if others else math.inf
        return Pair(prompt.worker.peer, None, _forecast(prompt, 0.0, prompt.cost_s, runner_up_s))

    def _one_worker(self, need: Need, fleet: Fleet) -> Pair | None:
        """For it all."""
        workers = first(fleet.decodes, takes_both, need, self._best)
        if not workers:
            return None
        candidates = Holders(need, fleet, self._hits).beside(workers, takes_both)
        asked, cheapest = self._asked(need), Cheapest()
        cheapest.alone(_prompts(need, candidates), _answers(asked, candidates))
        return _pair(cheapest, asked)

    def _two_workers(self, need: Need, fleet: Fleet, best: int, free: frozenset[int]) -> Pair | None:
        """One for the prompt and one for the answer, who may be the same if the mode says so. Where workers are kept
        `free` of answers, prompts with targets go to them, and else only to who holds them.
        """
        apart = free if need.slo.has_targets else NOBODY
        prefills = first(_for_prompts(fleet, apart), takes_prefill, need, best)
        if not prefills:
            return None
        decodes = first((worker for worker in fleet.decodes if worker.slot not in free), takes_decode, need, best)
        if not decodes:
            return None
        holders = Holders(need, fleet, self._hits)
        at = holders.beside(prefills, takes_prefill)
        to = [each for each in holders.beside(decodes, takes_decode) if each[0].slot not in free]
        local = self._local(fleet)
        if local and not apart:
            at += [each for each in to if each not in at and takes_prefill(each[0], need)]
        asked, cheapest = self._asked(need), Cheapest()
        cheapest.together(_prompts(need, at), _answers(asked, to), fleet, local=local)
        if cheapest.prompt is not None:
            self._room.note(cheapest.prompt)
        return _pair(cheapest, asked)

    def _kept_free(self, need: Need, fleet: Fleet) -> frozenset[int]:
        """Workers that should decode nothing."""
        if self._mode is not Mode.ADAPTIVE:
            return NOBODY
        if need.slo.has_targets:
            self._room.look(self._asked(need), fleet.live, need.waited_s)
        elif self._room.free:
            self._room.look_without_target(fleet.live)
        return self._room.free

    def _asked(self, need: Need) -> AskedAnswer:
        longest = need.kv_tokens + 1 - need.prompt_tokens
        tokens = min(float(longest), self._answer)
        return AskedAnswer(need.prompt_tokens, tokens, need.slo, spare_gaps(need.slo, tokens), need.waited_s)


def _for_prompts(fleet: Fleet, free: frozenset[int]) -> Iterable[WorkerBooks]:
    """Who computes prompts, in order: if workers are kept `free`, these and those that never decode."""
    if not free:
        return fleet.prefills
    return (worker for worker in fleet.prefills if worker.slot in free or not worker.decodes)


def _soon(need: Need, fleet: Fleet, free: frozenset[int]) -> bool:
    """Whether the request has only to wait until fewer prompts do where they are computed: nothing else that keeps it
    from there will pass so soon.
    """
    answers = [worker for worker in fleet.live if worker.slot not in free and takes_decode(worker, need)]
    return any(
        fleet.misfits.fit(prompt.peer, answer.peer)
        for prompt in _for_prompts(fleet, free)
        if can_prefill(prompt, need)
        for answer in answers
    )


def _prompts(need: Need, candidates: list[Candidate]) -> list[PromptForecast]:
    tokens, late_s = need.prompt_tokens, need.slo.ttft_s - need.waited_s
    return [PromptForecast(worker, tokens, pages * worker.page_tokens, late_s) for worker, pages in candidates]


def _answers(asked: AskedAnswer, candidates: list[Candidate]) -> list[AnswerForecast]:
    return [AnswerForecast(worker, pages * worker.page_tokens, asked) for worker, pages in candidates]


def _pair(found: Cheapest, asked: AskedAnswer) -> Pair | None:
    prompt, answer = found.prompt, found.answer
    if prompt is None or answer is None:
        return None
    first_gap_s = math.inf if prompt.ttft_s <= answer.held_until_s else answer.first_gap_s
    forecast = _forecast(prompt, answer.step_s, found.cost_s, found.runner_up_s, asked.tokens, first_gap_s=first_gap_s)
    return Pair(prompt.worker.peer, answer.worker.peer, forecast)


def _forecast(
    prompt: PromptForecast,
    itl_s: float,
    cost_s: float,
    runner_up_s: float,
    answer_tokens: float = 0.0,
    *,
    first_gap_s: float = math.inf,
) -> Forecast:
    return Forecast(
        ttft_s=prompt.ttft_s,
        compute_s=prompt.compute_s,
        itl_s=itl_s,
        cached_tokens=prompt.cached,
        computed_tokens=prompt.computed,
        prompt_steps=prompt.steps,
        longest_s=prompt.longest_s,
        cost_s=cost_s,
        runner_up_s=runner_up_s,
        answer_tokens=answer_tokens,
        first_gap_s=first_gap_s,
        measured=prompt.worker.cost.parameters.observed > 0,
    )
