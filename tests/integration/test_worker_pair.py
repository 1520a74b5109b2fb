"""Two real worker processes on the CPU: gRPC between them, NIXL under them, and the test in the role of the router."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.draws import Draw, History
from tandem.net import rpc
from tandem.protocol import conversion
from tandem.protocol.generated.tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.protocol.lifecycle.timeline import Edge
from tandem.protocol.messages import (
    Destination,
    FinishReason,
    Lease,
    PeerRef,
    PrefillTask,
    RequestEvent,
    RequestRef,
    Reservation,
    SamplingParams,
    TokenLogprobs,
    WorkerInspection,
)
from tests.factories import tiny_engine_config, write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
TOKEN = "secret"
PAGE_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""3 layers, keys and values, 2 heads, 16 tokens of 16 dimensions, float32."""
ENGINE = {"threads": 1, "kv_cache_bytes": 1 << 22, "max_step_tokens": 48}


@dataclass
class Answer:
    """The events of one request that the router received."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    edges: set[Edge] = field(default_factory=set)
    finish: FinishReason | None = None
    error: str = ""
    moved: int = 0
    pages: int = 0
    cached: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: RequestEvent) -> None:
        for number, token in enumerate(event.token_ids, event.first_index):
            assert number not in self.tokens
            self.tokens[number] = token
        self.logprobs |= dict(enumerate(event.logprobs, event.first_index))
        self.cached += event.cached_tokens
        self.edges |= {stamp.edge for stamp in event.edges}
        if event.transfer is not None:
            self.moved, self.pages = event.transfer.bytes, event.transfer.pages
        if event.finish_reason is not None:
            self.finish = event.finish_reason
            self.error = event.error.code if event.error else ""
            self.done.set()


class WorkerEnd:
    """A worker process, and a router's stream to it."""

    def __init__(self, worker_id: str, role: str, model: Path, **changes: Any) -> None:
        self.peer = PeerRef(worker_id, 1)
        self._order = {"worker_id": worker_id, "incarnation": 1, "role": role, "model": str(model), "engine": ENGINE}
        self._order |= {"token": TOKEN, "kv_checksum_rate": 1.0, **changes}
        self.answers: dict[str, Answer] = {}

    async def start(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        script = str(ROOT / "tests/integration/worker_process.py")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, cwd=ROOT,
        )  # fmt: skip
        assert self.process.stdin
        self.process.stdin.write(json.dumps(self._order).encode() + b"\n")
        self.info = await self._line()
        self.channel = rpc.open_channel(self.info["address"], TOKEN)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        await self.attach()

    async def attach(self) -> None:
        self.stream = self.stub.Attach(worker_pb2.AttachRequest(router_id="r"))
        await self.stream.initial_metadata()
        self.reader = asyncio.create_task(self._read())

    async def _line(self) -> dict[str, Any]:
        assert self.process.stdout
        line = await self.process.stdout.readline()
        assert line, f"{self.peer.worker_id} ended: {await self.process.wait()}"
        value: dict[str, Any] = json.loads(line)
        return value

    async def _read(self) -> None:
        try:
            async for message in self.stream:
                for event in conversion.step_events_from_proto(message).each():
                    self.answers[event.ref.request_id].take(event)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return

    async def stop(self) -> dict[str, Any]:
        """Returns the last line of a process that ended by itself."""
        await self.channel.close()
        await self.reader
        assert self.process.stdin
        self.process.stdin.close()
        last = await self._line()
        assert await self.process.wait() == 0
        return last

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()
        await self.channel.close()
        await self.reader

    async def inspect(self) -> WorkerInspection:
        return conversion.inspection_from_proto(await self.stub.Inspect(worker_pb2.InspectRequest()))

    async def empty(self) -> WorkerInspection:
        """Waits until every page is free, or cached without readers, and no request is known."""
        async with asyncio.timeout(60):
            while True:
                found = await self.inspect()
                assert found.integrity_error == ""
                unused = found.pages_free + found.pages_cached
                if unused == found.pages_total and not (found.requests or found.leases or found.pages_promised):
                    return found
                await asyncio.sleep(0.02)


