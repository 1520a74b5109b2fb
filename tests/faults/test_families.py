"""One model of each kind through a cluster, disaggregated: a decode worker dies, and the tokens are transformers'.

The kinds are a mixture of experts, latent attention, and windows with sinks; the other tests have grouped-query
attention.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.reference import TIE, Reference
from tests.factories import write_tiny_model

from .conftest import VOCAB
from .moments import busy, kill, restarted
from .streams import Client, Question, Stream

FAMILIES = ["qwen3_moe", "deepseek_v3", "gpt_oss"]
PROMPTS = (20, 33, 64, 90)
ANSWER = 150
IN_DECODE = 5


async def with_a_death(cluster: Any, questions: list[Question]) -> tuple[list[Stream], Any]:
    """Returns the streams of all questions and the decode worker that was killed while it generated answers."""
    async with Client(cluster.grpc_address) as client:
        streams = [client.ask(question) for question in questions]
        await asyncio.gather(*(stream.reached(IN_DECODE) for stream in streams))
        owners = await asyncio.to_thread(busy, cluster, "decode", lambda one: one.pages_owned)
        dead = cluster.named(owners[0])
        kill(dead)
        await asyncio.gather(*(stream.task for stream in streams))
        return streams, dead


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_transformers_though_a_worker_dies(
    family: str, running_cluster: Callable[..., Any], model_folder: Path, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / family, family, vocab_size=VOCAB)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, folder)
    cluster = running_cluster(
        model=folder,
        prefill=1,
        decode=2,
        dtype="float32",
        page_tokens=16,
        max_step_tokens=32,
        kv_cache_bytes=1 << 24,
    )
    rng = random.Random(9)
    questions = [Question(tuple(rng.randrange(3, VOCAB) for _ in range(length)), ANSWER) for length in PROMPTS]
    streams, dead = asyncio.run(with_a_death(cluster, questions))
    reference = Reference(folder)
    for stream in streams:
        assert stream.code is grpc.StatusCode.OK, (stream.name, stream.words)
        assert len(stream.tokens) == ANSWER
        choices = reference(stream.question.prompt, tuple(stream.tokens))
        for token, best, second, gap in zip(stream.tokens, choices.best, choices.seconds, choices.gaps, strict=True):
            assert token == best or (gap < TIE and token == second), stream.name
    restarted(cluster, dead)
    cluster.assert_idle_and_sound()
