"""Turns the tokens of one answer into text, and cuts it at a stop string."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings
from router.text.token_scores import TokenScore, format_logprobs
from tandem.protocol.messages import FinishReason, TokenLogprobs


class TokenText(Protocol):
    """The interface for decoding tokens, implemented by the tokenizer; any thread may call it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token."""


@dataclass(slots=True)
class TextJob:
    """The next tokens of one answer to detokenize, and the finish reason if the answer ends with them.

    `AnswerText.run` fills in `text`, `scores` and `matched_stop`. `logprobs` has one entry per token if log
    probabilities were requested, else none; `scores` are made from it.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    scores: list[TokenScore] = field(default_factory=list)
    text: str = ""
    matched_stop: str = ""


class AnswerText:
    """The detokenizer and the stop strings of one answer.

    The request owns it, and only the text thread calls it.
    """

    __slots__ = ("_chars", "_count", "_detokenizer", "_kept", "_min_tokens", "_stops", "_tokens")

    def __init__(
        self,
        tokens: TokenText,
        stop: Sequence[str],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        kept: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """`kept` has the special tokens that stay in the text: their texts by token id.

        A stop string that is complete within the first `min_tokens` tokens does not end the answer.
        """
        self._kept = kept
        self._tokens = tokens
        self._detokenizer = Detokenizer(tokens.decode)
        self._stops = StopStrings(stop, include=include_stop)
        self._chars = 0
        self._count = 0
        self._min_tokens = min_tokens

    def run(self, job: TextJob) -> None:
        """Fill in the job's text and scores; at a stop string, cut off text, scores and tokens."""
        if self._stops.matched:
            job.token_ids = []
            return
        out = [self._add_all(job.token_ids)] if self._is_plain(job) else self._add_each(job)
        if job.finish is not None and not self._stops.matched:
            out.append(self._stops.add(self._detokenizer.flush(), may_match=self._count > self._min_tokens))
            out.append(self._stops.flush())
        job.text = "".join(out)
        job.matched_stop = self._stops.matched

    def _is_plain(self, job: TextJob) -> bool:
        """Return True if all tokens can be decoded at once: no stop strings, no log probabilities, no kept tokens."""
        return not self._stops.any and not job.logprobs and self._kept.keys().isdisjoint(job.token_ids)

    def _add_all(self, token_ids: Sequence[int]) -> str:
        piece = self._detokenizer.add_all(token_ids)
        self._chars += len(piece)
        self._count += len(token_ids)
        return piece

    def _add_each(self, job: TextJob) -> list[str]:
        """Decode the tokens one by one and return their texts; also fill in scores, and cut at a stop string."""
        out: list[str] = []
        for count, token_id in enumerate(job.token_ids, 1):
            if job.logprobs:
                job.scores.append(
                    format_logprobs(token_id, job.logprobs[count - 1], self._chars, self._tokens.token_bytes)
                )
            kept = self._kept.get(token_id)
            piece = self._detokenizer.add(token_id) if kept is None else self._detokenizer.flush() + kept
            self._chars += len(piece)
            self._count += 1
            out.append(self._stops.add(piece, may_match=self._count > self._min_tokens))
            if self._stops.matched:
                job.token_ids = job.token_ids[:count]
                break
        return out
