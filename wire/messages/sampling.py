"""How tokens are chosen, and how likely the chosen ones were."""

from dataclasses import dataclass

LOGPROBS_MAX = 20
"""Most tokens that can be reported beside each chosen one."""
FREQUENCY_MAX = PRESENCE_MAX = 2.0
"""Largest absolute value of these penalties."""
REPETITION_MIN, REPETITION_MAX = 1e-6, 100.0
"""Limits of that penalty, within which no logit overflows."""
CACHE_SALT_MAX = 512
"""Most characters of a cache salt on its way to workers."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; already validated. `temperature` 0 is greedy, `top_k` 0 keeps all.

    `logprobs` is how many tokens are reported beside each chosen one, None = no log probabilities at all. Until the
    answer has `min_tokens` tokens, no token is chosen that would end it.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    min_tokens: int = 0

    @property
    def runs_to_limit(self) -> bool:
        """Whether no token ends the answer before `max_tokens`; a stop string still may."""
        return (self.ignore_eos and not self.stop_token_ids) or self.min_tokens >= self.max_tokens

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the choice."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities where one token was chosen: its own, and the `top` most likely ones."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()
