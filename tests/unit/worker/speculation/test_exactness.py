"""Answers of a real model in float32 on a CPU: token for token as without drafts, whoever drafts, however many."""

import asyncio
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest

import tandem.worker.worker
from benchmarks.speculation.local_worker import Answer, LocalWorker
from benchmarks.speculation.oracle import OracleProposer
from decode_worker.request import DecodeRequest
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.ngram import NgramProposer
from tandem.engine.speculation.proposer import Proposer
from tandem.engine.steps.batch import PendingStep, StepBatch
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tests.factories import tiny_engine_config, write_tiny_model

TOKENS, REQUESTS, VOCAB = 128, 16, 96
PROMPTS = [[3 + (7 * n + k * k) % (VOCAB - 3) for k in range(5 + n)] for n in range(REQUESTS)]
KINDS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "logprobs": 1},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
]
SAMPLINGS = [
    SamplingParams(TOKENS, seed=n, ignore_eos=True, **kind) for n, kind in zip(range(REQUESTS), itertools.cycle(KINDS))
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, num_hidden_layers=2)
    return tiny_engine_config(model, kv_cache_bytes=1 << 24)


@pytest.fixture(scope="module")
def runner(config: EngineConfig) -> ModelRunner:
    return ModelRunner.load(config)


@pytest.fixture(scope="module")
def plain(config: EngineConfig, runner: ModelRunner) -> list[Answer]:
    return asyncio.run(answers(config, runner))[0]


async def answers(
    config: EngineConfig, runner: ModelRunner, drafts: int | None = None
) -> tuple[list[Answer], int, int]:
    """Returns the answers, and how many drafts were verified and accepted; without `drafts` there are none."""
    method = SpeculationMethod.OFF if drafts is None else SpeculationMethod.NGRAM
    async with LocalWorker.open(runner, config, method) as local:
        if drafts is not None:
            local.speculation.fixed_drafts = drafts
        sent = [local.send(*arguments) for arguments in zip(PROMPTS, SAMPLINGS, strict=True)]
        await asyncio.gather(*(request.finished.wait() for request in sent))
        counts = None if drafts is None else local.speculation.counts
    runner.pool.check_integrity()
    if counts is None:
        return sent, 0, 0
    return sent, sum(counts.drafted.values()), sum(counts.accepted.values())


def oracle(plain: Sequence[Answer], alpha: float) -> Proposer:
    def whole(key: Hashable) -> Sequence[int]:
        assert isinstance(key, DecodeRequest)
        original_prompt = list(key.reservation.original_prompt)
        return [*original_prompt, *plain[PROMPTS.index(original_prompt)].token_ids]

    return OracleProposer(whole, alpha)


@pytest.mark.parametrize(("name", "drafts"), [("n-grams", 3), ("half right", 7), ("wrong", 1)])
def test_tokens_and_log_probabilities_are_those_without_drafts(
    name: str, drafts: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each proposer with one number of drafts: with every number, as fake engines have it, it takes thrice as long."""
    config, runner, plain = (request.getfixturevalue(fixture) for fixture in ("config", "runner", "plain"))
    make: dict[str, Callable[[], Proposer]] = {
        "n-grams": NgramProposer,
        "half right": lambda: oracle(plain, 0.5),
        "wrong": lambda: oracle(plain, 0.0),
    }
    monkeypatch.setattr(tandem.worker.worker, "make_proposer", lambda *_, **__: make[name]())
    monkeypatch.setattr(runner, "launch", checked(runner))
    actual, drafted, accepted = asyncio.run(answers(config, runner, drafts))
    assert [request.token_ids for request in actual] == [request.token_ids for request in plain]
    assert all(len(request.token_ids) == TOKENS for request in actual)
    for request_now, before, sampling in zip(actual, plain, SAMPLINGS, strict=True):
        assert len(request_now.logprobs) == (0 if sampling.logprobs is None else TOKENS)
        for now, then in zip(request_now.logprobs, before.logprobs, strict=True):
            assert now.top_ids == then.top_ids
            assert [now.chosen, *now.top] == pytest.approx([then.chosen, *then.top], abs=1e-5)
    assert drafted > 1000
    assert (accepted > 100) == (name != "wrong")


def checked(runner: ModelRunner) -> Callable[[StepBatch], PendingStep]:
    """Returns `launch` with a check of all pages before each step."""
    launch = runner.launch

    def run(batch: StepBatch) -> PendingStep:
        runner.pool.check_integrity()
        return launch(batch)

    return run
