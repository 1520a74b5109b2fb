"""The benchmark of diagnoses: its loads meet their bottlenecks, and its output shows the findings."""

import asyncio
import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bottlenecks import __main__ as program
from benchmarks.bottlenecks import command
from benchmarks.bottlenecks.loads import MADE_NARROW, STAGES, Load, Stage, settings_for, worker_of
from benchmarks.bottlenecks.look import Finding, Listener, _look, read
from benchmarks.load.served_model import ServedModel
from tandem.capacity.simulation.hardware import roofline
from tandem.cli.load.report import LoadReport
from tandem.cost_model.roofline import GPU
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import chunk_pairs
from tandem.engine.model_sizes import kv_bytes_per_token
from tandem.engine.models.shapes import shape_config
from tandem.metrics import families as f
from tandem.metrics.bottlenecks import CONCURRENT_TRANSFERS, Bottleneck
from tandem.metrics.exposition import Exposition, merge
from tandem.metrics.registry import Registry
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.protocol.ending import pages_for
from tandem.protocol.errors import InvalidArgument, Unavailable
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.settings.cluster import ClusterSettings

TCP_BYTES_PER_S, SLOW_TCP_BYTES_PER_S = 2e9, 4e8
"""Bandwidth of one stream over a host's loopback, staged through host memory: typical, and at worst."""
LOAD = Load("some", Bottleneck.BANDWIDTH, Role.DECODE, requests=8, prompt=32, answer=64, every_s=0.5)
SMALL_KV_BYTES = 46_080
"""Bytes of one token's KV in the default model in float32."""


def kv_bytes(device: str) -> int:
    """Returns the bytes of one token's KV in the model of a stage."""
    if device == "cpu":
        return SMALL_KV_BYTES
    return kv_bytes_per_token(shape_config("llama-3-8b"), 2)


@pytest.mark.parametrize("device", STAGES)
def test_loads_meet_their_bottlenecks_and_no_other(device: str, tmp_path: Path) -> None:
    stage = STAGES[device]
    config = ClusterSettings.of(tmp_path, **settings_for(stage, device, 2))
    assert config.engine.kv_cache_bytes is not None
    assert config.engine.page_tokens is not None
    pages = config.engine.kv_cache_bytes // (config.engine.page_tokens * kv_bytes(device))
    for load in stage.loads:
        one = pages_for(load.prompt + load.answer, config.engine.page_tokens)
        rows = min(load.requests, config.batch_requests)
        crowded = load.bottleneck is Bottleneck.KV_CAPACITY
        if load.half is Role.DECODE and not load.every_s:
            assert crowded is (one * rows > 0.9 * pages), load
            assert crowded is (one * (rows // 2 + 1) > pages // 2), (
                load
            )  # a worker of both roles reserves half of its pages
            assert (load.requests > config.batch_requests) is (
                load.bottleneck in {Bottleneck.QUEUE, Bottleneck.KV_CAPACITY}
            ), load


def test_what_is_made_narrow(tmp_path: Path) -> None:
    """Slowed transports and hosts are bottlenecks by an H200's roofline.

    Prompts are computed faster than TCP transfers their pages, and a step of the small model reads its weights in less
    time than its launches take.
    """
    wire, host = MADE_NARROW["wire"], MADE_NARROW["host"]
    (handed,), (tiny,) = wire.loads, host.loads
    cost = StepCost(roofline(shape_config("llama-3-8b")))
    compute_s, _ = cost.prefill_seconds(handed.prompt, chunk_pairs(handed.prompt, 0), 2048)
    assert handed.prompt * kv_bytes("cuda") / TCP_BYTES_PER_S > 2 * compute_s
    pool = wire.settings["kv_cache_bytes"]
    assert isinstance(pool, int)
    pages, one = pool // (128 * kv_bytes("cuda")), pages_for(handed.prompt + handed.answer, 128)
    assert 2 * CONCURRENT_TRANSFERS * one < pages, "several of them are on the way at once"
    assert pages // one * compute_s < wire.settle_s, "they are before the look begins"
    assert handed.requests * handed.prompt * kv_bytes("cuda") > 2 * TCP_BYTES_PER_S * wire.load_s, "and to its end"
    assert pool / SLOW_TCP_BYTES_PER_S < wire.settle_s + wire.look_s, "and some of them have arrived by then"
    small = roofline(shape_config("qwen3-0.6b"))
    assert small.base_s < 2 * GPU.launch_s
    for stage in (wire, host):
        assert stage.workers is not None
        ClusterSettings.of(tmp_path, **settings_for(stage, "cuda", stage.workers))
    assert host.settings["max_step_tokens"] < 2 * tiny.prompt  # type: ignore[operator]
    with pytest.raises(SystemExit):
        command.parse_arguments(["--narrow", "wire"])


def test_what_is_due_while_it_is_looked_at() -> None:
    workload = LOAD.workload(1.6, seed=3)
    assert [arrival.due_s for arrival in workload.arrivals] == [0.0, 0.5, 1.0, 1.5]
    assert len({arrival.prompt[0].key for arrival in workload.arrivals}) == 4
    assert {(a.prompt_tokens, a.new_tokens) for a in workload.arrivals} == {(32, 64)}


def test_one_worker_or_one_of_each_role() -> None:
    stage = STAGES["cpu"]
    assert settings_for(stage, "cpu", 1)["mode"] == Mode.COLOCATED
    assert settings_for(stage, "cpu", 2)["mode"] == Mode.DISAGGREGATED
    assert [worker_of(half, 2) for half in (Role.PREFILL, Role.DECODE)] == ["prefill-0", "decode-0"]
    assert worker_of(Role.PREFILL, 1) == worker_of(Role.DECODE, 1) == "both-0"


class Cluster:
    """A router and a worker that only reads memory; each scrape advances one second."""

    def __init__(self, running: list[int]) -> None:
        """Sets the number of running requests that the router exports at each scrape."""
        self.running = running
        self.seconds = 0.0
        self.router = Registry({"model": "m", "role": "router", "worker": "router"})
        self.router.read(lambda: {f.REQUESTS_RUNNING: self.running.pop(0)})
        self.worker = Registry({"model": "m", "worker": "decode-0"})
        self.worker.read(
            lambda: {
                f.STEP_BUSY: self.seconds, f.STEP_BYTES: 8e11 * self.seconds, f.DEVICE_BANDWIDTH: 1e12,
                f.STEP_FLOPS: 1e13 * self.seconds, f.DEVICE_FLOPS: 1e14, f.BATCH_LIMIT: 64, f.WORKER_READY: 1,
            }
        )  # fmt: skip

    async def scrape(self, _address: str, _key: str) -> Scrape:
        found = Scrape(
            merge(Exposition(each).render()[0].decode() for each in (self.router, self.worker)), self.seconds
        )
        self.seconds += 1.0
        return found


def looked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, running: Future[LoadReport], load: Load = LOAD
) -> ScrapeInterval:
    monkeypatch.setattr("benchmarks.bottlenecks.look.scrape", cluster.scrape)
    stage = Stage({}, "float32", (), settle_s=0.0, look_s=0.0)
    return asyncio.run(_look(load, stage, Listener("m:1", ""), running))


