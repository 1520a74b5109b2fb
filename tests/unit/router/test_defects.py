"""An internal error in one request ends that request, and no other."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from router.placement.worker_state import WorkerState
from router.requests.answer import Answer
from router.requests.ends import RequestEnds
from router.requests.placer import RequestPlacer
from router.requests.request import RoutedRequest
from router.requests.stream import EventStream
from tandem.logging.recurring import RecurringErrors
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tandem.protocol.messages import RequestEvent
from tests.unit.router.conftest import WITHOUT_RECOVERY, Cluster
from tests.unit.router.fake_cluster import answer_token, channel_to, until

NAMES = ["a", "b", "c", "d"]
BAD = "b"
HELD_AT, TOKENS = 3, 8


def prompt_of(name: str) -> list[int]:
    return [5, 6, 7, ord(name)]


class Answers:
    """Four streams at once, which pause after their third token until `go`."""

    def __init__(self, cluster: Cluster, stub: inference_pb2_grpc.InferenceStub) -> None:
        self._cluster = cluster
        self.ends = {name: asyncio.ensure_future(self._read(stub, name)) for name in NAMES}

    async def _read(self, stub: Any, name: str) -> list[int] | grpc.StatusCode:
        options = pb.GenerationOptions(max_tokens=TOKENS)
        request = pb.GenerateRequest(request_id=name, token_ids=pb.TokenIds(ids=prompt_of(name)), options=options)
        tokens: list[int] = []
        try:
            async for message in stub.Generate(request):
                tokens += message.chunk.token_ids
        except grpc.aio.AioRpcError as error:
            return error.code()
        return tokens

    @property
    def requests(self) -> list[RoutedRequest]:
        return list(self._cluster.router._dispatcher._live.values())

    async def held(self) -> None:
        await until(
            lambda: len(self.requests) == 4 and all(request.answer.token_count == HELD_AT for request in self.requests),
            "all have three tokens",
        )

    def step(self) -> None:
        """Sends one message with the next token of each."""
        events = [
            RequestEvent(request.ref, HELD_AT, (answer_token(request.admitted.prompt_token_ids, HELD_AT),))
            for request in self.requests
        ]
        self._cluster.decode.send(self._cluster.config.router_id, *events)

    async def check(self) -> None:
        """Asserts that three are complete, and that one failed with Internal."""
        self._cluster.decode.go.set()
        ends = dict(zip(self.ends, await asyncio.wait_for(asyncio.gather(*self.ends.values()), 30), strict=True))
        assert ends.pop(BAD) is grpc.StatusCode.INTERNAL
        assert ends == {name: [answer_token(prompt_of(name), index) for index in range(TOKENS)] for name in ends}


@pytest.fixture
async def answers(cluster: Cluster) -> AsyncIterator[Answers]:
    cluster.decode.switches.held_at = HELD_AT
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        made = Answers(cluster, inference_pb2_grpc.InferenceStub(channel))
        await made.held()
        yield made


def defect(real: Callable[..., Any], of: Callable[..., str]) -> Callable[..., Any]:
    """Returns `real`, except that it raises for the bad request, which `of` finds in the arguments."""

    def broken(*given: Any, **named: Any) -> Any:
        if of(*given) == BAD:
            raise KeyError("defect")
        return real(*given, **named)

    return broken


def defects_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the requests for which the log reports an internal error."""
    met = [record for record in caplog.records if "internal error in request" in record.message]
    return [getattr(record, "request_id", "").partition("~")[0] for record in met]


def name_of(request: RoutedRequest) -> str:
    return request.admitted.request_id


