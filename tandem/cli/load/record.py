"""The client's record of one request."""

from dataclasses import dataclass
from http import HTTPStatus

import numpy as np

from tandem.protocol.errors import ResourceExhausted

WRONG_LENGTH = "WRONG_LENGTH"
"""The error code of an answer that ended without an error but with the wrong number of tokens."""
_REJECTED = (ResourceExhausted.code, f"HTTP {HTTPStatus.TOO_MANY_REQUESTS:d}")
"""The error codes, over gRPC and HTTP, of requests that a server rejects at once for lack of capacity."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The record that a client keeps of one request. Times are in seconds after the common start of all clients.

    `token_s` has the arrival time of each token of the answer; tokens of one message have the same time, and `chunks`
    is the number of messages. Over HTTP, whose messages do not say how many tokens they hold, `token_s` has one time
    per message. If the answer is not complete, for example after an error, `finish` is empty and the fields after
    `error` are 0 or empty.
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
    """Code of the TandemError; empty for a complete answer."""
    retry_after_s: float = 0.0
    """Seconds after which the server says to send a failed request again; 0 = it does not say."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""

    @property
    def tokens(self) -> int:
        """The answer's length in tokens as the server counted it; for an incomplete answer, the tokens that arrived."""
        return self.completion_tokens or len(self.token_s)

    @property
    def rejected(self) -> bool:
        """True if the server rejected the request for lack of capacity."""
        return self.error in _REJECTED

    @property
    def lateness_s(self) -> float:
        """Seconds from the due time until the request was sent."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        """TTFT in seconds, from the DUE time to the first token; None without a token."""
        return self.token_s[0] - self.due_s if self.token_s else None

    @property
    def end_to_end_s(self) -> float:
        """Seconds from the due time to the end of the request, successful or not."""
        return self.ended_s - self.due_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Inter-token gaps in seconds; tokens of one message have gaps of 0."""
        return tuple(b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def tpot_s(self) -> float | None:
        """TPOT: mean seconds per token after the first token; None if fewer than two token times are known."""
        return (self.token_s[-1] - self.token_s[0]) / (self.tokens - 1) if len(self.token_s) > 1 else None

    @property
    def worst_decile_s(self) -> float | None:
        """Mean of the longest 10 % of the gaps (rounded up to whole gaps), in seconds; None without a gap."""
        gaps = sorted(self.gaps_s, reverse=True)
        return float(np.mean(gaps[: -(-len(gaps) // 10)])) if gaps else None
