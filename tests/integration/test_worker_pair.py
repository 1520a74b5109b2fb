"""Two real worker processes on the CPU: gRPC between them, NIXL under them, and the test in the role of the router."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import History, SamplingInput
from tandem.net import rpc
from tandem.protocol import conversion
from tandem.protocol.generated.tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.protocol.messages import (
    Destination,
    FinishReason,
    GrantedLease,
    PeerRef,
    PrefillTask,
    PrefixSource,
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
    finish: FinishReason | None = None
    error: str = ""
    moved: int = 0
    pages: int = 0
    cached_tokens: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: RequestEvent) -> None:
        for number, token in enumerate(event.token_ids, event.first_index):
            assert number not in self.tokens
            self.tokens[number] = token
        self.logprobs |= dict(enumerate(event.logprobs, event.first_index))
        if event.transfer is not None:
            self.moved, self.pages = event.transfer.bytes, event.transfer.pages
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
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
                for event in conversion.step_output_from_proto(message).each():
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

    async def inspect(self) -> WorkerInspection:
        return conversion.from_proto(await self.stub.Inspect(worker_pb2.InspectRequest()), WorkerInspection)

    async def empty(self) -> WorkerInspection:
        """Waits until every page is free, or cached without readers, and no request is known."""
        async with asyncio.timeout(60):
            while True:
                state = await self.inspect()
                assert state.integrity_error == ""
                unused = state.pages_free + state.pages_cached
                if unused == state.pages_total and not (state.requests or state.leases or state.pages_reserved):
                    return state
                await asyncio.sleep(0.02)


class Pair:
    """A prefill and a decode worker, and the router between them."""

    def __init__(self, model: Path, **changes: Any) -> None:
        self.answers: dict[str, Answer] = {}
        damaged = changes.pop("damaged_transfers", 0)
        self.prefill = WorkerEnd("prefill-0", "prefill", model, **changes)
        self.decode = WorkerEnd("decode-0", "decode", model, damaged_transfers=damaged, **changes)

    async def send(
        self, request_id: str, prompt: list[int], sampling: SamplingParams, source: WorkerEnd | None = None
    ) -> Answer:
        """Send a request as the router does; `source` is a worker from which the prompt's prefix may be pulled."""
        answer = self.answers[request_id] = Answer()
        ref = RequestRef(request_id, 1)
        reservation = Reservation("r", ref, tuple(prompt), sampling, self.prefill.peer)
        reply = await self.decode.stub.Reserve(conversion.to_proto(reservation, worker_pb2.ReserveRequest))
        lease = conversion.from_proto(reply, GrantedLease).lease
        destination = Destination(self.decode.peer, self.decode.info["address"], lease)
        pulled = None if source is None else PrefixSource(source.peer, source.info["address"], len(prompt))
        task = PrefillTask("r", ref, tuple(prompt), sampling, destination, source=pulled)
        await self.prefill.stub.Prefill(conversion.to_proto(task, worker_pb2.PrefillRequest))
        return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model: Path) -> AsyncIterator[Pair]:
    """A pair whose first transfer arrives with a flipped bit, and whose leases need no heartbeats on a slow machine."""
    made = Pair(model, kv_lease_s=120.0, quarantine_s=0.5, write_window_s=2.0, damaged_transfers=1)
    await asyncio.gather(made.prefill.start(made.answers), made.decode.start(made.answers))
    yield made
    for end in (made.prefill, made.decode):
        last = await end.stop()
        assert last["threads"] == []


def alone(model: Path, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Returns tokens and log probabilities of the same request on one engine: one chunk, one request at a time."""
    runner = ModelRunner.load(tiny_engine_config(model, kv_cache_bytes=ENGINE["kv_cache_bytes"]))
    pages = list(range(-(-(len(prompt) + sampling.max_tokens) // runner.page_tokens)))
    answer: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    history = History(prompt, answer) if sampling.penalized else None
    row = StepRow(prompt, 0, pages, SamplingInput(sampling, 0, history))
    for index in range(sampling.max_tokens):
        result = runner.run(StepBatch([row]))
        (token,) = result.token_ids
        assert token is not None
        answer.append(token)
        logprobs += result.logprobs
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else runner.facts.eos_token_ids)}
        if token in ends and index >= sampling.min_tokens:
            break
        row = StepRow([token], len(prompt) + index, pages, SamplingInput(sampling, index + 1, history))
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


async def test_a_flipped_bit_fails_the_transfer_and_the_next_attempt_is_right(pair: Pair, model: Path) -> None:
    prompt, sampling = [5, *prompts(10)[-1]], SamplingParams(max_tokens=8, ignore_eos=True)
    async with asyncio.timeout(60):
        broken = await pair.send("broken", prompt, sampling)
        await broken.done.wait()
        # The first token comes from the other worker, and may arrive before the error or not at all.
        assert broken.error == "TRANSFER_FAILED"
        assert len(broken.tokens) <= 1
        again = await pair.send("again", prompt, sampling)
        await again.done.wait()
    assert [again.tokens[n] for n in range(8)] == alone(model, prompt, sampling)[0]
    await pair.prefill.empty()
    state = await pair.decode.empty()
    assert state.checksum_failures == 1
    assert state.checksums_equal == again.pages


async def test_a_pair_generates_the_tokens_of_one_engine(pair: Pair, model: Path) -> None:
    before = await pair.decode.inspect()
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
            actual = answer.logprobs[number]
            assert wanted is not None
            assert actual.top_ids == wanted.top_ids
            assert (actual.chosen, *actual.top) == pytest.approx((wanted.chosen, *wanted.top), abs=1e-4)
        assert answer.finish in (FinishReason.STOP, FinishReason.LENGTH)
        if len(expected) > 1:
            assert answer.pages == -(-len(prompt) // 16)
            assert answer.moved == answer.pages * PAGE_BYTES
    assert "UCX" in pair.decode.info["transport"]
    after = await pair.decode.empty()
    assert after.checksums_equal - before.checksums_equal == sum(answer.pages for answer in answers)
    assert after.checksum_failures == before.checksum_failures
    await pair.prefill.empty()


async def test_the_prefill_worker_pulls_the_answer_before_from_the_decode_worker(pair: Pair, model: Path) -> None:
    """The next turn of a conversation: the decode worker alone has the KV of the answer."""
    prompt, sampling = [9, *prompts(10)[-1]], SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
    async with asyncio.timeout(60):
        first = await pair.send("turn 1", prompt, sampling)
        await first.done.wait()
        await pair.prefill.empty()
        await pair.decode.empty()
        longer = [*prompt, *(first.tokens[n] for n in range(40)), 7, 8, 9]
        second = await pair.send("turn 2", longer, sampling, source=pair.decode)
        await second.done.wait()
    assert [second.tokens[n] for n in range(40)] == alone(model, longer, sampling)[0]
    assert second.cached_tokens == (len(prompt) + 39) // 16 * 16
    assert (await pair.prefill.empty()).checksum_failures == 0
    await pair.decode.empty()
