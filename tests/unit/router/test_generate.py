"""The gRPC listener over fake workers: answers, limits, cancellation, and failures of workers."""

import asyncio
import gc
import os
import random
import signal
import socket
from dataclasses import replace
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.requests.request import RoutedRequest
from router.server import RouterServer, serve
from router.text.tokenizer import Tokenizer
from tandem.net.rpc import RETRY_AFTER
from tandem.protocol.ending import failure_event
from tandem.protocol.errors import FailedPrecondition, TransferFailed, Unavailable
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc, types_pb2
from tandem.protocol.messages import FinishReason, GrantedLease, RequestEvent, Reservation, Role
from tests.clocks import jump
from tests.soak import examples
from tests.unit.router.conftest import TEXT, WITHOUT_RECOVERY, Cluster
from tests.unit.router.fake_cluster import FakeWorker, answer_token, channel_to, until

PROMPT = [5, 6, 7, 8]


def expected(count: int, prompt: list[int] | None = None) -> list[int]:
    return [answer_token(prompt or PROMPT, index) for index in range(count)]


def ask(max_tokens: int | None = 8, prompt: list[int] | None = None, **options: Any) -> pb.GenerateRequest:
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT if prompt is None else prompt), options=pb.GenerationOptions(**options)
    )


def chat(variables: str) -> pb.ChatRequest:
    """Returns a chat request of one message with `chat_template_kwargs`."""
    turns = [pb.ChatMessage(role="user", content="Hi")]
    return pb.ChatRequest(messages=turns, options=pb.GenerationOptions(max_tokens=2), chat_template_kwargs=variables)


class Client:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = inference_pb2_grpc.InferenceStub(channel)

    async def run(self, request: Any) -> tuple[str, list[int], pb.Complete]:
        """Returns text, tokens and the last message of an answer."""
        call = self.stub.Chat(request) if isinstance(request, pb.ChatRequest) else self.stub.Generate(request)
        texts, ids, complete = [], [], None
        async for message in call:
            assert complete is None, "a message after Complete"
            if message.HasField("chunk"):
                texts.append(message.chunk.text)
                ids.extend(message.chunk.token_ids)
            else:
                complete = message.complete
        assert complete is not None
        return "".join(texts), ids, complete

    async def error(self, request: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.run(request)
        return caught.value


@pytest.fixture
async def client(cluster: Cluster) -> Any:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


async def test_answer_usage_and_timeline(cluster: Cluster, client: Client, tokenizer: Tokenizer) -> None:
    text, ids, complete = await client.run(ask(40))
    assert ids == expected(40)
    assert text == tokenizer.decode(ids)
    assert complete.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (4, 40, 0)
    timeline = complete.timeline
    assert (timeline.prefill_worker, timeline.decode_worker, timeline.transfer.backend) == (
        "prefill-0", "decode-0", "fake",
    )  # fmt: skip
    events = {stamp.event for stamp in timeline.event_times}
    names = (
        "RECEIVED",
        "TOKENIZED",
        "PLACED",
        "RESERVED",
        "PREFILL_FINISHED",
        "FIRST_TOKEN",
        "DECODE_ADMITTED",
        "FINISHED",
    )
    assert {types_pb2.LifecycleEvent.Value(f"LIFECYCLE_EVENT_{name}") for name in names} <= events
    reservation, task = cluster.decode.reservations[0], cluster.prefill.prefills[0]
    assert task.destination is not None
    assert (task.destination.address, reservation.prefill) == (cluster.decode.address, cluster.prefill.info.peer)
    assert cluster.prefill.aborted == [], "a request that ended well needs no abort"


async def test_text_prompt_and_chat(cluster: Cluster, client: Client, tokenizer: Tokenizer) -> None:
    await client.run(pb.GenerateRequest(text="The quick brown fox"))
    assert list(cluster.prefill.prefills[0].prompt_token_ids) == tokenizer.encode("The quick brown fox")
    message = pb.ChatMessage(role="user", content="Hello 😀")
    _, ids, complete = await client.run(pb.ChatRequest(messages=[message]))
    prompt = cluster.prefill.prefills[1].prompt_token_ids
    assert tokenizer._inner.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>user\nHello 😀<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == [answer_token(prompt, index) for index in range(32)]
    assert complete.completion_tokens == 32, "default_max_tokens of the router"


async def test_one_token_needs_no_decode_worker(cluster: Cluster, client: Client) -> None:
    _, ids, complete = await client.run(ask(1))
    assert (ids, complete.timeline.decode_worker) == (expected(1), "")
    assert cluster.decode.reservations == []


async def test_end_of_sequence_at_the_first_token_frees_the_lease(cluster: Cluster, client: Client) -> None:
    cluster.prefill.switches.stop_at = 0
    text, ids, complete = await client.run(ask(8))
    assert (text, ids, complete.finish_reason) == ("", [2], types_pb2.FINISH_REASON_STOP)
    await until(lambda: cluster.decode.idle, "the decode worker dropped the lease")


async def test_tokens_of_the_two_workers_may_race(cluster: Cluster, client: Client) -> None:
    cluster.prefill.switches.decode_first = True
    _, ids, _ = await client.run(ask(8))
    assert ids == expected(8)


async def test_sampling_defaults_and_values(cluster: Cluster, client: Client) -> None:
    await client.run(ask(2))
    await client.run(ask(2, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**64 - 1, stop_token_ids=[9]))
    plain, chosen = (task.sampling for task in cluster.prefill.prefills)
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p) == (1.0, 0, 1.0, 0.0)
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p) == (0.5, 7, 0.25, 0.125)
    assert (chosen.seed, chosen.stop_token_ids) == (2**64 - 1, (9,))
    assert cluster.decode.reservations[0].sampling == plain, "both workers sample alike"


