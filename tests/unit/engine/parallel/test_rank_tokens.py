"""Greedy answers in float32 of two and three ranks: the tokens of one rank, for 232 prompts and every kind of model."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speculation.local_worker import LocalWorker
from tandem.engine.config import EngineConfig
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.settings.parsing import NamedPath
from tests.adapters import EVERY, TinyAdapter
from tests.factories import FAMILIES, tiny_engine_config, write_tiny_model
from tests.ranks import group_runner

pytestmark = pytest.mark.usefixtures("adapters_read_here")

PROMPTS, TOKENS = 29, 16
SIZES: dict[str, Any] = {
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "hidden_size": 96,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
}
"""Sizes that two ranks and three ranks can divide."""


async def answers(runner: ModelRunner, config: EngineConfig, seed: str, method: SpeculationMethod) -> list[list[int]]:
    """Returns the answers to prompts of a worker that batches them; with an adapter, every second request has it."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 160) for _ in range(rng.randrange(4, 40))] for _ in range(PROMPTS)]
    adapters = ["", *(facts.identity for facts in runner.adapters.facts)]
    async with LocalWorker.open(runner, config, method) as worker:
        if worker.speculation is not None:
            worker.speculation.fixed_drafts = 3
        sent = [
            worker.send(prompt, SamplingParams(TOKENS, ignore_eos=True), adapters[number % len(adapters)])
            for number, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(answer.finished.wait() for answer in sent))
        assert worker.speculation is None or sum(worker.speculation.counts.drafted.values()) > 0
    return [answer.token_ids for answer in sent]


@pytest.mark.parametrize(
    ("case", "family"),
    [
        ("gqa", "llama3"),
        ("moe", "qwen3_moe"),
        ("whole experts", "qwen3_moe"),
        ("mla", "deepseek_v2"),
        ("windows", "ministral"),
        ("int8 kv", "llama3"),
        ("lora", "llama3"),
        ("n-grams", "llama3"),
        ("n-grams", "qwen3_5"),
    ],
)
def test_tokens_are_those_of_one_rank(case: str, family: str, tmp_path: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key in FAMILIES[family]}
    settings: dict[str, Any] = {"kv_cache_bytes": 1 << 25}
    if case == "whole experts":
        sizes |= {"num_experts": 6, "moe_intermediate_size": 25}
    if case == "int8 kv":
        settings["kv_cache_dtype"] = "int8"
    if case == "lora":
        settings["loras"] = (NamedPath("a", TinyAdapter(family, modules=EVERY, changes=sizes).write(tmp_path / "a")),)
    method = SpeculationMethod.NGRAM if case == "n-grams" else SpeculationMethod.OFF
    config = tiny_engine_config(write_tiny_model(tmp_path / "model", family, **sizes), **settings)
    wanted = asyncio.run(answers(ModelRunner.load(config, kernels=ReferenceKernels()), config, case, method))
    for ranks in (2, 3):
        with group_runner(config, ranks) as (runner, _):
            assert asyncio.run(answers(runner, config, case, method)) == wanted
