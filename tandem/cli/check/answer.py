"""The answer to one request, and its comparison with the answer that an idle server gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer, its log probability, and those of the most likely tokens at its position."""

    text: str
    logprob: float
    alternatives: Mapping[str, float]


@dataclass(slots=True)
class Answer:
    """The part of an answer that has arrived."""

    text: str = ""
    """The text of the first choice."""
    tokens: list[Token] = field(default_factory=list)
    """The tokens of the first choice, if the request asks for log probabilities and the server returns them."""
    counted_tokens: int = 0
    """The number of tokens with log probabilities, of all choices."""
    finish_reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    events: int = 0
    complete: bool = False
    """True after the end of the response, which of a stream is [DONE]."""
    left: bool = False
    """True if the client closed the connection before the end."""
    status: int = 0
    """The HTTP status; 0 = no response began."""
    error: str = ""
    """The reason for which the answer is incomplete, unless the client left; empty = none."""
    refusals: int = 0
    """The number of responses 429 and 503 after which the client sent the request again."""
    first_token_s: float = 0.0
    duration_s: float = 0.0

    def add(self, body: Mapping[str, Any]) -> None:
        """Add one event of a stream, or the body of a response without streaming."""
        if error := body.get("error"):
            self.error = str(error.get("message") or error) if isinstance(error, Mapping) else str(error)
        self.usage = body.get("usage") or self.usage
        for choice in body.get("choices") or ():
            tokens = list(_tokens(choice.get("logprobs") or {}))
            self.counted_tokens += len(tokens)
            if choice.get("index", 0) == 0:
                self.text += choice.get("text") or ""
                self.tokens += tokens
                self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _tokens(logprobs: Mapping[str, Any]) -> Iterator[Token]:
    texts = logprobs.get("tokens") or ()
    values = logprobs.get("token_logprobs") or [0.0] * len(texts)
    alternatives = logprobs.get("top_logprobs") or [None] * len(texts)
    for text, value, likely in zip(texts, values, alternatives, strict=True):
        yield Token(text, value or 0.0, likely or {})


class Agreement(Enum):
    """The result of comparing an answer with the reference."""

    SAME = auto()
    NEAR_TIE = auto()
    """They differ from a token on that was nearly as likely as another one, so rounding may have chosen."""
    UNEXPLAINED = auto()
    """They differ, and without log probabilities rounding cannot be excluded."""
    WRONG = auto()


def compare(answer: Answer, reference: Answer, tolerance: float) -> Agreement:
    """Compare an answer, or the beginning of one whose client left, with the reference.

    The texts may differ from the first token on for which the reference has an alternative that continues like the
    answer and whose log probability is at most `tolerance` below that of the token chosen.
    """
    text, expected = answer.text, reference.text
    if text == expected or (answer.left and expected.startswith(text)):
        return Agreement.SAME
    if not reference.tokens:
        return Agreement.UNEXPLAINED
    pairs = zip(text, expected, strict=False)
    common = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(text), len(expected)))
    start = 0
    for token in reference.tokens:
        if start > common:
            break
        rest = text[start:]
        for alternative, logprob in token.alternatives.items():
            continues = rest.startswith(alternative) if rest else _is_end(alternative) and not answer.left
            if alternative != token.text and continues and token.logprob - logprob <= tolerance:
                return Agreement.NEAR_TIE
        start += len(token.text)
    return Agreement.WRONG


def _is_end(token: str) -> bool:
    """Return True if this may be the text of a token that ends an answer: nothing, or as </s> and <|im_end|>."""
    return not token or (token.startswith("<") and token.endswith(">"))
