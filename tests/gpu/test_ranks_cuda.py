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
from tandem.settings.parsing import NamedPath
from tandem.worker.rank_group import RankGroup
from tests.adapters import ATTENTION, TinyAdapter
from tests.factories import greedy_answer, write_tiny_model
from tests.gpu.test_engine_cuda import CACHE, PROMPTS, greedy

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 512}
TOKENS = [[token % 150 for token in prompt] for prompt in PROMPTS]
WHOLE_EXPERTS = {"moe_intermediate_size": 129}


def answers_of(runner: ModelRunner) -> list[list[int]]:
    """Returns answers without an adapter and, if there is one, with it."""
    return greedy(runner, TOKENS) + [greedy_answer(runner, TOKENS[2], 16, 1) for _ in runner.adapters.facts]


def lead(config: EngineConfig, answers: SimpleQueue[list[list[int]]]) -> None:
    group = RankGroup(config, 2)
    try:
        answers.put(answers_of(group.load()))
    finally:
        group.close()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("family", "changes"), [("llama3", {}), ("qwen3_moe", WHOLE_EXPERTS)])
def test_two_gpus_give_the_tokens_of_one(family: str, changes: dict[str, int], graphs: bool, tmp_path: Path) -> None:
    """With an adapter, and a draft model on the first; in another process, as a process can be in only one group."""
    sizes = {**SIZES, **changes, "max_position_embeddings": 512}
    folder = write_tiny_model(tmp_path / "model", family, **sizes)
    adapter = TinyAdapter(family, modules=ATTENTION, changes=sizes).write(tmp_path / "adapter")
    config = EngineConfig.of(
        folder,
        device="cuda",
        dtype="float32",
        kv_cache_bytes=CACHE,
        page_tokens=16,
        max_batch_requests=8,
        cuda_graphs=graphs,
        loras=(NamedPath("adapter", adapter),),
        draft=folder,
        draft_graphs=True,
    )
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    leader = context.Process(target=lead, args=(config, answers))
    leader.start()
    leader.join()
    assert leader.exitcode == 0
    assert answers.get() == answers_of(ModelRunner.load(config))


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    config = EngineConfig.of(write_tiny_model(tmp_path), device="cuda")
    with pytest.raises(InvalidArgument, match="can see"):
        RankGroup(config, torch.cuda.device_count() + 1)