async def test_stop_string(cluster: Cluster, client: Client, tokenizer: Tokenizer) -> None:
    cluster.decode.switches.held_at = 50
    whole = tokenizer.decode(expected(60))
    stop = whole[20:26]
    text, ids, complete = await client.run(ask(60, stop=["never there", stop]))
    assert text == whole[: whole.index(stop)]
    assert (complete.finish_reason, complete.matched_stop) == (types_pb2.FINISH_REASON_STOP, stop)
    assert ids == expected(len(ids))
    assert complete.completion_tokens == len(ids) < 60
    assert stop in tokenizer.decode(ids)
    await until(lambda: len(cluster.decode.aborted) == 1, "the decode worker was told to stop")


BAD: list[tuple[str, Any, str]] = [
    ("empty token ids", ask(prompt=[]), "prompt"),
    ("no prompt", pb.GenerateRequest(), "prompt"),
    ("empty text", pb.GenerateRequest(text=""), "prompt"),
    ("NUL", pb.GenerateRequest(text="a\0b"), "prompt"),
    ("id out of range", ask(prompt=[1, 400]), "prompt"),
    ("max_tokens 0", ask(0), "max_tokens"),
    ("max_tokens negative", ask(-3), "max_tokens"),
    ("temperature NaN", ask(temperature=float("nan")), "temperature"),
    ("temperature negative", ask(temperature=-0.1), "temperature"),
    ("temperature inf", ask(temperature=float("inf")), "temperature"),
    ("top_p 0", ask(top_p=0.0), "top_p"),
    ("top_p over 1", ask(top_p=1.5), "top_p"),
    ("top_p NaN", ask(top_p=float("nan")), "top_p"),
    ("top_k negative", ask(top_k=-1), "top_k"),
    ("min_p over 1", ask(min_p=1.5), "min_p"),
    ("frequency_penalty over 2", ask(frequency_penalty=2.1), "frequency_penalty"),
    ("presence_penalty NaN", ask(presence_penalty=float("nan")), "presence_penalty"),
    ("repetition_penalty 0", ask(repetition_penalty=0.0), "repetition_penalty"),
    ("repetition_penalty over 100", ask(repetition_penalty=101.0), "repetition_penalty"),
    ("logprobs negative", ask(logprobs=-1), "logprobs"),
    ("logprobs over 20", ask(logprobs=21), "logprobs"),
    ("empty stop", ask(stop=[""]), "stop"),
    ("min_tokens over max_tokens", ask(8, min_tokens=9), "min_tokens"),
    ("min_tokens negative", ask(min_tokens=-1), "min_tokens"),
    ("no JSON", chat("x"), "chat_template_kwargs"),
    ("no object", chat("[1]"), "chat_template_kwargs"),
    ("large", chat('{"x": "' + "y" * 16400 + '"}'), "chat_template_kwargs"),
    ("the server's", chat('{"messages": []}'), "chat_template_kwargs.messages"),
    ("long stop", ask(stop=["x" * 257]), "stop"),
    ("many stops", ask(stop=["x"] * 17), "stop"),
    ("stop id", ask(stop_token_ids=[400]), "stop_token_ids"),
    ("slo class", ask(slo_class="gold"), "slo_class"),
    ("request id", pb.GenerateRequest(request_id="with space", text="x"), "request_id"),
    ("no messages", pb.ChatRequest(), "messages"),
    ("bad role", pb.ChatRequest(messages=[pb.ChatMessage(role="king", content="x")]), "messages[0].role"),
]


