"""A worker that lives and was taken for dead: nothing is handed over between the two until it registers again."""

import pytest

from tandem.protocol.errors import Unavailable
from tandem.protocol.messages import SamplingParams, WorkerInfo
from tests.fake_engine import PAGE_TOKENS, answer_to
from tests.worker_pair import End, WorkerPair, until

PROMPT = list(range(11, 11 + 2 * PAGE_TOKENS))
TEN = SamplingParams(max_tokens=10)


def info(end: End) -> WorkerInfo:
    """Returns the facts of a worker as the controller sends them."""
    assignment, pages = end.worker.assignment, end.engine.pool.counts().total
    return WorkerInfo(
        end.me, assignment.role, end.address, end.engine.facts, pages, PAGE_TOKENS, 8, 16, "cpu", "in-memory"
    )


@pytest.mark.parametrize("introduced", [False, True])
async def test_a_restored_prefill_worker_gets_leases_and_serves(introduced: bool) -> None:
    async with WorkerPair() as pair:
        if introduced:
            before = pair.send("before", PROMPT, TEN)
            await until(lambda: before.finish)
        pair.decode.worker.peer_gone(pair.prefill.me)
        with pytest.raises(Unavailable, match="prefill worker prefill-0 is gone"):
            pair.reserve("meanwhile", PROMPT, TEN)
        pair.decode.worker.peer_joined(info(pair.prefill))
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, TEN)
        await pair.empty()


async def test_a_decode_worker_that_is_back_gets_prompts_and_its_leases() -> None:
    async with WorkerPair() as pair:
        pair.prefill.worker.peer_gone(pair.decode.me)
        lost = pair.send("lost", PROMPT, TEN)
        await until(lambda: lost.finish)
        assert lost.error == Unavailable.code
        await pair.prefill.empty()
        assert pair.decode.worker.admission.open_leases == 1, "nobody tells the dead"
        pair.prefill.worker.peer_joined(info(pair.decode))
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, TEN)
        await pair.empty()
