"""An engine that fails, or never answers: its batch fails in words, nobody waits, and everybody else goes on."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer.checksums import PageChecks
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.engine.config import EngineConfig
from tandem.net import rpc
from tandem.protocol.errors import Unavailable
from tandem.protocol.generated.tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.protocol.messages import FinishReason, Role, SamplingParams
from tandem.worker.config import WorkerConfig
from tandem.worker.process import WorkerProcess
from tests.fake_engine import FakeEngine, answer_to
from tests.worker_pair import End, RequestOutput, WorkerPair, until

PROMPT = [11, 12, 13, 14, 15, 16, 17]
TEN = SamplingParams(max_tokens=10)
LONG = SamplingParams(max_tokens=150)
DEADLINE_S = 600.0
CUDA_WORDS = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later\n"


@pytest.fixture(autouse=True, params=[False, True], ids=["", "asynchronous"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", request.param)


def fail_at_launch(end: End) -> None:
    end.engine.launch_error = RuntimeError(CUDA_WORDS)
    end.engine.resume()


def fail_at_result(end: End) -> None:
    end.engine.error = RuntimeError(CUDA_WORDS)
    end.engine.resume()


def never_end(end: End) -> None:
    """PostedTransfers the start of the held step back by the deadline."""
    assert end.worker._loop._busy_since is not None
    end.worker._loop._busy_since -= DEADLINE_S


FAULTS = [fail_at_launch, fail_at_result, never_end]


async def decoding(pair: WorkerPair, name: str) -> RequestOutput:
    """A request in the decode worker's batch, whose next step is held."""
    pair.decode.engine.hold(after=3)
    output = pair.send(name, PROMPT, LONG)
    await until(lambda: len(output.tokens) > 2 and pair.decode.engine.waiting.is_set())
    return output


@pytest.mark.parametrize("break_it", FAULTS)
async def test_the_batch_fails_and_the_rest_is_left_to_the_router(break_it: Callable[[End], None]) -> None:
    async with WorkerPair(max_batch_requests=1, step_deadline_s=DEADLINE_S) as pair:
        running = await decoding(pair, "running")
        waiting = pair.send("waiting", PROMPT, TEN)
        await until(lambda: waiting.pages)
        break_it(pair.decode)
        await until(lambda: running.finish)
        assert (running.finish, running.error) == (FinishReason.ERROR, "INTERNAL")
        await until(pair.decode.worker.died.done)
        assert waiting.finish is None
        assert pair.streams[1].closed
        with pytest.raises(Unavailable):
            pair.reserve("late", PROMPT, TEN)
        one = SamplingParams(max_tokens=1)
        elsewhere = pair.outputs["elsewhere"] = RequestOutput()
        pair.prefill.worker.prefill(pair.task("elsewhere", PROMPT, one, None))
        await until(lambda: elsewhere.finish)
        assert elsewhere.tokens == answer_to(PROMPT, one)


@pytest.mark.parametrize("break_it", FAULTS)
async def test_a_prompt_that_is_computed_fails_and_gives_its_lease_back(
    break_it: Callable[[End], None],
) -> None:
    async with WorkerPair(max_step_tokens=8, max_batch_requests=4, step_deadline_s=DEADLINE_S) as pair:
        pair.prefill.engine.hold(after=1)
        computed = pair.send("computed", list(range(3, 43)), TEN)
        await until(pair.prefill.engine.waiting.is_set)
        queued = pair.send("queued", list(range(3, 63)), TEN)  # the shorter one is computed first
        break_it(pair.prefill)
        await until(lambda: computed.finish)
        assert computed.error == "INTERNAL"
        assert queued.finish is None
        with pytest.raises(Unavailable):
            pair.prefill.worker.prefill(pair.task("late", PROMPT, SamplingParams(max_tokens=1), None))
        pair.abort("queued")
        await pair.decode.empty()


