"""8-bit KV on the GPU: the tokens of the plain kernels, whatever else is in the batch or was in the pages before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.cache.page_checksums import page_checksums
from engine.cache.paged_cache import kernel_view
from engine.config import EngineConfig
from engine.kernels.kv_cache import QuantizedKv
from engine.kernels.reference import ReferenceKernels
from engine.model_runner import ModelRunner
from engine.steps.batch import StepBatch, StepRow
from engine.steps.draws import Draw
from tests.gpu.test_engine_cuda import Forced, greedy
from wire.messages import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CACHE = 1 << 30
GREEDY = Draw(SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), 0)
PROMPTS = [[(7 * i * i + 31 * s) % 40_000 for i in range(n)] for s, n in enumerate((5, 17, 64, 130, 700))]
POISON = 0xFF
"""A byte of which codes of float8, and all scales, are NaN."""


@pytest.fixture(scope="module", params=["int8", "fp8"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a GPU of compute capability 8.9")
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, model_folder: Path, kind: str) -> ModelRunner:
    """Returns an engine with CUDA graphs, in bfloat16 with flash-attn-4 where it is installed."""
    return ModelRunner.load(config(model_folder, kind, request.param))


def config(folder: Path, kind: str, dtype: str, page_tokens: int | None = None) -> EngineConfig:
    pages = page_tokens or (16 if dtype == "float32" else 128)
    return EngineConfig(
        folder, device="cuda", dtype=dtype, kv_cache_dtype=kind, page_tokens=pages, kv_cache_bytes=CACHE,
        max_batch_requests=16,
    )  # fmt: skip


def codes_of(runner: ModelRunner) -> QuantizedKv:
    held = runner.cache.tensor
    assert isinstance(held, QuantizedKv)
    return held


def test_tokens_of_the_plain_kernels_but_for_ties(runner: ModelRunner, kind: str, model_folder: Path) -> None:
    """The engine's logits are at most twice as far from float32 as those of the plain kernels in its dtype.

    All of them are over 8-bit KV, where a key that is rounded otherwise may get the next code.
    """
    dtype = runner.facts.dtype
    plain = ModelRunner.load(config(model_folder, kind, "bfloat16", 16), kernels=ReferenceKernels())
    exact = ModelRunner.load(config(model_folder, kind, "float32", 16), kernels=ReferenceKernels())
    answers = greedy(runner, PROMPTS, new_tokens=32)
    sides = [Forced(each, PROMPTS, answers) for each in (runner, plain, exact)]
    errors, allowed = [], []
    for index in range(32):
        ours, plainly, wanted = (side.logits(index) for side in sides)
        errors.append((ours - wanted).abs().amax(dim=1))
        allowed.append((plainly - wanted).abs().amax(dim=1))
        for number, answer in enumerate(answers):
            assert ours[number, answer[index]] == ours[number].max()
    found, limit = torch.stack(errors), torch.stack(allowed)
    print(f"{dtype}: logit error {found.max():.4f} at most, {found.mean():.4f} on average")
    print(f"plain bfloat16:    {limit.max():.4f} at most, {limit.mean():.4f} on average")
    assert found.max() <= 2 * limit.max()
    if dtype == "float32":
        assert found.mean() < limit.mean() / 4


def test_alone_as_in_company(runner: ModelRunner) -> None:
    """In float32 bit for bit; in bfloat16 products of other sizes round otherwise, with or without quantization."""
    together = greedy(runner, PROMPTS)
    alone = [greedy(runner, [prompt])[0] for prompt in PROMPTS]
    if runner.facts.dtype == "float32":
        assert alone == together
    else:
        assert sum(mine == other for mine, other in zip(alone, together, strict=True)) >= len(PROMPTS) - 2
    assert greedy(runner, PROMPTS) == together


def test_what_was_in_the_pages_before_does_not_matter(runner: ModelRunner) -> None:
    expected = greedy(runner, PROMPTS)
    runner.cache.storage.view(torch.uint8).fill_(POISON)
    assert codes_of(runner).scales.isnan().all()
    assert greedy(runner, PROMPTS) == expected


def test_chunks_of_a_prompt_give_the_tokens_of_a_whole_one(runner: ModelRunner) -> None:
    """A token sees quantized keys and values of its own prompt, too: chunks see the same ones."""
    prompt = PROMPTS[-1]
    pages = range(-(-len(prompt) // runner.page_tokens))
    (whole,) = runner.logits(StepBatch([StepRow(prompt, 0, pages, GREEDY)])).float().clone()
    runner.cache.storage.view(torch.uint8).fill_(POISON)
    start = 0
    for tokens in (300, 1, 129, 270):
        last = start + tokens == len(prompt)
        row = StepRow(prompt[start : start + tokens], start, pages, GREEDY if last else None)
        if last:
            (chunked,) = runner.logits(StepBatch([row])).float()
        else:
            runner.run(StepBatch([row]))
        start += tokens
    assert last
    # Without quantization it is about as much: products of other sizes round otherwise.
    assert (chunked - whole).abs().max() < (0.02 if runner.facts.dtype == "float32" else 0.25) * whole.std()
    assert not chunked.isnan().any()


def test_pages_continue_elsewhere(runner: ModelRunner, kind: str, model_folder: Path) -> None:
    """Pages are copied as bytes, as a transfer does."""
    other = ModelRunner.load(config(model_folder, kind, runner.facts.dtype))
    other.cache.storage.view(torch.uint8).fill_(POISON)
    prompt, each = PROMPTS[3], runner.page_tokens
    used = -(-len(prompt) // each)
    mine, theirs = list(range(3, 3 + used)), list(range(9 + used, 9, -1))
    (token,) = runner.run(StepBatch([StepRow(prompt, 0, mine, GREEDY)])).token_ids
    theirs_now, ours_now = (each.cache.storage.view(torch.uint8) for each in (other, runner))
    theirs_now[theirs] = ours_now[mine]
    filled = [min(each, len(prompt) - each * number) for number in range(used)]
    sums = list(runner.page_sums(mine, filled))
    assert list(other.page_sums(theirs, filled)) == sums
    for index in range(1, 4):
        rows = [StepRow([token or 0], len(prompt) + index - 1, pages, GREEDY) for pages in (mine, theirs)]
        tokens = [side.run(StepBatch([row])).token_ids[0] for side, row in zip((runner, other), rows, strict=True)]
        assert tokens[0] == tokens[1]
        token = tokens[0]


def test_checksums_are_those_of_the_host(runner: ModelRunner) -> None:
    greedy(runner, PROMPTS[:1], new_tokens=1)
    cache, pages, filled = runner.cache, [0, 3], [5, 1]
    copied = kernel_view(cache.storage.cpu(), cache.groups[0], cache.page_tokens)
    assert list(runner.page_sums(pages, filled)) == list(page_checksums(copied)(pages, filled))
