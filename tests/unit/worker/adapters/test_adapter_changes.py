"""Adapters that a worker loads and unloads while requests run."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import PendingStep, StepBatch
from tandem.net.rpc import error_of
from tandem.protocol import conversion
from tandem.protocol.errors import (
    FailedPrecondition,
    InvalidArgument,
    ModelError,
    NonFiniteLogits,
    NotFound,
    ResourceExhausted,
    StaleEpoch,
)
from tandem.protocol.generated.tandem.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tandem.protocol.messages import AdapterFacts, FinishReason, PeerRef, RequestRef
from tests.adapters import TinyAdapter
from tests.factories import greedy_answer, tiny_engine_config, write_tiny_model
from tests.unit.worker.adapters.test_adapter_handoffs import PROMPT, SAMPLING, made, send
from tests.worker_pair import End, RequestOutput, WorkerPair, until

pytestmark = pytest.mark.usefixtures("adapters_read_here")

ONE, OTHER = TinyAdapter(seed=1), TinyAdapter(seed=2, rank=7)

Factory = Callable[[int], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(model: Path) -> Factory:
    """A factory of engines with one slot."""
    config = tiny_engine_config(model, runtime_loras=True, max_loras=1)
    return lambda _pages: made(ModelRunner.load(config))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers of the models into which `ONE` and `OTHER` are merged."""
    folders = [adapter.merged(tmp_path_factory.mktemp("merged")) for adapter in (ONE, OTHER)]
    runners = [ModelRunner.load(tiny_engine_config(folder)) for folder in folders]
    return [greedy_answer(runner, PROMPT, SAMPLING.max_tokens) for runner in runners]


def facts(path: Path, name: str = "it", identity: str = "") -> AdapterFacts:
    return AdapterFacts(name, identity, str(path))


class HeldSteps:
    def __init__(self) -> None:
        self.waiting, self.go = threading.Event(), threading.Event()


def held_steps(engine: Any, monkeypatch: pytest.MonkeyPatch, after: int) -> HeldSteps:
    """Has the engine compute `after` steps of prompts and answers, and hold the next one until `go` is set."""
    held, launch, left = HeldSteps(), engine.launch, iter(range(after))

    def launch_held(batch: StepBatch) -> PendingStep:
        if next(left, None) is None:
            held.waiting.set()
            assert held.go.wait(60)
        return launch(batch)

    monkeypatch.setattr(engine, "launch", launch_held)
    return held


async def test_a_request_that_runs_keeps_its_adapter_and_another_one_waits_for_its_slot(
    engines: Factory, wanted: list[list[int]], tmp_path: Path
) -> None:
    async with WorkerPair(both=True, make_engine=engines, max_step_tokens=32) as pair:
        worker, me = pair.decode.worker, pair.decode.me
        changes: list[None] = []
        worker.adapters.on_change = lambda: changes.append(None)
        one = await worker.adapters.load(me, facts(ONE.write(tmp_path / "one")))
        other = facts(OTHER.write(tmp_path / "other"))
        running = send(pair, "running", one.identity)
        worker.adapters.unload(me, "it")
        assert len(changes) == 2
        assert not worker.adapters.facts
        later = send(pair, "later", one.identity)  # from a router that has yet to follow
        await until(lambda: running.finish and later.finish)
        assert running.tokens == later.tokens == wanted[0]
        await pair.decode.empty()

        reservation = replace(pair.reservation("reserved", PROMPT, SAMPLING), adapter=one.identity)
        worker.reserve(reservation)
        with pytest.raises(ResourceExhausted, match="'it' still finishes requests"):
            await worker.adapters.load(me, other)
        worker.abort(reservation.router_id, [RequestRef("reserved", 1)])
        other = await worker.adapters.load(me, other)
        with pytest.raises(NotFound, match="it was unloaded"):
            send(pair, "too late", one.identity)
        output = send(pair, "other", other.identity)
        await until(lambda: output.finish)
        assert (output.tokens, output.cached_tokens) == (wanted[1], 0)

        worker.adapters.unload(me, "it")
        assert await worker.adapters.load(me, one) == one
        again = send(pair, "again", one.identity)
        await until(lambda: again.finish)
        assert (again.tokens, again.cached_tokens) == (wanted[0], 64), "its cached pages are still its own"


