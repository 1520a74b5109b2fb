"""Hand-overs between real workers whose ranks divide a model differently: NIXL between ranks, gRPC between workers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tandem.protocol.messages import SamplingParams
from tests.factories import write_tiny_model
from tests.integration.test_worker_pair import ENGINE, Answer, Pair, WorkerEnd, alone, prompts

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 96}
SETTINGS = {"kv_lease_s": 120.0, "quarantine_s": 0.5, "write_window_s": 2.0}
PAIRS = [(1, 2), (2, 1), (2, 2), (3, 1)]
"""Ranks of the prefill worker and of the decode worker."""


class Workers:
    """A prefill and a decode worker for each number of ranks in `PAIRS`."""

    def __init__(self, model: Path) -> None:
        self.answers: dict[str, Answer] = {}
        self.prefill = {ranks: self._worker(model, "prefill", ranks) for ranks in sorted({pair[0] for pair in PAIRS})}
        self.decode = {ranks: self._worker(model, "decode", ranks) for ranks in sorted({pair[1] for pair in PAIRS})}
        self.all = [*self.prefill.values(), *self.decode.values()]

    @staticmethod
    def _worker(model: Path, role: str, ranks: int) -> WorkerEnd:
        engine = {**ENGINE, "tensor_parallel_size": ranks}
        damaged = 1 if (role, ranks) == ("decode", 2) else 0
        return WorkerEnd(f"{role}-{ranks}", role, model, engine=engine, damaged_transfers=damaged, **SETTINGS)

    async def send(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams,
        pair: tuple[int, int],
        source: WorkerEnd | None = None,
    ) -> Answer:
        sender = Pair.__new__(Pair)
        sender.answers, sender.prefill, sender.decode = self.answers, self.prefill[pair[0]], self.decode[pair[1]]
        answer = await sender.send(name, prompt, sampling, source)
        async with asyncio.timeout(120):
            await answer.done.wait()
        return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), **HEADS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(model: Path) -> AsyncIterator[Workers]:
    """Workers of which the decode worker of two ranks finds a flipped bit in its first transfer."""
    made = Workers(model)
    await asyncio.gather(*(worker.start(made.answers) for worker in made.all))
    yield made
    for worker in made.all:
        last = await worker.stop()
        assert last["threads"] == []


async def test_a_flipped_bit_in_the_memory_of_a_rank_fails_the_transfer(workers: Workers) -> None:
    answer = await workers.send("broken", prompts(10)[-1], SamplingParams(max_tokens=4, ignore_eos=True), (1, 2))
    assert answer.error == "TRANSFER_FAILED"
    state = await workers.decode[2].empty()
    assert state.checksum_failures == 1


@pytest.mark.parametrize("pair", PAIRS)
async def test_an_answer_after_a_hand_over_between_ranks_is_that_of_one_engine(
    workers: Workers, model: Path, pair: tuple[int, int]
) -> None:
    """Checksums are those of the whole model's pages, so the KV that arrived is byte for byte what was sent."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    before = await workers.decode[pair[1]].inspect()
    asked = [[*pair, *prompt] for prompt in prompts(10)[-2:]]
    answers = [await workers.send(f"{pair}-{n}", prompt, sampling, pair) for n, prompt in enumerate(asked)]
    for prompt, answer in zip(asked, answers, strict=True):
        assert not answer.error
        assert [answer.tokens[n] for n in range(8)] == alone(model, prompt, sampling)[0]
        assert answer.pages == -(-len(prompt) // 16)
    await workers.prefill[pair[0]].empty()
    after = await workers.decode[pair[1]].empty()
    assert after.checksums_equal - before.checksums_equal == sum(answer.pages for answer in answers)
    assert after.checksum_failures == before.checksum_failures


@pytest.mark.parametrize(("source", "pair"), [(2, (3, 1)), (3, (1, 2)), (1, (2, 1))])
async def test_a_prefix_is_pulled_from_a_worker_of_another_number_of_ranks(
    workers: Workers, model: Path, source: int, pair: tuple[int, int]
) -> None:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    prompt = [source, 11, *prompts(10)[-1]]
    await workers.send(f"before {source}", prompt, sampling, (source, 1))
    await workers.prefill[source].empty()
    answer = await workers.send(f"pulls from {source}", prompt, sampling, pair, workers.prefill[source])
    assert [answer.tokens[n] for n in range(8)] == alone(model, prompt, sampling)[0]
    assert answer.cached_tokens == (len(prompt) - 1) // 16 * 16
    for worker in workers.all:
        await worker.empty()
