"""The load that clients put on the cluster, and the latency targets of their requests."""

import math
from dataclasses import dataclass

from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork, chunk_pairs

LENGTH_CV2 = 1.0
"""Squared coefficient of variation that is assumed of prompt lengths: 0.9 for lognormal lengths with sigma 0.8."""


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Latency targets in seconds: time to first token and inter-token latency; infinite = no target."""

    ttft_s: float = math.inf
    gap_s: float = math.inf

    @property
    def text(self) -> str:
        """The targets as text."""
        ttft = "no TTFT target" if self.ttft_s == math.inf else f"TTFT {self.ttft_s * 1e3:.0f} ms"
        gap = "no ITL target" if self.gap_s == math.inf else f"ITL {self.gap_s * 1e3:.1f} ms"
        return f"{ttft}, {gap}"


@dataclass(frozen=True, slots=True)
class Demand:
    """A load: requests per second, and their mean lengths in tokens.

    `cached` is the fraction of prompt tokens whose KV is in prefix caches.
    """

    per_s: float
    prompt_tokens: float
    answer_tokens: float
    cached: float = 0.0

    def towards(self, newest: "Demand", part: float) -> "Demand":
        """Return a weighted mean of this demand and `newest`, which has the weight `part`.

        Rates of requests and of tokens are averaged; mean lengths follow from them.
        """

        def mixed(old: float, new: float) -> float:
            return (1 - part) * old + part * new

        per_s = mixed(self.per_s, newest.per_s)
        prompts = mixed(self.per_s * self.prompt_tokens, newest.per_s * newest.prompt_tokens)
        answers = mixed(self.per_s * self.answer_tokens, newest.per_s * newest.answer_tokens)
        computed = mixed(self.per_s * self.computed_tokens, newest.per_s * newest.computed_tokens)
        return Demand(per_s, prompts / per_s, answers / per_s, 1 - computed / prompts if prompts else 0.0)

    def differs(self, other: "Demand") -> float:
        """Return the difference of two demands: the larger |log ratio| of computed prompt and output tokens per second.

        0 = equal, 1 = a factor of e.
        """
        return max(
            abs(math.log(max(rate, 1e-9) / max(other_rate, 1e-9)))
            for rate, other_rate in (
                (self.per_s * self.computed_tokens, other.per_s * other.computed_tokens),
                (self.per_s * self.answer_tokens, other.per_s * other.answer_tokens),
            )
        )

    @property
    def computed_tokens(self) -> float:
        """Mean number of a request's prompt tokens that are not cached."""
        return self.prompt_tokens * (1.0 - self.cached)

    @property
    def context_tokens(self) -> float:
        """Mean number of context tokens that a request's decode row attends to, over all its steps."""
        return self.prompt_tokens + self.answer_tokens / 2

    @property
    def kv_tokens(self) -> float:
        """Number of tokens whose KV a request holds when it ends."""
        return self.prompt_tokens + self.answer_tokens

    def prompt_seconds(self, cost: StepCost, chunk_tokens: int) -> float:
        """Return the device seconds of a mean prompt in steps of `chunk_tokens` tokens, shared with other prompts.

        The prompt is charged for its share of the tokens of these steps, and for its own attention pairs.
        """
        tokens = self.computed_tokens
        if tokens <= 0:
            return 0.0
        spread = tokens * tokens / 2 * LENGTH_CV2  # long prompts have more pairs than a mean one
        pairs = chunk_pairs(int(tokens), int(self.prompt_tokens - tokens)) + spread
        steps = tokens / chunk_tokens
        return steps * cost.seconds(StepWork(prefill_tokens=chunk_tokens, prefill_pairs=pairs / steps))

    def lone_prompt_seconds(self, cost: StepCost, chunk_tokens: int) -> float:
        """Return the device seconds of a mean prompt that is computed alone, in chunks of `chunk_tokens` tokens."""
        tokens = int(self.computed_tokens)
        pairs = chunk_pairs(tokens, int(self.prompt_tokens) - tokens)
        return cost.prefill_seconds(tokens, pairs, max(1, chunk_tokens))[0] if tokens > 0 else 0.0
