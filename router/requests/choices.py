"""Several answers to one request (n > 1): their seeds, who waits for whom, and one reader for all of them.

The first is a request like any other. The others are held back until its decode worker has it: by then both workers
can find the prompt's full pages in their caches, and compute and send only what is behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from router.requests.answer import Answer, Ending, Piece
from router.requests.request import Admitted
from wire.errors import Cancelled
from wire.messages import SamplingParams

_SEED_BYTES = 8
_DOMAIN = b"tandem.choice.1"


def choice_of(admitted: Admitted, index: int) -> Admitted:
    """What answer number `index` is asked for: the same, with a seed of its own. Number 0 is the request as it is: the
    answer that n = 1 would give.
    """
    if not index:
        return admitted
    return replace(admitted, sampling=_seeded(admitted.sampling, index))


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """BLAKE2b with 64 bits over seed and number, both little-endian with 8 bytes."""
    data = sampling.seed.to_bytes(_SEED_BYTES, "little") + index.to_bytes(_SEED_BYTES, "little")
    digest = blake2b(data, digest_size=_SEED_BYTES, person=_DOMAIN).digest()
    return replace(sampling, seed=int.from_bytes(digest, "little"))


class Choices:
    """The answers to one request on their way to one reader, each with its number. Belongs to the event loop.

    Whoever holds it calls `close` at last, in every case: that cancels what still runs of all of them.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.request_id = answers[0].request_id
        self.answers = answers
        """In the order of their numbers."""
        self._open = dict.fromkeys(range(len(answers)))
        self._reading: dict[int, asyncio.Task[Piece | Ending]] = {}

    def __len__(self) -> int:
        """How many answers."""
        return len(self.answers)

    @property
    def over(self) -> bool:
        """Whether every answer has ended."""
        return not self._open

    async def next(self) -> tuple[int, Piece | Ending]:
        """The next piece of any answer that is not over, or its ending; raises the first `TandemError` of any of them,
        `Cancelled` once it is closed.
        """
        index, event = await (self._alone() if len(self.answers) == 1 else self._any())
        if isinstance(event, Ending):
            del self._open[index]
        return index, event

    def close(self) -> None:
        """The reader is gone or satisfied. Idempotent."""
        reading, self._reading = self._reading, {}
        for task in reading.values():
            if task.done() and not task.cancelled():
                task.exception()  # looked at, or asyncio logs it
            task.cancel()
        # The first goes last: the others may wait for it.
        for answer in reversed(self.answers):
            answer.close()

    async def _alone(self) -> tuple[int, Piece | Ending]:
        return 0, await self.answers[0].next()

    async def _any(self) -> tuple[int, Piece | Ending]:
        for index in self._open:
            if index not in self._reading:
                self._reading[index] = asyncio.ensure_future(self.answers[index].next())
        reading = self._reading
        await asyncio.wait(reading.values(), return_when=asyncio.FIRST_COMPLETED)
        # In the order in which they were asked: who was read goes behind the others.
        index = next(index for index, task in reading.items() if task.done())
        task = reading.pop(index)
        if task.cancelled():
            raise Cancelled("the client left")
        return index, task.result()
