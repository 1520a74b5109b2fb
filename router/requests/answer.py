"""The client's end of a request: pieces as they become certain, then an ending or an error."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from router.text.token_scores import TokenScore
from wire.errors import Cancelled, TandemError
from wire.messages import FinishReason
from wire.tracing.timeline import Timeline


@dataclass(slots=True)
class Piece:
    """The next piece of the answer: certain text (may be "") and the tokens since the last piece.

    `scores` has one entry for each token if log probabilities were asked for, else none.
    """

    text: str
    token_ids: list[int]
    scores: list[TokenScore]


@dataclass(frozen=True, slots=True)
class Ending:
    """How the answer ended, with counts in tokens."""

    finish_reason: FinishReason
    matched_stop: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: Timeline


class Answer:
    """One answer on its way to one reader. Belongs to the event loop.

    A reader slower than the model gets larger pieces, never more memory than the answer's tokens. Whoever holds it
    calls `close` at last, in every case: that cancels what still runs.
    """

    __slots__ = ("_close", "_ending", "_error", "_leave", "_piece", "_waiter", "at_once", "request_id", "token_count")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.token_count = 0
        """Tokens that were pushed so far."""
        self.at_once = False
        """Whether the newest piece came as soon as it could: its reader waited for it, and it for nothing."""
        self._leave: Callable[[int], None] | None = None
        self._close: Callable[[], None] | None = None
        self._piece: Piece | None = None
        self._ending: Callable[[], Ending] | None = None
        self._error: TandemError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def connect(self, leave: Callable[[int], None], close: Callable[[], None]) -> None:
        """Router side: call `leave` with the number of tokens of each piece that leaves, `close` once the reader is
        gone or has heard of an error.
        """
        self._leave, self._close = leave, close

    @property
    def over(self) -> bool:
        """Whether its end is known: nothing may be pushed any more."""
        return self._ending is not None or self._error is not None

    async def next(self) -> Piece | Ending:
        """The next piece, or the ending (after which there is nothing); raises the request's `TandemError`, `Cancelled`
        once it is closed.
        """
        while True:
            if self._piece is not None:
                piece, self._piece = self._piece, None
                if self._leave is not None:
                    self._leave(len(piece.token_ids))
                return piece
            if self._ending is not None:
                return self._ending()
            if self._error is not None:
                self._let_go()
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def close(self) -> None:
        """The reader is gone or satisfied. Idempotent."""
        if self._close is not None:
            self._let_go()
            self.fail(Cancelled("the client left"))

    def push(self, text: str, token_ids: list[int], scores: list[TokenScore], *, waited: bool = False) -> None:
        """Router side: more text and tokens, with a score for each of these or for none. `waited`: they were kept back
        for others to travel with.
        """
        self.token_count += len(token_ids)
        if self._piece is None:
            self._piece = Piece(text, token_ids, scores)
            self.at_once = self._waiter is not None and not waited
        else:
            self._piece.text += text
            self._piece.token_ids.extend(token_ids)
            self._piece.scores.extend(scores)
        self._wake()

    def finish(self, ending: Callable[[], Ending]) -> None:
        """Router side: the answer is complete; `ending` is asked for as the last message leaves."""
        self._ending = ending
        self._wake()

    def fail(self, error: TandemError) -> None:
        """Router side: the answer ends with `error`, after the pieces that are out already."""
        self._error = error
        self._wake()

    def _let_go(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()
        self._leave = self._ending = None  # they hold the request

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
