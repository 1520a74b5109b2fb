"""A worker changes its role and its steps while it runs: nobody's request is lost, and what comes late is told so."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tandem.engine.config import EngineConfig
from tandem.protocol.errors import InvalidArgument, RoleClosed, StaleEpoch, Unavailable
from tandem.protocol.messages import Assignment, PeerRef, Role, SamplingParams
from tandem.protocol.policy_name import PolicyName
from tests.fake_engine import FakeEngine, answer_to
from tests.worker_pair import End, RequestOutput, WorkerPair, until

PROMPT = [11, 12, 13, 14, 15, 16, 17]
TEN = SamplingParams(max_tokens=10)
ONE = SamplingParams(max_tokens=1)
LONG_S = 30.0


@pytest.fixture(autouse=True, params=[False, True], ids=["", "asynchronous"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "asynchronous", request.param)


def become(end: End, role: Role, grace_s: float = LONG_S) -> None:
    end.worker.assume(end.me, Assignment(role), grace_s)


def state(end: End) -> tuple[Role, Role | None]:
    return end.worker.assignment.role, end.worker.assignment.closing


async def waits_in_line(pair: WorkerPair) -> RequestOutput:
    """Sends a prompt that waits at the prefill worker while another one is computed."""
    pair.prefill.engine.hold()
    pair.send("before", PROMPT[:3], ONE)
    await until(pair.prefill.engine.waiting.is_set)
    del pair.outputs["before"]
    return pair.send("q", PROMPT, TEN)


async def is_computed(pair: WorkerPair) -> RequestOutput:
    pair.prefill.engine.hold()
    output = pair.send("q", PROMPT, TEN)
    await until(pair.prefill.engine.waiting.is_set)
    return output


async def is_on_its_way(pair: WorkerPair) -> RequestOutput:
    """Its first token is out, its pages are not written."""
    pair.fabric.hold()
    output = pair.send("q", PROMPT, TEN)
    await until(lambda: output.tokens and pair.fabric.writes)
    return output


async def decodes(pair: WorkerPair) -> RequestOutput:
    pair.decode.engine.hold(after=2)
    output = pair.send("q", PROMPT, TEN)
    await until(lambda: len(output.tokens) > 1)
    await until(pair.decode.engine.waiting.is_set)
    return output


QUEUES = [waits_in_line, is_computed, is_on_its_way, decodes]


def let_writes_land(pair: WorkerPair) -> None:
    pair.fabric.release()
    for end in pair.ends:
        end.engine.resume()


@pytest.mark.parametrize("queue", QUEUES)
async def test_both_swap_roles_and_a_request_ends_where_it_began(queue: object) -> None:
    async with WorkerPair() as pair:
        output = await queue(pair)  # type: ignore[operator]
        changes: list[tuple[Role, Role | None]] = []
        pair.decode.worker.assignment.on_change = lambda: changes.append(state(pair.decode))
        become(pair.prefill, Role.DECODE)
        become(pair.decode, Role.PREFILL)
        assert state(pair.decode) == (Role.BOTH, Role.DECODE)
        with pytest.raises(RoleClosed, match="takes no answers, as it has another role now; ask another one"):
            pair.reserve("late", PROMPT, TEN)
        with pytest.raises(RoleClosed, match="takes no prompts"):
            pair.prefill.worker.prefill(pair.task("late", PROMPT, ONE, None))
        # The same call again is no new work.
        pair.decode.worker.reserve(pair.reservation("q", PROMPT, TEN))
        let_writes_land(pair)
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, TEN)
        await until(lambda: state(pair.prefill) == (Role.DECODE, None))
        await until(lambda: state(pair.decode) == (Role.PREFILL, None))
        assert changes == [(Role.BOTH, Role.DECODE), (Role.PREFILL, None)]
        await pair.empty()


async def test_the_role_is_the_old_one_until_the_last_request_has_ended() -> None:
    async with WorkerPair() as pair:
        output = await decodes(pair)
        become(pair.decode, Role.PREFILL)
        pair.decode.engine.hold(after=4)
        await until(pair.decode.engine.waiting.is_set)
        await asyncio.sleep(0.1)
        assert not output.finish
        assert state(pair.decode) == (Role.BOTH, Role.DECODE)
        let_writes_land(pair)
        await until(lambda: state(pair.decode) == (Role.PREFILL, None))
        await until(lambda: output.finish)  # its last words may be on their way
        assert output.tokens == answer_to(PROMPT, TEN)


async def test_a_scheduler_that_opens_is_ready_at_once() -> None:
    async with WorkerPair() as pair:
        waiting = await decodes(pair)
        become(pair.decode, Role.PREFILL)
        one = pair.outputs["one"] = RequestOutput()
        pair.decode.worker.prefill(pair.task("one", PROMPT, ONE, None))
        let_writes_land(pair)
        await until(lambda: one.finish and waiting.finish)
        assert one.tokens == answer_to(PROMPT, ONE)
        assert waiting.tokens == answer_to(PROMPT, TEN)
        await pair.empty()


@pytest.mark.parametrize("queue", QUEUES)
async def test_what_takes_too_long_goes_on_elsewhere(queue: object) -> None:
    async with WorkerPair() as pair:
        output = await queue(pair)  # type: ignore[operator]
        end = pair.decode if queue is decodes else pair.prefill
        become(end, Role.PREFILL if queue is decodes else Role.DECODE, grace_s=0.01)
        await until(lambda: output.error == RoleClosed.code)
        assert output.tokens == answer_to(PROMPT, TEN)[: len(output.tokens)]
        pair.abort("q")  # as a router does before it sends the next attempt
        let_writes_land(pair)
        await until(lambda: state(end)[1] is None)
        await pair.empty()


async def test_a_scheduler_whose_transfers_are_in_flight_says_so_and_closes_after_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.worker.assignment.REST_S", 0.05)
    async with WorkerPair() as pair:
        output = await is_on_its_way(pair)
        become(pair.prefill, Role.DECODE, grace_s=0.01)
        await until(lambda: output.error == RoleClosed.code)
        pair.abort("q")
        await until(lambda: "still closes its prefill phase: transfers of 1 ended requests" in caplog.text)
        assert state(pair.prefill) == (Role.BOTH, Role.PREFILL)
        let_writes_land(pair)
        await until(lambda: state(pair.prefill) == (Role.DECODE, None))
        await pair.empty()


async def test_a_scheduler_that_opens_again_before_it_was_empty_stays_open() -> None:
    async with WorkerPair() as pair:
        output = await decodes(pair)
        become(pair.decode, Role.PREFILL)
        become(pair.decode, Role.BOTH)
        assert state(pair.decode) == (Role.BOTH, None)
        more = pair.send("more", PROMPT[:4], TEN)
        let_writes_land(pair)
        await until(lambda: output.finish and more.finish)
        assert more.tokens == answer_to(PROMPT[:4], TEN)
        await pair.empty()
        assert state(pair.decode) == (Role.BOTH, None)


async def test_limits_follow_the_role() -> None:
    async with WorkerPair(max_batch_requests=16) as pair:
        decode = pair.decode.worker
        assert (decode._schedulers.decode._max_batch, decode.admission._budget._limit) == (16, 64)
        become(pair.decode, Role.BOTH)
        assert (decode._schedulers.decode._max_batch, decode.admission._budget._limit) == (8, 32)
        become(pair.decode, Role.DECODE)
        await until(lambda: state(pair.decode) == (Role.DECODE, None))
        assert (decode._schedulers.decode._max_batch, decode.admission._budget._limit) == (16, 64)


async def test_limits_are_the_first_roles_at_the_start() -> None:
    async with WorkerPair(both=True, max_batch_requests=16) as pair:
        worker = pair.decode.worker
        assert (worker._schedulers.decode._max_batch, worker.admission._budget._limit) == (8, 32)


async def test_steps_follow_the_policy() -> None:
    async with WorkerPair(both=True, pages=200) as pair:
        engine = pair.decode.engine
        output = await decodes(pair)
        pair.decode.worker.assume(pair.decode.me, Assignment(Role.BOTH, PolicyName.CHUNKED, step_budget=3), LONG_S)
        late = pair.send("late", [7] * 12, TEN)
        await until(lambda: pair.decode.worker.report.load().prefill_requests)
        begun = len(engine.batches)
        let_writes_land(pair)
        await until(lambda: output.finish and late.finish)
        assert (output.tokens, late.tokens) == (answer_to(PROMPT, TEN), answer_to([7] * 12, TEN))
        # One step may have been planned before.
        assert max(sum(len(row.token_ids) for row in batch.rows) for batch in engine.batches[begun + 2 :]) == 3


async def test_a_worker_with_pipeline_stages_does_not_decode() -> None:
    async with WorkerPair(engine=EngineConfig.of(Path("fake"), pipeline_parallel_size=2)) as pair:
        with pytest.raises(InvalidArgument, match="prefill workers only"):
            become(pair.prefill, Role.BOTH)
        assert state(pair.prefill) == (Role.PREFILL, None)


async def test_an_assignment_for_another_incarnation_is_refused() -> None:
    async with WorkerPair() as pair:
        worker = pair.decode.worker
        with pytest.raises(StaleEpoch):
            worker.assume(PeerRef("decode-0", 2), Assignment(Role.BOTH), LONG_S)
        with pytest.raises(InvalidArgument):
            Assignment(Role.BOTH, step_budget=0)
        assert state(pair.decode) == (Role.DECODE, None)
        assert await worker.drain(1.0) == 0
        with pytest.raises(Unavailable, match="drains"):
            become(pair.decode, Role.BOTH)


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("grace_s", [0.01, LONG_S])
async def test_a_drain_finishes_or_hands_over_what_it_has(queue: object, grace_s: float) -> None:
    async with WorkerPair() as pair:
        output = await queue(pair)  # type: ignore[operator]
        end = pair.decode if queue is decodes else pair.prefill
        draining = asyncio.ensure_future(end.worker.drain(grace_s))
        await until(partial(getattr, end.worker.assignment, "draining"))
        assert state(end)[1] is end.config.role
        if grace_s == LONG_S:
            let_writes_land(pair)
            assert await draining == 0
            await until(lambda: output.finish)
            assert output.tokens == answer_to(PROMPT, TEN)
        else:
            assert await draining == (2 if queue is waits_in_line else 1)
            await until(lambda: output.error == RoleClosed.code)
            pair.abort("q")
            let_writes_land(pair)
        await pair.empty()
