"""Answers of a worker with a real draft model: token for token as without, in float32 on a CPU."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.speculation.local_worker import LocalWorker
from tandem.cost_model.acceptance import Acceptance
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.tokenizers.grammars import of_json_schema
from tests.eagle_heads import write_eagle
from tests.factories import tiny_engine_config, write_tiny_model
from tests.small_tokenizer import EOS, TOKENS, save_tokenizer

PROMPTS = [list(range(3, 20 + 7 * n)) for n in range(6)]
SAMPLINGS = [SamplingParams(40), SamplingParams(40, temperature=0.8, seed=3), SamplingParams(30, top_p=0.9, seed=1)]
GRAMMAR = of_json_schema({"type": "array", "items": {"enum": ["ab", "cd", "efg"]}, "minItems": 4, "maxItems": 6})
DRAFTS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("target"), vocab_size=TOKENS)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    """The answers without drafts."""
    config = engine(target)
    return asyncio.run(answers(ModelRunner.load(config), config))[0]


def engine(target: Path, draft: Path | None = None) -> EngineConfig:
    return tiny_engine_config(target, kv_cache_bytes=1 << 22, draft=draft)


async def answers(
    runner: ModelRunner,
    config: EngineConfig,
    drafts: int | None = DRAFTS,
    samplings: Sequence[SamplingParams] = SAMPLINGS,
    without_weights: SpeculationMethod = SpeculationMethod.OFF,
) -> tuple[list[list[int]], int, int]:
    """Returns the answers, and the drafts that were verified and accepted; of `drafts` None as many as pay."""
    method = without_weights if config.draft is None else SpeculationMethod.DRAFT
    async with LocalWorker.open(runner, config, method) as worker:
        speculation = worker.speculation
        if speculation is not None:
            speculation.fixed_drafts = drafts
        sent = [worker.send(prompt, samplings[n % len(samplings)]) for n, prompt in enumerate(PROMPTS)]
        await asyncio.gather(*(request.finished.wait() for request in sent))
        counts = None if speculation is None else speculation.counts
        if method is SpeculationMethod.DRAFT:
            pool = speculation._model._runner.pool
            pool.check_integrity()
            assert pool.counts().free == pool.total
        await asyncio.sleep(0)
        runner.pool.check_integrity()
    drafted = (sum(counts.drafted.values()), sum(counts.accepted.values())) if counts else (0, 0)
    return [request.token_ids for request in sent], *drafted


def test_the_model_itself_drafts_every_token(target: Path, plain: list[list[int]]) -> None:
    config = engine(target, draft=target)
    actual, drafted, accepted = asyncio.run(answers(ModelRunner.load(config), config))
    assert actual == plain
    assert accepted == drafted, "greedy or seeded, equal models draw equal tokens"
    tokens = sum(map(len, plain)) - len(plain)
    assert tokens / (tokens - accepted) > 0.8 * (DRAFTS + 1)


@pytest.mark.parametrize("family", ["smollm2", "ministral", "eagle"], ids=["random", "windows", "EAGLE head"])
def test_a_model_that_knows_nothing_changes_no_token(
    family: str, target: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    if family == "eagle":
        spec = load_spec(target)
        write_eagle(tmp_path, spec.hidden_size, spec.vocab_size)
    else:
        write_tiny_model(tmp_path, family, seed=5, num_hidden_layers=2, layer_types=None, vocab_size=TOKENS)
    config = engine(target, draft=tmp_path)
    runner = ModelRunner.load(config)
    actual, drafted, accepted = asyncio.run(answers(runner, config))
    assert actual == plain
    assert accepted < 0.1 * drafted
    actual, fewer, _ = asyncio.run(answers(runner, config, drafts=None))
    assert actual == plain
    assert fewer < 0.5 * drafted, "the control ends what is rejected"


def test_answers_follow_their_grammars(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy or seeded, with n-grams, which JSON has many of, and a draft model; refused drafts count as wrong."""
    samplings = [replace(sampling, grammar=GRAMMAR, max_tokens=70 - 10 * n) for n, sampling in enumerate(SAMPLINGS)]
    config, with_model = engine(target), engine(target, draft=target)
    runner = ModelRunner.load(config)
    plain, *_ = asyncio.run(answers(runner, config, samplings=samplings))
    assert {answer[-1] == EOS for answer in plain} == {True, False}
    actual, drafted, accepted = asyncio.run(
        answers(runner, config, samplings=samplings, without_weights=SpeculationMethod.NGRAM)
    )
    assert actual == plain
    assert 20 < accepted < drafted
    runner = ModelRunner.load(with_model)
    actual, drafted, accepted = asyncio.run(answers(runner, with_model, samplings=samplings))
    assert actual == plain
    assert accepted == drafted > 100, "the model drafts within the grammar"
    learned = []
    monkeypatch.setattr(Acceptance, "observe", lambda _, *seen: learned.append(seen))
    monkeypatch.setattr(runner, "allowed_drafts", lambda *_: 0)
    actual, drafted, _ = asyncio.run(answers(runner, with_model, samplings=samplings))
    assert actual == plain
    assert not drafted
    refused = sum(drafts > accepted for _, drafts, accepted in learned)
    assert refused == len(learned) > 50
