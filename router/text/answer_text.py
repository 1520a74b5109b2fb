"""From tokens to text, one answer at a time: what its tokens spell, up to where it stops."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings
from router.text.token_scores import TokenScore, spell
from wire.messages import FinishReason, TokenLogprobs


class TokenText(Protocol):
    """What tokens mean: the tokenizer, from any thread."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True)
class TextJob:
    """Tokens of one answer that are next in order, and how it ends if it does. `text` is the result.

    `logprobs` has one entry for each token if they were asked for, else none; `scores` is what becomes of them.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    scores: list[TokenScore] = field(default_factory=list)
    text: str = ""
    matched_stop: str = ""


class AnswerText:
    """Detokenizer and stop strings of one answer. Only the text thread touches it."""

    __slots__ = ("_chars", "_count", "_detokenizer", "_min_tokens", "_stops", "_tokens")

    def __init__(
        self, tokens: TokenText, stop: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        """A stop string that is whole with the first `min_tokens` tokens ends nothing."""
        self._tokens = tokens
        self._detokenizer = Detokenizer(tokens.decode)
        self._stops = StopStrings(stop, include=include_stop)
        self._chars = 0
        self._count = 0
        self._min_tokens = min_tokens

    def run(self, job: TextJob) -> None:
        """Fill in the job's text and scores; cut them, and its tokens, at a stop string."""
        if self._stops.matched:
            job.token_ids = []
            return
        out: list[str] = []
        for count, token_id in enumerate(job.token_ids, 1):
            if job.logprobs:
                job.scores.append(spell(token_id, job.logprobs[count - 1], self._chars, self._tokens.token_bytes))
            piece = self._detokenizer.add(token_id)
            self._chars += len(piece)
            self._count += 1
            out.append(self._stops.add(piece, may_match=self._count > self._min_tokens))
            if self._stops.matched:
                job.token_ids = job.token_ids[:count]
                break
        if job.finish is not None and not self._stops.matched:
            out.append(self._stops.add(self._detokenizer.flush(), may_match=self._count > self._min_tokens))
            out.append(self._stops.flush())
        job.text = "".join(out)
        job.matched_stop = self._stops.matched
