"""The progress of one prompt's computation, on which its hand-over waits."""

import asyncio

from tandem.protocol.errors import TandemError
from tandem.protocol.messages import FinishReason


class Progress:
    """The progress of one prompt's computation.

    `released` means that the engine never uses the prompt's pages again. Used on the event loop only: the engine
    thread's updates arrive there as calls, so no lock is needed. Owned by the prefill request; the hand-over waits for
    changes.
    """

    def __init__(self) -> None:
        self.computed_tokens = 0
        self.first_token_id: int | None = None
        self.finish_reason: FinishReason | None = None
        self.failure: TandemError | None = None
        self.released = False
        self._changed = asyncio.Event()

    def advance(self, computed_tokens: int) -> None:
        """Record that the pages have the KV of the first `computed_tokens` positions."""
        self.computed_tokens = computed_tokens
        self._changed.set()

    def finish(self, first_token_id: int, finish_reason: FinishReason | None) -> None:
        """Record that the whole prompt is computed; `finish_reason` is set if the first token ends the answer."""
        self.first_token_id = first_token_id
        self.finish_reason = finish_reason
        self.release()

    def release(self, failure: TandemError | None = None) -> None:
        """Record that the engine never uses this request's pages again.

        `failure` is the reason if the prompt was not computed completely.
        """
        self.failure = self.failure or failure
        self.released = True
        self._changed.set()

    async def beyond(self, tokens: int) -> None:
        """Wait until more than `tokens` positions are computed, or until the engine has released the request."""
        while self.computed_tokens <= tokens and not self.released:
            self._changed.clear()
            await self._changed.wait()

    async def until_released(self) -> None:
        """Wait until the engine has released the request."""
        while not self.released:
            self._changed.clear()
            await self._changed.wait()
