"""What clients ask of the cluster, and what they were promised."""

import math
from dataclasses import dataclass

from costs.step_cost import StepCost, chunk_pairs
from wire.cost_parameters import CostParameters

LENGTH_CV2 = 1.0
"""Deviation over mean of prompt lengths, squared, where only the mean is known: 0.9 of lognormal ones of sigma 0.8."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Targets in seconds, of the first token and between tokens; infinite = none."""

    ttft_s: float = math.inf
    gap_s: float = math.inf

    @property
    def text(self) -> str:
        """For a person."""
        ttft = "no TTFT target" if self.ttft_s == math.inf else f"TTFT {self.ttft_s * 1e3:.0f} ms"
        gap = "no ITL target" if self.gap_s == math.inf else f"ITL {self.gap_s * 1e3:.1f} ms"
        return f"{ttft}, {gap}"


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests a second, and the mean tokens of each. `cached` is the part of prompt tokens that caches hold."""

    per_s: float
    prompt_tokens: float
    answer_tokens: float
    cached: float = 0.0

    def towards(self, newest: "Demand", part: float) -> "Demand":
        """So far towards `newest`: all that comes in a second is mixed, and lengths are its means."""

        def mixed(old: float, new: float) -> float:
            return (1 - part) * old + part * new

        per_s = mixed(self.per_s, newest.per_s)
        prompts = mixed(self.per_s * self.prompt_tokens, newest.per_s * newest.prompt_tokens)
        answers = mixed(self.per_s * self.answer_tokens, newest.per_s * newest.answer_tokens)
        computed = mixed(self.per_s * self.computed_tokens, newest.per_s * newest.computed_tokens)
        return Demand(per_s, prompts / per_s, answers / per_s, 1 - computed / prompts if prompts else 0.0)

    def differs(self, other: "Demand") -> float:
        """How far apart the prompt tokens, or the answer tokens, of a second are: 0 = not at all, 1 = e times."""
        return max(
            abs(math.log(max(mine, 1e-9) / max(theirs, 1e-9)))
            for mine, theirs in (
                (self.per_s * self.computed_tokens, other.per_s * other.computed_tokens),
                (self.per_s * self.answer_tokens, other.per_s * other.answer_tokens),
            )
        )

    @property
    def computed_tokens(self) -> float:
        """Of a prompt, on average."""
        return self.prompt_tokens * (1.0 - self.cached)

    @property
    def context_tokens(self) -> float:
        """That a decode row attends to, on average over an answer's life."""
        return self.prompt_tokens + self.answer_tokens / 2

    @property
    def kv_tokens(self) -> float:
        """That an answer takes at its end."""
        return self.prompt_tokens + self.answer_tokens

    def prompt_seconds(self, cost: StepCost, chunk_tokens: int) -> float:
        """Device seconds that a mean prompt takes, where steps of prompts are full."""
        tokens = self.computed_tokens
        if tokens <= 0:
            return 0.0
        return self.chunk_share_seconds(cost, chunk_tokens) + self.attention_seconds(cost)

    def lone_prompt_seconds(self, cost: CostParameters, chunk_tokens: int) -> float:
        """Seconds until a mean prompt alone is computed."""
        tokens = int(self.computed_tokens)
        return StepCost(cost).prefill_seconds(tokens, int(self.prompt_tokens) - tokens, chunk_tokens)

    def chunk_share_seconds(self, cost: StepCost, chunk_tokens: int) -> float:
        """Its share of full chunks, without attention."""
        p = cost.parameters
        chunk_s = p.base_s + p.prompt_base_s + p.token_s * max(0, chunk_tokens - p.free_tokens)
        return chunk_s * self.computed_tokens / chunk_tokens

    def attention_seconds(self, cost: StepCost) -> float:
        """Of its attention pairs; long prompts have more of them than their part of the tokens."""
        tokens = self.computed_tokens
        spread = tokens * tokens / 2 * LENGTH_CV2
        pairs = chunk_pairs(int(tokens), int(self.prompt_tokens - tokens)) + spread
        return cost.parameters.pair_s * pairs
