"""EAGLE-3 heads and MTP layers on a GPU: the states, logits and drafts of the plain kernels, and unchanged answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speculation.local_worker import LocalWorker
from tandem.engine.config import EngineConfig
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.proposer import WantedDraft
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tests.eagle_heads import write_eagle
from tests.factories import draw, write_tiny_model
from tests.mtp_models import write_mtp
from tests.unit.engine.speculation.head_steps import HeadSteps, target_states

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TOLERANCE = 2e-4
TOKENS = [(7 * n + n * n) % 150 + 3 for n in range(14)]
PROMPTS = [[3 + (7 * n + k * k) % 150 for k in range(9 + 15 * n)] for n in range(8)]
SAMPLINGS = [SamplingParams(60), SamplingParams(60, temperature=0.8, seed=3), SamplingParams(60, top_p=0.9, seed=1)]
DRAFTS = 3
_WIDE: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
"""Dimensions that the GPU's kernels take."""


def write_case(case: str, folder: Path) -> dict[str, Any]:
    """Write a model with its head, and return the settings of its engine."""
    if case == "EAGLE-3":
        model = write_tiny_model(folder / "model", hidden_size=128, num_hidden_layers=8, **_WIDE)
        few = list(range(3, 140, 2))
        head = write_eagle(folder / "head", 128, 160, third=True, prefix="midlayer.", tokens=few, **_WIDE)
        return {"model": model, "draft": head}
    kind, _, knowing = case.partition(", ")
    sizes = _LATENT if kind == "deepseek_v3" else _WIDE
    return {"model": write_mtp(folder, kind, knowing=bool(knowing), hidden_size=128, **sizes), "mtp": True}


def config_of(settings: dict[str, Any], device: str) -> EngineConfig:
    common = {"dtype": "float32", "page_tokens": 16, "kv_cache_bytes": 1 << 26, "max_batch_requests": 16, "threads": 4}
    return EngineConfig.of(**settings, device=device, draft_graphs=device == "cuda", **common)


@pytest.mark.parametrize("case", ["EAGLE-3", "glm4_moe", "deepseek_v3", "mimo"])
def test_states_logits_and_drafts_are_those_of_the_plain_kernels(case: str, tmp_path: Path) -> None:
    """The states of the model and the drafts come from steps in CUDA graphs."""
    settings = write_case(case, tmp_path)
    ours = ModelRunner.load(config_of(settings, "cuda"))
    plain = ModelRunner.load(config_of(settings, "cpu"), kernels=ReferenceKernels())
    states = [target_states(runner, TOKENS) for runner in (ours, plain)]
    torch.testing.assert_close(states[0].cpu(), states[1], atol=TOLERANCE, rtol=TOLERANCE)
    assert ours.graph_use.hits >= len(TOKENS)
    heads = [HeadSteps(runner) for runner in (ours, plain)]
    given = [head.from_target(drawn)[:-1] for head, drawn in zip(heads, states, strict=True)]
    torch.testing.assert_close(given[0].cpu(), given[1], atol=TOLERANCE, rtol=TOLERANCE)
    logits = [head.logits(TOKENS[1:], states) for head, states in zip(heads, given, strict=True)]
    torch.testing.assert_close(logits[0].cpu(), logits[1], atol=TOLERANCE, rtol=TOLERANCE)
    drafts = []
    for head in heads:
        head.proposer.begin("a", TOKENS, "")
        assert head.proposer.capacity("a", DRAFTS) == DRAFTS
        drafts += head.proposer.compute([WantedDraft("a", [draw(index) for index in range(DRAFTS)], rows=[0])])
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("case", ["EAGLE-3", "glm4_moe, knowing", "deepseek_v3, knowing", "mimo, knowing"])
def test_answers_are_those_without_drafts(case: str, tmp_path: Path) -> None:
    settings = write_case(case, tmp_path)
    method = SpeculationMethod.MTP if settings.get("mtp") else SpeculationMethod.DRAFT
    config = config_of(settings, "cuda")
    runner = ModelRunner.load(config)
    wanted, *_ = asyncio.run(answers(runner, config, SpeculationMethod.OFF))
    actual, drafted, accepted = asyncio.run(answers(runner, config, method))
    assert actual == wanted
    assert drafted > 100
    assert accepted == drafted if "knowing" in case else accepted < 0.2 * drafted


async def answers(
    runner: ModelRunner, config: EngineConfig, method: SpeculationMethod
) -> tuple[list[list[int]], int, int]:
    """Return the answers, and the numbers of draft tokens that were verified and accepted."""
    async with LocalWorker.open(runner, config, method) as worker:
        speculation = worker.speculation
        if speculation is not None:
            speculation.fixed_drafts = DRAFTS
        sent = [worker.send(prompt, SAMPLINGS[n % len(SAMPLINGS)]) for n, prompt in enumerate(PROMPTS)]
        await asyncio.gather(*(request.finished.wait() for request in sent))
        counts = None if speculation is None else speculation.counts
    runner.pool.check_integrity()
    drafted = (sum(counts.drafted.values()), sum(counts.accepted.values())) if counts else (0, 0)
    return [request.token_ids for request in sent], *drafted
