"""Every event of a request's life on two workers, and no page lost on any of them."""

import asyncio
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tandem.protocol.errors import (
    InvalidArgument,
    ResourceExhausted,
    RoleClosed,
    StaleEpoch,
    Unavailable,
)
from tandem.protocol.lifecycle.events import LifecycleEvent
from tandem.protocol.messages import (
    Destination,
    FinishReason,
    Lease,
    PeerRef,
    PrefillTask,
    RequestRef,
    Role,
    SamplingParams,
)
from tests.clocks import jump
from tests.fake_engine import FACTS, PAGE_TOKENS, FakeEngine, answer_to, logprobs_of
from tests.worker_pair import ROUTER, End, RequestOutput, WorkerPair, until

PROMPT = [11, 12, 13, 14, 15, 16, 17]
TEN = SamplingParams(max_tokens=10)
LONG = SamplingParams(max_tokens=150)
TRANSFER = [
    LifecycleEvent.TRANSFER_STARTED,
    LifecycleEvent.LAST_PAGES_POSTED,
    LifecycleEvent.NOTICE_MADE,
    LifecycleEvent.NOTICE_POSTED,
    LifecycleEvent.TRANSFER_FINISHED,
    LifecycleEvent.KV_CHECKED,
]
"""The events of a request whose KV is transferred."""


