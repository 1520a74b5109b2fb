"""8-bit KV on the GPU: the tokens of the plain kernels, whatever else is in the batch or was in the pages before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.paged_cache import kernel_view
from tandem.engine.config import EngineConfig
from tandem.engine.kernels.kv_cache import QuantizedKv
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams
from tests.gpu.test_engine_cuda import Forced, greedy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CACHE = 1 << 30
GREEDY = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), 0)
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
    return EngineConfig.of(
        folder, device="cuda", dtype=dtype, kv_cache_dtype=kind, page_tokens=pages, kv_cache_bytes=CACHE,
        max_batch_requests=16,
    )  # fmt: skip


def codes_of(runner: ModelRunner) -> QuantizedKv:
    held = runner.cache.tensor
    assert isinstance(held, QuantizedKv)
    return held


def plain(folder: Path, kind: str, dtype: str) -> ModelRunner:
    """Returns an engine of the plain kernels."""
    return ModelRunner.load(config(folder, kind, dtype, 16), kernels=ReferenceKernels())


def forced(runner: ModelRunner, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
    """Returns the logits [tokens, prompts, vocab] before each token of the answers."""
    fed = Forced(runner, prompts, answers)
    return torch.stack([fed.logits(index).clone() for index in range(len(answers[0]))])


@pytest.fixture(scope="module")
def own_error(kind: str, model_folder: Path, runner: ModelRunner) -> float:
    """Returns how far 8-bit KV moves logits of `PROMPTS`, in bfloat16 together with that.

    A key or value that differs in its last digit may get the next code, and what follows from it others: two ways to
    compute the same tokens are as far apart as rounding itself moves them, also in float32.
    """
    answers = greedy(runner, PROMPTS)
    exact = forced(plain(model_folder, "auto", "float32"), PROMPTS, answers)
    rounded = forced(plain(model_folder, kind, runner.facts.dtype), PROMPTS, answers)
    error = float((rounded - exact).abs().max())
    print(f"{kind}, {runner.facts.dtype}: rounding moves logits by up to {error:.3f}")
    return error


def test_tokens_of_the_plain_kernels_but_for_ties(runner: ModelRunner, kind: str, model_folder: Path) -> None:
    """The engine's logits are at most twice as far from float32 as those of the plain kernels in bfloat16.

    All of them are over 8-bit KV, where a key that is rounded otherwise may get the next code; in float32 they are
    closer on average.
    """
    dtype = runner.facts.dtype
    answers = greedy(runner, PROMPTS, new_tokens=32)
    ours, plainly, wanted = (
        forced(candidate, PROMPTS, answers)
        for candidate in (runner, plain(model_folder, kind, "bfloat16"), plain(model_folder, kind, "float32"))
    )
    taken = torch.tensor(answers, device=ours.device).t()
    assert torch.equal(ours.gather(-1, taken[..., None])[..., 0], ours.amax(-1))
    errors, limit = ((logits - wanted).abs().amax(dim=-1) for logits in (ours, plainly))
    print(f"{dtype}: logit error {errors.max():.4f} at most, {errors.mean():.4f} on average")
    print(f"plain bfloat16:    {limit.max():.4f} at most, {limit.mean():.4f} on average")
    assert errors.max() <= 2 * limit.max()
    if dtype == "float32":
        assert errors.mean() < limit.mean()


def test_alone_as_in_company(runner: ModelRunner, own_error: float) -> None:
    """Products of other sizes round otherwise, which 8-bit KV enlarges to its own rounding but no further."""
    together = greedy(runner, PROMPTS)
    assert greedy(runner, PROMPTS) == together
    in_company = forced(runner, PROMPTS, together)
    for number, (prompt, answer) in enumerate(zip(PROMPTS, together, strict=True)):
        alone = forced(runner, [prompt], [answer])[:, 0]
        assert (alone - in_company[:, number]).abs().max() <= 2 * own_error


def test_what_was_in_the_pages_before_does_not_matter(runner: ModelRunner) -> None:
    expected = greedy(runner, PROMPTS)
    runner.cache.storage.view(torch.uint8).fill_(POISON)
    assert codes_of(runner).scales.isnan().all()
    assert greedy(runner, PROMPTS) == expected


def test_chunks_of_a_prompt_give_the_tokens_of_a_whole_one(runner: ModelRunner, own_error: float) -> None:
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
    assert (chunked - whole).abs().max() <= 2 * own_error
    assert not chunked.isnan().any()


def test_pages_continue_elsewhere(runner: ModelRunner, kind: str, model_folder: Path) -> None:
    """Pages are copied as bytes, as a transfer does."""
    other = ModelRunner.load(config(model_folder, kind, runner.facts.dtype))
    other.cache.storage.view(torch.uint8).fill_(POISON)
    prompt, page_tokens = PROMPTS[3], runner.page_tokens
    used = -(-len(prompt) // page_tokens)
    mine, theirs = list(range(3, 3 + used)), list(range(9 + used, 9, -1))
    (token,) = runner.run(StepBatch([StepRow(prompt, 0, mine, GREEDY)])).token_ids
    theirs_now, ours_now = (owner.cache.storage.view(torch.uint8) for owner in (other, runner))
    theirs_now[theirs] = ours_now[mine]
    filled = [min(page_tokens, len(prompt) - page_tokens * number) for number in range(used)]
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
