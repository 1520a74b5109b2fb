"""A worker that loses its pool to silent prefill workers says so, takes nothing new, and recovers."""

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kv_transfer.nixl_backend import processes
from tandem.metrics import families as f
from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.messages import PrefillTask, RequestRef, SamplingParams
from tandem.worker.reporting.metrics import worker_facts
from tests.fake_engine import PAGE_TOKENS, answer_to
from tests.worker_pair import WorkerPair, until

PROMPT = list(range(11, 11 + 2 * PAGE_TOKENS))
ONE = SamplingParams(max_tokens=2)
POOL = 16
LOST = 5
"""Requests of two pages each, more than half of the pool."""


async def fill_quarantine(pair: WorkerPair, requests: int) -> None:
    """The prefill worker's writes do not arrive, and nobody wants them any more."""
    pair.fabric.hold()
    names = [f"lost-{number}" for number in range(requests)]
    for name in names:
        pair.send(name, PROMPT, ONE)
    await until(lambda: pair.decode.engine.pool.counts().advertised == 2 * requests)
    for name in names:
        pair.decode.worker.admission.abort("router-1", [pair.reservation(name, PROMPT, ONE).ref])


async def test_exhausted_quarantine_is_loud_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with WorkerPair(pages=POOL, prefill_pages=64) as pair:
        admission = pair.decode.worker.admission
        with caplog.at_level(logging.WARNING):
            await fill_quarantine(pair, LOST)
            with pytest.raises(ResourceExhausted) as caught:
                pair.reserve("q", PROMPT, ONE)
        assert caught.value.retry_after_s > 0
        assert (
            "decode-0 promises nothing for now: too many of its 16 KV pages are in quarantine" in caught.value.message
        )
        assert "as prefill-0 may still write to them" in caught.value.message
        assert admission.not_ready in caught.value.message
        loud = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert [record.message for record in loud] == [
            f"decode-0 is not ready (10 KV pages lost): {admission.not_ready}"
        ]

        with caplog.at_level(logging.WARNING):
            pair.fabric.release()
            await until(lambda: not admission.not_ready)
        assert "decode-0 is ready again" in caplog.text
        output = pair.send("q", PROMPT, ONE)
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, ONE)
        await pair.empty()


async def test_the_death_of_the_silent_worker_ends_it_too() -> None:
    async with WorkerPair(pages=POOL, prefill_pages=64, write_window_s=0.5) as pair:
        await fill_quarantine(pair, LOST)
        assert pair.decode.worker.admission.not_ready
        pair.fabric.kill(pair.prefill.me)
        pair.decode.worker.peer_gone(pair.prefill.me)
        await until(lambda: pair.decode.engine.pool.counts().free == POOL)
        assert not pair.decode.worker.admission.not_ready


async def test_a_distant_writer_s_grace_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerPair(
        pages=POOL, prefill_pages=64, write_window_s=10.0, quarantine_s=5.0, quarantine_far_s=60.0
    ) as pair:
        pool, transport_poll_s = pair.decode.engine.pool, 0.0
        await fill_quarantine(pair, 1)
        monkeypatch.setattr(pair.decode.worker.peers, "same_host", lambda _: False)
        monkeypatch.setattr(pair.decode.worker.transport, "transport_poll_s", lambda: transport_poll_s)
        pair.decode.worker.peer_gone(pair.prefill.me)
        pair.decode.age(10.0)
        transport_poll_s = 59.0
        pair.decode.age(0.0)
        assert pool.counts().quarantined == 2
        transport_poll_s = 60.0
        pair.decode.age(0.0)
        assert pool.counts().free == POOL


async def test_the_transport_listens_as_long_as_pages_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[int] = []
    async with WorkerPair(pages=POOL, prefill_pages=64) as pair:
        monkeypatch.setattr(pair.decode.worker.transport, "expect", expected.append)
        await fill_quarantine(pair, 1)
        assert pair.decode.engine.pool.counts().quarantined == 2
        assert expected[-1] == 1
        pair.fabric.release()
        await until(lambda: expected[-1] == 0)


