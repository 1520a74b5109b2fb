"""A model on several GPUs: the tokens of one GPU, with graphs and without, for every kind of step."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import PendingStep, StepBatch, StepRow
from tandem.protocol.errors import InvalidArgument
from tandem.worker.rank_group import RankGroup
from tests.factories import write_tiny_model
from tests.gpu.test_engine_cuda import CACHE, GREEDY, PROMPTS, greedy

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 512}
TOKENS = [[token % 150 for token in prompt] for prompt in PROMPTS]
CHUNK = 50

Compute = Callable[[ModelRunner], list[list[int]]]


def answers(runner: ModelRunner) -> list[list[int]]:
    return greedy(runner, TOKENS)


def first_tokens(runner: ModelRunner) -> list[list[int]]:
    """Returns the sampled tokens of each step of a prefill worker: one chunk, of which two are in flight."""
    sampled: list[list[int]] = []
    pending: deque[PendingStep] = deque()
    for number, prompt in enumerate(TOKENS):
        for start in range(0, len(prompt), CHUNK):
            chunk, last = prompt[start : start + CHUNK], start + CHUNK >= len(prompt)
            row = StepRow(chunk, start, [2 * number, 2 * number + 1], GREEDY if last else None)
            pending.append(runner.launch(StepBatch([row])))
            if len(pending) == 2:
                sampled.append([token for token in pending.popleft()().token_ids if token is not None])
    sampled.append([token for token in pending.popleft()().token_ids if token is not None])
    return sampled


def lead(
    config: EngineConfig, ranks: int, stages: int, compute: Compute, results: SimpleQueue[list[list[int]]]
) -> None:
    group = RankGroup(config, ranks, stages=stages)
    try:
        results.put(compute(group.load()))
    finally:
        group.close()


@pytest.mark.parametrize(
    ("ranks", "stages", "compute"), [(2, 1, answers), (1, 2, first_tokens)], ids=["two ranks", "two stages"]
)
@pytest.mark.parametrize("graphs", [True, False])
def test_two_gpus_give_the_tokens_of_one(
    graphs: bool, ranks: int, stages: int, compute: Compute, tmp_path: Path
) -> None:
    """In a process of its own, because a process can be in only one group. The stages have two layers and one."""
    folder = write_tiny_model(tmp_path, "llama3", **SIZES, max_position_embeddings=512)
    config = EngineConfig.of(
        folder, device="cuda", dtype="float32", kv_cache_bytes=CACHE, max_batch_requests=8, cuda_graphs=graphs
    )
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    leader = context.Process(target=lead, args=(config, ranks, stages, compute, results))
    leader.start()
    leader.join()
    assert leader.exitcode == 0
    assert results.get() == compute(ModelRunner.load(config))


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    config = EngineConfig.of(write_tiny_model(tmp_path), device="cuda")
    with pytest.raises(InvalidArgument, match="can see"):
        RankGroup(config, torch.cuda.device_count() + 1)
