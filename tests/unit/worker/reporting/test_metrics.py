"""A worker's metrics: steps by their work, recent utilization, hand-overs, and facts of a running pair."""

import asyncio
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cost_model.roofline import ModelSizes, Roofline
from tandem.cost_model.step_collectives import StepCollectives
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.cost_model.step_work import StepWork, chunk_pairs
from tandem.engine.graph_use import GraphUse
from tandem.metrics import families as f
from tandem.metrics.bottlenecks import Bottleneck, diagnose
from tandem.metrics.exposition import Exposition, merge
from tandem.metrics.registry import Registry
from tandem.metrics.scrape import Scrape, ScrapeInterval
from tandem.metrics.worker_figures import figures_of
from tandem.protocol.cost_parameters import UNMEASURED
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.lifecycle.events import TransferStats
from tandem.protocol.messages import (
    Assignment,
    FinishReason,
    RequestEvent,
    RequestRef,
    Role,
    RoutedEvent,
    SamplingParams,
)
from tandem.settings.ceilings import Ceilings
from tandem.settings.engine import EngineSettings
from tandem.worker.loop import StepMeter
from tandem.worker.reporting.metrics import Utilization, WorkerMetrics, engine_facts, rank_facts, worker_facts
from tests.worker_pair import WorkerPair, until

SIZES = ModelSizes(
    weights=1000, weight_bytes=2000, kv_bytes_per_token=10, attention_flop_per_pair=4, output_weights=100
)
ROOFLINE = Roofline(SIZES, Ceilings(flops=1e6, bytes_per_s=1e5, launch_s=0.0))
DECODE = StepWork(decode_rows=2, decode_context_tokens=50)
PROMPT = StepWork(8, chunk_pairs(8, 4))


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics("m", "decode-0", Utilization(ROOFLINE))


def test_what_a_step_reads_and_computes() -> None:
    assert SIZES.step_bytes(DECODE) == 2000 + 10 * 50
    assert SIZES.step_flops(DECODE) == 2 * 1000 * 2 + 4 * 50
    assert SIZES.step_bytes(PROMPT) == 2000 + 10 * 8
    assert SIZES.step_flops(PROMPT) == 2 * 900 * 8 + 4 * (8 * 4 + 36), "no scores of words but for the last token"


def test_ranks_that_share_a_device_share_its_ceilings() -> None:
    shared = Ceilings(flops=5e5, bytes_per_s=5e4, launch_s=0.0)
    assert Utilization(ROOFLINE, ranks=2).ceilings == shared
    assert Utilization(ROOFLINE, ROOFLINE.ceilings, ranks=2).ceilings == shared
    ranks = [EngineSettings(device=device, tensor_parallel_size=2).ranks_of_device for device in ("cpu", "cuda")]
    assert ranks == [2, 1]


def test_steps_are_counted_by_what_was_in_them(metrics: WorkerMetrics) -> None:
    now = iter([1.0, 1.5, 1.5, 3.5, 4.0, 4.25])
    meter = StepMeter(UNMEASURED, lambda: next(now), metrics.step)
    for work in (DECODE, PROMPT, StepWork(3, 6.0, 4, 90)):
        meter.end(work, meter.begin())
        meter.learn()
    registry = metrics.registry
    totals = {phase: registry.histogram(f.STEP_SECONDS, phase).total for phase in ("decode", "prefill", "mixed")}
    assert totals == {"decode": 0.5, "prefill": 2.0, "mixed": 0.25}
    assert (registry.histogram(f.STEP_DECODE_ROWS).count, registry.histogram(f.STEP_DECODE_ROWS).total) == (2, 6)
    assert (registry.histogram(f.STEP_PREFILL_TOKENS).count, registry.histogram(f.STEP_PREFILL_TOKENS).total) == (2, 11)
    assert registry.counter(f.STEP_TOKENS, "decode").value == 6
    assert registry.counter(f.STEP_TOKENS, "prefill").value == 11
    assert metrics.utilization.busy_s == 2.75
    over = registry.histogram(f.STEP_OVER_PREDICTED, "decode")
    assert over.total == pytest.approx(0.5 / StepCost(UNMEASURED).seconds(DECODE))
    assert [registry.histogram(f.STEP_OVER_PREDICTED, phase).count for phase in ("prefill", "mixed")] == [1, 1]


