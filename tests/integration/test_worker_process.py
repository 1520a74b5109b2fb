"""One worker process from start to end, in this process: no resource of it is left, in any case."""

import gc
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.nixl_backend.transport import NixlTransport
from kv_transfer.ranks.group_transport import GroupTransport
from tandem.cost_model.roofline import CPU
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.ending import answer_tokens
from tandem.protocol.errors import FailedPrecondition, Internal, InvalidArgument, ModelError, Unavailable
from tandem.protocol.messages import PeerRef, PrefillTask, RequestRef, Reservation, Role, SamplingParams
from tandem.protocol.policy_name import PolicyName
from tandem.settings.ceilings import Ceilings
from tandem.worker.config import WorkerConfig
from tandem.worker.peers.peers import Peers
from tandem.worker.process import WorkerProcess
from tests.factories import tiny_engine_config, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def own_threads() -> set[str]:
    """Returns the threads of a worker; gRPC's poller ends when its last object is collected."""
    gc.collect()
    return {t.name for t in threading.enumerate()} & {"engine", "events", "nixl"}


def ceilings(process: WorkerProcess) -> Ceilings:
    """Returns the ceilings that utilization refers to."""
    assert process._worker is not None
    return process._worker.metrics.utilization.ceilings


def config(model: Path, **changes: object) -> WorkerConfig:
    return WorkerConfig("w", Role.BOTH, tiny_engine_config(model)).with_fields(**changes)


def test_starts_reports_and_stops(model: Path) -> None:
    stages: list[str] = []
    process = WorkerProcess(config(model, served_model_names=("tiny",)), 3)
    info = process.start(lambda stage, _fraction: stages.append(stage))
    assert (info.peer.worker_id, info.peer.incarnation, info.model.name) == ("w", 3, "tiny")
    assert info.pages_total > 0
    assert stages[-1] == "serving"
    assert ceilings(process) != CPU, "those of the device are measured"
    assert own_threads() == {"engine", "events", "nixl"}
    host, port = info.address.split(":")
    with socket.create_connection((host, int(port)), timeout=60):
        pass
    assert process.drain(1.0) == 0
    process.wait()  # its supervisor starts another: this one has left the cluster for good
    process.stop()
    process.stop()
    process.wait()
    assert own_threads() == set()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=60)


def test_ceilings_that_are_given_stay(model: Path) -> None:
    given = Ceilings(flops=1e12, bytes_per_s=1e11, launch_s=0.0)
    process = WorkerProcess(config(model, ceilings=given), 1)
    process.start()
    assert ceilings(process) == given
    process.stop()


def test_a_request_as_long_as_announced_is_accepted_whatever_the_chunks(tmp_path: Path) -> None:
    """A chunk limits the prompt tokens of a step, not the pages by which the engine forecasts a windowed request."""
    folder = write_tiny_model(tmp_path, "gemma3", max_position_embeddings=1 << 16)
    engine = tiny_engine_config(folder, max_step_tokens=256, page_tokens=16)
    process = WorkerProcess(
        WorkerConfig("w", Role.BOTH, engine, step_policy=PolicyName.CHUNKED, step_budget=16, attach_grace_s=600.0), 1
    )
    info = process.start()
    worker, loaded = process._worker, process._engine
    assert worker is not None
    assert loaded is not None
    assert info.max_step_tokens == 16
    assert info.model.max_context > answer_tokens(info), "the pages are the limit"
    assert info.kv_pages == loaded.kv_pages

    async def reserve(tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens + 1 - 8)
        worker.reserve(Reservation("r", RequestRef(f"q{tokens}", 1), (3,) * 8, sampling, info.peer))

    process._call(reserve(answer_tokens(info)))
    with pytest.raises(InvalidArgument):
        process._call(reserve(answer_tokens(info) + 1))
    process.stop()


def test_what_is_wrong_with_it_is_among_what_it_announces(model: Path) -> None:
    process = WorkerProcess(config(model), 1)
    process.start()
    worker, engine = process._worker, process._engine
    assert worker is not None
    assert engine is not None
    process._call(refuse(worker.peers))
    assert isinstance(worker.transport, GroupTransport)
    (rank,) = worker.transport._ranks
    assert isinstance(rank, NixlTransport)
    rank._ucx_transports.warnings = ("KV pages go over TCP",)
    worker.admission._budget._lost.not_ready = "too many pages are lost"
    info = process._info(engine, worker, "")
    assert info.not_ready == "too many pages are lost"
    wire, misfit = info.warnings
    assert wire == "KV pages go over TCP"
    assert misfit.startswith("shares no request with prefill-9: transfer")
    process.stop()


async def refuse(peers: Peers) -> None:
    """Simulates the handshake of a worker of another release."""
    mine = peers._mine
    theirs = replace(mine, protocol_version=1, description=replace(mine.description, peer=PeerRef("prefill-9", 1)))
    with pytest.raises(FailedPrecondition):
        peers.accept(theirs)


def test_a_model_that_is_not_there_leaves_nothing(tmp_path: Path) -> None:
    process = WorkerProcess(config(tmp_path / "nowhere"), 1)
    with pytest.raises(ModelError) as started:
        process.start()
    assert own_threads() == set()
    with pytest.raises(ModelError) as ended:
        process.wait()
    assert ended.value is started.value, "waiting for its end raises the reason, as starting does"


def test_wait_raises_the_error_of_a_failed_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such luck\nand a page more")

    monkeypatch.setattr(ModelRunner, "measure_ceilings", broken)
    process = WorkerProcess(config(model), 1)
    with pytest.raises(RuntimeError):
        process.start()
    with pytest.raises(Internal, match=r"failed to start: RuntimeError: no such luck$"):
        process.wait()


def test_pipeline_stages_are_refused_for_a_worker_that_decodes(model: Path) -> None:
    with pytest.raises(InvalidArgument, match="2 stages are for prefill workers only") as caught:
        WorkerProcess(config(model, pipeline_parallel_size=2), 1).start()
    assert caught.value.field == "pipeline_parallel_size"
    assert own_threads() == set()


def test_a_taken_port_is_named(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=str(port)):
            WorkerProcess(config(model, port=port), 1).start()
    assert own_threads() == set()


def test_a_controller_that_is_not_there_leaves_nothing(model: Path) -> None:
    with pytest.raises(Unavailable, match="controller"):
        WorkerProcess(config(model, controller_address="127.0.0.1:1"), 1).start()
    assert own_threads() == set()


def test_a_step_that_fails_ends_the_wait_loudly(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    process = WorkerProcess(config(model), 1)
    process.start()
    monkeypatch.setattr(ModelRunner, "launch", broken)
    worker = process._worker
    assert worker is not None

    def ask() -> None:
        worker.prefill(PrefillTask("r", RequestRef("q", 1), (3, 4), SamplingParams(max_tokens=1), None))

    process._events.call_soon_threadsafe(ask)
    with pytest.raises(Internal, match="a defect"):
        process.wait()
    process.stop()
    assert own_threads() == set()