class Pair:
    """A prefill and a decode worker, and the router between them."""

    def __init__(self, model: Path, **changes: Any) -> None:
        self.answers: dict[str, Answer] = {}
        damaged = changes.pop("damaged_transfers", 0)
        self.prefill = WorkerEnd("prefill-0", "prefill", model, **changes)
        self.decode = WorkerEnd("decode-0", "decode", model, damaged_transfers=damaged, **changes)

    async def send(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> Answer:
        answer = self.answers[request_id] = Answer()
        ref = RequestRef(request_id, 1)
        lease = await self.reserve(ref, prompt, sampling)
        destination = Destination(self.decode.peer, self.decode.info["address"], lease)
        task = PrefillTask("r", ref, tuple(prompt), sampling, destination)
        await self.prefill.stub.Prefill(conversion.prefill_task_to_proto(task))
        return answer

    async def reserve(self, ref: RequestRef, prompt: list[int], sampling: SamplingParams) -> Lease:
        reservation = Reservation("r", ref, tuple(prompt), sampling, self.prefill.peer)
        reply = await self.decode.stub.Reserve(conversion.reservation_to_proto(reservation))
        return conversion.granted_from_proto(reply).lease

    async def abort(self, request_id: str) -> None:
        message = worker_pb2.AbortWorkRequest(
            router_id="r", requests=[worker_pb2.RequestRef(request_id=request_id, attempt=1)]
        )
        await asyncio.gather(self.prefill.stub.Abort(message), self.decode.stub.Abort(message))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


async def running_pair(model: Path, lease_s: float, **changes: Any) -> AsyncIterator[Pair]:
    made = Pair(model, kv_lease_s=lease_s, quarantine_s=0.5, write_window_s=2.0, **changes)
    await asyncio.gather(made.prefill.start(made.answers), made.decode.start(made.answers))
    yield made
    for end in (made.prefill, made.decode):
        if end.process.returncode is None:
            last = await end.stop()
            assert last["threads"] == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model: Path) -> AsyncIterator[Pair]:
    """A pair without heartbeats whose leases do not end on a slow machine."""
    async for made in running_pair(model, lease_s=120.0):
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def damaging_pair(model: Path) -> AsyncIterator[Pair]:
    """A pair whose first transfer arrives with a flipped bit."""
    async for made in running_pair(model, lease_s=120.0, damaged_transfers=1):
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def mortal_pair(model: Path) -> AsyncIterator[Pair]:
    """A pair without heartbeats whose leases end soon."""
    async for made in running_pair(model, lease_s=1.0):
        yield made


