"""Puts the tokens of one answer in order, each exactly once, even if workers report them out of order or twice."""

from tandem.protocol.errors import Unavailable
from tandem.protocol.messages import FinishReason, TokenLogprobs


class TokenAssembler:
    """Orders the tokens of one answer by index. The `RoutedRequest` owns it; all calls are on the event loop.

    The first token comes from the prefill worker and the others from the decode worker, so the first may arrive after
    others. A later attempt continues after the tokens already sent, or repeats some of them.

    A repeated token must equal the token that was sent first. It may differ although sampling is seeded: another
    attempt runs in another batch, whose rounding can change the choice between tokens of almost equal probability. The
    tokens after it would continue an answer that the client never saw.
    """

    __slots__ = ("_early", "_finish", "_finish_at", "_token_ids")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._early: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._finish: FinishReason | None = None
        self._finish_at = 0

    @property
    def count(self) -> int:
        """Number of tokens in order so far, which is also the index of the next token."""
        return len(self._token_ids)

    def first(self, count: int) -> tuple[int, ...]:
        """Return the first `count` tokens, all of which must have arrived in order."""
        return tuple(self._token_ids[:count])

    def add(
        self, first_index: int, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Add tokens that begin at `first_index`; return the tokens that are now next in order, with their logprobs.

        Tokens after a gap are kept until the gap is filled, and repeated tokens are dropped. `logprobs` has one entry
        per token, or none at all. Raises Unavailable if a repeated token differs from the one already sent.
        """
        if first_index == len(self._token_ids) and not self._early:
            return self.extend(token_ids), logprobs
        pairs = zip(token_ids, logprobs or (None,) * len(token_ids), strict=True)
        for index, (token_id, score) in enumerate(pairs, first_index):
            if index >= self.count:
                self._early[index] = token_id, score
            elif token_id != self._token_ids[index]:
                raise Unavailable(
                    f"the request was computed again and its token {index} came out differently from the one already "
                    "sent, so the answer cannot go on; send the request again"
                )
        start, scores = self.count, []
        while self.count in self._early:
            token_id, score = self._early.pop(self.count)
            self._token_ids.append(token_id)
            if score is not None:
                scores.append(score)
        return tuple(self._token_ids[start:]), tuple(scores)

    def only_continues_at(self, index: int) -> bool:
        """Return True if `index` is next in order, no tokens after a gap are kept, and the answer's end is unknown."""
        return index == len(self._token_ids) and not self._early and self._finish is None

    def extend(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Add tokens that are known to be next in order, and return them."""
        self._token_ids += token_ids
        return token_ids

    def finish_at(self, end: int, reason: FinishReason) -> None:
        """Record that the answer ends after `end` tokens, with finish reason `reason`."""
        self._finish, self._finish_at = reason, end

    @property
    def finished(self) -> FinishReason | None:
        """The finish reason, once all tokens of the answer are in order; None before."""
        return self._finish if self._finish is not None and self.count >= self._finish_at else None

    def restart(self) -> None:
        """Begin a new attempt: keep the tokens that are in order, and drop the tokens after a gap."""
        self._early.clear()
        self._finish = None
