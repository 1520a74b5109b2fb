"""Answers with EAGLE-3 heads and MTP layers: token for token as without, on one worker, handed over, and preempted."""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speculation.local_worker import LocalWorker
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.proposer import ProposerName
from tandem.metrics import families as f
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.worker.reporting.metrics import speculation_facts
from tests.eagle_heads import write_eagle
from tests.factories import tiny_engine_config, write_tiny_model
from tests.mtp_models import write_mtp
from tests.worker_pair import PairedRunner, Sender, WorkerPair

PROMPTS = [[3 + (7 * n + k * k) % 150 for k in range(9 + 5 * n)] for n in range(6)]
SAMPLINGS = [
    SamplingParams(40),
    SamplingParams(40, temperature=0.8, seed=3),
    SamplingParams(40, top_p=0.9, seed=1),
]
DRAFTS, STEP = 3, 32
KV_BYTES = 8 << 20
FEW_PAGES = 11
"""The pages of a pool in which two of the requests, but not all six, can end."""
Loader = Callable[[str, int], tuple[EngineConfig, SpeculationMethod]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Writes the checkpoints of a case once, and returns a configuration for them."""

    @cache
    def written(case: str) -> tuple[Path, dict[str, Any], SpeculationMethod]:
        folder = tmp_path_factory.mktemp("case")
        if case == "EAGLE-3":
            model = write_tiny_model(folder / "model", num_hidden_layers=8)
            head = write_eagle(folder / "head", 64, 160, third=True, prefix="midlayer.", tokens=list(range(3, 140, 2)))
            return model, {"draft": head}, SpeculationMethod.DRAFT
        kind, _, knowing = case.partition(", ")
        return write_mtp(folder, kind, knowing=bool(knowing)), {"mtp": True}, SpeculationMethod.MTP

    def config(case: str, kv_cache_bytes: int = KV_BYTES) -> tuple[EngineConfig, SpeculationMethod]:
        model, changes, method = written(case)
        return tiny_engine_config(model, kv_cache_bytes=kv_cache_bytes, max_step_tokens=STEP, **changes), method

    return config


@pytest.fixture(scope="module")
def plain(load: Loader) -> Callable[[str], list[list[int]]]:
    """Returns the answers without drafts."""

    @cache
    def answers(case: str) -> list[list[int]]:
        config = load(case)[0].with_fields(draft=None, mtp=False)
        return asyncio.run(_plain_answers(config))

    return answers


async def _plain_answers(config: EngineConfig) -> list[list[int]]:
    async with LocalWorker.open(ModelRunner.load(config), config, SpeculationMethod.OFF) as worker:
        sent = [worker.send(prompt, sampling) for prompt, sampling in asked()]
        await asyncio.gather(*(request.finished.wait() for request in sent))
    return [request.token_ids for request in sent]


def asked() -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, SAMPLINGS[n % len(SAMPLINGS)]) for n, prompt in enumerate(PROMPTS)]


async def answers(pair: WorkerPair) -> list[list[int]]:
    for end in pair.ends:
        end.worker._schedulers.decode.speculation.fixed_drafts = DRAFTS
    sender = Sender(pair, SAMPLINGS[0].max_tokens)
    outputs = await asyncio.gather(*(sender.run(f"q{n}", *request) for n, request in enumerate(asked())))
    return [output.tokens for output in outputs]


def drafted_and_accepted(pair: WorkerPair, name: ProposerName) -> Sequence[float]:
    """Returns the decode worker's metrics of draft tokens by source."""
    facts: Any = speculation_facts(pair.decode.worker._schedulers.decode.speculation.counts, 1.0)
    return [
        sum(count for labels, count in facts[family].items() if labels[0] == name)
        for family in (f.DRAFTED_BY_SOURCE, f.ACCEPTED_BY_SOURCE)
    ]


@pytest.mark.parametrize("way", ["on one worker", "handed over", "preempted"])
@pytest.mark.parametrize(
    "case",
    [
        "EAGLE-3",
        "deepseek_v3",
        "deepseek_v3, knowing",
        "glm4_moe, knowing",
        "mimo, knowing",
        "qwen3_5, knowing",
    ],
)
async def test_answers_are_those_without_drafts(
    case: str, way: str, load: Loader, plain: Callable[[str], list[list[int]]]
) -> None:
    wanted = await asyncio.to_thread(plain, case)
    config, method = load(case)
    if way == "preempted":
        config, _ = load(case, FEW_PAGES * KV_BYTES // ModelRunner.load(config).pool.total)
    changes: dict[str, Any] = {"make_engine": lambda _pages: PairedRunner.load(config), "max_step_tokens": STEP}
    async with WorkerPair(both=way == "on one worker", speculate=method, **changes) as pair:
        assert await answers(pair) == wanted
        assert bool(pair.decode.worker.report.load().preemptions) == (way == "preempted")
        name = ProposerName.MTP if method is SpeculationMethod.MTP else ProposerName.EAGLE
        drafted, accepted = drafted_and_accepted(pair, name)
        assert drafted > 50
        assert accepted == drafted if "knowing" in case else accepted < 0.2 * drafted
        await pair.empty()
        head = pair.decode.worker._schedulers.decode.speculation._model._head
        head.pool.check_integrity()
        assert head.pool.counts().free == head.pool.total
