"""The real router without its listeners, and clients that read its answers.

The real parts are the dispatcher with its queue, placement, request tasks, lease keepers and the links to workers.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from router.config import RouterConfig
from router.placement.fleet import Fleet
from router.placement.policy import Placement, PlacementPolicy
from router.placement.queue import QueuedRequest
from router.requests.answer import Answer, AnswerEnd
from router.requests.choices import Choices
from router.requests.dispatch import Dispatcher
from router.requests.request import Admitted
from router.requests.text_thread import RequestText
from tandem.cost_model.step_cost import StepCost
from tandem.protocol.errors import (
    DeadlineExceeded,
    ResourceExhausted,
    StaleEpoch,
    TandemError,
    TransferFailed,
    Unavailable,
)
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import FinishReason, SamplingParams
from tandem.protocol.mode import Mode
from tandem.settings.model import ModelSettings
from tests.fake_engine import answer_to
from tests.model.checks import Broken
from tests.model.processes import Process, ProcessLoop
from tests.model.workers import RPC_TIMEOUT_S, Controller

STALL_S = QUEUE_S = 10.0
SILENCE_S = 2.0
"""Seconds of silence after which a worker counts as silent: longer than a call may take, shorter than a stall."""
CLEAR_ERRORS = (Unavailable, TransferFailed, StaleEpoch, DeadlineExceeded, ResourceExhausted)
"""The errors that a client may receive while processes die; any other error is a defect."""


class Words:
    """A tokenizer that turns each token id into text."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{token_id} " for token_id in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return f"{token_id} ".encode()


class InlineText:
    """Replaces `router.requests.text_thread.TextThread`, without a thread."""

    def __init__(self, deliver: Callable[[list[RequestText]], None]) -> None:
        self._deliver = deliver

    def submit(self, jobs: list[RequestText]) -> None:
        for job in jobs:
            job.request.text.run(job)
        asyncio.get_running_loop().call_soon(self._deliver, jobs)

    async def stop(self) -> None:
        """Do nothing, because no thread runs."""


class CountedAnswer(Answer):
    """An answer that records each of its ends; `Client.check` allows only one."""

    __slots__ = ("closing", "ends")

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.ends: list[str] = []
        self.closing = False

    def close(self) -> None:
        self.closing = True
        super().close()

    def finish(self, ending: Callable[[], AnswerEnd]) -> None:
        self._count("finished")
        super().finish(ending)

    def fail(self, error: TandemError) -> None:
        self._count(f"failed: {error!r}")
        super().fail(error)

    def _count(self, end: str) -> None:
        if not self.closing:
            self.ends.append(end)


@dataclass
class Client:
    """A client of the router with one request."""

    name: str
    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    answer: Answer | None = None
    ending: AnswerEnd | None = None
    error: TandemError | None = None
    left: bool = False

    def __post_init__(self) -> None:
        self.right = answer_to(self.prompt, self.sampling)

    @property
    def over(self) -> bool:
        return self.left or self.ending is not None or self.error is not None

    def check(self) -> None:
        """Check that the request ended at most once and received only tokens of its own answer."""
        expected = self.right
        if self.tokens != expected[: len(self.tokens)]:
            raise Broken(f"{self.name} got {self.tokens} instead of {expected}")
        if self.ending is not None and (self.error is not None or self.tokens != expected):
            raise Broken(f"{self.name} ended with {self.tokens} and {self.error!r} instead of {expected}")
        if self.error is not None and not isinstance(self.error, CLEAR_ERRORS):
            raise Broken(f"{self.name} ended with {self.error!r}")
        if isinstance(self.answer, CountedAnswer) and len(self.answer.ends) > 1:
            raise Broken(f"{self.name} ended more than once: {self.answer.ends}")


class UnmeasuredPolicy(PlacementPolicy):
    """The product's placement without measured durations of real steps, which would differ from run to run."""

    def place(self, request: QueuedRequest, fleet: Fleet, waited_s: float) -> Placement | None:
        for worker in fleet.live:
            worker.page_transfer_s = 0.0
            worker.cost = StepCost()
            worker.refresh()
        return super().place(request, fleet, waited_s)


class RouterProcess:
    """The process with the router, and its clients."""

    def __init__(self, loop: ProcessLoop) -> None:
        self.process = Process("router", loop)
        self.config = RouterConfig(
            "router-0",
            ModelSettings(Path("fake"), ("fake",)),
            Controller.ADDRESS,
            mode=Mode.ADAPTIVE,
            rpc_timeout_s=RPC_TIMEOUT_S,
            queue_timeout_s=QUEUE_S,
            stall_timeout_s=STALL_S,
            worker_silence_s=SILENCE_S,
            max_queued_requests=16,
        )
        self.clients: list[Client] = []
        self.dispatcher = self.process.run(Dispatcher, self.config, UnmeasuredPolicy(), Words(), lambda: None)

    def ask(self, prompt: list[int], sampling: SamplingParams) -> Client:
        """Start a client that sends a request and reads its answer to the end."""
        client = Client(f"q{len(self.clients)}", prompt, sampling)
        self.clients.append(client)
        self.process.run(self._ask, client)
        return client

    def leave(self, client: Client) -> None:
        """Disconnect a client that has not read its whole answer."""
        client.left = True
        if client.answer is not None:
            self.process.run(client.answer.close)

    def left(self) -> str:
        """Return the state that the router still keeps; "" = none."""
        dispatcher = self.dispatcher
        links = [link for link in dispatcher.pool.links if link.request_ids or len(link.leases)]
        live = dispatcher._live
        busy = live or live._by_client_id or dispatcher.waiting or len(dispatcher._calls) or links
        return f"{list(live.values())} {links}" if busy else ""

    def _ask(self, client: Client) -> None:
        now = EventTime.now(LifecycleEvent.RECEIVED)
        admitted = Admitted(client.name, tuple(client.prompt), client.sampling, (), 0, (now,))
        try:
            choices = self.dispatcher.submit(admitted)
            (client.answer,) = choices.answers
        except TandemError as error:
            client.error = error
        else:
            asyncio.get_running_loop().create_task(self._read(client, choices))

    async def _read(self, client: Client, choices: Choices) -> None:
        try:
            while not isinstance(piece := (await choices.next())[1], AnswerEnd):
                client.tokens += piece.token_ids
            if not client.left:
                client.ending = piece
        except TandemError as error:
            if not client.left:
                client.error = error
        finally:
            choices.close()


def finish_reason(client: Client) -> FinishReason:
    """Return the finish reason of the correct answer."""
    stopped = client.right[-1] in client.sampling.stop_token_ids
    return FinishReason.STOP if stopped else FinishReason.LENGTH