def alone(model: Path, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Returns tokens and log probabilities of the same request on one engine: one chunk, one request at a time."""
    runner = ModelRunner.load(tiny_engine_config(model, kv_cache_bytes=ENGINE["kv_cache_bytes"]))
    pages = list(range(-(-(len(prompt) + sampling.max_tokens) // runner.page_tokens)))
    answer: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    history = History(prompt, answer) if sampling.penalized else None
    row = StepRow(prompt, 0, pages, Draw(sampling, 0, history))
    for index in range(sampling.max_tokens):
        result = runner.run(StepBatch([row]))
        (token,) = result.token_ids
        assert token is not None
        answer.append(token)
        logprobs += result.logprobs
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else runner.facts.eos_token_ids)}
        if token in ends and index >= sampling.min_tokens:
            break
        row = StepRow([token], len(prompt) + index, pages, Draw(sampling, index + 1, history))
    return answer, logprobs


def prompts(count: int) -> list[list[int]]:
    """Returns prompts of lengths around pages and chunks, one to a few hundred tokens."""
    rng = np.random.default_rng(7)
    lengths = [1, 15, 16, 17, 47, 48, 49, 96, 130, 300]
    return [rng.integers(3, 160, lengths[n % len(lengths)]).tolist() for n in range(count)]


def some_sampling(number: int) -> SamplingParams:
    """Returns greedy and random sampling, with and without penalties and log probabilities, and with a least length."""
    kinds: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"repetition_penalty": 1.3, "logprobs": 3},
        {"logprobs": 0},
        {"min_tokens": 6, "stop_token_ids": tuple(range(10, 150)), "logprobs": 2},
    ]
    return SamplingParams(
        max_tokens=12 + number,
        temperature=0.0 if number % 2 else 0.8,
        seed=number,
        ignore_eos=number % 3 == 0,
        **kinds[number // 2 % len(kinds)],
    )


async def test_same_tokens_as_the_engine_alone(pair: Pair, model: Path) -> None:
    asked = prompts(20)
    samplings = [some_sampling(n) for n in range(len(asked))]
    answers = await asyncio.gather(
        *(
            pair.send(f"q{n}", prompt, sampling)
            for n, (prompt, sampling) in enumerate(zip(asked, samplings, strict=True))
        )
    )
    async with asyncio.timeout(60):
        await asyncio.gather(*(answer.done.wait() for answer in answers))
    for prompt, sampling, answer in zip(asked, samplings, answers, strict=True):
        expected, logprobs = alone(model, prompt, sampling)
        assert [answer.tokens[n] for n in range(len(answer.tokens))] == expected
        assert len(answer.logprobs) == len(logprobs) == (0 if sampling.logprobs is None else len(expected))
        for number, wanted in enumerate(logprobs):
            found = answer.logprobs[number]
            assert wanted is not None
            assert found.top_ids == wanted.top_ids
            assert (found.chosen, *found.top) == pytest.approx((wanted.chosen, *wanted.top), abs=1e-4)
        assert answer.finish in (FinishReason.STOP, FinishReason.LENGTH)
        if len(expected) > 1:
            assert answer.pages == -(-len(prompt) // 16)
            assert answer.moved == answer.pages * PAGE_BYTES
    assert "UCX" in pair.decode.info["transport"]
    found = await pair.decode.inspect()
    assert found.checksums_equal == sum(answer.pages for answer in answers)
    assert found.checksum_failures == 0
    await pair.prefill.empty()
    await pair.decode.empty()


async def test_a_conversation_is_neither_computed_nor_sent_again(pair: Pair, model: Path) -> None:
    await converse(pair, model)


async def converse(talking: Pair, model: Path) -> None:
    """Greedy and random draws, penalties and log probabilities equal those of the engine alone, which has no cache."""
    prompt = np.random.default_rng(11).integers(3, 160, 100).tolist()
    stored = 0
    for turn in range(4):
        sampling = replace(some_sampling(turn), max_tokens=25, ignore_eos=True)
        answer = await talking.send(f"turn-{turn}", prompt, sampling)
        async with asyncio.timeout(60):
            await answer.done.wait()
            await talking.prefill.empty()
            await talking.decode.empty()
        tokens = [answer.tokens[n] for n in range(25)]
        assert tokens == alone(model, prompt, sampling)[0]
        assert answer.pages == -(-len(prompt) // 16) - stored // 16
        assert answer.moved == answer.pages * PAGE_BYTES
        assert bool(answer.cached) == bool(turn)
        stored = len(prompt) + 24
        prompt = [*prompt, *tokens, 5, 6, 7]


async def test_a_flipped_bit_is_seen_and_the_next_attempt_is_right(damaging_pair: Pair, model: Path) -> None:
    prompt, sampling = prompts(10)[-1], SamplingParams(max_tokens=8, ignore_eos=True)
    async with asyncio.timeout(60):
        broken = await damaging_pair.send("broken", prompt, sampling)
        await broken.done.wait()
        assert (broken.error, len(broken.tokens)) == ("TRANSFER_FAILED", 1)
        again = await damaging_pair.send("again", prompt, sampling)
        await again.done.wait()
    assert [again.tokens[n] for n in range(8)] == alone(model, prompt, sampling)[0]
    await damaging_pair.prefill.empty()
    found = await damaging_pair.decode.empty()
    assert found.checksum_failures == 1
    assert found.checksums_equal == again.pages


async def test_edges_of_one_request(pair: Pair) -> None:
    answer = await pair.send("q", prompts(10)[-1], SamplingParams(max_tokens=8, ignore_eos=True))
    async with asyncio.timeout(60):
        await answer.done.wait()
    assert answer.edges == {
        Edge.PREFILL_QUEUED, Edge.PREFILL_STARTED, Edge.PREFILL_FINISHED, Edge.TRANSFER_STARTED,
        Edge.LAST_PAGES_POSTED, Edge.NOTICE_MADE, Edge.NOTICE_POSTED, Edge.TRANSFER_FINISHED, Edge.NOTICE_SEEN,
        Edge.KV_CHECKED, Edge.DECODE_ADMITTED, Edge.DECODE_STARTED,
    }  # fmt: skip


async def test_random_aborts_leave_every_page_free(pair: Pair) -> None:
    rng = np.random.default_rng(3)
    asked = prompts(40)
    answers = await asyncio.gather(
        *(pair.send(f"q{n}", p, SamplingParams(max_tokens=40, ignore_eos=True)) for n, p in enumerate(asked))
    )
    cancelled = set(rng.choice(len(asked), 20, replace=False).tolist())

    async def cancel(number: int) -> None:
        await asyncio.sleep(float(rng.random()) * 0.5)
        await pair.abort(f"q{number}")

    await asyncio.gather(*(cancel(number) for number in cancelled))
    async with asyncio.timeout(60):
        await asyncio.gather(*(a.done.wait() for n, a in enumerate(answers) if n not in cancelled))
    assert all(len(a.tokens) == 40 for n, a in enumerate(answers) if n not in cancelled)
    await pair.prefill.empty()
    await pair.decode.empty()


async def test_router_that_leaves_takes_its_requests_along(pair: Pair) -> None:
    for n, prompt in enumerate(prompts(10)):
        await pair.send(f"q{n}", prompt, SamplingParams(max_tokens=200, ignore_eos=True))
    pair.prefill.stream.cancel()
    pair.decode.stream.cancel()
    await asyncio.gather(pair.prefill.empty(), pair.decode.empty())
    await asyncio.gather(pair.prefill.attach(), pair.decode.attach())


async def test_prefill_worker_killed_between_reserve_and_transfer(mortal_pair: Pair) -> None:
    for n, prompt in enumerate(prompts(10)):
        await mortal_pair.send(f"q{n}", prompt, SamplingParams(max_tokens=100, ignore_eos=True))
    await mortal_pair.prefill.kill()
    # Without a controller the writer is not reported dead: the pages that it may still write stay in quarantine.
    async with asyncio.timeout(60):
        while (found := await mortal_pair.decode.inspect()).requests:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert found.integrity_error == ""
    assert found.pages_promised == 0
    assert found.pages_free + found.pages_cached + found.pages_quarantined == found.pages_total


async def test_decode_worker_killed_in_the_middle(mortal_pair: Pair) -> None:
    answers = [
        await mortal_pair.send(f"q{n}", prompt, SamplingParams(max_tokens=100, ignore_eos=True))
        for n, prompt in enumerate(prompts(10))
    ]
    await mortal_pair.decode.kill()
    await mortal_pair.prefill.empty()
    # On a slow machine leases had ended before the worker was killed.
    assert {answer.error for answer in answers} <= {"", "TRANSFER_FAILED", "UNAVAILABLE", "STALE_EPOCH"}


async def test_a_caller_without_the_token_is_refused(pair: Pair) -> None:
    channel = rpc.open_channel(pair.decode.info["address"])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await channel.close()


async def test_bad_requests_name_the_field_and_hurt_nobody(pair: Pair) -> None:
    for prompt, sampling, field_name in (
        ([], SamplingParams(max_tokens=4), "prompt_token_ids"),
        ([3, 160], SamplingParams(max_tokens=4), "prompt_token_ids"),
        ([3] * 512, SamplingParams(max_tokens=4), "prompt_token_ids"),
        ([3], SamplingParams(max_tokens=0), "max_tokens"),
        ([3], SamplingParams(max_tokens=4, temperature=float("nan")), "temperature"),
        ([3], SamplingParams(max_tokens=4, top_p=0.0), "top_p"),
        ([3], SamplingParams(max_tokens=4, stop_token_ids=(160,)), "stop_token_ids"),
        ([3], SamplingParams(max_tokens=4, repetition_penalty=-1.0), "repetition_penalty"),
        ([3], SamplingParams(max_tokens=4, logprobs=21), "logprobs"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.reserve(RequestRef("bad", 1), prompt, sampling)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(f"{field_name}: ")
    answer = await pair.send("good", [3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True))
    async with asyncio.timeout(60):
        await answer.done.wait()
    assert len(answer.tokens) == 4
