"""Placement by predicted cost: the pair of workers that keeps everybody waiting least and breaks fewest targets.

Why these terms, and what they leave out: docs/decisions/0014-placement.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice

from router.fleet import Fleet
from router.placement import (
    STEPS_AHEAD,
    Forecast,
    Mode,
    Need,
    Pair,
    Placement,
    can_prefill,
    takes_decode,
    takes_prefill,
)
from router.prefix_index import NO_MATCH, PrefixMatch
from router.step_forecast import MISS_S, AnswerForecast, PromptForecast
from router.worker_books import WorkerBooks

_BEST = 2
"""Workers of each kind that are looked at because little waits there."""
_HITS = 2
"""And those that are looked at because they hold most of the prompt."""
_LOOK = 64
"""Workers that are asked for room before a request waits; the order makes room behind them unlikely."""
_ANSWER_GUESS, _ANSWER_PART = 256.0, 0.02
"""Tokens of an answer before any ended, and the weight of the newest in their mean."""

_Takes = Callable[[WorkerBooks], bool]


class CostPlacement(Placement):
    """Looks at a few workers in the order of their load, and at those that hold most of the prompt."""

    def __init__(
        self, mode: Mode = Mode.ADAPTIVE, steps_ahead: int = STEPS_AHEAD, *, best: int = _BEST, hits: int = _HITS
    ) -> None:
        """`best` workers of each kind are looked at because little waits there, `hits` because of what they hold."""
        self._mode = mode
        self._steps_ahead = steps_ahead
        self._best, self._hits = best, hits
        self._answer = _ANSWER_GUESS

    def choose(self, need: Need, fleet: Fleet) -> Pair | None:
        return self._cheapest(
            need,
            fleet,
            lambda worker: takes_prefill(worker, need, self._steps_ahead),
            lambda worker: takes_decode(worker, need),
        )

    def foresee(self, need: Need, fleet: Fleet) -> Forecast | None:
        match = _match(need, fleet)
        workers = _first(fleet.prefills, lambda worker: can_prefill(worker, need), 1)
        workers += [each for each in _holders(fleet, match, 1) if each not in workers and can_prefill(each, need)]
        prompts = _prompts(need, workers, _Held(match))
        if not prompts:
            return None
        soonest = min(prompts, key=lambda prompt: prompt.ttft_s)
        return _forecast(soonest, 0.0, soonest.ttft_s, math.inf)

    def change_mode(self, mode: Mode) -> None:
        self._mode = mode

    def learn_answer(self, tokens: int) -> None:
        self._answer += _ANSWER_PART * (tokens - self._answer)

    def _cheapest(self, need: Need, fleet: Fleet, takes_prompt: _Takes, takes_answer: _Takes) -> Pair | None:
        if self._mode is Mode.COLOCATED and fleet.colocates and need.decodes:
            return self._cheapest_alone(need, fleet, lambda worker: takes_answer(worker) and takes_prompt(worker))
        prefills = _first(fleet.prefills, takes_prompt, self._best)
        if not prefills:
            return None
        decodes = _first(fleet.decodes, takes_answer, self._best) if need.decodes else []
        if need.decodes and not decodes:
            return None
        match = _match(need, fleet)
        for worker in _holders(fleet, match, self._hits):
            if worker not in prefills and takes_prompt(worker):
                prefills.append(worker)
            if need.decodes and worker not in decodes and takes_answer(worker):
                decodes.append(worker)
        if self._mode is Mode.ADAPTIVE or len(fleet.live) == 1:
            prefills += [worker for worker in decodes if worker not in prefills and takes_prompt(worker)]
        held = _Held(match)
        prompts = _prompts(need, prefills, held)
        if not need.decodes:
            return _without_answer(prompts)
        return self._pair(need, fleet, prompts, self._answers(need, decodes, held))

    def _cheapest_alone(self, need: Need, fleet: Fleet, takes: _Takes) -> Pair | None:
        """One worker for it all."""
        match = _match(need, fleet)
        workers = _first(fleet.decodes, takes, self._best)
        workers += [each for each in _holders(fleet, match, self._hits) if each not in workers and takes(each)]
        held = _Held(match)
        return self._pair(need, fleet, _prompts(need, workers, held), self._answers(need, workers, held))

    def _answers(self, need: Need, decodes: list[WorkerBooks], held: _Held) -> list[AnswerForecast]:
        longest = need.kv_tokens + 1 - need.prompt_tokens
        answer = min(float(longest), self._answer)
        context = need.prompt_tokens + int(answer) // 2
        return [AnswerForecast(each, held[each], context, answer, need.slo) for each in decodes]

    def _pair(
        self, need: Need, fleet: Fleet, prompts: list[PromptForecast], answers: list[AnswerForecast]
    ) -> Pair | None:
        best: tuple[PromptForecast, AnswerForecast] | None = None
        cost_s = runner_up_s = math.inf
        pairs, locals_ = self._allowed(fleet)
        for answer in answers:
            worker, missing = answer.worker, max(1, need.prompt_tokens - answer.cached)
            if pairs:
                whole_s = worker.transfer.seconds(fleet.kv_bytes(missing, worker.page_tokens))
            for prompt in prompts:
                if prompt.worker is worker:
                    if not locals_:
                        continue
                    total = prompt.cost_s + answer.cost_s + answer.here_s
                elif pairs:
                    total = prompt.cost_s + answer.cost_s
                    exposed_s = _exposed(prompt, whole_s, missing)
                    total += exposed_s if exposed_s <= answer.slack_s else exposed_s + MISS_S
                else:
                    continue
                if total < cost_s:
                    best, cost_s, runner_up_s = (prompt, answer), total, cost_s
                elif total < runner_up_s:
                    runner_up_s = total
        if best is None:
            return None
        prompt, answer = best
        forecast = _forecast(prompt, answer.step_s, cost_s, runner_up_s, answer.tokens)
        return Pair(prompt.worker.peer, answer.worker.peer, forecast)

    def _allowed(self, fleet: Fleet) -> tuple[bool, bool]:
        """Whether two workers may share a request, and whether one may do it all."""
        if self._mode is Mode.ADAPTIVE:
            return True, True
        if self._mode is Mode.DISAGGREGATED:
            return True, len(fleet.live) == 1
        return not fleet.colocates, True


def _match(need: Need, fleet: Fleet) -> PrefixMatch:
    return fleet.prefixes.match(need.digests) if need.digests else NO_MATCH


def _prompts(need: Need, workers: Iterable[WorkerBooks], held: _Held) -> list[PromptForecast]:
    late_s = need.slo.ttft_s - need.waited_s
    return [PromptForecast(each, need.prompt_tokens, held[each], late_s) for each in workers]


def _first(ranking: Iterable[WorkerBooks], takes: _Takes, count: int) -> list[WorkerBooks]:
    found: list[WorkerBooks] = []
    for worker in islice(ranking, _LOOK):
        if takes(worker):
            found.append(worker)
            if len(found) == count:
                break
    return found


def _holders(fleet: Fleet, match: PrefixMatch, count: int) -> list[WorkerBooks]:
    """Who holds most of the prompt."""
    workers = (fleet.worker(slot) for slot in match.longest(count))
    return [worker for worker in workers if worker is not None]


class _Held(dict[WorkerBooks, int]):
    """Tokens of a prompt that workers hold, each looked up once."""

    def __init__(self, match: PrefixMatch) -> None:
        super().__init__()
        self._match = match

    def __missing__(self, worker: WorkerBooks) -> int:
        found = self[worker] = self._match.pages(worker.slot) * worker.page_tokens
        return found


def _exposed(prompt: PromptForecast, whole_s: float, missing: int) -> float:
    """Seconds for which the answer waits for its KV: pages of earlier chunks move while later ones are computed, the
    last chunk's cannot. `whole_s` is the transfer of all `missing` tokens.
    """
    last_s = whole_s * prompt.last_chunk / missing if prompt.last_chunk < missing else whole_s
    rest_s = whole_s - prompt.compute_s
    return last_s if last_s > rest_s else rest_s


def _without_answer(prompts: list[PromptForecast]) -> Pair:
    """A prompt whose first token is the last."""
    first, *others = sorted(prompts, key=lambda prompt: prompt.cost_s)
    runner_up_s = others[0].cost_s if others else math.inf
    return Pair(first.worker.peer, None, _forecast(first, 0.0, first.cost_s, runner_up_s))


def _forecast(
    prompt: PromptForecast, itl_s: float, cost_s: float, runner_up_s: float, answer_tokens: float = 0.0
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
        measured=prompt.worker.cost.parameters.observed > 0,
    )