@pytest.mark.parametrize(
    "group",
    [
        StepCollectives(2, 65, 8192, 128_256, 4.5e11),
        StepCollectives(2, 1, 8192, 0, 4.5e11, kv_gathers=32, kv_bytes=131_072),
    ],
    ids=["tensor parallel", "context parallel"],
)
def test_a_worker_of_several_gpus_reports_their_exchanges(group: StepCollectives, metrics: WorkerMetrics) -> None:
    """The time is what the cost model adds to these steps."""
    works = DECODE, PROMPT, StepWork(3, 6.0, 4, 90)
    for work in works:
        metrics.step(work, 1.0, 1.0)
    none = CostParameters(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    seconds = sum(StepCost(group.added_to(none)).seconds(work) for work in works)
    facts = rank_facts(metrics, group, 2)
    assert facts[f.WORKER_RANKS] == 2
    assert facts[f.STEP_COLLECTIVES] == pytest.approx(seconds)
    assert rank_facts(metrics, None, 1) == {f.WORKER_RANKS: 1}


def test_a_rank_computes_its_tokens_of_steps_with_prompts() -> None:
    alone, divided = Utilization(ROOFLINE), Utilization(replace(ROOFLINE, token_ranks=2))
    for used in (alone, divided):
        used.step(PROMPT, 1.0)
    assert (divided.flops, divided.bytes) == (alone.flops / 2, alone.bytes)
    for used in (alone, divided):
        used.step(DECODE, 1.0)
    assert divided.flops - alone.flops / 2 == pytest.approx(4200 / 2), "each rank decodes as a whole"


def test_utilization_is_of_the_newest_steps() -> None:
    used = Utilization(ROOFLINE)
    assert used.bandwidth == used.compute == 0
    for _ in range(40):
        used.step(DECODE, 0.5)
    assert used.bandwidth == pytest.approx(2500 / (0.5 * 1e5))
    assert used.compute == pytest.approx(4200 / (0.5 * 1e6))
    for _ in range(20):
        used.step(DECODE, 1.0)
    assert used.bandwidth == pytest.approx(2500 / 1e5)
    assert used.busy_s == 40.0


def test_a_ceiling_that_steps_exceed_was_measured_too_low() -> None:
    """Half a second of steps that read 300,000 bytes a second."""
    fast = StepWork(decode_rows=1, decode_context_tokens=28_000)
    measured, given = Utilization(ROOFLINE), Utilization(ROOFLINE, given=ROOFLINE.ceilings)
    for used in (measured, given):
        for _ in range(2):
            used.step(DECODE, 0.5)
        used.step(fast, 0.94)
    assert measured.ceilings.bytes_per_s == pytest.approx(3e5)
    assert measured.ceilings.flops == ROOFLINE.ceilings.flops
    assert measured.bandwidth < 1 < given.bandwidth
    assert given.ceilings == ROOFLINE.ceilings
    measured.step(DECODE, 5.0)
    assert measured.ceilings.bytes_per_s == pytest.approx(3e5)


def test_how_hand_overs_end(metrics: WorkerMetrics) -> None:
    events: list[RoutedEvent] = []
    emit = metrics.hearing(events.append)
    ref = RequestRef("a", 1)
    for event in (
        RequestEvent(ref, transfer=TransferStats(4_000_000, 4, "UCX", 2_000_000)),
        RequestEvent(ref, transfer=TransferStats(0, 0, "UCX", 0)),
        RequestEvent(ref, finish_reason=FinishReason.ERROR),
        RequestEvent(ref, finish_reason=FinishReason.LENGTH),
    ):
        emit(RoutedEvent("router", event))
    registry = metrics.registry
    assert len(events) == 4
    assert (registry.histogram(f.TRANSFER_SECONDS).count, registry.histogram(f.TRANSFER_SECONDS).total) == (2, 0.002)
    assert (registry.histogram(f.TRANSFER_BANDWIDTH).count, registry.histogram(f.TRANSFER_BANDWIDTH).total) == (1, 2e9)
    assert registry.counter(f.TRANSFER_BYTES).value == 4_000_000
    assert registry.counter(f.TRANSFER_FAILURES).value == 1


async def test_a_running_pair() -> None:
    """One request of 40 prompt tokens."""
    async with WorkerPair() as pair:
        output = pair.send("a", list(range(3, 43)), SamplingParams(max_tokens=4))
        await until(lambda: output.finish is not None)
        await pair.empty()
        prefill, decode = (worker_facts(end.worker.report, end.worker.transport) for end in (pair.prefill, pair.decode))
        assert decode[f.EXPIRED_LEASES] == prefill[f.EXPIRED_LEASES] == 0
        assert prefill[f.PREFIX_QUERIES] == 40
        for facts, end in ((prefill, pair.prefill), (decode, pair.decode)):
            pages = facts[f.KV_PAGES]
            assert not isinstance(pages, float | int)
            assert sum(pages.values()) == end.engine.pool.counts().total
            stored = facts[f.PREFIX_EVENTS]
            assert stored == {("stored",): pages["cached",], ("removed",): 0}
            assert facts[f.KV_USAGE] == facts[f.REQUESTS_RUNNING] == facts[f.OPEN_LEASES] == 0
            assert facts[f.WORKER_READY]
            assert facts[f.POOL_SOUND]
        registry = pair.prefill.worker.metrics.registry
        assert registry.histogram(f.TRANSFER_SECONDS).count == 1
        prefilled = registry.counter(f.STEP_TOKENS, "prefill")
        decoded = pair.decode.worker.metrics.registry.counter(f.STEP_TOKENS, "decode")
        # A step is counted behind its news.
        await until(lambda: (prefilled.value, decoded.value) == (40, 3))
        assert registry.labels == {"model": "fake", "worker": "prefill-0"}


async def test_hand_overs_that_do_not_end_are_the_wire() -> None:
    """No write lands while the metrics of a real pair are scraped twice.

    Pages of both are taken, and more prompts wait at the router.
    """
    sampling = SamplingParams(max_tokens=4)
    async with WorkerPair(pages=16) as pair:
        boards = [end.worker.metrics.registry for end in pair.ends]
        for end, registry in zip(pair.ends, boards, strict=True):
            registry.read(partial(worker_facts, end.worker.report, end.worker.transport))
        router = Registry({"model": "fake", "role": "router", "worker": "router"})
        router.read(lambda: {f.REQUESTS_WAITING: 5})

        def scrape() -> Scrape:
            text = merge(Exposition(registry).render()[0].decode() for registry in (router, *boards))
            return Scrape(text, time.monotonic())

        pair.fabric.hold()
        outputs = [pair.send(name, prompt_of(number), sampling) for number, name in enumerate("abc")]
        await until(
            lambda: pair.prefill.worker.metrics.writing._writing == 3 and all(output.tokens for output in outputs)
        )
        with pytest.raises(ResourceExhausted):
            pair.reserve("d", prompt_of(3), sampling)
        before = scrape()
        await asyncio.sleep(0.3)
        interval = ScrapeInterval(before, scrape())
        assert interval.now.total(f.TRANSFER_SECONDS, "_count") == 0
        prefill, decode = (figures_of(interval, end.me.worker_id) for end in pair.ends)
        # 3 but for the time that a scrape takes on a busy machine.
        assert prefill.transferring == decode.others_transferring > 1
        assert (prefill.kv_used, decode.arriving, decode.kv_used) == (12 / 16, 12 / 16, 15 / 16)
        assert diagnose(prefill).bottleneck is diagnose(decode).bottleneck is Bottleneck.TRANSFER
        pair.fabric.release()
        await until(lambda: all(output.finish is not None for output in outputs))
        await pair.empty()
        written = scrape().total(f.TRANSFER_WRITING, worker="prefill-0")
        await asyncio.sleep(0.01)
        assert scrape().total(f.TRANSFER_WRITING, worker="prefill-0") == written > interval.grown(f.TRANSFER_WRITING)


def prompt_of(number: int) -> list[int]:
    """Returns a prompt of 16 tokens that shares no page with another."""
    return list(range(3 + 16 * number, 19 + 16 * number))


async def test_a_change_of_role_is_a_change_of_one_series() -> None:
    async with WorkerPair() as pair:
        worker = pair.prefill.worker
        engine: Any = SimpleNamespace(
            device_name="cpu",
            facts=worker.facts,
            graph_use=GraphUse(),
            expert_tokens=SimpleNamespace(read=lambda: {("first", "0"): 7}),
        )
        worker.metrics.registry.read(partial(engine_facts, engine, lambda: worker.assignment.role.value))
        seen = []
        for role in (Role.PREFILL, Role.BOTH):
            worker.assignment.assume(Assignment(role), grace_s=0)
            text = Exposition(worker.metrics.registry).render()[0].decode()
            series = {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
            seen.append(series)
        left, came = seen[0] - seen[1], seen[1] - seen[0]
        assert len(left) == len(came) == 1
        assert 'role="prefill"' in next(iter(left))
        assert 'role="both"' in next(iter(came))


async def test_utilization_uses_the_ceilings_that_an_operator_gives() -> None:
    given = Ceilings(flops=1e6, bytes_per_s=2e6, launch_s=0.0)
    async with WorkerPair() as plain, WorkerPair(ceilings=given, max_batch_requests=5) as configured:
        for pair, ceilings in ((plain, plain.decode.engine.roofline.ceilings), (configured, given)):
            assert pair.decode.worker.metrics.utilization.ceilings == ceilings
        assert worker_facts(configured.decode.worker.report, configured.decode.worker.transport)[f.BATCH_LIMIT] == 5


async def test_transfers_that_fail_change_or_lose_pages() -> None:
    """The causes of three alerts, as what they go by counts them."""
    prompt, sampling = list(range(3, 43)), SamplingParams(max_tokens=4)
    async with WorkerPair() as pair:
        sent = pair.prefill.worker.metrics.registry.counter(f.TRANSFER_FAILURES)
        pair.fabric.fail_next()
        failed = pair.send("a", prompt, sampling)
        await until(lambda: failed.finish is not None)
        await pair.empty()
        assert sent.value == 1
        assert worker_facts(pair.decode.worker.report, pair.decode.worker.transport)[f.CHECKSUM_FAILURES] == 0
        pair.fabric.damage_next(lambda pages: pair.decode.engine.memory[pages[0]].fill(7))
        changed = pair.send("b", prompt, sampling)
        await until(lambda: changed.finish is not None)
        await pair.empty()
        facts = worker_facts(pair.decode.worker.report, pair.decode.worker.transport)
        assert facts[f.CHECKSUM_FAILURES] == 1
        assert facts[f.POOL_SOUND]
        pair.decode.engine.pool._free.take(1)
        last = pair.send("c", prompt, sampling)
        await until(
            lambda: (
                last.finish is not None
                and not worker_facts(pair.decode.worker.report, pair.decode.worker.transport)[f.POOL_SOUND]
            )
        )


async def test_a_request_that_finds_no_pages() -> None:
    async with WorkerPair(pages=8) as pair:
        lease = pair.reserve("a", list(range(3, 23)), SamplingParams(max_tokens=8, ignore_eos=True))
        registry = pair.decode.worker.metrics.registry
        assert registry.counter(f.KV_REFUSALS).value == 0
        with pytest.raises(ResourceExhausted):
            pair.reserve("b", list(range(3, 23)), SamplingParams(max_tokens=8, ignore_eos=True))
        assert registry.counter(f.KV_REFUSALS).value == 1
        facts = worker_facts(pair.decode.worker.report, pair.decode.worker.transport)
        assert isinstance(facts[f.KV_USAGE], float)
        assert facts[f.KV_USAGE] > 0.5
        pair.decode.worker.abort("router-1", [RequestRef("a", 1)])
        await until(lambda: not worker_facts(pair.decode.worker.report, pair.decode.worker.transport)[f.OPEN_LEASES])
        assert lease.request_id == "a"


async def test_a_lease_without_renewals_expires() -> None:
    async with WorkerPair(kv_lease_s=0.05) as pair:
        pair.reserve("b", list(range(3, 43)), SamplingParams(max_tokens=4))
        await until(lambda: worker_facts(pair.decode.worker.report, pair.decode.worker.transport)[f.EXPIRED_LEASES])
        await pair.empty()
        assert worker_facts(pair.decode.worker.report, pair.decode.worker.transport)[f.EXPIRED_LEASES] == 1
