"""One message a step for each router, and what happens to the requests of a router without a stream."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.protocol.errors import Unavailable
from tandem.protocol.messages import (
    FinishReason,
    RequestEvent,
    RequestRef,
    RoutedEvent,
    RoutedTokens,
    StepOutput,
    StepTokens,
    WorkerLoad,
)
from tandem.protocol.prefixes import PrefixChanges
from tandem.worker.output_streams import PREFIX_BATCHES_MAX, OutputStream, OutputStreams

LOAD = WorkerLoad(0, 0, 0, 0, 8)


def event(name: str) -> RequestEvent:
    return RequestEvent(RequestRef(name, 1))


def tokens(index: int, *names: str) -> StepTokens:
    """One more token, number `index`, for each of these requests."""
    return StepTokens(names, [1] * len(names), [index] * len(names), range(100 + index, 100 + index + len(names)))


class Office:
    """An streams that notes whose requests it has given up."""

    def __init__(self, grace_s: float = 0.01) -> None:
        self.gone: list[str] = []
        self.batches = 0
        events = asyncio.get_running_loop()
        self.streams = OutputStreams(events, lambda: LOAD, self._router_gone, grace_s, self._changes)
        self.publish = self.streams.publish

    def _changes(self) -> PrefixChanges | None:
        """One batch a step, if any were asked for."""
        if not self.batches:
            return None
        self.batches += 1
        return PrefixChanges(self.batches - 1)

    def _router_gone(self, router_id: str) -> list[RequestEvent]:
        self.gone.append(router_id)
        return [event("lost")]


async def read(stream: OutputStream) -> tuple[AsyncIterator[StepOutput], StepOutput]:
    """The stream and its first message, which comes at once."""
    messages = aiter(stream.messages())
    return messages, await anext(messages)


async def test_steps_go_to_each_router_alone() -> None:
    office = Office()
    (one, first), (two, _) = await read(office.streams.attach("1")), await read(office.streams.attach("2"))
    assert first == StepOutput(0, (), LOAD)
    office.publish(7, [RoutedEvent("1", event("a")), RoutedEvent("2", event("b")), RoutedEvent("3", event("c"))])
    assert await anext(one) == StepOutput(7, (event("a"),), LOAD)
    assert await anext(two) == StepOutput(7, (event("b"),), LOAD)
    office.streams.post(RoutedEvent("1", event("d")))
    assert await anext(one) == StepOutput(7, (event("d"),), LOAD)


async def test_a_slow_reader_gets_several_steps_as_one_message() -> None:
    office = Office()
    messages, _ = await read(office.streams.attach("1"))
    for step in (1, 2, 3):
        office.publish(step, [RoutedEvent("1", event(str(step)))])
    await asyncio.sleep(0)
    assert await anext(messages) == StepOutput(3, (event("1"), event("2"), event("3")), LOAD)


async def test_tokens_of_a_step_go_to_their_router_after_its_events() -> None:
    office = Office()
    (one, _), (two, _) = await read(office.streams.attach("1")), await read(office.streams.attach("2"))
    some, others, lost = tokens(3, "a", "b"), tokens(5, "c"), tokens(0, "d")
    routed = [RoutedTokens("1", some), RoutedTokens("2", others), RoutedTokens("3", lost)]
    office.publish(7, [RoutedEvent("2", event("z"))], routed)
    assert await anext(one) == StepOutput(7, (), LOAD, tokens=(some,))
    second = await anext(two)
    assert second == StepOutput(7, (event("z"),), LOAD, tokens=(others,))
    assert [event.ref.request_id for event in second.each()] == ["z", "c"]


async def test_a_slow_reader_gets_tokens_before_what_came_later() -> None:
    """The end of an answer must not overtake its tokens, nor later tokens the ones before."""
    office = Office()
    messages, _ = await read(office.streams.attach("1"))
    office.publish(1, [], [RoutedTokens("1", tokens(3, "a", "b"))])
    office.publish(2, [], [RoutedTokens("1", tokens(4, "a", "b"))])
    end = RequestEvent(RequestRef("a", 1), 5, (9,), FinishReason.STOP)
    office.publish(3, [RoutedEvent("1", end)], [RoutedTokens("1", tokens(5, "b"))])
    office.publish(4, [], [RoutedTokens("1", tokens(6, "b"))])
    await asyncio.sleep(0)
    message = await anext(messages)
    assert message.step == 4
    assert message.tokens == (tokens(5, "b"), tokens(6, "b"))
    events = [(event.ref.request_id, event.first_index, event.finish_reason) for event in message.each()]
    assert [index for name, index, _ in events if name == "a"] == [3, 4, 5]
    assert [index for name, index, _ in events if name == "b"] == [3, 4, 5, 6]
    assert [reason for name, _, reason in events if name == "a"] == [None, None, FinishReason.STOP]


async def test_an_event_between_steps_comes_after_waiting_tokens() -> None:
    office = Office(grace_s=60.0)
    office.streams.expect("1")
    office.publish(1, [], [RoutedTokens("1", tokens(3, "a"))])
    await asyncio.sleep(0)
    office.streams.post(RoutedEvent("1", RequestEvent(RequestRef("a", 1), 4, preempted=True)))
    office.publish(2, [], [RoutedTokens("1", tokens(3, "b"))])
    await asyncio.sleep(0)
    _, first = await read(office.streams.attach("1"))  # takes over what the stream that was expected had
    assert [(event.ref.request_id, event.first_index) for event in first.each()] == [("a", 3), ("a", 4), ("b", 3)]


async def test_a_router_is_gone_with_its_stream() -> None:
    office = Office()
    stream = office.streams.attach("1")
    office.streams.detach(stream)
    office.streams.detach(stream)
    assert office.gone == ["1"]
    office.publish(1, [RoutedEvent("1", event("a"))])  # nobody listens any more


async def test_events_wait_for_a_stream_that_is_about_to_come() -> None:
    office = Office(grace_s=60.0)
    office.streams.expect("1")
    office.streams.post(RoutedEvent("1", event("early")))
    _, first = await read(office.streams.attach("1"))
    assert first.events == (event("early"),)
    assert office.gone == []


async def test_a_router_that_does_not_come_is_gone() -> None:
    office = Office()
    office.streams.expect("1")
    office.streams.expect("2")
    office.streams.attach("2")
    await asyncio.sleep(0.05)
    assert office.gone == ["1"]


async def test_a_second_stream_ends_the_first_and_gets_the_lost_events() -> None:
    office = Office()
    old = office.streams.attach("1")
    messages, _ = await read(old)
    _, first = await read(office.streams.attach("1"))
    assert first.events == (event("lost"),)
    assert [message async for message in messages] in ([], [StepOutput(0, (), LOAD)])
    office.streams.detach(old)
    assert office.gone == ["1"]


async def test_closing_sends_what_is_pending_first() -> None:
    office = Office()
    messages, _ = await read(office.streams.attach("1"))
    office.streams.post(RoutedEvent("1", event("last")))
    office.streams.close()
    assert [message.events async for message in messages] == [(event("last"),)]
    with pytest.raises(Unavailable, match="is ending"):
        office.streams.attach("2")


async def test_tokens_that_wait_when_the_worker_closes_are_sent_before_the_stream_ends() -> None:
    office = Office()
    messages, _ = await read(office.streams.attach("1"))
    office.publish(1, [], [RoutedTokens("1", tokens(3, "a"))])
    await asyncio.sleep(0)
    office.streams.close()
    assert [message.tokens async for message in messages] == [(tokens(3, "a"),)]


async def test_changes_of_the_prefix_cache_go_to_streams_that_request_them() -> None:
    office = Office()
    office.batches = 1
    asked, _ = await read(office.streams.attach("1", prefixes=True))
    others, _ = await read(office.streams.attach("2"))
    for step in (1, 2):
        office.publish(step, [])
    await asyncio.sleep(0)
    assert await anext(asked) == StepOutput(2, (), LOAD, (PrefixChanges(1), PrefixChanges(2)))
    assert await anext(others) == StepOutput(2, (), LOAD)
    office.streams.post(RoutedEvent("1", event("a")))
    assert (await anext(asked)).prefixes == ()


async def test_a_router_that_does_not_read_loses_the_oldest_changes_and_can_see_it() -> None:
    office = Office()
    office.batches = 1
    messages, _ = await read(office.streams.attach("1", prefixes=True))
    for step in range(PREFIX_BATCHES_MAX + 3):
        office.publish(step, [])
    await asyncio.sleep(0)
    numbers = [changes.sequence for changes in (await anext(messages)).prefixes]
    assert numbers == list(range(4, PREFIX_BATCHES_MAX + 4))


async def test_the_callback_of_a_step_is_queued_after_its_events_and_runs_before_they_are_sent() -> None:
    office = Office()
    messages, _ = await read(office.streams.attach("1"))
    order: list[str] = []
    woken = asyncio.Event()

    async def handoff() -> None:
        await woken.wait()
        order.append("handoff")

    async def stream() -> None:
        await anext(messages)
        order.append("message")

    tasks = [asyncio.ensure_future(stream()), asyncio.ensure_future(handoff())]
    await asyncio.sleep(0)

    def call() -> None:
        order.append(f"call after {len(office.streams._streams['1'].pending)} event")
        woken.set()

    office.publish(1, [RoutedEvent("1", event("a"))], (), [call])
    await asyncio.gather(*tasks)
    assert order == ["call after 1 event", "handoff", "message"]
