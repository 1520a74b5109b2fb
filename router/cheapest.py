"""The cheapest of some pairs of forecasts, and what the next best one would cost."""

from __future__ import annotations

import math
from collections.abc import Iterable

from router.fleet import Fleet
from router.step_forecast import MISS_S, AnswerForecast, PromptForecast


class Cheapest:
    """Of the pairs that it is shown; costs in seconds. The first of several that cost the same."""

    __slots__ = ("answer", "cost_s", "prompt", "runner_up_s")

    def __init__(self) -> None:
        self.prompt: PromptForecast | None = None
        self.answer: AnswerForecast | None = None
        self.cost_s = self.runner_up_s = math.inf

    def alone(self, prompts: Iterable[PromptForecast], answers: Iterable[AnswerForecast]) -> None:
        """Each prompt with the answer of the same worker, which has the same place."""
        for prompt, answer in zip(prompts, answers, strict=True):
            cost_s = prompt.cost_s + answer.cost_s
            if prompt.ttft_s > answer.held_until_s:
                cost_s += answer.here_s
            self._look(prompt, answer, cost_s)

    def together(
        self, prompts: list[PromptForecast], answers: list[AnswerForecast], fleet: Fleet, *, local: bool
    ) -> None:
        """Each prompt with each answer; only if `local` may one worker do both."""
        misfits = fleet.misfits or None
        least_s = min([prompt.cost_s for prompt in prompts])
        for answer in answers:
            # What pairs cost beside their forecasts only makes them dearer.
            if least_s + answer.cost_s >= self.runner_up_s:
                continue
            worker = answer.worker
            whole_s = worker.transfer.seconds(fleet.kv_bytes(answer.missing, worker.page_tokens))
            for prompt in prompts:
                cost_s = prompt.cost_s + answer.cost_s
                if cost_s >= self.runner_up_s:
                    continue
                if prompt.worker is not worker:
                    if misfits is not None and not misfits.fit(prompt.worker.peer, worker.peer):
                        continue
                    exposed_s = _exposed(prompt, whole_s, answer.missing)
                    late = exposed_s > answer.slack_s
                    self._look(prompt, answer, cost_s + (exposed_s + MISS_S if late else exposed_s))
                elif local:
                    if prompt.ttft_s > answer.held_until_s:
                        cost_s += answer.here_s
                    self._look(prompt, answer, cost_s)

    def _look(self, prompt: PromptForecast, answer: AnswerForecast, cost_s: float) -> None:
        if cost_s < self.cost_s:
            self.prompt, self.answer = prompt, answer
            self.cost_s, self.runner_up_s = cost_s, self.cost_s
        elif cost_s < self.runner_up_s:
            self.runner_up_s = cost_s


def _exposed(prompt: PromptForecast, whole_s: float, missing: int) -> float:
    """Seconds for which the answer waits for its KV: pages of earlier chunks move while later ones are computed, the
    last chunk's cannot. `whole_s` is the transfer of all `missing` tokens.
    """
    last = (prompt.computed - 1) % prompt.worker.max_step_tokens + 1
    last_s = whole_s * last / missing if last < missing else whole_s
    rest_s = whole_s - prompt.compute_s
    return last_s if last_s > rest_s else rest_s
