"""A model on several GPUs: the tokens of one GPU, with graphs and without, for every kind of step."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.errors import InvalidArgument
from tandem.worker.rank_group import RankGroup
from tests.factories import write_tiny_model
from tests.gpu.test_engine_cuda import CACHE, PROMPTS, greedy

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 512}
TOKENS = [[token % 150 for token in prompt] for prompt in PROMPTS]


def lead(config: EngineConfig, answers: SimpleQueue[list[list[int]]]) -> None:
    group = RankGroup(config, 2)
    try:
        answers.put(greedy(group.load(), TOKENS))
    finally:
        group.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_two_gpus_give_the_tokens_of_one(graphs: bool, tmp_path: Path) -> None:
    """In a process of its own, because a process can be in only one group."""
    folder = write_tiny_model(tmp_path, "llama3", **SIZES, max_position_embeddings=512)
    config = EngineConfig.of(
        folder, device="cuda", dtype="float32", kv_cache_bytes=CACHE, max_batch_requests=8, cuda_graphs=graphs
    )
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    leader = context.Process(target=lead, args=(config, answers))
    leader.start()
    leader.join()
    assert leader.exitcode == 0
    assert answers.get() == greedy(ModelRunner.load(config), TOKENS)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    config = EngineConfig.of(write_tiny_model(tmp_path), device="cuda")
    with pytest.raises(InvalidArgument, match="can see"):
        RankGroup(config, torch.cuda.device_count() + 1)
