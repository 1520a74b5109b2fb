"""A hand-over from a real prefill worker with pipeline stages, whose decode worker has the whole model."""

import asyncio
from pathlib import Path

from tandem.protocol.messages import SamplingParams
from tests.factories import write_tiny_model
from tests.integration.test_worker_pair import ENGINE, Pair, WorkerEnd, alone, prompts


async def test_an_answer_after_a_hand_over_from_stages_is_that_of_one_engine(tmp_path: Path) -> None:
    """Two stages of two layers and one, with two ranks each; checksums are those of the whole model's pages."""
    model = write_tiny_model(tmp_path)
    pair = Pair(model, kv_lease_s=120.0)
    stages = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    pair.prefill = WorkerEnd("prefill-0", "prefill", model, engine=ENGINE | stages, kv_lease_s=120.0)
    await asyncio.gather(pair.prefill.start(pair.answers), pair.decode.start(pair.answers))
    prompt, sampling = prompts(10)[-1], SamplingParams(max_tokens=8, ignore_eos=True)
    async with asyncio.timeout(120):
        answer = await pair.send("r", prompt, sampling)
        await answer.done.wait()
    assert not answer.error
    assert [answer.tokens[number] for number in range(8)] == alone(model, prompt, sampling)[0]
    await pair.prefill.empty()
    state = await pair.decode.empty()
    assert (state.checksums_equal, state.checksum_failures) == (answer.pages, 0)
    for worker in (pair.prefill, pair.decode):
        assert (await worker.stop())["threads"] == []