async def test_bad_input_names_field_and_next_request_works(cluster: Cluster, client: Client) -> None:
    for what, request, field in BAD:
        error = await client.error(request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, what
        assert (error.details() or "").startswith(f"{field}: "), (what, error.details())
    error = await client.error(pb.GenerateRequest(model="other", text="x"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "'fake'" in (error.details() or "")
    assert cluster.prefill.prefills == []
    _, ids, _ = await client.run(ask(4))
    assert ids == expected(4)


async def test_a_least_length_goes_to_the_workers_and_holds_for_stop_strings(cluster: Cluster, client: Client) -> None:
    whole, ids, _ = await client.run(ask(40))
    stop = whole[8:10]
    for least, include in ((0, False), (30, False), (40, True)):
        asked = ask(40, stop=[stop], min_tokens=least, include_stop_str_in_output=include)
        text, received, complete = await client.run(asked)
        assert cluster.prefill.prefills[-1].sampling.min_tokens == least
        assert len(received) >= max(least, 1)
        assert received == ids[: len(received)]
        assert whole.startswith(text)
        if least == 40:
            assert (text, complete.matched_stop) == (whole, "")
    text, _, complete = await client.run(ask(40, stop=[stop], include_stop_str_in_output=True))
    assert (text, complete.matched_stop) == (whole[: whole.index(stop) + 2], stop)


async def test_context_is_the_limit_to_the_token(client: Client) -> None:
    _, ids, _ = await client.run(ask(None, prompt=[5] * 2047))
    assert len(ids) == 1
    _, ids, _ = await client.run(ask(4, prompt=[5] * 2044))
    assert len(ids) == 4


async def test_a_request_no_pool_can_hold_is_refused(cluster: Cluster, client: Client) -> None:
    small = await FakeWorker("decode-1", Role.DECODE, pages_total=4, token="secret").start()
    await cluster.members(cluster.prefill, small)
    await until(lambda: cluster.router._dispatcher.pool.model.decode_tokens_max == 64, "the small pool is known")  # type: ignore[union-attr]
    error = await client.error(ask(62))
    assert error.details() == (
        "This model's maximum context length is 65 tokens. However, you requested 66 tokens (4 in the prompt, 62 in the"
        " completion). Please reduce the length of the prompt or completion. The workers' KV cache holds no more of the"
        " model's context of 2048."
    )
    error = await client.error(ask(None, prompt=[5] * 65))
    assert "is 65 tokens. However, you requested 66 tokens (65 in the prompt, 1 " in str(error.details())
    _, ids, _ = await client.run(ask(61))
    assert len(ids) == 61
    _, ids, _ = await client.run(ask(1, prompt=[5] * 65))
    assert len(ids) == 1, "one token needs no decode worker"
    both = await FakeWorker("both-0", Role.BOTH, pages_total=4, token="secret").start()
    await cluster.members(both)
    error = await client.error(ask(30))
    assert "maximum context length is 33 tokens" in str(error.details()), "a half is for prompts"
    _, ids, _ = await client.run(ask(29))
    assert len(ids) == 29


class TestUnnamedLimits:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"default_max_tokens": None}

    async def test_an_answer_may_fill_the_context(self, cluster: Cluster, client: Client) -> None:
        """Regression: the answer was cut at 512 tokens."""
        _, ids, _ = await client.run(ask(None, prompt=[5] * 1000))
        assert len(ids) == 1048
        message = pb.ChatMessage(role="user", content="Hello")
        _, ids, complete = await client.run(pb.ChatRequest(messages=[message]))
        assert len(ids) == 2048 - complete.prompt_tokens

    @pytest.mark.parametrize(("pages", "fits"), [((8, 7), 113), ((8, 5), 81), ((8, 3), 129)])
    async def test_it_fits_at_all_workers_that_are_about_as_large(
        self, cluster: Cluster, client: Client, pages: tuple[int, ...], fits: int
    ) -> None:
        """Regression: the largest worker alone served all requests without a limit."""
        workers = [
            await FakeWorker(f"decode-{n}", Role.DECODE, pages_total=page_count, token="secret").start()
            for n, page_count in enumerate(pages, start=1)
        ]
        await cluster.members(cluster.prefill, *workers)
        pool = cluster.router._dispatcher.pool
        await until(lambda: pool.model and pool.model.decode_tokens_min == min(pages) * 16, "these are known")
        _, ids, _ = await client.run(ask(None, prompt=[5] * 4))
        assert len(ids) + 4 == fits


async def test_transfer_failures_are_retried_without_repeat_or_gap(cluster: Cluster, client: Client) -> None:
    cluster.prefill.switches.fail_transfers = 2
    _, ids, complete = await client.run(ask(8))
    assert ids == expected(8)
    assert complete.completion_tokens == 8
    assert [task.ref.attempt for task in cluster.prefill.prefills] == [1, 2, 3]
    cluster.prefill.switches.fail_transfers = 3
    error = await client.error(ask(8))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "did not arrive" in (error.details() or "")


async def test_a_full_decode_worker_sends_the_request_back_to_the_queue(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.refuse_reserve = 4
    _, ids, _ = await client.run(ask(8))
    assert ids == expected(8)
    assert len(cluster.decode.reservations) == 5


async def test_pages_bind_late(cluster: Cluster, client: Client) -> None:
    tiny = await FakeWorker("decode-1", Role.DECODE, pages_total=2, token="secret").start()
    await cluster.members(cluster.prefill, tiny)
    tiny.switches.step_s = 0.002
    answers = await asyncio.gather(*(client.run(ask(20)) for _ in range(5)))
    assert all(ids == expected(20) for _, ids, _ in answers)
    assert len(tiny.reservations) == 5, "no Reserve was refused: the router knew there was no room"


async def test_lower_priority_goes_first(cluster: Cluster, client: Client) -> None:
    tiny = await FakeWorker("decode-1", Role.DECODE, pages_total=2, token="secret").start()
    await cluster.members(cluster.prefill, tiny)
    tiny.switches.held_at = 1
    runs = []
    for number, priority in enumerate((0, 0, -5)):
        runs.append(asyncio.create_task(client.run(ask(20, prompt=[10 + number] * 4, priority=priority))))
        await until(lambda n=number: cluster.router._dispatcher._live.arrivals == n + 1, "it arrived")
    tiny.go.set()
    await asyncio.gather(*runs)
    assert [task.prompt_token_ids[0] for task in cluster.prefill.prefills] == [10, 12, 11]


class TestFullQueue:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"max_queued_requests": 2, "retry_after_s": 3.0}

    async def test_the_next_one_is_turned_away_at_once(self, cluster: Cluster, client: Client) -> None:
        tiny = await FakeWorker("decode-1", Role.DECODE, pages_total=2, token="secret").start()
        await cluster.members(cluster.prefill, tiny)
        tiny.switches.held_at = 1
        running = [asyncio.create_task(client.run(ask(20)))]
        await until(lambda: tiny.tasks, "the first has all the room")
        running += [asyncio.create_task(client.run(ask(20))) for _ in range(2)]
        await until(lambda: cluster.router._dispatcher.waiting == 2, "two wait")
        error = await client.error(ask(4))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata() or ())[RETRY_AFTER] == "3"
        tiny.go.set()
        await asyncio.gather(*running)


async def test_no_worker_means_unavailable_at_once(cluster: Cluster, client: Client) -> None:
    await cluster.controller.set(cluster.prefill)
    await until(lambda: not cluster.router.ready, "the router saw the decode worker leave")
    error = await client.error(ask(4))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "no decode worker" in (error.details() or "")
    assert RETRY_AFTER in dict(error.trailing_metadata() or ())


async def test_an_attempt_that_samples_another_first_token_is_not_spliced_in(cluster: Cluster, client: Client) -> None:
    """The prompt fills the prefill worker's pool, so token 0 cannot be appended to it and is computed again."""
    tight = await FakeWorker("prefill-1", Role.PREFILL, pages_total=1, token="secret").start()
    await cluster.members(tight, cluster.decode)
    prompt = [5] * tight.page_tokens
    tight.switches.fail_transfers = 1
    _, ids, _ = await client.run(ask(8, prompt))
    assert ids == expected(8, prompt)
    assert [task.prior_output_tokens for task in tight.prefills] == [0, 0]
    tight.switches.fail_transfers = 1
    tight.prefills.clear()
    tight.answer = lambda prompt, index: answer_token(prompt, index) + len(tight.prefills) - 1
    error = await client.error(ask(8, prompt))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "token 0 came out differently" in (error.details() or "")
    assert len(tight.prefills) == 2


@pytest.mark.parametrize(("tokens", "out"), [(40, 8), (12, 11)])
async def test_answers_go_on_elsewhere_when_their_decode_worker_dies(
    cluster: Cluster, client: Client, tokens: int, out: int
) -> None:
    """With 12 tokens only one is left, which needs no decode worker."""
    doomed = cluster.decode
    doomed.switches.mute_after = out
    running = [asyncio.create_task(client.run(ask(tokens, prompt=[5, n], logprobs=1))) for n in range(6)]
    live = cluster.router._dispatcher._live
    await until(lambda: [request.assembler.count for request in live.values()] == [out] * 6, "some tokens are out")
    heir = await FakeWorker("decode-1", Role.DECODE, token="secret").start()
    await cluster.members(cluster.prefill, doomed, heir)
    await doomed.kill()
    for n, (_, ids, complete) in enumerate(await asyncio.gather(*running)):
        assert ids == expected(tokens, [5, n])
        assert (complete.prompt_tokens, complete.completion_tokens) == (2, tokens)
    second = [task for task in cluster.prefill.prefills if task.ref.attempt == 2]
    assert len(second) == 6
    assert {task.prior_output_tokens for task in second} == {out}
    assert {task.original_prompt for task in second} == {(5, n) for n in range(6)}
    assert len({reservation.ref.request_id for reservation in heir.reservations}) == (6 if tokens - out > 1 else 0)
    assert all(
        reservation.answer == tuple(expected(out, list(reservation.original_prompt)))
        for reservation in heir.reservations
    )
    await cluster.members(cluster.prefill, heir)


async def test_an_answer_that_no_live_prefill_worker_can_hold_is_computed_again(
    cluster: Cluster, client: Client
) -> None:
    """The large prefill worker dies, still registered, while a request waits whose context fits nowhere else."""
    large, doomed = cluster.prefill, cluster.decode
    doomed.switches.mute_after = 25
    running = asyncio.create_task(client.run(ask(40)))
    (request,) = await _live_ones(cluster, 1)
    await until(lambda: request.assembler.count == 25, "some tokens are out")
    small = await FakeWorker("prefill-1", Role.PREFILL, pages_total=1, token="secret").start()
    heir = await FakeWorker("decode-1", Role.DECODE, token="secret", not_ready="not yet").start()
    await cluster.members(large, small, doomed, heir)
    dispatcher = cluster.router._dispatcher
    await doomed.kill()
    await until(lambda: dispatcher.waiting == 1, "it waits")
    await large.kill()
    await until(lambda: large.info.peer not in {view.peer for view in dispatcher.pool.views()}, "it is seen to be dead")
    heir.not_ready = ""
    await cluster.controller.set(large, small, doomed, heir)
    _, ids, _ = await asyncio.wait_for(running, 60)
    assert ids == expected(40)
    assert [task.prior_output_tokens for task in small.prefills] == [small.page_tokens - len(PROMPT)]
    await cluster.members(small, heir)


async def _live_ones(cluster: Cluster, count: int) -> list[RoutedRequest]:
    live = cluster.router._dispatcher._live
    await until(lambda: len(live) == count, f"{count} requests are here")
    return list(live.values())


async def test_prompts_go_to_another_prefill_worker_when_theirs_dies(cluster: Cluster, client: Client) -> None:
    doomed = cluster.prefill
    doomed.switches.silent_prefill = True
    running = [asyncio.create_task(client.run(ask(8, prompt=[5, n]))) for n in range(4)]
    await until(lambda: len(doomed.prefills) == 4, "all are placed")
    heir = await FakeWorker("prefill-1", Role.PREFILL, token="secret").start()
    await cluster.members(doomed, heir, cluster.decode)
    await doomed.kill()
    for n, (_, ids, _) in enumerate(await asyncio.gather(*running)):
        assert ids == expected(8, [5, n])
    await cluster.members(heir, cluster.decode)


async def test_a_failure_after_the_last_token_fails_nothing(cluster: Cluster, client: Client) -> None:
    """A prefill worker may report a failed transfer after the last token, while the text is not decoded yet."""
    cluster.prefill.switches.silent_prefill = True
    running = asyncio.create_task(client.run(ask(3)))
    await placed(cluster, 1)
    (request,) = await _live_ones(cluster, 1)
    whole = RequestEvent(request.ref, 0, tuple(expected(3)), FinishReason.LENGTH)
    cluster.prefill.send("router-0", whole, failure_event(request.ref, TransferFailed("the pages did not arrive")))
    _, ids, complete = await running
    assert ids == expected(3)
    assert types_pb2.LIFECYCLE_EVENT_REQUEUED not in [stamp.event for stamp in complete.timeline.event_times]
    cluster.decode.forget()
    cluster.prefill.forget()


async def test_a_request_moves_at_most_twice(cluster: Cluster, client: Client) -> None:
    others = [await FakeWorker(f"decode-{n}", Role.DECODE, token="secret").start() for n in (1, 2, 3)]
    decodes = [cluster.decode, *others]
    await cluster.members(cluster.prefill, *decodes)
    for worker in decodes:
        worker.switches.step_s = 0.01
    run = asyncio.create_task(client.error(ask(1000)))
    for _ in range(3):
        await until(lambda: any(worker.tasks for worker in decodes), "it decodes")
        victim = next(worker for worker in decodes if worker.tasks)
        decodes.remove(victim)
        await victim.kill()
    error = await asyncio.wait_for(run, 60)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert victim.worker_id in (error.details() or "")
    assert [task.ref.attempt for task in cluster.prefill.prefills] == [1, 2, 3]
    await cluster.members(cluster.prefill, *decodes)


class TestSilentWorkers:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"rpc_timeout_s": 0.1}

    async def test_a_worker_that_does_not_answer_a_call_is_left_for_another(
        self, cluster: Cluster, client: Client
    ) -> None:
        cluster.decode.switches.silent_reserve = True
        pool, asked = cluster.router._dispatcher.pool, []
        link = pool.link(cluster.decode.info.peer)
        reserve = link.reserve

        async def note(reservation: Reservation) -> GrantedLease:
            asked.append(reservation.ref.attempt)
            return await reserve(reservation)

        link.reserve = note  # type: ignore[method-assign]
        error = await asyncio.wait_for(client.error(ask(8)), 60)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert asked == [1, 2, 3]
        other = await FakeWorker("decode-1", Role.DECODE, token="secret").start()
        await cluster.members(cluster.prefill, cluster.decode, other)
        for worker in (cluster.prefill, other):
            pool.link(worker.info.peer)._timeout = 60.0
        answers = await asyncio.gather(*(client.run(ask(8)) for _ in range(4)))
        assert all(ids == expected(8) for _, ids, _ in answers)
        cluster.decode.switches.silent_reserve = False


