"""Speculative decoding of a model that is divided among ranks: the drafts and the tokens of one rank."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speculation.local_worker import LocalWorker
from tandem.engine.config import EngineConfig
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.proposer import BatchProposer, WantedDraft
from tandem.engine.steps.batch import StepBatch
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tests.eagle_heads import write_eagle
from tests.factories import draw, row, tiny_engine_config, write_tiny_model
from tests.medusa_heads import write_heads
from tests.mtp_models import LAYOUTS, write_mtp
from tests.ranks import group_runner

VOCAB, HIDDEN = 96, 64
PROMPTS = [[3 + (7 * n + k * k) % (VOCAB - 3) for k in range(5 + 3 * n)] for n in range(4)]
DRAFTS = 3


def write_draft(kind: str, model: Path, folder: Path) -> Path:
    if kind == "model":
        return model
    if kind == "EAGLE-3":
        ids, shapes = [1, 2], {"fc.weight": (HIDDEN, 2 * HIDDEN)}
        return write_eagle(folder, HIDDEN, VOCAB, third=True, shapes=shapes, eagle_aux_hidden_state_layer_ids=ids)
    if kind == "eagle":
        return write_eagle(folder, HIDDEN, VOCAB)
    if kind == "eagle of few tokens":
        return write_eagle(folder, HIDDEN, VOCAB, tokens=[3, 17, 29, 40, 41, 88, 95])
    if kind == "heads":
        return write_heads(folder, HIDDEN, VOCAB, original_lm_head=True)
    return write_heads(folder, HIDDEN, VOCAB)


async def answers(runner: ModelRunner, config: EngineConfig) -> tuple[list[list[int]], int, int]:
    """Returns the answers, and the numbers of draft tokens that were verified and accepted."""
    method = SpeculationMethod.MTP if config.mtp else SpeculationMethod.DRAFT
    async with LocalWorker.open(runner, config, method) as worker:
        worker.speculation.fixed_drafts = DRAFTS
        sent = [worker.send(prompt, SamplingParams(24, ignore_eos=True)) for prompt in PROMPTS]
        await asyncio.gather(*(request.finished.wait() for request in sent))
        counts = worker.speculation.counts
    runner.pool.check_integrity()
    return [request.token_ids for request in sent], sum(counts.drafted.values()), sum(counts.accepted.values())


def config_with(kind: str, changes: dict[str, Any], folder: Path) -> EngineConfig:
    if kind in LAYOUTS:
        checkpoint = write_mtp(folder, kind, hidden_size=HIDDEN, vocab_size=VOCAB, **changes)
        return tiny_engine_config(checkpoint, kv_cache_bytes=8 << 20, mtp=True)
    model = write_tiny_model(folder / "model", hidden_size=HIDDEN, vocab_size=VOCAB, **changes)
    return tiny_engine_config(model, kv_cache_bytes=8 << 20, draft=write_draft(kind, model, folder / "draft"))


def first_draft(runner: ModelRunner) -> list[int]:
    """Returns the draft tokens after the first token of an answer."""
    assert runner.draft_proposer is not None
    proposer = runner.draft_proposer()
    assert isinstance(proposer, BatchProposer)
    (token,) = runner.run(StepBatch([row(PROMPTS[-1], 0, [0, 1])])).token_ids
    assert token is not None
    proposer.begin("a", [*PROMPTS[-1], token], "")
    assert proposer.capacity("a", DRAFTS) == DRAFTS
    wanted = WantedDraft("a", [draw(index) for index in range(1, DRAFTS + 1)], rows=[0])
    (draft,) = proposer.compute([wanted])
    assert draft
    return list(draft)


@pytest.mark.parametrize("kind", ["model", "eagle", "heads", "EAGLE-3", "deepseek_v3", "glm4_moe"])
def test_answers_with_drafts_are_those_of_one_rank(kind: str, tmp_path: Path) -> None:
    config = config_with(kind, {}, tmp_path)
    wanted = asyncio.run(answers(ModelRunner.load(config, kernels=ReferenceKernels()), config))
    assert wanted[1] > 0
    with group_runner(config, 2) as (runner, _):
        assert asyncio.run(answers(runner, config)) == wanted


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("model", {}),
        ("eagle", {}),
        ("eagle", {"tie_word_embeddings": True}),
        ("eagle of few tokens", {}),
        ("EAGLE-3", {}),
        ("deepseek_v3", {}),
        ("mimo", {}),
        ("heads", {}),
        ("heads with projections", {}),
    ],
)
def test_the_first_rank_drafts_what_one_rank_drafts(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = config_with(kind, changes, tmp_path)
    wanted = first_draft(ModelRunner.load(config, kernels=ReferenceKernels()))
    with group_runner(config, 2) as (runner, followers):
        assert first_draft(runner) == wanted
        assert [follower.cache.pages for follower in followers] == [runner.cache.pages]
