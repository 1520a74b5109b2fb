"""Prompts that were placed at one worker, and what of them is left to compute there."""

from __future__ import annotations

import math
from collections.abc import Callable

from costs.step_cost import chunk_pairs
from router.placed_work import PromptWork

_COMPUTED = PromptWork(0)
_ON_ITS_WAY_S = 2e-3
"""A word that comes so soon after a prompt was taken may be older."""


class PromptQueue:
    """By the worker's word, which knows how far prompts are and those of other routers, too, and beside it those of
    this router that it cannot know yet. Without its word, by this router's own books: whole prompts.
    """

    __slots__ = ("_clock", "_mine", "_pairs", "_tokens", "_told", "_untold")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mine: dict[str, PromptWork] = {}
        self._tokens = 0
        self._pairs = 0.0
        self._told: int | None = None
        """Tokens, as the worker said."""
        self._untold: dict[str, float] = {}
        """Requests that it did not count then, by when it took them."""

    def book(self, request_id: str, work: PromptWork) -> None:
        """A prompt goes there."""
        self._forget_work(self._mine.get(request_id, _COMPUTED))
        self._mine[request_id] = work
        self._untold[request_id] = math.inf
        self._tokens += work.tokens
        self._pairs += work.pairs

    def taken(self, request_id: str) -> None:
        """The worker has it, and counts it from now on."""
        if request_id in self._untold:
            self._untold[request_id] = self._clock()

    def computed(self, request_id: str) -> bool:
        """It is computed, its KV may still be on the way; whether that is news."""
        work = self._mine.get(request_id)
        if work is None or not work.tokens:
            return False
        self._mine[request_id] = _COMPUTED
        self._untold.pop(request_id, None)
        self._forget_work(work)
        return True

    def forget(self, request_id: str) -> bool:
        """It is nothing to the worker any more; whether anything of it was left."""
        work = self._mine.pop(request_id, _COMPUTED)
        self._untold.pop(request_id, None)
        self._forget_work(work)
        if work.tokens and not self._tokens:
            # Its worker may be idle now, and then says nothing more.
            self._told = None
        return work.tokens > 0

    def tell(self, tokens: int) -> bool:
        """The worker's word, after a step; whether that changes anything."""
        known, many = self._told, len(self._untold)
        self._told = tokens
        if many:
            before_s = self._clock() - _ON_ITS_WAY_S
            self._untold = {each: taken_s for each, taken_s in self._untold.items() if taken_s > before_s}
        return tokens != known or len(self._untold) != many

    def expire(self) -> bool:
        """Its word is too old; whether there was one."""
        known, self._told = self._told, None
        return known is not None

    @property
    def request_ids(self) -> set[str]:
        """Requests whose prompts were placed there, computed ones included."""
        return set(self._mine)

    @property
    def idle(self) -> bool:
        """Whether none of this router's prompts is being computed."""
        return self._tokens == 0

    @property
    def tokens(self) -> int:
        """Not yet computed."""
        if self._told is None:
            return self._tokens
        return self._told + sum(self._mine[each].tokens for each in self._untold)

    def pairs(self, tokens: int) -> float:
        """Attention pairs of these `tokens`: of a prompt that is partly computed the last ones are left, which attend
        to the most.
        """
        if not self._tokens:
            return chunk_pairs(tokens, 0)
        if tokens >= self._tokens:
            return self._pairs * tokens / self._tokens
        computed = 1 - tokens / self._tokens
        return self._pairs * (1 - computed * computed)

    def _forget_work(self, work: PromptWork) -> None:
        self._tokens -= work.tokens
        self._pairs = self._pairs - work.pairs if self._tokens else 0.0
