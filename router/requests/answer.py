"""The stream that the client receives: chunks of the answer whose text is final, then an ending or an error.

The text of a token is final once no later token can change it: a character may be spread over several tokens, and a
stop string may begin in one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from router.text.token_scores import TokenScore
from tandem.protocol.errors import Cancelled, Internal, TandemError
from tandem.protocol.lifecycle.events import Timeline
from tandem.protocol.messages import FinishReason, PromptLogprobs


@dataclass(slots=True)
class AnswerChunk:
    """The next chunk of an answer: the text that has become final ("" if none), and the tokens since the last chunk.

    `scores` has one entry per token if log probabilities were requested, else none.
    """

    text: str
    token_ids: list[int]
    scores: list[TokenScore]


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of a complete answer, which the reply shows after the last chunk; counts are in tokens."""

    finish_reason: FinishReason
    matched_stop: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Number of prompt tokens whose KV was read from a prefix cache."""
    cache_written_tokens: int
    """Number of prompt tokens whose KV this request has added to a prefix cache."""
    timeline: Timeline


class Answer:
    """The buffer of one answer between the router, which pushes chunks, and one reader.

    All calls are on the event loop. Chunks that the reader has not read yet are joined, so that a slow reader gets
    larger chunks and the buffer never holds more than the answer's tokens. The reader owns the answer and must call
    `close` in every case: `close` aborts the request if it is still running.
    """

    __slots__ = (
        "_begun",
        "_chunk",
        "_close",
        "_ending",
        "_error",
        "_leave",
        "_waiter",
        "at_once",
        "prompt_logprobs",
        "request_id",
        "token_count",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.token_count = 0
        """Number of tokens pushed so far."""
        self.at_once = False
        """True if the newest chunk reached the reader without delay: not batched, and the reader waited for it."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """The prompt's log probabilities, set before the first chunk is pushed; None if not requested."""
        self._leave: Callable[[int], None] | None = None
        self._close: Callable[[], None] | None = None
        self._chunk: AnswerChunk | None = None
        self._ending: Callable[[], AnswerEnd] | None = None
        self._error: TandemError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._begun: asyncio.Future[None] | None = None
        """The future on which `scores_of_prompt` waits for the first token; None if it is not waiting."""

    def connect(self, leave: Callable[[int], None], close: Callable[[], None]) -> None:
        """Router side: set the callbacks of the request.

        `leave` is called for each chunk that is read, with its number of tokens. `close` is called once, when the
        reader closes the answer or has received an error.
        """
        self._leave, self._close = leave, close

    @property
    def over(self) -> bool:
        """True if the answer has its ending or its error, after which nothing may be pushed."""
        return self._ending is not None or self._error is not None

    async def scores_of_prompt(self) -> PromptLogprobs | None:
        """Wait for the first token, and return the log probabilities of the prompt; only one caller may wait.

        None if the answer ends without a token. Raises Internal if the worker sent the first token without the prompt's
        log probabilities.
        """
        while self.prompt_logprobs is None and not self.token_count and not self.over:
            self._begun = asyncio.get_running_loop().create_future()
            try:
                await self._begun
            finally:
                self._begun = None
        if self.prompt_logprobs is None and self.token_count:
            raise Internal("the worker sent no log probabilities of the prompt; run workers of the router's release")
        return self.prompt_logprobs

    async def next(self) -> AnswerChunk | AnswerEnd:
        """Wait for the next chunk and return it; after the last chunk, return the ending.

        Raises the request's `TandemError`, or `Cancelled` once the answer is closed.
        """
        while True:
            if self._chunk is not None:
                chunk, self._chunk = self._chunk, None
                if self._leave is not None:
                    self._leave(len(chunk.token_ids))
                return chunk
            if self._ending is not None:
                return self._ending()
            if self._error is not None:
                self._disconnect()
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def close(self) -> None:
        """Reader side: stop reading, whether or not the answer is complete. May be called several times."""
        if self._close is not None:
            self._disconnect()
            self.fail(Cancelled("the client left"))

    def push(self, text: str, token_ids: list[int], scores: list[TokenScore], *, waited: bool = False) -> None:
        """Router side: add final text and tokens; `scores` has an entry for each token, or none at all.

        `waited` is True if the tokens were delayed to be sent together with later tokens.
        """
        self.token_count += len(token_ids)
        if self._chunk is None:
            self._chunk = AnswerChunk(text, token_ids, scores)
            self.at_once = self._waiter is not None and not waited
        else:
            self._chunk.text += text
            self._chunk.token_ids.extend(token_ids)
            self._chunk.scores.extend(scores)
        self._wake()

    def finish(self, ending: Callable[[], AnswerEnd]) -> None:
        """Router side: complete the answer; `ending` is called once the reader has read all chunks."""
        self._ending = ending
        self._wake()

    def fail(self, error: TandemError) -> None:
        """Router side: end the answer with `error`, which the reader gets after the chunks that were pushed before."""
        self._error = error
        self._wake()

    def _disconnect(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()
        self._leave = self._ending = None  # the callbacks would keep the request alive

    def _wake(self) -> None:
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
