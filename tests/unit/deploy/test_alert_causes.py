"""Causes of each alert that no test with a real cluster covers.

Each cause is created in real parts, whose scraped metrics are played to the rules with an operator's durations. The
alert fires alone, and ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import tandem.worker.worker
from benchmarks.speculation.oracle import OracleProposer
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_backend.ucx_transports import UcxTransports
from tandem.engine.device import device_name
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.messages import PeerDescription, PeerRef, RequestRef, SamplingParams
from tests.fake_engine import PAGE_TOKENS, whole_text
from tests.unit.deploy.played import play
from tests.unit.deploy.small_cluster import SmallCluster
from tests.unit.deploy.test_rules import ROOT, alerts, needs_promtool
from tests.unit.kv_transfer.test_nixl_wire import PUT, table
from tests.worker_pair import ROUTER, until

pytestmark = needs_promtool

PROMPT, ONE = list(range(11, 11 + 2 * PAGE_TOKENS)), SamplingParams(max_tokens=2)
DRAFTS = 7
DRAFTED = {alpha: SamplingParams(max_tokens, ignore_eos=True) for alpha, max_tokens in ((1.0, 240), (0.0, 40))}
"""Answers of which eight have more than a thousand drafts, by the probability that a draft is right."""
POOL, LOST = 16, 5
"""Pages, and requests of two pages each, which lose more than half of the pool."""


def assert_fires(cluster: SmallCluster, firing: Mapping[int, set[str]], folder: Path) -> None:
    """Asserts that these alerts, and no others, fire at these minutes, and none at the beginning and at the end."""
    wrong = play(cluster.texts, {0: set(), **firing, len(cluster.texts) - 1: set()}, folder)
    assert not wrong, wrong


async def test_a_controller_that_is_gone(tmp_path: Path) -> None:
    async with SmallCluster() as cluster:
        await cluster.minutes(3)
        await cluster.close_controller()
        await cluster.minutes(5)
        await cluster.open_controller()
        await cluster.minutes(2)
    assert_fires(cluster, {3: set(), 5: {"TandemControllerUnreachable"}}, tmp_path)


async def test_a_worker_that_dies_again_and_again(tmp_path: Path) -> None:
    async with SmallCluster() as cluster:
        await cluster.minutes(2)
        await cluster.kill("prefill-0")
        for _ in range(3):
            await cluster.kill("decode-0")
            await cluster.minutes(2)
        await cluster.minutes(16)
    assert_fires(cluster, {2: set(), 7: {"TandemProcessRestartsOften"}, 16: {"TandemProcessRestartsOften"}}, tmp_path)


async def test_a_decode_worker_that_has_lost_its_pages(tmp_path: Path) -> None:
    async with SmallCluster(pages=POOL, prefill_pages=64) as cluster:
        await cluster.minutes(2)
        pair, names = cluster.pair, [f"lost-{number}" for number in range(LOST)]
        pair.fabric.hold()
        for name in names:
            pair.send(name, PROMPT, ONE)
        await until(lambda: pair.decode.engine.pool.counts().advertised == 2 * LOST)
        pair.decode.worker.abort(ROUTER, [RequestRef(name, 1) for name in names])
        await cluster.minutes(8)
        pair.fabric.release()
        await until(lambda: not pair.decode.worker.report.not_ready)
        pair.abort(*names)
        await pair.empty()
        await cluster.minutes(15)
    lost = {"TandemNoDecodeWorker", "TandemPagesQuarantined"}
    assert_fires(cluster, {5: lost, 8: lost | {"TandemWorkerNotReady"}}, tmp_path)


async def test_writes_that_do_not_rest(tmp_path: Path) -> None:
    async with SmallCluster(prefill_pages=POOL) as cluster:
        await cluster.minutes(2)
        pair = cluster.pair
        pair.fabric.hold()
        for number in range(2):
            pair.send(f"lost-{number}", [token + 50 * number for token in PROMPT], ONE)
        await until(lambda: len(pair.fabric.writes) == 2)
        pair.prefill.worker.abort(ROUTER, [RequestRef(f"lost-{number}", 1) for number in range(2)])
        await cluster.minutes(4)
        pair.fabric.release()
        await until(lambda: not pair.prefill.worker.report.pending_transfer_pages)
        await cluster.minutes(2)
    assert_fires(cluster, {5: {"TandemTransfersStuck"}}, tmp_path)


async def test_hand_overs_that_fail(tmp_path: Path) -> None:
    async with SmallCluster() as cluster:
        pair = cluster.pair
        for number in range(25):
            if number in {0, 5, 10}:
                await cluster.minutes(2)
            pair.fabric.fail_next(number in {10, 11})
            output = pair.send(f"{number}", PROMPT, ONE)
            await until(lambda output=output: output.finish is not None)
        await until(lambda: not pair.decode.engine.pool.counts().quarantined)
        await cluster.minutes(13)
    assert_fires(cluster, {5: set(), 9: {"TandemTransferFailures"}}, tmp_path)


async def test_pages_that_arrive_changed(tmp_path: Path) -> None:
    async with SmallCluster() as cluster:
        await cluster.minutes(2)
        pair = cluster.pair
        pair.fabric.damage_next(lambda pages: pair.decode.engine.memory[pages[0]].fill(7))
        for name in map(str, range(25)):
            output = pair.send(name, PROMPT, ONE)
            await until(lambda output=output: output.finish is not None)
        await cluster.minutes(34)
    assert_fires(cluster, {3: {"TandemKvChecksumFailed"}, 20: {"TandemKvChecksumFailed"}}, tmp_path)


async def test_a_pool_that_contradicts_itself(tmp_path: Path) -> None:
    async with SmallCluster() as cluster:
        await cluster.minutes(2)
        pair = cluster.pair
        pair.decode.engine.pool._free.take(1)
        output = pair.send("q", PROMPT, ONE)
        await until(lambda: output.finish is not None and pair.decode.worker.report.inspect().integrity_error)
        await cluster.minutes(2)
    async with SmallCluster() as restarted:
        await restarted.minutes(2)
    cluster.texts += restarted.texts
    assert_fires(cluster, {3: {"TandemKvPoolInconsistent"}}, tmp_path)


async def test_a_decode_worker_without_pages_to_spare(tmp_path: Path) -> None:
    async with SmallCluster(pages=POOL) as cluster:
        await cluster.minutes(2)
        pair, names = cluster.pair, [f"{number}" for number in range(POOL)]
        with suppress(ResourceExhausted):
            for name in names:
                pair.reserve(name, PROMPT, SamplingParams(max_tokens=2 * PAGE_TOKENS, ignore_eos=True))
        await cluster.minutes(12)
        pair.decode.worker.abort(ROUTER, [RequestRef(name, 1) for name in names])
        await pair.empty()
        await cluster.minutes(2)
    assert_fires(cluster, {11: set(), 13: {"TandemKvFull"}}, tmp_path)


async def test_a_worker_of_both_roles_that_refuses_below_a_full_pool(tmp_path: Path) -> None:
    async with SmallCluster(both=True, pages=80) as cluster:
        await cluster.minutes(2)
        pair = cluster.pair
        for minute in range(16):
            for number in range(50):
                with suppress(ResourceExhausted):
                    pair.reserve(f"{minute}-{number}", PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
            await cluster.minutes(1)
        load = pair.decode.worker.report.load()
        assert load.pages_used < 0.9 * load.pages_total
        await cluster.minutes(7)
    assert_fires(cluster, {9: set(), 17: {"TandemKvFull"}}, tmp_path)


@pytest.mark.parametrize(
    ("device", "tells", "named", "unnamed"),
    [
        ("cuda:0", ["transport_kinds"], {"TandemTcpOnGpuHost"}, set()),
        ("cuda:0", ["warnings"], {"TandemTcpOnGpuHost"}, {"TandemTcpOnGpuHost"}),
        ("cpu", ["transport_kinds", "warnings"], set(), set()),
    ],
)
async def test_pages_of_a_gpu_that_go_over_tcp(
    *,
    device: str,
    tells: list[str],
    named: set[str],
    unnamed: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transport's names come from UCX's own tables, then from none; a second worker names its device."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    put = PUT.replace("host memory", "cuda memory")
    fast, slow = (table("prefill-0/1", put, f"| 0..inf | zero-copy | {wire} |") for wire in ("cuda_ipc/cuda", "tcp/lo"))
    wires = UcxTransports("UCX", "prefill-0/1", KVLayout(0, 8, 2, 2, 16, (64, 64), 4, "float32", "VRAM"), "here")
    says = {"transport_kinds": lambda: wires.kinds, "warnings": lambda: wires.warnings}
    peer = PeerDescription(PeerRef("decode-0", 1), b"", 0, 1, 8, 0, "VRAM", "here")
    async with SmallCluster(device=device_name(torch.device(device))) as cluster:
        for what in tells:
            monkeypatch.setattr(cluster.pair.prefill.worker.transport, what, says[what])
        for ucx_log in (fast, fast + slow, "", fast):
            wires.learn(peer, ucx_log, {})
            await cluster.minutes(4)
    assert_fires(cluster, {3: set(), 6: named, 7: named, 11: unnamed}, tmp_path)


async def test_drafts_that_no_longer_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = OracleProposer(whole_text, alpha=1.0)
    monkeypatch.setattr(tandem.worker.worker, "make_proposer", lambda *_, **__: oracle)
    async with SmallCluster(both=True, pages=600) as cluster:
        decode = cluster.pair.decode.worker._schedulers.decode
        assert decode.speculation is not None
        decode.speculation.fixed_drafts = DRAFTS
        for alpha, minutes, times in ((1.0, 20, 2), (0.0, 10, 4), (1.0, 20, 1)):
            oracle.alpha = alpha
            for turn in range(times):
                await cluster.minutes(minutes)
                outputs = [
                    cluster.pair.send(f"{alpha} {turn} {n}", [*PROMPT, n + 50], DRAFTED[alpha]) for n in range(8)
                ]
                await until(lambda outputs=outputs: all(output.finish for output in outputs))
                await cluster.pair.empty()
        await cluster.minutes(20)
    assert_fires(cluster, {51: set(), 85: {"TandemDraftsRejected"}}, tmp_path)


def test_each_alert_has_a_cause_that_is_real() -> None:
    """Every alert occurs in this file or in the test with a real cluster, there in lines that expect it to fire."""
    here, beside = Path(__file__).read_text(), (ROOT / "tests" / "e2e" / "test_prometheus.py").read_text()
    made = [here, *(line for line in beside.splitlines() if " not " not in line)]
    assert set(alerts()) == set(re.findall(r"\bTandem\w+", "\n".join(made)))