@pytest.mark.parametrize("after", [0, 3], ids=["its prompt is computed", "it decodes"])
async def test_a_cancelled_request_keeps_the_slot_until_no_step_computes_it(
    after: int, engines: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with WorkerPair(both=True, make_engine=engines, max_step_tokens=32) as pair:
        worker, me = pair.decode.worker, pair.decode.me
        one = await worker.adapters.load(me, facts(ONE.write(tmp_path / "one")))
        other = facts(OTHER.write(tmp_path / "other"))
        steps = held_steps(pair.decode.engine, monkeypatch, after)
        send(pair, "cancelled", one.identity)
        await until(steps.waiting.is_set)
        assert worker._schedulers.adapters() == {one.identity}
        pair.abort("cancelled")
        worker.adapters.unload(me, "it")
        assert not worker.admission.refs()
        assert worker._schedulers.adapters() == {one.identity}
        with pytest.raises(ResourceExhausted, match="'it' still finishes requests"):
            await worker.adapters.load(me, other)
        steps.go.set()
        await until(lambda: not worker._schedulers.adapters())
        await worker.adapters.load(me, other)
        await pair.empty()


async def test_a_prompt_finds_the_adapter_of_its_reservation_on_another_worker(
    engines: Factory, wanted: list[list[int]], tmp_path: Path
) -> None:
    """Also if the adapter is unloaded in between, and another one is loaded, as the controller does both."""
    async with WorkerPair(make_engine=engines, max_step_tokens=32) as pair:
        paths = [adapter.write(tmp_path / str(number)) for number, adapter in enumerate((ONE, OTHER))]
        for end in pair.ends:
            one = await end.worker.adapters.load(end.me, facts(paths[0]))
        output = pair.outputs["it"] = RequestOutput([])
        reservation = replace(pair.reservation("it", PROMPT, SAMPLING), adapter=one.identity)
        lease = pair.decode.worker.reserve(reservation).lease
        for end in pair.ends:
            end.worker.adapters.unload(end.me, "it")
        in_use = [end.worker.report.inspect().adapters_in_use for end in pair.ends]
        assert in_use == [(), (one.identity,)]
        with pytest.raises(ResourceExhausted, match="'it' still finishes requests"):
            await load_over_grpc(pair.prefill, paths[1], in_use[1])
        pair.prefill.worker.prefill(replace(pair.task("it", PROMPT, SAMPLING, lease), adapter=one.identity))
        await until(lambda: output.finish)
        assert output.tokens == wanted[0]
        await pair.empty()
        for end in pair.ends:
            await load_over_grpc(end, paths[1], ())


async def load_over_grpc(end: End, path: Path, in_use: Sequence[str]) -> None:
    asked = worker_pb2.LoadWorkerAdapterRequest(
        peer=conversion.to_proto(end.me, types_pb2.PeerRef),
        adapter=types_pb2.AdapterFacts(name="other", path=str(path)),
        in_use=in_use,
    )
    async with grpc.aio.insecure_channel(end.address) as to:
        try:
            await worker_pb2_grpc.WorkerStub(to).LoadAdapter(asked)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, "worker") from error


@pytest.mark.parametrize("both", [True, False], ids=["colocated", "handed over"])
async def test_an_adapter_that_overflows_fails_its_own_requests(
    both: bool, model: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    """Its update is finite, what attention makes of it is not. Others share its steps, and then its pages."""
    config = tiny_engine_config(model, runtime_loras=True, max_loras=2)
    async with WorkerPair(
        both=both, make_engine=lambda _: made(ModelRunner.load(config)), max_step_tokens=32, pages=16
    ) as pair:
        for end in pair.ends:
            good = await end.worker.adapters.load(end.me, facts(ONE.write(tmp_path / "one"), "good"))
            bad = await end.worker.adapters.load(end.me, facts(replace(ONE, alpha=1e30).write(tmp_path / "bad"), "bad"))
        for attempt in range(3):
            broken, whole = (send(pair, f"{adapter.name} {attempt}", adapter.identity) for adapter in (bad, good))
            await until(lambda broken=broken, whole=whole: broken.finish and whole.finish)
            assert (broken.finish, broken.error) == (FinishReason.ERROR, NonFiniteLogits.code)
            assert not broken.tokens
            assert whole.tokens == wanted[0]
            pair.abort(f"bad {attempt}")  # as its router does
        await pair.empty()


async def test_what_cannot_be_loaded_changes_nothing(engines: Factory, tmp_path: Path) -> None:
    async with WorkerPair(both=True, make_engine=engines) as pair:
        adapters, me = pair.decode.worker.adapters, pair.decode.me
        one = facts(ONE.write(tmp_path / "one"))
        with pytest.raises(ModelError, match="is no adapter"):
            await adapters.load(me, facts(tmp_path / "nothing"))
        with pytest.raises(InvalidArgument, match="max_lora_rank: is 16"):
            await adapters.load(me, facts(replace(ONE, rank=17).write(tmp_path / "wide")))
        with pytest.raises(FailedPrecondition, match="give all workers the same files"):
            await adapters.load(me, replace(one, identity="00" * 16))
        with pytest.raises(StaleEpoch):
            await adapters.load(PeerRef(me.worker_id, me.incarnation + 1), one)
        assert not adapters.facts
        first, second = await asyncio.gather(adapters.load(me, one), adapters.load(me, one))
        assert first == second == adapters.facts[0]
        with pytest.raises(FailedPrecondition, match="'it' is another adapter here; unload it first"):
            await adapters.load(me, facts(OTHER.write(tmp_path / "other")))
        moved = await adapters.load(me, facts(ONE.write(tmp_path / "moved")))
        assert adapters.facts == (moved,)
        assert (moved.identity, moved.path) == (first.identity, str(tmp_path / "moved"))


async def test_over_grpc(engines: Factory, tmp_path: Path) -> None:
    async with WorkerPair(both=True, make_engine=engines) as pair, grpc.aio.insecure_channel(pair.decode.address) as to:
        stub, me = worker_pb2_grpc.WorkerStub(to), pair.decode.me
        path = str(ONE.write(tmp_path / "one"))
        asked = types_pb2.AdapterFacts(name="it", path=path)
        run = {"peer": conversion.to_proto(me, types_pb2.PeerRef)}
        reply = await stub.LoadAdapter(worker_pb2.LoadWorkerAdapterRequest(**run, adapter=asked))
        loaded = pair.decode.worker.adapters.facts
        assert [(adapter.name, adapter.identity, adapter.path) for adapter in loaded] == [
            ("it", reply.adapter.identity, path)
        ]
        await stub.UnloadAdapter(worker_pb2.UnloadWorkerAdapterRequest(**run, name="it"))
        assert not pair.decode.worker.adapters.facts
        asked.path = "/nothing"
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.LoadAdapter(worker_pb2.LoadWorkerAdapterRequest(**run, adapter=asked))
        assert isinstance(error_of(failure.value, "worker"), ModelError)
