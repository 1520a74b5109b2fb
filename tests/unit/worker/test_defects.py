"""A defect that one request meets inside a worker is that request's end, and nobody else's."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from decode_worker import token_events
from decode_worker.kv_arrival import ArrivalCheck
from decode_worker.requests import DecodeRequests
from prefill_worker.scheduler import PrefillScheduler
from tandem.protocol.messages import FinishReason, RequestEvent, RequestRef, RoutedEvent, SamplingParams, WorkerLoad
from tandem.worker.output_streams import OutputStreams
from tests.fake_engine import answer_to
from tests.worker_pair import WorkerPair, until

PROMPT = [11, 12, 13, 14, 15, 16, 17]
TEN = SamplingParams(max_tokens=10)
BAD = "b"
NAMES = ("a", BAD, "c")


def defect(real: Callable[..., Any], of: Callable[..., str]) -> Callable[..., Any]:
    """`real`, but for the bad request, which `of` finds among the arguments."""

    def broken(*given: Any, **named: Any) -> Any:
        if of(*given) == BAD:
            raise KeyError("defect")
        return real(*given, **named)

    return broken


async def others_are_whole(pair: WorkerPair, code: str) -> None:
    """Three at once: two have all their tokens, one fails with this code, and nothing is left of it."""
    outputs = {name: pair.send(name, PROMPT, TEN) for name in NAMES}
    await until(lambda: all(output.finish for output in outputs.values()))
    assert (outputs[BAD].finish, outputs[BAD].error) == (FinishReason.ERROR, code)
    for name in set(NAMES) - {BAD}:
        assert outputs[name].tokens == answer_to(PROMPT, TEN)
    assert not any(end.worker.died.done() for end in pair.ends)
    pair.abort(BAD)  # as its router does
    await pair.empty()


@pytest.mark.parametrize("both", [False, True])
async def test_a_token_whose_event_cannot_be_made_fails_its_request_alone(
    both: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def name(_batch: Any, step: Any, row: int, _scores: Any) -> str:
        request_id: str = step.tokens(row)[0].reservation.ref.request_id
        return request_id

    monkeypatch.setattr(token_events, "_event_for", defect(token_events._event_for, name))
    async with WorkerPair(both=both) as pair:
        with caplog.at_level(logging.ERROR):
            await others_are_whole(pair, "INTERNAL")
    assert [record.request_id for record in caplog.records if "met a defect" in record.message] == [BAD]  # type: ignore[attr-defined]


@pytest.mark.parametrize("both", [False, True])
async def test_a_prompt_whose_end_cannot_be_handled(both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = lambda _scheduler, request, *_: request.task.ref.request_id  # noqa: E731
    monkeypatch.setattr(PrefillScheduler, "_finish", defect(PrefillScheduler._finish, name))
    async with WorkerPair(both=both) as pair:
        await others_are_whole(pair, "INTERNAL")


async def test_a_local_prompt_that_cannot_be_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    name = lambda _scheduler, request, *_: request.task.ref.request_id  # noqa: E731
    monkeypatch.setattr(PrefillScheduler, "_local_notice", defect(PrefillScheduler._local_notice, name))
    async with WorkerPair(both=True) as pair:
        await others_are_whole(pair, "INTERNAL")


@pytest.mark.parametrize(
    ("owner", "method", "of"),
    [
        (ArrivalCheck, "stamp_problem", lambda _check, request, _notice: request.reservation.ref.request_id),
        (DecodeRequests, "admit", lambda _held, request, _notice: request.reservation.ref.request_id),
    ],
)
@pytest.mark.parametrize("rate", [0.0, 1.0])
async def test_pages_that_cannot_be_taken_in(
    rate: float, owner: type, method: str, of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, defect(getattr(owner, method), of))
    async with WorkerPair(kv_checksum_rate=rate) as pair:
        await others_are_whole(pair, "TRANSFER_FAILED")


async def test_a_call_that_fails_keeps_no_other_from_being_made(caplog: pytest.LogCaptureFixture) -> None:
    made: list[int] = []
    streams = OutputStreams(asyncio.get_running_loop(), lambda: WorkerLoad(0, 0, 0, 0, 8), lambda _: [], 60.0)
    streams.publish(1, (), (), (lambda: made.append(1), lambda: made.remove(0), lambda: made.append(2)))
    await until(lambda: len(made) == 2)
    assert "did not hear of its step" in caplog.text


async def test_a_step_is_sent_without_cache_changes_that_cannot_be_read() -> None:
    def broken() -> None:
        raise KeyError("defect")

    streams = OutputStreams(asyncio.get_running_loop(), lambda: WorkerLoad(0, 0, 0, 0, 8), lambda _: [], 60.0, broken)
    messages = aiter(streams.attach("r", prefixes=True).messages())
    await anext(messages)
    event = RequestEvent(RequestRef("a", 1))
    streams.publish(1, [RoutedEvent("r", event)])
    async with asyncio.timeout(30):
        assert (await anext(messages)).events == (event,)


async def test_an_event_that_cannot_be_written_ends_its_request_alone() -> None:
    """On the real stream to a router, whose other requests would end with it."""
    from tandem.net import rpc
    from tandem.protocol.generated.tandem.v1 import worker_pb2, worker_pb2_grpc

    async with WorkerPair() as pair, rpc.open_channel(pair.decode.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Attach(worker_pb2.AttachRequest(router_id="r"))
        stream = aiter(call)
        await anext(stream)
        good, bad = RequestEvent(RequestRef("a", 1)), RequestEvent(RequestRef(BAD, 1), 0, (-1,))
        for event in (bad, good):
            pair.decode.worker._streams.post(RoutedEvent("r", event))
        message = await anext(stream)
        assert [(event.ref.request_id, event.error.code) for event in message.events] == [(BAD, "INTERNAL"), ("a", "")]
        call.cancel()
