"""Steps that verify drafts on a GPU: graphs against the same steps without, and answers against those without drafts.

The attention kernel itself is compared by `tests/kernels/attention/test_draft_groups.py`, which runs on GPUs as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speculation.draft_rows import with_drafts
from benchmarks.speculation.local_worker import LocalWorker
from benchmarks.speculation.oracle import OracleProposer
from decode_worker.request import DecodeRequest
from tandem.engine.config import EngineConfig
from tandem.engine.cuda.verify_graphs import VerifySize
from tandem.engine.kernels.kv_cache import QuantizedKv
from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.ngram import NgramProposer
from tandem.engine.speculation.proposer import Proposer
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GREEDY = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
LENGTHS = [5, 17, 128, 130, 1000]
"""Prompts that end within pages and at their borders."""
SHARE = 9
"""Pages of a request."""
COUNTS = [[1, 0, 0, 0, 0], [3] * 5, [7, 0, 1, 2, 5], [2] * 5, [7] * 5, [4, 4, 4, 4, 6]]
"""The drafts of each request in a step."""
ANSWER_TOKENS = 48
SAMPLINGS = {
    "greedy": SamplingParams(ANSWER_TOKENS, ignore_eos=True),
    "top-p": SamplingParams(ANSWER_TOKENS, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True),
    "top-k": SamplingParams(ANSWER_TOKENS, temperature=1.0, top_k=20, seed=8, ignore_eos=True),
    "min-p": SamplingParams(ANSWER_TOKENS, temperature=0.9, min_p=0.05, seed=9, logprobs=2, ignore_eos=True),
    "penalties": SamplingParams(ANSWER_TOKENS, temperature=0.7, presence_penalty=0.5, seed=10, ignore_eos=True),
}


def config_of(folder: Path, dtype: str, kv_cache_dtype: str = "auto") -> EngineConfig:
    return EngineConfig.of(
        folder,
        device="cuda",
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_bytes=1 << 30,
        max_batch_requests=16,
        draft_graphs=True,
    )


@pytest.fixture(scope="module", params=[("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")], ids="-".join)
def runner(request: pytest.FixtureRequest, model_folder: Path) -> ModelRunner:
    return ModelRunner.load(config_of(model_folder, *request.param))


def prompt(tokens: int, salt: int) -> list[int]:
    return [(7 * n * n + 31 * salt + n) % 40_000 for n in range(tokens)]


def verifying(counts: Sequence[int]) -> StepBatch:
    """Returns the step behind the prompts, with so many drafts for each request."""
    newest = [StepRow([n + 100], length, pages_of(n), GREEDY) for n, length in enumerate(LENGTHS)]
    return StepBatch([], with_drafts(newest, [prompt(count, n) for n, count in enumerate(counts)]))


def pages_of(number: int) -> range:
    return range(number * SHARE, (number + 1) * SHARE)


def fill(runner: ModelRunner) -> None:
    """Computes the prompts."""
    for number, length in enumerate(LENGTHS):
        runner.run(StepBatch([StepRow(prompt(length, number), 0, pages_of(number), GREEDY)]))


def test_the_graphs_of_all_sizes_are_captured(runner: ModelRunner) -> None:
    stepper: Any = runner.stepper
    sizes = list(stepper.verify._graphs)
    assert len(sizes) == 25
    assert sizes == sorted(sizes)
    assert max(size.rows for size in sizes) == 128


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_graph_computes_the_bits_of_the_step_that_it_captured(runner: ModelRunner, counts: list[int]) -> None:
    fill(runner)
    stepper: Any = runner.stepper
    batch, hits = verifying(counts), runner.graph_use.hits
    replayed = runner.logits(batch).clone()
    assert runner.graph_use.hits == hits + 1
    graph = stepper.verify.fitting(batch)
    size = next(size for size, candidate in stepper.verify._graphs.items() if candidate is graph)
    assert isinstance(size, VerifySize)
    with torch.inference_mode():
        words, compute, _ = stepper.verify._step(size)
        words.copy_(graph.words)
        eager = compute()
        torch.cuda.synchronize()
    assert replayed.isfinite().all()
    assert torch.equal(eager[: len(batch)], replayed)
    assert eager.isfinite().all(), "padding is zeros"


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_logits_are_those_of_single_rows(runner: ModelRunner, counts: list[int]) -> None:
    """Behind each draft, those of a step whose only row of the request is that draft's.

    In bfloat16 other tiles round otherwise, which 8-bit KV enlarges (tests/gpu/quantization/test_quantized_kv.py).
    """
    fill(runner)
    batch = verifying(counts)
    ours = runner.logits(batch).float().clone()
    rows = batch.rows
    exact = runner.dtype == torch.float32
    near = 1e-4 if exact else 1.5 if isinstance(runner.cache.tensor, QuantizedKv) else 0.75
    for distance in range(max(counts) + 1):
        some = [at for at, row in enumerate(rows) if row.start - LENGTHS[row.page_ids[0] // SHARE] == distance]
        plain = runner.logits(StepBatch([rows[at] for at in some])).float()
        torch.testing.assert_close(ours[some], plain, rtol=1e-4 if exact else 0.1, atol=near)
        if exact:
            assert ours[some].argmax(-1).tolist() == plain.argmax(-1).tolist()


def answer_of(plain: dict[Hashable, list[int]]) -> Callable[[Hashable], Sequence[int]]:
    """Returns what an oracle asks: the prompt and the plain answer of a request."""

    def whole(key: Hashable) -> Sequence[int]:
        assert isinstance(key, DecodeRequest)
        original_prompt = tuple(key.reservation.original_prompt)
        return [*original_prompt, *plain[original_prompt, key.reservation.sampling]]

    return whole


async def answers(worker: LocalWorker, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    sent = [worker.send(*arguments) for arguments in asked]
    await asyncio.gather(*(request.finished.wait() for request in sent))
    return [request.token_ids for request in sent]


@pytest.fixture(scope="module")
def exact_runner(model_folder: Path) -> tuple[ModelRunner, EngineConfig]:
    config = replace(config_of(model_folder, "float32"), max_batch_requests=32)
    return ModelRunner.load(config), config


def test_answers_are_those_without_drafts(exact_runner: tuple[ModelRunner, EngineConfig]) -> None:
    """In float32: greedy and seeded answers, with real, half right and always wrong drafts, few and many of them."""
    asyncio.run(_compare_answers(*exact_runner))


async def _compare_answers(runner: ModelRunner, config: EngineConfig) -> None:
    repeating = [prompt(12, 3) * 6, prompt(30, 4) * 3]
    prompts = [*(prompt(20 + 31 * n, n) for n in range(4)), *repeating]
    asked = [(prompt, sampling) for sampling in SAMPLINGS.values() for prompt in prompts]
    async with LocalWorker.open(runner, config, SpeculationMethod.OFF) as worker:
        wanted = await answers(worker, asked)
    plain: dict[Hashable, list[int]] = {
        (tuple(original_prompt), sampling): answer
        for (original_prompt, sampling), answer in zip(asked, wanted, strict=True)
    }
    proposers: dict[str, Callable[[], Proposer]] = {
        "n-grams": NgramProposer,
        "half right": lambda: OracleProposer(answer_of(plain), 0.5),
        "wrong": lambda: OracleProposer(answer_of(plain), 0.0),
    }
    for name, propose in proposers.items():
        for drafts in (1, 3, 7, None):
            async with LocalWorker.open(runner, config, SpeculationMethod.NGRAM) as worker:
                worker.speculation._proposer = propose()
                worker.speculation.fixed_drafts = drafts
                actual = await answers(worker, asked)
                accepted = sum(worker.speculation.counts.accepted.values())
            differing = [n for n, (ours, theirs) in enumerate(zip(actual, wanted, strict=True)) if ours != theirs]
            assert not differing, f"{name}, {drafts} drafts: {len(differing)} of {len(asked)} answers differ"
            if drafts is not None:
                assert (accepted > 0) == (name != "wrong")