async def test_the_grace_passes_only_while_the_transport_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerPair(pages=POOL, prefill_pages=64, write_window_s=0.1) as pair:
        pool = pair.decode.engine.pool
        await fill_quarantine(pair, 1)
        with monkeypatch.context() as deaf:
            deaf.setattr(pair.decode.worker.transport, "transport_poll_s", lambda: 0.0)
            pair.decode.worker.peer_gone(pair.prefill.me)
            await asyncio.sleep(0.5)
            assert pool.counts().quarantined == 2
        await until(lambda: pool.counts().free == POOL)


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that plays the prefill worker's."""
    made = subprocess.Popen(["sleep", "600"])
    yield made
    made.kill()
    made.wait()


async def test_a_writer_that_stands_still_may_write_for_as_long_as_it_lives(child: "subprocess.Popen[bytes]") -> None:
    window_s, grace_s = 0.2, 0.1
    async with WorkerPair(
        pages=POOL, prefill_pages=64, write_window_s=window_s, quarantine_s=grace_s, quarantine_far_s=grace_s
    ) as pair:
        pool = pair.decode.engine.pool
        namespace, _, _ = processes.this_process().split()
        name = f"{namespace} {child.pid} {processes._stat(child.pid)[processes._STARTED_AT]}"
        them = replace(pair.prefill.worker.transport.describe(), process=name)
        pair.decode.worker.peers._same_host.add(them)
        os.kill(child.pid, signal.SIGSTOP)
        await fill_quarantine(pair, 1)
        pair.decode.worker.peer_gone(pair.prefill.me)
        await asyncio.sleep(3 * (window_s + grace_s))
        assert pool.counts().quarantined == 2
        child.kill()
        await until(lambda: pool.counts().free == POOL)


async def test_writes_that_do_not_rest_are_loud_and_end(caplog: pytest.LogCaptureFixture) -> None:
    async with WorkerPair(pages=64, prefill_pages=POOL) as pair:
        prefill = pair.prefill.worker
        pair.fabric.hold()
        refs = [RequestRef(f"lost-{number}", 1) for number in range(LOST)]
        for number, ref in enumerate(refs):
            pair.send(ref.request_id, [token + 50 * number for token in PROMPT], ONE)
        await until(lambda: len(pair.fabric.writes) == LOST)
        assert not prefill.report.not_ready
        with caplog.at_level(logging.WARNING):
            prefill.abort("router-1", refs[:-1])
            await until(lambda: prefill.report.pending_transfer_pages == 2 * (LOST - 1))
            assert not prefill.report.not_ready, "half of the pool is daily life"
            assert worker_facts(prefill.report, prefill.transport)[f.PENDING_TRANSFER_PAGES] == 2 * (LOST - 1)
            prefill.abort("router-1", refs[-1:])
            await until(lambda: prefill.report.not_ready)
        assert "too many of its 16 KV pages are still being written to decode-0" in prefill.report.not_ready
        assert not worker_facts(prefill.report, prefill.transport)[f.WORKER_READY]
        assert f"prefill-0 is not ready (10 KV pages lost): {prefill.report.not_ready}" in caplog.text
        task = PrefillTask("router-1", RequestRef("q", 1), tuple(PROMPT), SamplingParams(max_tokens=1), None)
        with pytest.raises(ResourceExhausted, match="prefill-0 takes no prompts for now") as caught:
            prefill.prefill(task)
        assert caught.value.retry_after_s > 0

        pair.fabric.release()
        await until(lambda: not prefill.report.not_ready)
        await until(lambda: not prefill.report.pending_transfer_pages)
        output = pair.send("q", PROMPT, ONE)
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, ONE)
        await pair.empty()


async def test_some_quarantine_is_daily_life() -> None:
    async with WorkerPair(pages=POOL, prefill_pages=64) as pair:
        await fill_quarantine(pair, 4)
        assert pair.decode.engine.pool.counts().quarantined == POOL // 2
        assert not pair.decode.worker.admission.not_ready
        pair.reserve("q", PROMPT, ONE)


async def test_the_share_is_a_setting_of_both_halves() -> None:
    async with WorkerPair(pages=POOL, kv_quarantine_share=0.1) as pair:
        await fill_quarantine(pair, 1)
        assert pair.decode.worker.admission.not_ready
        await until(lambda: pair.fabric.writes)
        pair.prefill.worker.abort("router-1", [RequestRef("lost-0", 1)])
        await until(lambda: pair.prefill.worker.report.not_ready)
