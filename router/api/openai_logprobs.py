"""Log probabilities as OpenAI clients expect them, in the two shapes of the two APIs."""

from collections.abc import Sequence
from typing import Any

from router.text.token_scores import ScoredToken, TokenScore

_LEAST = -9999.0
"""Stands for what JSON has no number for: the logarithm of 0, or of what a broken model gives."""


def chat_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions: an entry for each token, the end of sequence included."""
    content = [{**_entry(each.chosen), "top_logprobs": [_entry(other) for other in each.top]} for each in scores]
    return {"content": content, "refusal": None}


def completion_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions; the chosen token is among the top ones, or stands beside them."""
    return {
        "tokens": [_text(each.chosen.utf8) for each in scores],
        "token_logprobs": [_number(each.chosen.logprob) for each in scores],
        "top_logprobs": [
            {_text(token.utf8): _number(token.logprob) for token in (*each.top, each.chosen)} for each in scores
        ],
        "text_offset": [each.offset for each in scores],
    }


def _entry(token: ScoredToken) -> dict[str, Any]:
    return {"token": _text(token.utf8), "logprob": _number(token.logprob), "bytes": list(token.utf8)}


def _text(utf8: bytes) -> str:
    """As OpenAI writes a part of a character: tokens that differ must not become one replacement character."""
    try:
        return utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)


def _number(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST  # NaN compares false
