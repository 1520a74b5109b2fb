"""The record of one request at its client."""

from dataclasses import dataclass

import numpy as np

WRONG_LENGTH = "WRONG_LENGTH"
"""The error code of an answer that ended without an error, but with a wrong number of tokens."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times in seconds after the common start of all clients; `token_s` has one for each token of the answer.

    Tokens of one message have the same time; `chunks` is the number of messages. By HTTP, whose messages do not say how
    many tokens they hold, `token_s` has one time for each message. Without an end, as after an error,
    `finish` is empty and the fields after `error` are 0 or empty.
    """

    index: int
    due_s: float
    sent_s: float
    ended_s: float
    token_s: tuple[float, ...]
    asked_tokens: int
    chunks: int = 0
    finish: str = ""
    """Name of the FinishReason."""
    error: str = ""
    """Code of the typed error, empty for a complete answer."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of the answer as the server counted them; of one that did not end, those that arrived."""
        return self.completion_tokens or len(self.token_s)

    @property
    def lateness_s(self) -> float:
        """Seconds from the due time to the sending."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the DUE time to the first token; None without a token."""
        return self.token_s[0] - self.due_s if self.token_s else None

    @property
    def end_to_end_s(self) -> float:
        """Seconds from the due time to the end, with or without an error."""
        return self.ended_s - self.due_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between each token and the next; 0 for tokens of one message."""
        return tuple(b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None with fewer than two messages, whose times would differ."""
        return (self.token_s[-1] - self.token_s[0]) / (self.tokens - 1) if len(self.token_s) > 1 else None

    @property
    def worst_decile_s(self) -> float | None:
        """Mean of the longest tenth of the gaps, rounded up; None with fewer than two tokens."""
        gaps = sorted(self.gaps_s, reverse=True)
        return float(np.mean(gaps[: -(-len(gaps) // 10)])) if gaps else None
