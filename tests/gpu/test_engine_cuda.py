"""The same runner on a GPU: the CPU reference's greedy tokens, whatever else is in the batch, with steps one ahead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.linear.triton_linear_plan import FLOAT_STREAMED_TOKENS
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import PendingStep, StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CACHE = 1 << 30
GREEDY = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
PROMPTS = [[(7 * i * i + 31 * s) % 40_000 for i in range(n)] for s, n in enumerate((5, 17, 64, 130))]


def greedy(runner: ModelRunner, prompts: list[list[int]], new_tokens: int = 16) -> list[list[int]]:
    """Decodes greedily: all prompts in one step, then token by token, each launched before the last one is read."""
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
            draw, start = SamplingInput(sampling, index), len(prompt) + index - 1
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
    config = EngineConfig.of(
        model_folder, device="cuda", dtype="float32", page_tokens=16, kv_cache_bytes=CACHE, max_batch_requests=16
    )
    return ModelRunner.load(config)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> ModelRunner:
    """Returns the plain kernels in float32, the reference.

    They run on the GPU, too, with the same results in less time.
    """
    config = EngineConfig.of(
        model_folder, device="cuda", dtype="float32", page_tokens=16, kv_cache_bytes=CACHE, max_batch_requests=64
    )
    return ModelRunner.load(config, kernels=ReferenceKernels())


def test_same_tokens_as_the_plain_kernels_on_the_cpu(on_gpu: ModelRunner, model_folder: Path) -> None:
    config = EngineConfig.of(model_folder, device="cpu", dtype="float32", page_tokens=16)
    assert greedy(on_gpu, PROMPTS) == greedy(ModelRunner.load(config, kernels=ReferenceKernels()), PROMPTS)


def test_alone_as_in_company(on_gpu: ModelRunner) -> None:
    together = greedy(on_gpu, PROMPTS)
    assert [greedy(on_gpu, [prompt])[0] for prompt in PROMPTS] == together


def test_alone_as_in_company_where_a_library_multiplies(on_gpu: ModelRunner) -> None:
    """The first prompt is streamed alone and multiplied by the library in a batch.

    The second uses the library both times.
    """
    lengths = (40, 300, 400, 600)
    assert lengths[0] <= FLOAT_STREAMED_TOKENS < lengths[1]
    prompts = [[(11 * i * i + 53 * s + i) % 40_000 for i in range(n)] for s, n in enumerate(lengths)]
    together = greedy(on_gpu, prompts)
    assert [greedy(on_gpu, [prompt])[0] for prompt in prompts] == together


def test_seeded_draws_alone_as_in_company(on_gpu: ModelRunner) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.9, top_k=40, top_p=0.95, seed=11, ignore_eos=True)
    together = decode(on_gpu, PROMPTS, sampling)
    assert [decode(on_gpu, [prompt], sampling)[0] for prompt in PROMPTS] == together


def test_decode_rows_and_chunks_in_one_step(on_gpu: ModelRunner) -> None:
    """Three requests decode while a fourth prompt is computed in chunks in the same steps, the last of one token."""
    early, late, chunks = PROMPTS[:3], PROMPTS[3], (64, 65, 1)
    assert sum(chunks) == len(late)
    pages = [range(number * 20, (number + 1) * 20) for number in range(len(PROMPTS))]
    answers: list[list[int]] = [[] for _ in PROMPTS]

    def step(rows: dict[int, StepRow]) -> None:
        drawn = on_gpu.run(StepBatch(list(rows.values()))).token_ids
        for number, token in zip(rows, drawn, strict=True):
            if token is not None:
                answers[number].append(token)

    def decoding(numbers: Iterable[int]) -> dict[int, StepRow]:
        return {
            number: StepRow(
                answers[number][-1:], len(PROMPTS[number]) + len(answers[number]) - 1, pages[number], GREEDY
            )
            for number in numbers
        }

    step({number: StepRow(prompt, 0, pages[number], GREEDY) for number, prompt in enumerate(early)})
    start = 0
    for chunk in chunks:
        last = start + chunk == len(late)
        row = StepRow(late[start : start + chunk], start, pages[3], GREEDY if last else None)
        step(decoding(range(3)) | {3: row})
        start += chunk
    for _ in range(15):
        step(decoding(range(4)))
    apart = [greedy(on_gpu, [prompt])[0] for prompt in PROMPTS]
    assert [answer[:16] for answer in answers] == apart


class Forced:
    """A runner that is fed `answers` instead of its own tokens: all prompts in one step, then token by token."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], answers: list[list[int]]) -> None:
        longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        self._pages = -(-longest // runner.page_tokens)
        self._runner, self._prompts, self._answers = runner, prompts, answers

    def logits(self, index: int) -> torch.Tensor:
        """Returns float32 [prompts, vocab] before token `index` of the answers; to be called in order, from 0 on."""
        rows = []
        for number, (prompt, answer) in enumerate(zip(self._prompts, self._answers, strict=True)):
            pages = range(number * self._pages, (number + 1) * self._pages)
            if index == 0:
                rows.append(StepRow(prompt, 0, pages, GREEDY))
            else:
                rows.append(StepRow([answer[index - 1]], len(prompt) + index - 1, pages, GREEDY))
        return self._runner.logits(StepBatch(rows)).float()


def test_bfloat16_gives_the_tokens_of_float32_but_for_ties(reference: ModelRunner, model_folder: Path) -> None:
    """50 prompts, 64 tokens, the same context on all sides for each.

    The engine's logits, from which it drew, are at most twice as far from float32 as the plain kernels' in bfloat16.
    Where its token is another one, float32 has both so close together that the plain kernels' errors at this very
    position would explain it as well: a tie, by name.
    """
    config = EngineConfig.of(model_folder, device="cuda", dtype="bfloat16", kv_cache_bytes=CACHE, max_batch_requests=64)
    ours = ModelRunner.load(config)
    plain = ModelRunner.load(replace(config, page_tokens=16), kernels=ReferenceKernels())
    prompts = [[(13 * i * i + 977 * s + i) % 40_000 for i in range(5 + 7 * s)] for s in range(50)]
    answers = greedy(ours, prompts, new_tokens=64)
    sides = [Forced(runner, prompts, answers) for runner in (ours, plain, reference)]
    errors, plain_errors, same = [], [], 0
    for index in range(64):
        drawn_from, plainly, exact = (side.logits(index) for side in sides)
        errors.append((drawn_from - exact).abs().amax(dim=1))
        plain_error = plainly - exact
        plain_errors.append(plain_error.abs().amax(dim=1))
        # A common offset of all logits changes no choice: only the differences of their errors count.
        bounds = (plain_error.amax(dim=1) - plain_error.amin(dim=1)).tolist()
        for number, answer in enumerate(answers):
            token, best = answer[index], int(exact[number].argmax())
            assert drawn_from[number, token] == drawn_from[number].max()
            gap = float(exact[number, best] - exact[number, token])
            same += gap == 0
            if gap > 0:
                where = f"prompt of {len(prompts[number])}, token {index}"
                print(f"{where}: {token} for {best}, {gap:.4f} apart where {bounds[number]:.4f} may be")
                assert gap <= bounds[number]
    differences, allowed = torch.stack(errors), torch.stack(plain_errors)
    print(f"{same} of {differences.numel()} tokens agree")
    print(
        f"logit error {differences.max():.4f} at most, {differences.mean():.4f} on average; plain kernels in bfloat16"
    )
    print(f"            {allowed.max():.4f} at most, {allowed.mean():.4f} on average")
    assert differences.max() <= 2 * allowed.max()
    assert differences.mean() <= 2 * allowed.mean()
    assert same >= 0.95 * differences.numel()


def test_graphs_share_the_memory_of_their_logits(model_folder: Path) -> None:
    config = EngineConfig.of(model_folder, device="cuda", dtype="float32", kv_cache_bytes=CACHE, max_batch_requests=256)
    runner = ModelRunner.load(config)
    stepper: Any = runner.stepper
    kept = [graph.logits for graph in stepper.graphs._graphs]
    taken = reached = 0
    for start, size in sorted((logits.data_ptr(), logits.numel() * 4) for logits in kept):
        taken += max(0, start + size - max(start, reached))
        reached = max(reached, start + size)
    assert taken < sum(logits.numel() * 4 for logits in kept) / 2


def test_a_graph_s_logits_last_until_the_next_step(on_gpu: ModelRunner, reference: ModelRunner) -> None:
    """Graphs of one row and of many, in turns, after the many captures that came before."""
    for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[:2], PROMPTS[:1]):
        answers = [[7, 11] for _ in prompts]
        ours, exact = Forced(on_gpu, prompts, answers), Forced(reference, prompts, answers)
        for index in range(3):
            mine = ours.logits(index)
            torch.cuda.synchronize()
            torch.testing.assert_close(mine, exact.logits(index), rtol=1e-3, atol=1e-2)


def test_the_cache_fills_what_the_setting_leaves(model_folder: Path) -> None:
    config = EngineConfig.of(model_folder, device="cuda", dtype="bfloat16", memory_fraction=0.2, max_batch_requests=8)
    runner = ModelRunner.load(config)
    total = torch.cuda.mem_get_info()[1]
    assert 0.1 * total < runner.cache.pages * runner.cache.page_bytes < 0.2 * total


def test_too_small_a_share_names_the_setting(model_folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="memory_fraction"):
        ModelRunner.load(
            EngineConfig.of(model_folder, device="cuda", dtype="bfloat16", memory_fraction=0.005, max_batch_requests=64)
        )