def finding(monkeypatch: pytest.MonkeyPatch, load: Load = LOAD) -> Finding:
    return read(load, "decode-0", looked(Cluster([0, 1, 1, 1]), monkeypatch, Future()))


def test_it_looks_when_requests_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    interval = looked(Cluster([0, 0, 3, 3, 3]), monkeypatch, Future())
    assert (interval.before.at_s, interval.now.at_s) == (3.0, 4.0)
    burst = looked(Cluster([0, 3, 4, 3, 3]), monkeypatch, Future(), replace(LOAD, every_s=0.0))
    assert burst.before.at_s == 3.0


def test_a_load_that_ends_before(monkeypatch: pytest.MonkeyPatch) -> None:
    over: Future[LoadReport] = Future()
    over.set_exception(Unavailable("a client died"))
    with pytest.raises(Unavailable, match="a client died"):
        looked(Cluster([0]), monkeypatch, over)


def test_what_is_said_of_a_bottleneck(monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding(monkeypatch)
    assert found.right
    assert "decode-0 bandwidth (right); MBU 0.80, MFU 0.10" in command.line(found)
    result = found.as_result()
    assert (result["expected"], result["named"], result["mbu"], result["mfu"]) == ("bandwidth", "bandwidth", 0.8, 0.1)
    wrong = Finding(STAGES["cpu"].loads[0], *[getattr(found, name) for name in found.__slots__[1:]])
    assert not wrong.right
    assert "WRONG, it should be compute" in command.line(wrong)
    figures = command.figures([found, wrong])
    assert figures["bottlenecks_named_right"] == "1 of 2"
    assert figures["bottleneck_some"] == "bandwidth, MBU 0.80, MFU 0.10"
    assert figures["bottleneck_long_prompts"] == "bandwidth (wrong: compute), MBU 0.80, MFU 0.10"


@pytest.mark.parametrize("bottleneck", [Bottleneck.BANDWIDTH, Bottleneck.HOST])
def test_the_program_ends_with_1_if_a_bottleneck_is_misnamed(
    bottleneck: Bottleneck, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = finding(monkeypatch, Load("some", bottleneck, Role.DECODE, 1, 1, 1))
    monkeypatch.setattr("sys.argv", ["bottlenecks"])
    monkeypatch.setattr(command, "choose_model", lambda *_: ServedModel(Path(), "tiny", random_weights=False))
    monkeypatch.setattr(command, "measure", lambda *_: ([found], {"bytes_per_s": 2e10, "flops": 1e11}))
    if bottleneck is Bottleneck.BANDWIDTH:
        program.main()
    else:
        with pytest.raises(SystemExit, match="1"):
            program.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["loads"][0]["expected"], said["flops"], said["bottlenecks_workers"]) == (bottleneck, 1e11, 1)


def test_ceilings_beside_those_measured_at_length() -> None:
    short, at_length = {"bytes_per_s": 3.8e12, "flops": 7e14}, {"bytes_per_s": 4e12, "flops": 7e14}
    assert command.compared(short, at_length) == {"bytes_per_s_ratio": 0.95, "flops_ratio": 1.0}
    assert command.compared(short, {}) == {}


def test_some_loads_by_name() -> None:
    stage = STAGES["cpu"]
    assert command.chosen_loads(stage, "") == list(stage.loads)
    assert [load.bottleneck for load in command.chosen_loads(stage, "next to nothing, long answers")] == [
        Bottleneck.NONE,
        Bottleneck.BANDWIDTH,
    ]
    with pytest.raises(InvalidArgument, match="--only: 'host'"):
        command.chosen_loads(stage, "host")
