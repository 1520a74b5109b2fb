"""Log probabilities in OpenAI's two forms: that of chat completions and that of completions."""

from collections.abc import Sequence
from typing import Any

from router.text.token_scores import ScoredToken, TokenScore

_LEAST = -9999.0
"""The lowest log probability in replies; it replaces lower values, and -inf and NaN, which JSON cannot represent."""


def chat_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """Return the `logprobs` of a choice of /v1/chat/completions: one entry per token, including the end of sequence."""
    content = [{**_entry(score.chosen), "top_logprobs": [_entry(token) for token in score.top]} for score in scores]
    return {"content": content, "refusal": None}


def completion_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """Return the `logprobs` of a choice of /v1/completions; its top tokens always include the chosen one."""
    return {
        "tokens": [entry_text(score.chosen.utf8) for score in scores],
        "token_logprobs": [finite(score.chosen.logprob) for score in scores],
        "top_logprobs": [
            {entry_text(token.utf8): finite(token.logprob) for token in (*score.top, score.chosen)} for score in scores
        ],
        "text_offset": [score.offset for score in scores],
    }


def _entry(token: ScoredToken) -> dict[str, Any]:
    return {"token": entry_text(token.utf8), "logprob": finite(token.logprob), "bytes": list(token.utf8)}


def entry_text(utf8: bytes) -> str:
    """Return the text of a token; bytes of an incomplete character are shown as hex, so that tokens stay distinct."""
    try:
        return utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)


def finite(logprob: float) -> float:
    """Return `logprob` as a number that JSON can represent: at least `_LEAST`, also for NaN."""
    return logprob if logprob > _LEAST else _LEAST  # NaN compares false
