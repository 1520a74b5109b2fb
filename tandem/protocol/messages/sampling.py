"""Sampling parameters and log probabilities."""

from collections.abc import Iterator
from dataclasses import dataclass

INT32_MAX = 2**31 - 1
"""Maximum of `max_tokens`, `top_k` and other numbers of tokens in a request."""
SEED_MAX = 2**64 - 1
TEMPERATURE_MAX = 100.0
LOGPROBS_MAX = 20
"""Maximum number of alternatives whose log probabilities can be requested per token."""
FREQUENCY_MAX = PRESENCE_MAX = 2.0
"""Maximum absolute value of the frequency and presence penalties."""
REPETITION_MIN, REPETITION_MAX = 1e-6, 100.0
"""Minimum and maximum of the repetition penalty; within them no logit overflows."""
LOGIT_BIAS_MAX = 100.0
"""Maximum absolute value of a logit bias."""
LOGIT_BIASES_MAX = 1024
"""Maximum number of tokens that a request may give a logit bias."""
PROMPT_SCORES_MAX = 1 << 18
"""Maximum number of log probabilities that are returned for one prompt, alternatives included."""
CACHE_RETENTION_MAX_S = 86400.0
"""Maximum time in seconds for which a request may ask to keep its pages."""
CACHE_SALT_MAX = 512
"""Maximum number of characters of a cache salt in messages to workers."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters; `temperature` 0 is greedy, `top_k` 0 keeps all tokens.

    `logprobs` is the number of alternatives reported with each chosen token, None = no log probabilities. Until the
    answer has `min_tokens` tokens, tokens that would end it are not sampled. `prompt_logprobs` is the number of
    alternatives reported with each token of the prompt, None = no log probabilities of the prompt.
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
    speculate: bool = True
    """False to turn speculative decoding off for this request; the answer does not change."""
    grammar: str = ""
    """The grammar that the answer must follow (`tandem/tokenizers/grammars.py`); "" = none."""
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the value that is added to its logit, before penalties and temperature."""

    @property
    def runs_to_limit(self) -> bool:
        """True if no token can end the answer before `max_tokens`; a stop string still may."""
        return (self.ignore_eos and not self.stop_token_ids) or self.min_tokens >= self.max_tokens

    @property
    def penalized(self) -> bool:
        """True if a frequency, presence or repetition penalty is set, so that the logits depend on earlier tokens."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1

    def prompt_scores(self, prompt_tokens: int) -> int:
        """Return the number of log probabilities that are reported for a prompt, alternatives included."""
        return 0 if self.prompt_logprobs is None else prompt_tokens * (1 + self.prompt_logprobs)

    @property
    def masked_tokens(self) -> int:
        """Number of leading answer tokens whose logits are changed by a logit bias or `min_tokens`, before penalties.

        See `tandem/engine/logits_mask.py`.
        """
        return self.max_tokens if self.logit_bias else self.min_tokens

    @property
    def needs_history(self) -> bool:
        """True if sampling depends on the earlier tokens and not only on the logits."""
        return self.penalized or self.grammar != ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities (natural logarithm) at one position: of the chosen token and of the most likely tokens."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a prompt's tokens given the tokens before them, starting with the second token.

    `chosen` has one entry for each of the n tokens. `top_ids` and `top` have n · `top_count` entries: the most likely
    alternatives of the first token, then those of the second, and so on.
    """

    chosen: tuple[float, ...]
    top_count: int = 0
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()

    def tokens(self) -> Iterator[TokenLogprobs]:
        """Iterate over the tokens: the log probabilities of each."""
        for number, chosen in enumerate(self.chosen):
            some = slice(number * self.top_count, (number + 1) * self.top_count)
            yield TokenLogprobs(chosen, self.top_ids[some], self.top[some])
