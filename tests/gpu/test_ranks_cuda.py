"""A model on several GPUs: the tokens of one GPU, with graphs and without, for every kind of step."""

from __future__ import annotations

import multiprocessing
from collections import deque
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import start_processes

from tandem.engine.config import EngineConfig
from tandem.engine.config.sharding import Rank
from tandem.engine.model_runner import ModelRunner
from tandem.engine.parallel.cuda_collectives import CudaCollectives
from tandem.engine.steps.batch import PendingStep, StepBatch, StepRow
from tandem.protocol.errors import InvalidArgument
from tandem.settings.parsing import NamedPath
from tandem.worker.rank_group import RankGroup
from tests.adapters import ATTENTION, TinyAdapter
from tests.factories import greedy_answer, write_tiny_model
from tests.gpu.test_engine_cuda import CACHE, GREEDY, PROMPTS, greedy
from tests.gpu.test_no_waits import no_waits
from tests.rank_sums import check_sums

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 512}
TOKENS = [[token % 150 for token in prompt] for prompt in PROMPTS]
CHUNK, PAGES = 50, 9
"""Tokens of a chunk, and pages of a prompt."""
MOST_BYTES = 1 << 21
WHOLE_EXPERTS = {"moe_intermediate_size": 129, "head_dim": 64}


def answers_of(runner: ModelRunner) -> list[list[int]]:
    """Returns answers without an adapter and, if there is one, with it."""
    return greedy(runner, TOKENS) + [greedy_answer(runner, TOKENS[2], 16, 1) for _ in runner.adapters.facts]


def first_tokens_of(runner: ModelRunner) -> list[list[int]]:
    """Returns the sampled tokens of each step of a prefill worker: one chunk, of which two are in flight."""
    sampled: list[list[int]] = []
    pending: deque[PendingStep] = deque()
    for number, prompt in enumerate(TOKENS):
        pages = range(number * PAGES, (number + 1) * PAGES)
        for start in range(0, len(prompt), CHUNK):
            draw = GREEDY if start + CHUNK >= len(prompt) else None
            pending.append(runner.launch(StepBatch([StepRow(prompt[start : start + CHUNK], start, pages, draw)])))
            if len(pending) == 2:
                sampled.append([token for token in pending.popleft()().token_ids if token is not None])
    sampled.append([token for token in pending.popleft()().token_ids if token is not None])
    return sampled


def lead(config: EngineConfig, stages: int, divides_tokens: bool, answers: SimpleQueue[list[list[int]]]) -> None:
    group = RankGroup(config, 2 // stages, stages=stages, divides_tokens=divides_tokens)
    try:
        runner = group.load()
        answers.put(first_tokens_of(runner) if stages > 1 or divides_tokens else answers_of(runner))
        if divides_tokens:
            with no_waits():
                result = runner.launch(StepBatch([StepRow(TOKENS[-1][:CHUNK], 0, range(PAGES), GREEDY)]))
            result()
    finally:
        group.close()


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig.of(
        folder, device="cuda", dtype="float32", kv_cache_bytes=CACHE, page_tokens=16, max_batch_requests=8, **changes
    )


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("family", "changes"), [("llama3", {}), ("qwen3_moe", WHOLE_EXPERTS)])
def test_two_gpus_give_the_tokens_of_one(family: str, changes: dict[str, int], graphs: bool, tmp_path: Path) -> None:
    """With an adapter, and a draft model on the first; in another process, as a process can be in only one group."""
    sizes = {**SIZES, **changes, "max_position_embeddings": 512}
    folder = write_tiny_model(tmp_path / "model", family, **sizes)
    adapter = TinyAdapter(family, modules=ATTENTION, changes=sizes).write(tmp_path / "adapter")
    config = config_of(
        folder,
        cuda_graphs=graphs,
        loras=(NamedPath("adapter", adapter),),
        draft=folder,
        draft_graphs=True,
    )
    assert of_two_gpus(config, stages=1) == answers_of(ModelRunner.load(config))


@pytest.mark.parametrize("graphs", [True, False])
def test_two_pipeline_stages_give_the_first_tokens_of_one_gpu(graphs: bool, tmp_path: Path) -> None:
    """The stages have two layers and one."""
    folder = write_tiny_model(tmp_path, "llama3", **SIZES, max_position_embeddings=512)
    config = config_of(folder, cuda_graphs=graphs)
    assert of_two_gpus(config, stages=2) == first_tokens_of(ModelRunner.load(config))


@pytest.mark.parametrize(("graphs", "step_tokens"), [(True, 2048), (True, 63), (False, 2048)])
def test_two_gpus_that_divide_tokens_give_the_first_tokens_of_one(
    graphs: bool, step_tokens: int, tmp_path: Path
) -> None:
    """All steps with graphs, which are not divided; divided prompts beside graphs of decode steps; and no graphs.

    The launch of a divided step does not wait for the device.
    """
    folder = write_tiny_model(tmp_path, "llama3", **SIZES, max_position_embeddings=512)
    config = config_of(folder, cuda_graphs=graphs, max_step_tokens=step_tokens)
    wanted = first_tokens_of(ModelRunner.load(config))
    assert of_two_gpus(config, stages=1, divides_tokens=True) == wanted


def of_two_gpus(config: EngineConfig, stages: int, *, divides_tokens: bool = False) -> list[list[int]]:
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    leader = context.Process(target=lead, args=(config, stages, divides_tokens, answers))
    leader.start()
    leader.join()
    assert leader.exitcode == 0
    return answers.get()


def check_rank(number: int, ranks: int, meeting: Path, checked: SimpleQueue[list[int]]) -> None:
    device = torch.device("cuda", number)
    collectives = CudaCollectives(Rank(number, ranks), meeting, 120.0, device, most_bytes=MOST_BYTES)
    checked.put(check_sums(collectives.sums, number, ranks, MOST_BYTES, device))
    collectives.close()


@pytest.mark.parametrize("ranks", range(2, torch.cuda.device_count() + 1))
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(ranks: int, tmp_path: Path) -> None:
    checked: SimpleQueue[list[int]] = multiprocessing.get_context("spawn").SimpleQueue()
    start_processes(check_rank, (ranks, tmp_path / "meeting", checked), ranks, daemon=True)
    words = [checked.get() for _ in range(ranks)]
    assert words == [words[0]] * ranks


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    config = EngineConfig.of(write_tiny_model(tmp_path), device="cuda")
    with pytest.raises(InvalidArgument, match="can see"):
        RankGroup(config, torch.cuda.device_count() + 1)
