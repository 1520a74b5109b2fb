"""Several answers to one client request (n > 1 or several prompts): their seeds, and one reader for all of them.

The first answer to a prompt is placed like any other request. The other answers are held until the decode worker has
admitted the first: by then the prefill worker and the decode worker have cached the prompt's full pages, so only the
rest of the prompt is computed and transferred for the other answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from router.access.client_call import served_call
from router.requests.answer import Answer, AnswerChunk, AnswerEnd
from router.requests.request import Admitted
from tandem.protocol.errors import Cancelled, TandemError
from tandem.protocol.messages import SamplingParams

_SEED_BYTES = 8
_DOMAIN = b"tandem.choice.1"


def choice_of(admitted: Admitted, index: int) -> Admitted:
    """Return the request for answer number `index`: a copy of `admitted` with its own seed.

    Number 0 is the unchanged request, so its answer is the same as with n = 1; only number 0 scores the prompt.
    """
    if not index:
        return admitted
    return replace(admitted, sampling=seeded(admitted.sampling, index))


def seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return `sampling` with a seed derived for answer number `index`.

    It is the 64-bit BLAKE2b hash of the seed and the answer number, each as 8 bytes little-endian.
    """
    data = sampling.seed.to_bytes(_SEED_BYTES, "little") + index.to_bytes(_SEED_BYTES, "little")
    digest = blake2b(data, digest_size=_SEED_BYTES, person=_DOMAIN).digest()
    return replace(sampling, seed=int.from_bytes(digest, "little"), prompt_logprobs=None)


class Choices:
    """The numbered answers to one request, merged for one reader. All calls are on the event loop.

    The reader owns it and must call `close` in every case: `close` aborts all answers that are still running.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._call = served_call()
        self.request_id = answers[0].request_id
        self.answers = answers
        """The answers, ordered by number."""
        self._open = dict.fromkeys(range(len(answers)))
        self._reading: dict[int, asyncio.Task[AnswerChunk | AnswerEnd]] = {}

    def __len__(self) -> int:
        """Number of answers."""
        return len(self.answers)

    @property
    def over(self) -> bool:
        """True if every answer has ended."""
        return not self._open

    async def next(self) -> tuple[int, AnswerChunk | AnswerEnd]:
        """Wait for the next chunk or ending of any open answer, and return it with the answer's number.

        Raises the first `TandemError` of any answer, or `Cancelled` once the answers are closed.
        """
        try:
            index, event = await (self._alone() if len(self.answers) == 1 else self._any())
        except TandemError as error:
            self._call.failed(error.code)
            raise
        if isinstance(event, AnswerEnd):
            del self._open[index]
        else:
            self._call.count_output_tokens(len(event.token_ids))
        return index, event

    def close(self) -> None:
        """Stop reading, whether or not the answers are complete. May be called several times."""
        reading, self._reading = self._reading, {}
        for task in reading.values():
            if task.done() and not task.cancelled():
                task.exception()  # retrieved, or asyncio logs it
            task.cancel()
        # The first answer is closed last: its end would start the others, which may be held until then.
        for answer in reversed(self.answers):
            answer.close()

    async def _alone(self) -> tuple[int, AnswerChunk | AnswerEnd]:
        return 0, await self.answers[0].next()

    async def _any(self) -> tuple[int, AnswerChunk | AnswerEnd]:
        for index in self._open:
            if index not in self._reading:
                self._reading[index] = asyncio.ensure_future(self.answers[index].next())
        reading = self._reading
        await asyncio.wait(reading.values(), return_when=asyncio.FIRST_COMPLETED)
        # Round robin: an answer that was read moves to the end of `_reading`.
        index = next(index for index, task in reading.items() if task.done())
        task = reading.pop(index)
        if task.cancelled():
            raise Cancelled("the client left")
        return index, task.result()
