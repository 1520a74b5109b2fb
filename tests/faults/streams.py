"""Greedy streams in flight, compared token by token with the answers of an undisturbed cluster."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from tandem.net.rpc import open_client_channel
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2

DEADLINE_S = 300.0
"""The deadline of each request in seconds: one that takes longer hangs. A worker's replacement may be among it."""
LONG_PROMPT_TOKENS = 3000
SHORT_PROMPT_TOKENS = (20, 33, 48, 64, 90, 17)
ANSWER_TOKENS = 400
AT_ONCE = 4
"""Concurrent streams of a load, unless a test says otherwise."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the number of tokens to generate."""

    prompt: tuple[int, ...]
    tokens: int = ANSWER_TOKENS
    shares_pages: bool = False
    """True if its pages are scarce and shared: cached prefixes are used, and its length has to be predicted.

    Otherwise the request has a cache salt of its own, so that its prompt is always prefilled and transferred as a
    whole, however often it was sent before, and only the number of tokens ends the answer.
    """

    def request(self, name: str = "") -> inference_pb2.GenerateRequest:
        """Returns the request for a router."""
        return inference_pb2.GenerateRequest(
            request_id=name,
            token_ids=inference_pb2.TokenIds(ids=self.prompt),
            options=inference_pb2.GenerationOptions(
                max_tokens=self.tokens,
                temperature=0,
                ignore_eos=not self.shares_pages,
                cache_salt="" if self.shares_pages else name,
            ),
        )


class Stream:
    """One request: its tokens as they arrive, and its end."""

    def __init__(self, stub: Any, original_prompt: Question, name: str) -> None:
        self.original_prompt = original_prompt
        self.name = name
        self.tokens: list[int] = []
        self.code = grpc.StatusCode.UNKNOWN
        self.words = ""
        self.ended_at = 0.0
        self.complete = inference_pb2.Complete()
        """The router's last message about the answer; empty until the stream has succeeded."""
        self._news = asyncio.Event()
        self._call = stub.Generate(original_prompt.request(name), timeout=DEADLINE_S)
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            async for message in self._call:
                self.tokens += message.chunk.token_ids
                self.complete = message.complete
                self._news.set()
            self.code = grpc.StatusCode.OK
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
            self.code = grpc.StatusCode.CANCELLED
        except grpc.aio.AioRpcError as error:
            self.code, self.words = error.code(), error.details() or ""
        finally:
            self.ended_at = time.monotonic()
            self._news.set()

    def abort(self) -> None:
        """Cancels the request as a client that leaves does; its code is then CANCELLED, unless it has already ended."""
        self._call.cancel()

    async def reached(self, tokens: int) -> None:
        """Waits until `tokens` tokens have arrived; AssertionError if the stream ends before."""
        while len(self.tokens) < tokens:
            assert not self.task.done(), (self.name, self.code, self.words)
            self._news.clear()
            await self._news.wait()

    def check(self, expected: Sequence[int]) -> None:
        """Asserts that the stream succeeded with exactly the expected tokens."""
        assert self.code is grpc.StatusCode.OK, (self.name, self.code, self.words)
        assert self.tokens == list(expected), self.name


class Client:
    """A connection to a router for the length of an `async with`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._asked = 0

    async def __aenter__(self) -> Client:
        self._channel = open_client_channel(self._address)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def ask(self, original_prompt: Question, name: str = "stream") -> Stream:
        """Sends a request whose name begins with `name`."""
        self._asked += 1
        return Stream(self._stub, original_prompt, f"{name}-{self._asked}-{time.time_ns()}")


async def undisturbed(address: str, questions: Sequence[Question]) -> list[list[int]]:
    """Returns the answers of a cluster in which nothing fails."""
    async with Client(address) as client:
        streams = [client.ask(original_prompt) for original_prompt in questions]
        await asyncio.gather(*(stream.task for stream in streams))
        assert {stream.code for stream in streams} == {grpc.StatusCode.OK}, [stream.words for stream in streams]
        return [stream.tokens for stream in streams]


class Load:
    """Sends questions over and over, a few at a time, until it is stopped."""

    def __init__(
        self, client: Client, questions: list[Question], expected: list[list[int]], at_once: int = AT_ONCE
    ) -> None:
        self._client, self._questions, self._expected, self._at_once = client, questions, expected, at_once
        self._stopping = False
        self._running: dict[int, Stream] = {}
        self.right = 0
        self.aborted = 0
        self.refused: list[str] = []
        self.with_cached_prefix = 0
        """The number of right answers to prompts of which a prefix was cached."""
        self.preempted = 0
        """The number of right answers that were preempted at least once."""
        self._tasks = [asyncio.ensure_future(self._keep_asking(first)) for first in range(at_once)]

    async def _keep_asking(self, first: int) -> None:
        turn = first
        while not self._stopping:
            which = turn % len(self._questions)
            stream = self._running[first] = self._client.ask(self._questions[which])
            await stream.task
            turn += self._at_once + 1
            if stream.code is grpc.StatusCode.UNAVAILABLE and stream.words:
                self.refused.append(stream.words)
            elif stream.code is grpc.StatusCode.CANCELLED:
                assert stream.tokens == self._expected[which][: len(stream.tokens)], stream.name
                self.aborted += 1
            else:
                stream.check(self._expected[which])
                self.right += 1
                self.with_cached_prefix += stream.complete.cached_tokens > 0
                events = {event.event for event in stream.complete.timeline.event_times}
                self.preempted += types_pb2.LIFECYCLE_EVENT_PREEMPTED in events

    def abort(self, rng: random.Random) -> None:
        """Cancels a random request that is running."""
        rng.choice(list(self._running.values())).abort()

    async def stop(self) -> None:
        """Stops the load; raises AssertionError for the first answer that was wrong or failed."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
