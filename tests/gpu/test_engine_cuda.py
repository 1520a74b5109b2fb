"""The same runner on a GPU: the CPU reference's greedy tokens, whatever else is in the batch, with steps one ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import Draw, PendingStep, StepBatch, StepRow
from engine.config import EngineConfig
from engine.kernels.reference import ReferenceKernels
from engine.model_runner import ModelRunner
from wire.errors import InvalidArgument
from wire.messages import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CACHE = 1 << 30
PROMPTS = [[(7 * i * i + 31 * s) % 40_000 for i in range(n)] for s, n in enumerate((5, 17, 64, 130))]


def greedy(runner: ModelRunner, prompts: list[list[int]], new_tokens: int = 16) -> list[list[int]]:
    """All prompts in one step, then all together token by token, each step launched before the last one is read."""
    return decode(runner, prompts, SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True))


def decode(runner: ModelRunner, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    share = -(-(max(map(len, prompts)) + sampling.max_tokens) // runner.page_tokens)
    pages = [list(range(i * share, (i + 1) * share)) for i in range(len(prompts))]
    answers: list[list[int]] = [[] for _ in prompts]
    pending: PendingStep | None = None

    def read(step: PendingStep) -> None:
        for answer, token in zip(answers, step().token_ids, strict=True):
            assert token is not None
            answer.append(token)

    for index in range(sampling.max_tokens):
        rows = []
        for number, prompt in enumerate(prompts):
            draw, start = Draw(sampling, index), len(prompt) + index - 1
            if index == 0:
                rows.append(StepRow(prompt, 0, pages[number], draw))
            elif runner.asynchronous:
                rows.append(StepRow([0], start, pages[number], draw, source=number))
            else:
                rows.append(StepRow([answers[number][-1]], start, pages[number], draw))
        launched = runner.launch(StepBatch(rows))
        if not runner.asynchronous:
            read(launched)
            continue
        if pending is not None:
            read(pending)
        pending = launched
    if pending is not None:
        read(pending)
    return answers


@pytest.fixture(scope="module")
def on_gpu(model_folder: Path) -> ModelRunner:
    config = EngineConfig(
        model_folder, device="cuda", dtype="float32", page_tokens=16, kv_cache_bytes=CACHE, max_batch_requests=16
    )
    return ModelRunner.load(config)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> ModelRunner:
    """The plain kernels in float32, the yardstick. They run on the GPU, too, where they are the same in less time."""
    config = EngineConfig(model_folder, device="cuda", dtype="float32", page_tokens=16, kv_cache_bytes=CACHE)
    return ModelRunner.load(config, kernels=ReferenceKernels())


def test_same_tokens_as_the_plain_kernels_on_the_cpu(on_gpu: ModelRunner, model_folder: Path) -> None:
    config = EngineConfig(model_folder, device="cpu", dtype="float32", page_tokens=16)
    assert greedy(on_gpu, PROMPTS) == greedy(ModelRunner.load(config, kernels=ReferenceKernels()), PROMPTS)


def test_alone_as_in_company(on_gpu: ModelRunner) -> None:
    together = greedy(on_gpu, PROMPTS)
    assert [greedy(on_gpu, [prompt])[0] for prompt in PROMPTS] == together


def test_seeded_draws_alone_as_in_company(on_gpu: ModelRunner) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.9, top_k=40, top_p=0.95, seed=11, ignore_eos=True)
    together = decode(on_gpu, PROMPTS, sampling)
    assert [decode(on_gpu, [prompt], sampling)[0] for prompt in PROMPTS] == together


def test_bfloat16_gives_the_tokens_of_float32_but_for_ties(reference: ModelRunner, model_folder: Path) -> None:
    """50 prompts, 64 tokens, the same context on both sides for each: 95 % agree, and the rest are near ties."""
    config = EngineConfig(model_folder, device="cuda", dtype="bfloat16", kv_cache_bytes=CACHE)
    ours = ModelRunner.load(config)
    prompts = [[(13 * i * i + 977 * s + i) % 40_000 for i in range(5 + 7 * s)] for s in range(50)]
    answers = greedy(ours, prompts, new_tokens=64)
    tokens = same = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = [*prompt, *answer]
        step = [
            StepRow(whole[: len(prompt) + i], 0, range(40), Draw(SamplingParams(max_tokens=1), 0)) for i in range(64)
        ]
        for index, row in enumerate(step):
            logits = reference.logits(StepBatch([row]))[0]
            best = logits.topk(2)
            tokens += 1
            if int(best.indices[0]) == answer[index]:
                same += 1
            else:
                gap = float(best.values[0] - logits[answer[index]])
                print(f"prompt of {len(prompt)}, token {index}: {gap:.4f} below the best")
                assert gap < 0.75
    print(f"{same} of {tokens} tokens agree")
    assert same >= 0.95 * tokens


def test_the_cache_fills_what_the_setting_leaves(model_folder: Path) -> None:
    config = EngineConfig(model_folder, device="cuda", dtype="bfloat16", memory_fraction=0.2, max_batch_requests=8)
    runner = ModelRunner.load(config)
    total = torch.cuda.mem_get_info()[1]
    assert 0.1 * total < runner.cache.pages * runner.cache.page_bytes < 0.2 * total


def test_too_small_a_share_names_the_setting(model_folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="memory_fraction"):
        ModelRunner.load(EngineConfig(model_folder, device="cuda", dtype="bfloat16", memory_fraction=0.005))
