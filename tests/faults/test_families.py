"""One model of each kind through a cluster, disaggregated: a decode worker dies, and the tokens are transformers'.

The kinds are a mixture of experts, latent attention, and windows with sinks; the other tests have grouped-query
attention.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.model_runner import ModelRunner
from engine.steps.batch import StepBatch, StepRow
from tests.e2e.reference import TIE, Reference
from tests.factories import draw, tiny_engine_config, write_tiny_model

from .conftest import VOCAB
from .moments import busy, kill, restarted
from .streams import Client, Question, Stream, undisturbed

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


def copy_of_tiny_model(family: str, model_folder: Path, folder: Path) -> Path:
    """Writes a tiny model with the tokenizer of the small one; returns its folder."""
    written = write_tiny_model(folder / family, family, vocab_size=VOCAB)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, written)
    return written


SETTINGS = {
    "prefill": 1,
    "decode": 2,
    "dtype": "float32",
    "page_tokens": 16,
    "max_step_tokens": 32,
    "kv_cache_bytes": 1 << 24,
}


def questions() -> list[Question]:
    rng = random.Random(9)
    return [Question(tuple(rng.randrange(3, VOCAB) for _ in range(length)), ANSWER) for length in PROMPTS]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_transformers_though_a_worker_dies(
    family: str, running_cluster: Callable[..., Any], model_folder: Path, tmp_path: Path
) -> None:
    folder = copy_of_tiny_model(family, model_folder, tmp_path)
    cluster = running_cluster(model=folder, **SETTINGS)
    streams, dead = asyncio.run(with_a_death(cluster, questions()))
    reference = Reference(folder)
    for stream in streams:
        assert stream.code is grpc.StatusCode.OK, (stream.name, stream.words)
        assert len(stream.tokens) == ANSWER
        choices = reference(stream.question.prompt, tuple(stream.tokens))
        for token, best, second, gap in zip(stream.tokens, choices.best, choices.seconds, choices.gaps, strict=True):
            assert token == best or (gap < TIE and token == second), stream.name
    restarted(cluster, dead)
    cluster.assert_idle_and_sound()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["llama3", "gpt_oss"])
def test_8_bits_give_the_tokens_of_one_engine_though_a_worker_dies(
    family: str, running_cluster: Callable[..., Any], model_folder: Path, tmp_path: Path
) -> None:
    """Codes and scales are handed over: the answers are those of one engine that computes each alone.

    They are the same without hand-overs, in the same cluster; with windows, whose pages are freed, that is all that is
    compared.
    """
    folder, scheme = copy_of_tiny_model(family, model_folder, tmp_path), {"kv_cache_dtype": "int8"}
    if family == "llama3":
        scheme["quantization"] = "int8"
    cluster = running_cluster(model=folder, **scheme, **SETTINGS)
    streams, dead = asyncio.run(with_a_death(cluster, questions()))
    assert {stream.code for stream in streams} == {grpc.StatusCode.OK}, [stream.words for stream in streams]
    if family == "llama3":
        runner = ModelRunner.load(tiny_engine_config(folder, **scheme, max_step_tokens=32, threads=1))
        for stream in streams:
            assert stream.tokens == greedy(runner, stream.question.prompt), stream.name
    restarted(cluster, dead)
    asyncio.run(cluster.controller.set_mode("colocated", step_policy="chunked", step_budget=48))
    colocated = asyncio.run(undisturbed(cluster.grpc_address, questions()))
    assert colocated == [stream.tokens for stream in streams]
    cluster.assert_idle_and_sound()


def greedy(runner: ModelRunner, prompt: Sequence[int]) -> list[int]:
    """Returns the tokens of an answer that one engine computes, the prompt in chunks of a step."""
    pages, found, start = list(range(-(-(len(prompt) + ANSWER) // 16))), list(prompt), 0
    while len(found) < len(prompt) + ANSWER:
        chunk = found[start : start + 32]
        last = start + len(chunk) == len(found)
        step = StepRow(chunk, start, pages, draw(index=len(found) - len(prompt)) if last else None)
        (token,) = runner.run(StepBatch([step])).token_ids
        start += len(chunk)
        found += [] if token is None else [token]
    return found[len(prompt) :]