@pytest.fixture(autouse=True, params=[False, True], ids=["", "asynchronous"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event with both kinds of engine."""
    monkeypatch.setattr(FakeEngine, "asynchronous", request.param)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("length", [1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 16, 17, 100])
async def test_one_request(length: int, both: bool) -> None:
    async with WorkerPair(both=both) as pair:
        prompt = list(range(10, 10 + length))
        output = pair.send("q", prompt, TEN)
        await until(lambda: output.finish and (both or output.pages))
        assert output.tokens == answer_to(prompt, TEN)
        assert output.finish is FinishReason.LENGTH
        event_times = [LifecycleEvent.PREFILL_QUEUED, LifecycleEvent.PREFILL_STARTED, LifecycleEvent.PREFILL_FINISHED]
        assert output.event_times[:3] == event_times
        transfer = [] if both else TRANSFER
        assert set(output.event_times) == {
            *event_times,
            *transfer,
            LifecycleEvent.NOTICE_SEEN,
            LifecycleEvent.DECODE_ADMITTED,
            LifecycleEvent.DECODE_STARTED,
        }
        assert output.pages == (0 if both else -(-length // PAGE_TOKENS))
        await pair.empty()


@pytest.mark.parametrize("both", [False, True])
async def test_many_at_once(both: bool) -> None:
    async with WorkerPair(both=both, pages=400) as pair:
        asked = {f"q{n}": [n + 3, *range(20, 20 + n)] for n in range(30)}
        outputs = {name: pair.send(name, prompt, TEN) for name, prompt in asked.items()}
        await until(lambda: all(output.finish for output in outputs.values()))
        for name, prompt in asked.items():
            assert outputs[name].tokens == answer_to(prompt, TEN)
        assert max(len(batch.rows) for batch in pair.decode.engine.batches) <= 16
        await pair.empty()


@pytest.mark.parametrize("both", [False, True])
async def test_penalties_look_back_on_prompt_and_answer(both: bool) -> None:
    async with WorkerPair(both=both, max_step_tokens=8, max_batch_requests=4) as pair:
        sampling = [SamplingParams(10, presence_penalty=1.0), SamplingParams(10, repetition_penalty=1.1), TEN]
        outputs = [pair.send(f"q{n}", PROMPT, params) for n, params in enumerate(sampling)]
        await until(lambda: all(output.finish for output in outputs))
        assert [params.tokens for params in outputs] == [answer_to(PROMPT, params) for params in sampling]
        assert outputs[0].tokens == outputs[1].tokens != outputs[2].tokens
        await pair.empty()


@pytest.mark.parametrize("both", [False, True])
async def test_logprobs_go_with_their_tokens(both: bool) -> None:
    async with WorkerPair(both=both) as pair:
        tops = (3, None, 0)
        outputs = [pair.send(f"q{n}", PROMPT, SamplingParams(10, logprobs=top)) for n, top in enumerate(tops)]
        await until(lambda: all(output.finish for output in outputs))
        for output, top in zip(outputs, tops, strict=True):
            assert output.tokens == answer_to(PROMPT, TEN)
            assert output.logprobs == ([] if top is None else [logprobs_of(token, top) for token in output.tokens])
        await pair.empty()


async def test_prompts_of_a_burst_share_their_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    all_are_here = threading.Event()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert all_are_here.wait(60)

    monkeypatch.setattr("tandem.worker.loop.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    async with WorkerPair(batch_wait_s=0.5, max_step_tokens=64) as pair:
        await until(lambda: pair.prefill.worker._loop._work._cond._waiters)  # type: ignore[attr-defined]
        outputs = [pair.send(f"q{n}", [n + 3, *PROMPT], TEN) for n in range(4)]
        all_are_here.set()
        await until(lambda: all(output.finish for output in outputs))
        assert slept == [0.5]
        assert len(pair.prefill.engine.batches[0].rows) == 4
        await pair.empty()


async def test_a_chunked_prompt_is_written_while_it_computes() -> None:
    async with WorkerPair(max_step_tokens=8, max_batch_requests=4) as pair:
        pair.fabric.hold()
        output = pair.send("q", list(range(3, 33)), TEN)
        await until(lambda: output.tokens)
        assert [len(batch.rows[0].token_ids) for batch in pair.prefill.engine.batches] == [8, 8, 8, 6]
        assert len(output.tokens) == 1  # the first token does not wait for the transfer
        pair.fabric.release()
        await until(lambda: output.finish)
        assert output.tokens == answer_to(list(range(3, 33)), TEN)
        await pair.empty()


async def test_hand_overs_that_outlast_their_permissions_renew_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_worker.write_window.RENEW_AT", 0.1 / 30)
    async with WorkerPair(write_window_s=30.0) as pair:
        renewed: list[int] = []
        admission = pair.decode.worker.admission
        prolong = admission.prolong

        def watch(leases: Iterable[Lease], prefill: PeerRef) -> tuple[Lease, ...]:
            named = list(leases)
            renewed.append(len(named))
            return prolong(named, prefill)

        monkeypatch.setattr(admission, "prolong", watch)
        pair.fabric.hold()
        outputs = [pair.send(f"q{n}", [n + 3, *PROMPT], TEN) for n in range(3)]
        await until(lambda: renewed[-3:] == [3, 3, 3])
        assert renewed[-1] == 3, "and not one by one"
        pair.fabric.release()
        await until(lambda: all(output.finish for output in outputs))
        assert [output.tokens for output in outputs] == [answer_to([n + 3, *PROMPT], TEN) for n in range(3)]
        await pair.empty()


@pytest.mark.parametrize("both", [False, True])
async def test_an_answer_of_one_token_never_reaches_the_decode_half(both: bool) -> None:
    async with WorkerPair(both=both) as pair:
        one = SamplingParams(max_tokens=1)
        (first,) = answer_to(PROMPT, one)
        stops = SamplingParams(max_tokens=10, stop_token_ids=(first,))
        outputs = [pair.send("length", PROMPT, one), pair.send("stop", PROMPT, stops)]
        await until(lambda: all(output.finish for output in outputs))
        assert [output.finish for output in outputs] == [FinishReason.LENGTH, FinishReason.STOP]
        assert [output.tokens for output in outputs] == [[first], [first]]
        await pair.empty()


async def test_no_destination_is_fine_for_one_token() -> None:
    async with WorkerPair() as pair:
        one = SamplingParams(max_tokens=1)
        output = pair.outputs["q"] = RequestOutput()
        pair.prefill.worker.prefill(pair.task("q", PROMPT, one, None))
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, one)
        with pytest.raises(InvalidArgument, match="destination"):
            pair.prefill.worker.prefill(pair.task("r", PROMPT, TEN, None))
        await pair.empty()


async def test_stop_token_ends_decoding() -> None:
    async with WorkerPair() as pair:
        expected = answer_to(PROMPT, TEN)
        sampling = SamplingParams(max_tokens=10, stop_token_ids=(expected[4],))
        output = pair.send("q", PROMPT, sampling)
        await until(lambda: output.finish)
        assert output.tokens == expected[:5]
        assert output.finish is FinishReason.STOP
        await pair.empty()


async def test_the_context_ends_decoding() -> None:
    async with WorkerPair(pages=200) as pair:
        prompt = [5] * 250
        output = pair.send("q", prompt, SamplingParams(max_tokens=1000))
        await until(lambda: output.finish)
        assert len(output.tokens) == 6  # 256 in all
        assert output.tokens == answer_to(prompt, SamplingParams(max_tokens=1000))
        await pair.empty()


# ---- aborts ----


async def test_abort_while_queued() -> None:
    async with WorkerPair(prefill_pages=8) as pair:
        pair.prefill.engine.hold()
        pair.send("first", [9] * 30, TEN)
        await until(pair.prefill.engine.waiting.is_set)
        second = pair.send("second", [8] * 30, TEN)  # no pages left for it
        pair.abort("second")
        await until(lambda: pair.prefill.worker.report.inspect().requests == 1)
        pair.prefill.engine.resume()
        await until(lambda: pair.outputs["first"].finish)
        assert second.tokens == []
        await pair.empty()


@pytest.mark.parametrize("both", [False, True])
async def test_abort_in_a_running_prefill_step(both: bool) -> None:
    async with WorkerPair(both=both) as pair:
        pair.prefill.engine.hold()
        output = pair.send("q", PROMPT, TEN)
        await until(pair.prefill.engine.waiting.is_set)
        pair.abort("q")
        await asyncio.sleep(0.01)
        counts = pair.prefill.engine.pool.counts()
        assert counts.free < counts.total  # the engine still writes them
        pair.prefill.engine.resume()
        await pair.empty()
        assert output.tokens == []


async def test_abort_between_two_chunks() -> None:
    async with WorkerPair(max_step_tokens=4, max_batch_requests=4) as pair:
        pair.prefill.engine.hold()
        pair.send("q", list(range(3, 43)), TEN)
        await until(pair.prefill.engine.waiting.is_set)
        pair.send("other", PROMPT, TEN)
        pair.prefill.engine.resume()
        await until(lambda: len(pair.prefill.engine.batches) > 1)
        pair.abort("q")
        await until(lambda: pair.outputs["other"].finish)
        assert pair.outputs["other"].tokens == answer_to(PROMPT, TEN)
        await pair.empty()


async def test_abort_while_pages_are_on_the_way() -> None:
    async with WorkerPair() as pair:
        pair.fabric.hold()
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.tokens)
        await until(lambda: pair.decode.engine.pool.counts().advertised)
        pair.abort("q")
        await until(lambda: pair.decode.engine.pool.counts().quarantined)
        assert pair.prefill.engine.pool.counts().owned  # a posted write still reads them
        with pytest.raises(ResourceExhausted):
            pair.reserve("r", PROMPT, SamplingParams(max_tokens=249))  # quarantined pages are nobody's
        pair.fabric.release()
        await pair.empty()
        assert len(output.tokens) == 1


async def test_abort_of_a_running_request() -> None:
    async with WorkerPair() as pair:
        pair.decode.engine.hold(after=3)
        output = pair.send("q", PROMPT, LONG)
        await until(lambda: len(output.tokens) > 3)
        pair.abort("q")
        pair.decode.engine.resume()
        await pair.empty()
        assert output.finish is None


async def test_abort_of_a_ready_request() -> None:
    async with WorkerPair(max_batch_requests=1) as pair:
        pair.decode.engine.hold(after=3)
        first = pair.send("first", PROMPT, LONG)
        await until(lambda: len(first.tokens) > 2)
        second = pair.send("second", PROMPT, TEN)
        await until(lambda: second.pages)
        pair.fabric.wait_until_idle()
        pair.abort("second", "first")
        pair.decode.engine.resume()
        await pair.empty()
        assert len(second.tokens) == 1


async def test_abort_of_an_earlier_attempt_spares_the_later_one() -> None:
    async with WorkerPair() as pair:
        output = pair.send("q", PROMPT, TEN, attempt=3)
        pair.abort("q", attempt=2)
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, TEN)
        pair.abort("nobody")
        await pair.empty()


async def test_a_closed_stream_ends_its_requests() -> None:
    async with WorkerPair(pages=200) as pair:
        pair.decode.engine.hold(after=10)
        outputs = [pair.send(f"q{n}", PROMPT, LONG) for n in range(4)]
        await until(lambda: any(len(output.tokens) > 2 for output in outputs))
        pair.send("late", list(range(3, 80)), TEN)
        for end, stream in zip(pair.ends, pair.streams, strict=True):
            end.worker.detach(stream)
        pair.decode.engine.resume()
        await pair.empty()


async def test_a_router_that_never_attaches_is_forgotten() -> None:
    async with WorkerPair(attach_grace_s=0.05) as pair:
        for end, stream in zip(pair.ends, pair.streams, strict=True):
            end.worker.detach(stream)
        pair.send("q", PROMPT, LONG)
        await pair.empty()


async def test_a_second_stream_takes_the_place_of_the_first() -> None:
    async with WorkerPair() as pair:
        pair.decode.engine.hold(after=3)
        old = pair.send("old", PROMPT, LONG)
        await until(lambda: len(old.tokens) > 2)
        for end in pair.ends:
            pair.attach(end)
        pair.decode.engine.resume()
        await until(lambda: old.finish)
        assert old.error == "UNAVAILABLE"
        new = pair.send("new", PROMPT, TEN)
        await until(lambda: new.finish)
        assert new.tokens == answer_to(PROMPT, TEN)
        for end, stream in zip(pair.ends, pair.streams[:2], strict=True):
            end.worker.detach(stream)  # late news of the first stream's end
        again = pair.send("again", PROMPT, TEN)
        await until(lambda: again.finish)
        await pair.empty()


# ---- attempts, leases, epochs ----


async def test_said_twice_is_said_once() -> None:
    async with WorkerPair() as pair:
        pair.prefill.engine.hold()
        output = pair.send("q", PROMPT, TEN)
        lease = pair.reserve("q", PROMPT, TEN)
        pair.prefill.worker.prefill(pair.task("q", PROMPT, TEN, lease))
        assert pair.decode.worker.report.inspect().leases == 1
        pair.prefill.engine.resume()
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, TEN)
        await pair.empty()


async def test_a_later_attempt_replaces_and_an_earlier_one_is_stale() -> None:
    async with WorkerPair() as pair:
        pair.fabric.hold()
        first = pair.send("q", PROMPT, TEN)
        await until(lambda: first.tokens)
        second = pair.send("q", PROMPT, TEN, attempt=2)
        with pytest.raises(StaleEpoch):
            pair.reserve("q", PROMPT, TEN, attempt=1)
        with pytest.raises(StaleEpoch):
            pair.prefill.worker.prefill(pair.task("q", PROMPT, TEN, pair.reserve("x", PROMPT, TEN), attempt=1))
        pair.abort("x")
        pair.fabric.release()
        await until(lambda: second.finish)
        assert second.tokens == answer_to(PROMPT, TEN)
        assert pair.decode.worker.report.inspect().fenced >= 1
        assert pair.prefill.worker.report.inspect().fenced == 1
        await pair.empty()


async def test_a_lease_without_heartbeat_expires() -> None:
    async with WorkerPair(kv_lease_s=30.0) as pair:
        pair.fabric.hold()
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: pair.decode.engine.pool.counts().advertised)
        pair.decode.age(29.0)
        assert output.finish is None
        pair.decode.age(1.0)
        await until(lambda: output.finish)
        assert output.error == "TRANSFER_FAILED"
        assert pair.decode.engine.pool.counts().quarantined == 2
        pair.fabric.release()
        await pair.empty()


async def test_heartbeats_keep_a_lease_and_name_the_lost_ones() -> None:
    async with WorkerPair(kv_lease_s=30.0) as pair:
        kept, lost = pair.reserve("kept", PROMPT, TEN), pair.reserve("lost", PROMPT, TEN)
        for _ in range(8):
            pair.decode.age(10.0)
            pair.decode.worker.admission.heartbeat([kept])
        assert pair.decode.worker.admission.heartbeat([kept, lost]) == (lost,)
        pair.abort("kept")
        await pair.empty()


async def test_an_admitted_lease_is_not_lost() -> None:
    async with WorkerPair() as pair:
        lease = pair.reserve("q", PROMPT, TEN)
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert pair.decode.worker.admission.heartbeat([lease]) == ()
        await pair.empty()


async def test_what_does_not_fit_the_reservation_fails_closed() -> None:
    async with WorkerPair() as pair:
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        lease = pair.reserve("r", PROMPT, TEN)
        changed = pair.outputs["r"] = RequestOutput()
        pair.prefill.worker.prefill(pair.task("r", [*PROMPT[:-1], 99], TEN, lease))
        await until(lambda: changed.finish)
        assert changed.error == "TRANSFER_FAILED"
        assert len(changed.tokens) == 1
        assert pair.decode.worker.report.inspect().fenced == 1
        await pair.empty()


async def test_an_allotment_that_is_too_large_is_refused() -> None:
    async with WorkerPair() as pair:
        lease = pair.reserve("q", PROMPT, TEN)
        output = pair.outputs["q"] = RequestOutput()
        pair.prefill.worker.prefill(pair.task("q", PROMPT * 3, TEN, lease))
        await until(lambda: output.finish)
        assert output.error == "INVALID_ARGUMENT"
        await pair.empty()


# ---- room ----


async def test_a_full_pool_says_so_and_takes_the_next_when_it_is_free() -> None:
    async with WorkerPair(pages=10, prefill_pages=64) as pair:
        sampling = SamplingParams(max_tokens=20)  # 26 positions: 7 pages of 10
        first = pair.send("first", PROMPT, sampling)
        with pytest.raises(ResourceExhausted) as refused:
            pair.send("second", PROMPT, sampling)
        assert refused.value.retry_after_s > 0
        with pytest.raises(InvalidArgument, match="max_tokens"):
            pair.send("never", PROMPT, SamplingParams(max_tokens=40))
        await until(lambda: first.finish)
        await pair.decode.empty()
        second = pair.send("second", PROMPT, sampling)
        await until(lambda: second.finish)
        assert second.tokens == answer_to(PROMPT, sampling)
        await pair.empty()


async def test_prompts_wait_for_pages_the_short_ones_first_and_none_starves() -> None:
    async with WorkerPair(pages=300, prefill_pages=8) as pair:
        asked = {f"q{n}": [n + 3] * (30 if n % 2 else 5) for n in range(12)}
        # All twelve are queued when a step is planned next: the one of another prompt is held until then.
        pair.prefill.engine.hold()
        before = pair.send("before", [200] * 5, TEN)
        await until(pair.prefill.engine.waiting.is_set)
        outputs = {name: pair.send(name, prompt, TEN) for name, prompt in asked.items()}
        pair.prefill.engine.resume()
        await until(lambda: before.finish)
        await until(lambda: all(output.finish for output in outputs.values()))
        for name, prompt in asked.items():
            assert outputs[name].tokens == answer_to(prompt, TEN)
        started = [
            row.token_ids[0] - 3
            for batch in pair.prefill.engine.batches
            for row in batch.rows
            if row.start == 0 and row.token_ids[0] != 200
        ]
        assert sorted(started) == list(range(12))
        short, long = ([number for number in started if number % 2 == odd] for odd in (0, 1))
        assert (short, long) == (sorted(short), sorted(long))
        assert started.index(2) < started.index(1) < started.index(10)
        await pair.empty()


async def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    async with WorkerPair() as pair:
        pair.decode.engine.hold(after=3)
        output = pair.send("q", PROMPT, LONG)
        await until(lambda: len(output.tokens) > 1)
        draining = asyncio.create_task(pair.decode.worker.drain(60.0))
        await asyncio.sleep(0)
        pair.decode.engine.resume()
        with pytest.raises(Unavailable):
            pair.reserve("r", PROMPT, TEN)
        assert await pair.prefill.worker.drain(60.0) == 0
        with pytest.raises(Unavailable):
            pair.prefill.worker.prefill(pair.task("r", PROMPT, SamplingParams(max_tokens=1), None))
        assert await draining == 0
        await until(lambda: output.finish)  # its last words may be on their way
        assert output.tokens == answer_to(PROMPT, LONG)
        await pair.empty()


async def test_drain_counts_the_requests_that_are_left() -> None:
    async with WorkerPair() as pair:
        pair.decode.engine.hold()
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.pages)
        assert await pair.decode.worker.drain(0.01) == 1


# ---- what is looked after in idle times ----


async def test_a_pool_that_lost_a_page_is_reported_when_the_worker_is_idle(caplog: pytest.LogCaptureFixture) -> None:
    async with WorkerPair() as pair:
        worker, pool = pair.decode.worker, pair.decode.engine.pool
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        await pair.empty()
        pool._free.take(1)
        again = pair.send("r", PROMPT, TEN)
        await until(lambda: again.finish and worker.report.inspect().integrity_error)
        assert "lost" in worker.report.inspect().integrity_error
        assert "lost" in caplog.text


async def test_asking_how_a_worker_is_looks_at_no_page() -> None:
    """Others ask often, and the pool's lock is what the engine's next step waits for."""
    async with WorkerPair() as pair:
        pair.decode.engine.pool._faults = None  # type: ignore[assignment,method-assign]
        assert pair.decode.worker.report.inspect().integrity_error == ""


async def test_leases_end_after_a_defect_in_the_timer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with WorkerPair(kv_lease_s=0.05) as pair:
        admission = pair.decode.worker.admission
        expire, broken = admission.expire, [KeyError("a defect")]

        def fragile() -> None:
            if broken:
                raise broken.pop()
            expire()

        monkeypatch.setattr(admission, "expire", fragile)
        pair.reserve("q", PROMPT, TEN)
        await pair.empty()
        assert "continues after an error" in caplog.text


# ---- failures ----


async def test_another_decode_worker_gives_the_same_answer_after_a_death() -> None:
    sampling = SamplingParams(max_tokens=10, frequency_penalty=0.5, repetition_penalty=1.2, logprobs=1)
    async with WorkerPair() as pair:
        pair.decode.engine.hold(after=4)
        first = pair.send("q", PROMPT, sampling)
        await until(lambda: len(first.tokens) > 3)
        dead = pair.ends.pop()
        del pair.outputs["q"]
        await dead.stop()
        pair.prefill.worker.peer_gone(dead.me)
        pair.decode = End("decode-1", Role.DECODE, pair.fabric, 64, {})
        pair.ends.append(pair.decode)
        await pair.decode.start()
        pair.attach(pair.decode)
        second = pair.send("q", PROMPT, sampling, attempt=2, answer=first.tokens)
        await until(lambda: second.finish)
        assert second.tokens == answer_to(PROMPT, sampling)
        assert [*first.logprobs, *second.logprobs] == [logprobs_of(token, 1) for token in second.tokens]
        await pair.empty()


MOST = tuple(range(3, 950))
"""Stop tokens that no answer would get around."""


@pytest.mark.parametrize("both", [False, True])
async def test_an_attempt_continues_after_any_token_of_an_answer(both: bool) -> None:
    """Draws, penalties, limits and stop tokens count from the client's own prompt, wherever an attempt begins."""
    whole = answer_to(PROMPT, TEN)
    kinds = {
        "plain": TEN,
        "penalized": SamplingParams(10, presence_penalty=1.0),
        "stopped": SamplingParams(10, stop_token_ids=(whole[-1],)),
        "long enough": SamplingParams(10, stop_token_ids=MOST, min_tokens=9),
        "long enough, penalized": SamplingParams(10, stop_token_ids=MOST, min_tokens=9, presence_penalty=1.0),
        "biased": SamplingParams(10, logit_bias=tuple((token, -100.0) for token in (*whole[1:4], 990))),
    }
    async with WorkerPair(both=both, pages=400) as pair:
        asked = {
            f"{kind} {count}": (sampling, answer_to(PROMPT, sampling)[:count])
            for kind, sampling in kinds.items()
            for count in range(10)
        }
        outputs = {name: pair.send(name, PROMPT, kind, answer=out) for name, (kind, out) in asked.items()}
        await until(lambda: all(output.finish for output in outputs.values()))
        for name, (sampling, _) in asked.items():
            assert outputs[name].tokens == answer_to(PROMPT, sampling), name
            stopped = sampling.stop_token_ids
            assert outputs[name].finish is (FinishReason.STOP if stopped else FinishReason.LENGTH), name
        await pair.empty()


async def test_the_end_of_the_context_counts_what_was_answered_before() -> None:
    async with WorkerPair(pages=400) as pair:
        prompt = list(range(3, 3 + FACTS.max_context - 6))
        whole = answer_to(prompt, TEN)
        assert len(whole) == 6
        outputs = {n: pair.send(f"q{n}", prompt, TEN, answer=whole[:n]) for n in range(6)}
        await until(lambda: all(output.finish for output in outputs.values()))
        assert [output.tokens for output in outputs.values()] == [whole] * 6
        await pair.empty()


async def test_a_failed_write_is_reported_and_everything_freed() -> None:
    async with WorkerPair() as pair:
        pair.fabric.fail_next()
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.error == "TRANSFER_FAILED"
        assert len(output.tokens) == 1
        await pair.empty()
        again = pair.send("q", PROMPT, TEN, attempt=2)
        await until(lambda: again.finish)
        assert again.tokens == answer_to(PROMPT, TEN)
        await pair.empty()


async def test_a_write_that_stands_still_fails_at_its_deadline_and_keeps_its_pages_until_it_is_quiet() -> None:
    async with WorkerPair(kv_transfer_deadline_s=30.0, kv_checksum_rate=0.0) as pair:
        pair.fabric.hold()
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.tokens and pair.fabric.writes)
        jump(30.0)
        await until(lambda: output.finish)
        assert output.message == "pages were not written within 30 s; prefill again elsewhere"
        assert output.error == "TRANSFER_FAILED"
        pair.abort("q")  # as the router does before it tries again
        assert pair.prefill.engine.pool.counts().owned
        await until(lambda: pair.decode.engine.pool.counts().quarantined)
        pair.fabric.release()
        again = pair.send("q", PROMPT, TEN, attempt=2, answer=output.tokens)
        await until(lambda: again.finish)
        assert again.tokens == answer_to(PROMPT, TEN)
        await pair.empty()


async def test_a_failed_chunk_stops_the_rest() -> None:
    async with WorkerPair(max_step_tokens=4, max_batch_requests=4) as pair:
        pair.fabric.fail_next()
        output = pair.send("q", list(range(3, 43)), TEN)
        await until(lambda: output.finish)
        assert output.error == "TRANSFER_FAILED"
        await pair.empty()


@pytest.mark.parametrize("period_s", [1000.0, 0.1], ids=["the lease ends first", "the writer says so first"])
async def test_a_lost_notice_costs_a_prefill_and_no_page(period_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.peers.peers.DELIVERY_PERIOD_S", period_s)
    async with WorkerPair(kv_lease_s=30.0) as pair:
        pair.fabric.drop_notices()
        output = pair.send("q", PROMPT, TEN)
        if period_s > pair.decode.config.kv_lease_s:
            await until(lambda: output.pages)
            assert output.finish is None
            pair.decode.age(30.0)
        await until(lambda: output.finish)
        assert output.error == "TRANSFER_FAILED"
        if period_s > pair.decode.config.kv_lease_s:
            pair.prefill.worker.peers._deliveries._period_s = 0.01
            jump(period_s)  # the writer's word frees the pages
        await pair.empty()


async def test_a_dead_prefill_worker_is_survived() -> None:
    async with WorkerPair() as pair:
        pair.fabric.hold()
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: pair.decode.engine.pool.counts().advertised)
        pair.fabric.kill(pair.prefill.me)
        pair.fabric.release()
        pair.decode.worker.peer_gone(pair.prefill.me)
        await until(lambda: output.finish)
        assert output.error == "TRANSFER_FAILED"
        await pair.decode.empty()
        with pytest.raises(Unavailable):
            pair.reserve("r", PROMPT, TEN)
        await pair.prefill.empty()


async def test_a_decode_worker_that_restarted_is_not_mistaken_for_the_old_one() -> None:
    async with WorkerPair() as pair:
        lease = pair.reserve("q", PROMPT, TEN)
        moved = Destination(PeerRef("decode-0", 0), pair.decode.address, lease)
        output = pair.outputs["q"] = RequestOutput()
        pair.prefill.worker.prefill(PrefillTask(ROUTER, RequestRef("q", 1), tuple(PROMPT), TEN, moved))
        await until(lambda: output.finish)
        assert output.error == "STALE_EPOCH"
        pair.abort("q")
        await pair.empty()


async def test_a_decode_worker_that_is_not_there() -> None:
    async with WorkerPair() as pair:
        pair.decode.address = "127.0.0.1:1"
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.error == "UNAVAILABLE"
        pair.abort("q")
        await pair.empty()


async def test_workers_that_do_not_fit_refuse_in_words() -> None:
    async with WorkerPair() as pair:
        mine = pair.decode.worker.peers._mine
        pair.decode.worker.peers._mine = replace(mine, compatibility_hash="0" * 64)
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.error == "FAILED_PRECONDITION"
        await pair.empty()


async def test_a_step_that_fails_ends_the_worker_loudly() -> None:
    async with WorkerPair() as pair:
        pair.decode.engine.hold(after=3)
        running = pair.send("running", PROMPT, LONG)
        await until(lambda: len(running.tokens) > 2)
        pair.decode.engine.error = RuntimeError("a defect")
        pair.decode.engine.resume()
        await until(pair.decode.worker.died.done)
        await until(lambda: running.finish)
        assert running.error == "INTERNAL"
        assert str(pair.decode.worker.died.result()) == "a defect"


async def test_a_closed_half_takes_nothing() -> None:
    async with WorkerPair() as pair:
        with pytest.raises(RoleClosed):
            pair.prefill.worker.reserve(pair.reservation("q", PROMPT, TEN))
        with pytest.raises(RoleClosed):
            pair.decode.worker.prefill(pair.task("q", PROMPT, SamplingParams(max_tokens=1), None))


async def test_one_prefill_token_ends_without_waiting_for_a_full_house() -> None:
    async with WorkerPair(max_prefill_requests=1) as pair:
        pair.prefill.engine.hold()
        pair.send("q", PROMPT, TEN)
        with pytest.raises(ResourceExhausted):
            pair.prefill.worker.prefill(pair.task("r", PROMPT, SamplingParams(max_tokens=1), None))
        pair.prefill.engine.resume()
        await until(lambda: pair.outputs["q"].finish)
        await pair.empty()