async def test_an_answer_that_cannot_be_delivered_ends_alone(
    cluster: Cluster, answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All four return from the text thread in one call."""
    monkeypatch.setattr(Answer, "push", defect(Answer.push, lambda answer, *_: answer.request_id))
    with caplog.at_level(logging.ERROR):
        answers.step()
        await answers.check()
    assert defects_logged(caplog) == [BAD]


async def test_an_event_that_cannot_be_taken_ends_its_request_and_not_the_link(
    cluster: Cluster, answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = cluster.decode.streams[cluster.config.router_id]
    taken = defect(EventStream._take_tokens, lambda _, request, *__: name_of(request))
    monkeypatch.setattr(EventStream, "_take_tokens", taken)
    with caplog.at_level(logging.ERROR):
        answers.step()
        await answers.check()
    assert cluster.decode.streams[cluster.config.router_id] is stream
    assert defects_logged(caplog) == [BAD]


async def test_a_load_that_cannot_be_taken_ends_no_link(
    cluster: Cluster, answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("defect")

    stream = cluster.decode.streams[cluster.config.router_id]
    monkeypatch.setattr(WorkerState, "report", broken)
    with caplog.at_level(logging.ERROR):
        answers.step()
        cluster.decode.go.set()
        ends = await asyncio.gather(*answers.ends.values())
    assert [len(end) for end in ends if isinstance(end, list)] == [TOKENS] * 4
    assert cluster.decode.streams[cluster.config.router_id] is stream
    defects = [record for record in caplog.records if "could not be processed" in record.message]
    errors = RecurringErrors()
    assert defects
    assert len([record for record in defects if errors.take(record)]) == 1


async def test_a_request_that_cannot_be_swept_keeps_no_other_from_it(
    cluster: Cluster, answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All requests exceed the stall timeout at the same moment."""
    real = RequestEnds.fail_attempt
    monkeypatch.setattr(RequestEnds, "fail_attempt", defect(real, lambda _, request, *__: name_of(request)))
    with caplog.at_level(logging.ERROR):
        for request in answers.requests:
            request.last_event_s -= 1e6
        sweeper = cluster.router._dispatcher._sweeper
        sweeper._sweep(sweeper._clock())
        assert {name_of(request) for request in answers.requests} == {"a", "c", "d"}
        assert {request.attempt for request in answers.requests} == {2}
        await answers.check()
    assert defects_logged(caplog) == [BAD]


@pytest.mark.parametrize("settings", [WITHOUT_RECOVERY])
async def test_a_lost_worker_is_reported_to_all_of_its_requests(
    cluster: Cluster, answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = RequestEnds.fail_attempt
    monkeypatch.setattr(RequestEnds, "fail_attempt", defect(real, lambda _, request, *__: name_of(request)))
    with caplog.at_level(logging.ERROR):
        await cluster.decode.drop_streams()
        ends = await asyncio.wait_for(asyncio.gather(*answers.ends.values()), 30)
    others = grpc.StatusCode.UNAVAILABLE  # no other worker decodes
    assert ends == [grpc.StatusCode.INTERNAL if name == BAD else others for name in NAMES]
    assert defects_logged(caplog) == [BAD]


async def test_a_request_that_cannot_be_placed_does_not_block_later_ones(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = defect(RequestPlacer._place, lambda _, request, *__: name_of(request))
    monkeypatch.setattr(RequestPlacer, "_place", place)
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        with caplog.at_level(logging.ERROR):
            await Answers(cluster, inference_pb2_grpc.InferenceStub(channel)).check()
    assert defects_logged(caplog) == [BAD]


async def test_the_end_of_a_broken_request_is_tried_to_its_last_step(
    cluster: Cluster, answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The metrics raise for it as well; its workers and the list of requests are cleaned up all the same."""
    metrics = type(cluster.router._dispatcher.metrics)
    monkeypatch.setattr(metrics, "failed", defect(metrics.failed, lambda _, request, *__: name_of(request)))
    monkeypatch.setattr(Answer, "push", defect(Answer.push, lambda answer, *_: answer.request_id))
    with caplog.at_level(logging.ERROR):
        answers.step()
        await answers.check()
    assert any("cleanup failed" in record.message for record in caplog.records)
    await cluster.settled()