async def test_heartbeats_are_answered_while_a_step_computes() -> None:
    async with WorkerPair() as pair:
        running = await decoding(pair, "running")
        async with rpc.open_channel(pair.decode.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            reply = await stub.Heartbeat(worker_pb2.HeartbeatRequest(), timeout=60)
        assert not reply.unknown
        assert running.finish is None
        pair.decode.engine.resume()
        await until(lambda: running.finish)
        assert running.tokens == answer_to(PROMPT, LONG)


async def test_the_reason_is_one_line() -> None:
    async with WorkerPair() as pair:
        running = await decoding(pair, "running")
        fail_at_result(pair.decode)
        await until(lambda: running.finish)
        assert running.message == (
            "worker decode-0 failed in a step (RuntimeError: CUDA error: device-side assert triggered) and restarts;"
            " send it again"
        )


async def test_a_stuck_step_is_named_and_closing_does_not_wait_for_it() -> None:
    async with WorkerPair(step_deadline_s=DEADLINE_S) as pair:
        running = await decoding(pair, "running")
        worker = pair.decode.worker
        never_end(pair.decode)
        await until(worker.died.done)
        await until(lambda: running.finish)
        assert "did not end within 600 s" in running.message
        async with asyncio.timeout(60):
            await worker.close()
        assert pair.decode.engine.waiting.is_set()  # still stuck


async def test_a_stuck_checksum_ends_the_worker_as_a_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerPair() as pair:
        monkeypatch.setattr(PageChecks, "busy_s", 1e9)
        await until(pair.decode.worker.died.done)
        assert "a checksum did not end within" in str(pair.decode.worker.died.result())
        monkeypatch.undo()


async def test_a_check_of_the_pool_that_hangs_hides_no_stuck_step(monkeypatch: pytest.MonkeyPatch) -> None:
    checking, go = threading.Event(), threading.Event()

    def never_ends(_: PrefixCache) -> None:
        checking.set()
        go.wait(60)

    monkeypatch.setattr(PrefixCache, "check_integrity", never_ends)
    async with WorkerPair(step_deadline_s=DEADLINE_S) as pair:
        first = pair.send("first", PROMPT, TEN)
        await until(lambda: first.finish and checking.is_set())  # the prefill worker checks earlier than the other one
        await decoding(pair, "running")
        never_end(pair.decode)
        await until(pair.decode.worker.died.done)
        assert "a step did not end within 600 s" in str(pair.decode.worker.died.result())
        go.set()
        monkeypatch.undo()


async def test_a_check_of_the_pool_that_hangs_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(PrefixCache, "check_integrity", lambda _: go.wait(60))
    async with WorkerPair(step_deadline_s=DEADLINE_S) as pair:
        pair.send("first", PROMPT, TEN)
        watchdog = pair.decode.worker._watchdog
        await until(lambda: watchdog._checking_since)
        assert not watchdog.check_device()
        watchdog._checking_since -= DEADLINE_S
        await until(pair.decode.worker.died.done)
        assert "a check of the pool did not end" in str(pair.decode.worker.died.result())
        go.set()
        monkeypatch.undo()


async def test_a_liveness_probe_finds_a_stuck_step() -> None:
    """Also where the worker's own timer is gone."""
    async with WorkerPair(step_deadline_s=DEADLINE_S) as pair:
        await decoding(pair, "running")
        pair.decode.worker._watchdog.stop()
        pair.decode.worker.look_for_stuck()
        assert not pair.decode.worker.died.done()
        never_end(pair.decode)
        pair.decode.worker.look_for_stuck()
        assert pair.decode.worker.died.done()


async def test_a_sign_of_life_comes_from_the_worker_s_own_event_loop() -> None:
    process = WorkerProcess(WorkerConfig("w", Role.BOTH, EngineConfig.of(Path("fake"))), 1)
    process._thread.start()
    async with asyncio.timeout(60):
        await process.works()
    go = threading.Event()
    process._events.call_soon_threadsafe(go.wait, 60)
    sign = asyncio.ensure_future(process.works())
    await asyncio.sleep(0.05)
    assert not sign.done()
    go.set()
    async with asyncio.timeout(60):
        await sign
    await asyncio.to_thread(process.stop)
    async with asyncio.timeout(60):
        await process.works()  # it has ended: nobody is asked


async def test_the_result_of_a_step_that_ends_too_late_is_ignored() -> None:
    async with WorkerPair(step_deadline_s=DEADLINE_S) as pair:
        running = await decoding(pair, "running")
        worker = pair.decode.worker
        never_end(pair.decode)
        await until(worker.died.done)
        steps, tokens = worker._loop.steps, len(running.tokens)
        pair.decode.engine.resume()
        await until(lambda: not worker._loop._thread.is_alive())
        assert (worker._loop.steps, len(running.tokens)) == (steps, tokens)
        assert "did not end" in str(worker.died.result())
        counts = pair.decode.engine.pool.counts()
        assert counts.free + counts.cached + counts.advertised + counts.quarantined == counts.total


async def test_a_slow_step_is_waited_for() -> None:
    async with WorkerPair(step_deadline_s=2 * DEADLINE_S) as pair:
        running = await decoding(pair, "running")
        never_end(pair.decode)
        assert not pair.decode.worker._loop.abandon_stuck_step()
        pair.decode.engine.resume()
        await until(lambda: running.finish)
        assert running.tokens == answer_to(PROMPT, LONG)
        await pair.empty()


async def test_an_idle_engine_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerPair(step_deadline_s=DEADLINE_S) as pair:
        loops = [end.worker._loop for end in pair.ends]
        for name, later_s in (("first", 0.0), ("second", 2 * DEADLINE_S)):
            await until(lambda: all(loop._busy_since is None and not loop._work.is_set() for loop in loops))
            clock = SimpleNamespace(monotonic=lambda later_s=later_s: time.monotonic() + later_s)
            monkeypatch.setattr("tandem.worker.loop.time", clock)
            assert not any(loop.abandon_stuck_step() for loop in loops)
            output = pair.send(name, PROMPT, TEN)
            await until(lambda output=output: output.finish)
            assert output.tokens == answer_to(PROMPT, TEN)
            await pair.empty()