@pytest.mark.parametrize("settings", [WITHOUT_RECOVERY])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_dead_worker_ends_its_requests_and_its_successor_serves(
    cluster: Cluster, client: Client, role: Role
) -> None:
    cluster.decode.switches.step_s = 0.01
    cluster.prefill.switches.silent_prefill = role is Role.PREFILL
    running = [asyncio.create_task(client.error(ask(500, prompt=[5, n]))) for n in range(4)]
    await until(lambda: len(cluster.prefill.prefills) == 4, "all are placed")
    old = cluster.prefill if role is Role.PREFILL else cluster.decode
    if role is Role.DECODE:
        await until(lambda: len(old.tasks) == 4, "all are decoding")
    await old.kill()
    for error in await asyncio.wait_for(asyncio.gather(*running), 60):
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert old.worker_id in (error.details() or "")
    heir = await FakeWorker(old.worker_id, role, incarnation=2, token="secret").start()
    other = next(w for w in cluster.workers if w is not old)
    await cluster.members(*(heir, other))
    _, ids, _ = await client.run(ask(8))
    assert ids == expected(8)


async def test_prefill_worker_may_die_after_the_hand_over(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.step_s = 0.01
    run = asyncio.create_task(client.run(ask(40)))
    await until(lambda: cluster.router._dispatcher.pool.links[0].connected and bool(cluster.decode.tasks), "it decodes")
    links = cluster.router._dispatcher.pool.links
    await until(lambda: not any(link.request_ids for link in links if link.info.role.prefills), "handed over")
    await cluster.prefill.kill()
    _, ids, _ = await run
    assert ids == expected(40)


@pytest.mark.parametrize("settings", [WITHOUT_RECOVERY])
async def test_a_broken_stream_fails_its_requests_and_comes_back(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.break_after = 3
    error = await client.error(ask(20))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    cluster.decode.switches.break_after = None
    await until(lambda: cluster.router.ready, "the stream is open again")
    _, ids, _ = await client.run(ask(8))
    assert ids == expected(8)


async def test_worker_that_leaves_finishes_what_it_has(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.step_s = 0.01
    run = asyncio.create_task(client.run(ask(40)))
    await until(lambda: bool(cluster.decode.tasks), "it decodes")
    leaving = cluster.decode
    heir = await FakeWorker("decode-1", Role.DECODE, token="secret").start()
    await cluster.members(cluster.prefill, heir)
    _, ids, _ = await client.run(ask(4))
    assert len(heir.reservations) == 1
    _, ids, _ = await run
    assert ids == expected(40)
    await until(lambda: len(cluster.router._dispatcher.pool.links) == 2, "its link is gone")
    assert leaving.idle


async def test_a_prefill_worker_that_refuses_is_asked_again_three_times(cluster: Cluster, client: Client) -> None:
    cluster.prefill.switches.prefill_error = Unavailable("draining")
    error = await client.error(ask(8))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert len(cluster.prefill.prefills) == 3


async def test_heartbeats_keep_waiting_leases_and_a_lost_one_is_noticed(cluster: Cluster, client: Client) -> None:
    cluster.prefill.switches.silent_prefill = True
    cluster.decode.switches.lease_s = 0.3
    run = asyncio.create_task(client.run(ask(8)))
    await until(lambda: len(cluster.decode.heartbeats) >= 2, "heartbeats")
    cluster.prefill.switches.silent_prefill = False
    cluster.decode.switches.forgotten_attempts = 1
    cluster.decode.switches.lease_s = 30.0
    _, ids, _ = await run
    assert ids == expected(8)
    assert [task.ref.attempt for task in cluster.prefill.prefills] == [1, 2]


async def placed(cluster: Cluster, attempts: int) -> None:
    """Waits until `attempts` attempts are placed; the prefill worker sends nothing."""
    dispatcher = cluster.router._dispatcher
    await until(lambda: len(cluster.prefill.prefills) == attempts and not dispatcher._calls, "it is placed")


def silence(cluster: Cluster) -> None:
    """PostedTransfers the sweeper's clock past the stall timeout."""
    sweeper = cluster.router._dispatcher._sweeper
    sweeper._sweep(sweeper._clock() + cluster.config.stall_timeout_s)


class TestStall:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"queue_timeout_s": 0.3}

    async def test_silence_ends_at_a_deadline(self, cluster: Cluster, client: Client) -> None:
        cluster.prefill.switches.silent_prefill = True
        running = asyncio.create_task(client.error(ask(8)))
        for attempts in (1, 2, 3):
            await placed(cluster, attempts)
            silence(cluster)
        error = await running
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "prefill-0" in (error.details() or "")
        assert [task.ref.attempt for task in cluster.prefill.prefills] == [1, 2, 3]

    async def test_silence_is_the_end_of_an_attempt_only(self, cluster: Cluster, client: Client) -> None:
        cluster.prefill.switches.silent_prefill = True
        running = asyncio.create_task(client.run(ask(8)))
        await placed(cluster, 1)
        cluster.prefill.switches.silent_prefill = False
        silence(cluster)
        _, ids, _ = await running
        assert ids == expected(8)
        assert [task.ref.attempt for task in cluster.prefill.prefills] == [1, 2]

    async def test_waiting_ends_at_a_deadline(self, cluster: Cluster, client: Client) -> None:
        cluster.decode.switches.refuse_reserve = 10**9
        error = await client.error(ask(8))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no worker had capacity" in (error.details() or "")


async def test_abort_by_id_completes_the_answer(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.step_s = 0.01
    request = ask(500)
    request.request_id = "mine"
    run = asyncio.create_task(client.run(request))
    await until(lambda: bool(cluster.decode.tasks), "it decodes")
    again = await client.error(request)
    assert (again.details() or "").startswith("request_id: ")
    assert (await client.stub.Abort(pb.AbortRequest(request_id="mine"))).found
    _, ids, complete = await run
    assert complete.finish_reason == types_pb2.FINISH_REASON_ABORT
    assert ids == expected(len(ids))
    assert not (await client.stub.Abort(pb.AbortRequest(request_id="mine"))).found


def _living(kind: type) -> int:
    gc.collect()
    return sum(type(item) is kind for item in gc.get_objects())


async def test_many_requests_cancelled_at_random_leave_nothing(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.step_s = 0.001
    dice = random.Random(7)

    async def one(number: int) -> None:
        prompt = [3 + number % 200, 4, 5]
        call = client.stub.Generate(ask(dice.randrange(1, 30), prompt=prompt))
        after = dice.randrange(0, 12) if number % 3 == 0 else None
        ids: list[int] = []
        try:
            if after == 0:
                await asyncio.sleep(dice.random() * 0.05)
                call.cancel()
            async for message in call:
                ids.extend(message.chunk.token_ids)
                if after is not None and len(ids) >= after:
                    call.cancel()
        except asyncio.CancelledError:
            pass
        assert ids == expected(len(ids), prompt)

    for _ in range(examples(1)):
        await asyncio.gather(*(one(number) for number in range(150)))
    await cluster.settled()
    queue = cluster.router._dispatcher._scheduler.queue
    assert (len(queue), len(queue._tenants), len(queue._resumed)) == (0, 0, 0)
    # Text of ended requests may not be delivered yet; a count keeps no request alive, as a list would.
    await until(lambda: _living(RoutedRequest) == 0, "every request is gone from memory")


async def test_a_both_worker_serves_alone(cluster: Cluster, client: Client) -> None:
    both = await FakeWorker("both-0", Role.BOTH, token="secret").start()
    await cluster.members(both)
    await until(lambda: len(cluster.router._dispatcher.pool.links) == 1, "only one is left")
    _, ids, complete = await client.run(ask(8))
    assert ids == expected(8)
    assert complete.timeline.prefill_worker == complete.timeline.decode_worker == "both-0"


async def test_controller_may_go_and_come_back(cluster: Cluster, client: Client) -> None:
    await cluster.controller.stop()
    _, ids, _ = await client.run(ask(8))
    assert ids == expected(8)


async def test_info_loads_health_and_reflection(cluster: Cluster, client: Client) -> None:
    info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.max_context, list(info.eos_token_ids)) == ("fake", 2048, [2])
    assert list(info.summary) == ["1 B parameters"]
    server = await client.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert {(w.worker_id, w.connected, w.pages_total) for w in server.workers} == {
        ("prefill-0", True, 512), ("decode-0", True, 512),
    }  # fmt: skip
    assert (await client.stub.GetLoads(pb.GetLoadsRequest())) == pb.GetLoadsResponse()
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        probe = health_pb2_grpc.HealthStub(channel)
        for service in ("", "tandem.v1.Inference"):
            reply = await probe.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        await cluster.controller.set(cluster.decode)
        await until(lambda: not cluster.router.ready, "not ready")
        reply = await probe.Check(health_pb2.HealthCheckRequest(service="tandem.v1.Inference"))
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        names = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        listed = await names.read()
        assert "tandem.v1.Inference" in {s.name for s in listed.list_services_response.service}


class TestKeys:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_keys": ("one", "two")}

    async def test_a_key_is_needed_but_for_health(self, cluster: Cluster) -> None:
        async with channel_to(cluster.endpoints.grpc_address) as channel:
            assert (await Client(channel).error(ask(4))).code() is grpc.StatusCode.UNAUTHENTICATED
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        async with channel_to(cluster.endpoints.grpc_address, "two") as channel:
            _, ids, _ = await Client(channel).run(ask(4))
            assert ids == expected(4)


async def test_long_text_streams_in_whole_characters(cluster: Cluster, client: Client, tokenizer: Tokenizer) -> None:
    wanted = tokenizer.encode(TEXT)
    for worker in cluster.workers:
        worker.answer = lambda _prompt, index: wanted[index]
    texts = []
    async for message in client.stub.Generate(ask(len(wanted))):
        texts.append(message.chunk.text)
    assert "".join(texts) == TEXT
    assert all("\N{REPLACEMENT CHARACTER}" not in text for text in texts)


async def test_stopping_lets_answers_end_and_fails_the_late(cluster: Cluster, client: Client) -> None:
    cluster.decode.switches.step_s = 0.01
    soon = asyncio.create_task(client.run(ask(10)))
    late = asyncio.create_task(client.error(ask(1000)))
    await until(lambda: len(cluster.decode.tasks) == 2, "both decode")
    stopping = asyncio.create_task(cluster.router.stop(60.0))
    _, ids, _ = await soon
    assert ids == expected(10)
    assert not late.done()
    jump(60.0)
    error = await late
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in (error.details() or "")
    await stopping
    await until(lambda: cluster.decode.idle and cluster.prefill.idle, "the workers forgot both")


async def test_health_may_be_watched(cluster: Cluster) -> None:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        request = health_pb2.HealthCheckRequest(service="tandem.v1.Inference")
        call = health_pb2_grpc.HealthStub(channel).Watch(request)
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        await cluster.controller.set(cluster.decode)
        assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        call.cancel()


async def test_a_taken_port_is_reported_in_words(cluster: Cluster) -> None:
    for listener in ("grpc", "http"):
        port = int(getattr(cluster.endpoints, f"{listener}_address").split(":")[1])
        with pytest.raises(FailedPrecondition, match=f"{listener}_port: .*{port}"):
            await RouterServer(replace(cluster.config, **{f"{listener}_port": port})).start()


async def test_one_port_for_both_listeners_is_reported_in_words(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    router = RouterServer(replace(cluster.config, router_id="router-1", grpc_port=port, http_port=port))
    with pytest.raises(FailedPrecondition, match=f"_port: .*{port}"):
        await asyncio.wait_for(router.start(), 60)
    with socket.create_server(("127.0.0.1", port)):
        pass  # the router has closed all listeners


async def test_an_http_listener_that_cannot_open_is_reported_in_words(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_listener(*_: object) -> None:
        raise OSError("no listener")

    monkeypatch.setattr("uvicorn.Server.startup", no_listener)
    with pytest.raises(FailedPrecondition, match=r"http_port: .*no listener"):
        await asyncio.wait_for(RouterServer(replace(cluster.config, router_id="router-1")).start(), 60)


async def test_ipv6_listeners_open_at_the_address_they_name(cluster: Cluster) -> None:
    router = RouterServer(replace(cluster.config, router_id="router-6", host="::1"))
    endpoints = await router.start()
    assert endpoints.grpc_address.startswith("[::1]:")
    await until(lambda: router.ready, "it sees the workers")
    async with channel_to(endpoints.grpc_address) as channel:
        _, ids, _ = await Client(channel).run(ask(4))
        assert ids == expected(4)
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"http://{endpoints.http_address}/health")).status_code == 200
    await router.stop(1.0)


async def test_open_listeners_without_a_key_are_warned_of(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    assert "no API key" not in caplog.text
    for keys in (("key",), ()):
        router = RouterServer(
            replace(cluster.config, router_id="router-0", host="0.0.0.0", api_keys=keys, insecure=not keys)
        )
        await router.start()
        await router.stop(0.0)
        assert ("no API key" in caplog.text) is (not keys)


async def test_a_process_serves_until_sigterm(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serving = asyncio.create_task(serve(replace(cluster.config, router_id="router-1", grpc_port=port), 0.5))
    async with channel_to(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service="")
        await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True, timeout=60)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 60)
