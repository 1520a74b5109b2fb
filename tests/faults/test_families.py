"""One model of each kind through a cluster, disaggregated: a decode worker dies, and the tokens are transformers'.

The kinds are a mixture of experts, latent attention, and windows with sinks; the other tests have grouped-query
attention.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tandem.engine.draft_training.answers import AnswerGenerator
from tandem.engine.draft_training.train_draft import base_weights
from tandem.engine.draft_training.train_heads import HeadSizes, TrainedHeads, frequent_tokens, train_heads, write_heads
from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.proposer import ProposerName
from tandem.metrics import families as f
from tandem.metrics.metrics_server import fetch
from tandem.metrics.scrape import Scrape
from tests.adapter_client import AdapterClient
from tests.e2e.reference import TIE, Reference
from tests.factories import greedy_answer, tiny_engine_config, write_tiny_model
from tests.soak import soak

from .conftest import VOCAB
from .moments import busy, kill, restarted
from .streams import Client, Question, Stream, undisturbed

ADAPTED = "qwen3_moe"
"""The family whose cluster loads adapters."""
DRAFTED = "deepseek_v3"
"""The family whose cluster has Medusa heads; n-grams, which the others draft with, find next to nothing here."""
FAMILIES = [pytest.param(family, marks=soak) for family in ("qwen3_moe", "deepseek_v3", "gpt_oss")]
PROMPTS = (20, 33, 64, 90)
ANSWER = 150
IN_DECODE = 5
FOLLOWS_WITHIN_S = 60.0


async def with_a_death(cluster: Any, questions: list[Question]) -> tuple[list[Stream], Any]:
    """Returns the streams of all questions and the decode worker that was killed while it generated answers."""
    async with Client(cluster.grpc_address) as client:
        streams = [client.ask(original_prompt) for original_prompt in questions]
        await asyncio.gather(*(stream.reached(IN_DECODE) for stream in streams))
        owners = await asyncio.to_thread(busy, cluster, "decode", lambda one: one.pages_owned)
        dead = cluster.named(owners[0])
        kill(dead)
        await asyncio.gather(*(stream.task for stream in streams))
        return streams, dead


def copy_of_tiny_model(family: str, model_folder: Path, folder: Path, **changes: object) -> Path:
    """Writes a tiny model with the tokenizer of the small one; returns its folder."""
    written = write_tiny_model(folder / family, family, vocab_size=VOCAB, **changes)
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
def test_answers_are_those_of_transformers_though_a_worker_dies(
    family: str, running_cluster: Callable[..., Any], model_folder: Path, tmp_path: Path
) -> None:
    folder = copy_of_tiny_model(family, model_folder, tmp_path)
    adapted = family == ADAPTED
    drafting = drafts_of(folder, tmp_path / "heads") if family == DRAFTED else {}
    cluster = running_cluster(model=folder, runtime_loras=adapted, max_loras=2, **SETTINGS, **drafting)
    operator = AdapterClient(cluster, family, VOCAB, tmp_path) if adapted else None
    first = None if operator is None else load_first(operator)
    streams, dead = asyncio.run(with_a_death(cluster, questions()))
    reference = Reference(folder)
    for stream in streams:
        assert stream.code is grpc.StatusCode.OK, (stream.name, stream.words)
        assert len(stream.tokens) == ANSWER
        choices = reference(stream.original_prompt.prompt, tuple(stream.tokens))
        for token, best, second, gap in zip(stream.tokens, choices.best, choices.seconds, choices.gaps, strict=True):
            assert token == best or (gap < TIE and token == second), stream.name
    if drafting:
        assert accepted_drafts(cluster, proposer=ProposerName.MEDUSA.value), (
            "steps verified drafts, some while the worker died"
        )
    restarted(cluster, dead)
    if operator is not None and first is not None:
        adapters_come_and_go(operator, first)
    cluster.assert_idle_and_sound()


def drafts_of(model: Path, folder: Path) -> dict[str, Any]:
    """Writes heads that know the answers by heart; returns the settings with them."""
    config = tiny_engine_config(model, kv_cache_bytes=1 << 24, keep_hidden=True)
    runner = ModelRunner.load(config)
    answers = next(
        AnswerGenerator(runner, 0.0, 0).answers([original_prompt.prompt for original_prompt in questions()], ANSWER)
    )
    torch.manual_seed(0)
    vocabulary = len(PROMPTS) * ANSWER
    token_map = frequent_tokens(answers, vocabulary, VOCAB)
    heads = TrainedHeads(base_weights(config, runner.spec), HeadSizes(2, 1, vocabulary), token_map)
    train_heads(heads, answers, epochs=300, seed=0)
    write_heads(heads, runner.spec, folder, {})
    return {"speculate": "draft", "draft": folder}


def accepted_drafts(cluster: Any, **labels: str) -> float:
    """Returns the accepted drafts of the proposers with these labels, at all workers that are alive."""
    exported = Scrape(asyncio.run(fetch(cluster.metrics_address, "/metrics", timeout_s=60.0)), 0.0)
    return exported.total(f.ACCEPTED_BY_SOURCE, **labels)


def load_first(operator: AdapterClient) -> list[int]:
    """Loads an adapter; returns the answer with it."""
    path, wanted = operator.write("first", seed=1)
    reply = operator.load("sql", path)
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert operator.answer("sql") == wanted
    return wanted


def adapters_by_worker(cluster: Any) -> dict[str, list[str]]:
    return {member.peer.worker_id: [adapter.name for adapter in member.model.adapters] for member in cluster.members()}


def adapters_come_and_go(operator: AdapterClient, first: list[int]) -> None:
    """A worker has restarted since `load_first`; the cached prefixes of an adapter are no other adapter's."""
    cluster, base = operator.cluster, operator.answer("")
    assert operator.listed() == ["sql"]
    wanted = {name: ["sql"] for name in ("prefill-0", "decode-0", "decode-1")}
    within = time.monotonic() + FOLLOWS_WITHIN_S  # the replacement loads the adapter after it has joined
    while (listed := adapters_by_worker(cluster)) != wanted:
        assert time.monotonic() < within, listed
        time.sleep(0.1)
    assert operator.answer("sql") == first

    path, second = operator.write("second", seed=2)
    assert len({tuple(answer) for answer in (first, second, base)}) == 3, "the adapters change nothing"
    taken = operator.load("sql", path)
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")
    missing = operator.load("other", operator.folder / "nothing")
    assert missing.status_code == 400
    assert "is no adapter" in missing.text
    assert "worker " in missing.json()["error"]["message"]
    assert operator.listed() == ["sql"]

    assert operator.unload("sql").status_code == 200
    assert operator.ask("sql").status_code == operator.unload("sql").status_code == 404
    assert not operator.listed()
    asyncio.run(cluster.controller.load_adapter("sql", str(path)))
    assert [adapter.path for adapter in asyncio.run(cluster.controller.adapters())] == [str(path)]
    deadline_s = time.monotonic() + FOLLOWS_WITHIN_S  # another operator's change reaches this router in a moment
    while operator.ask("sql").status_code != 200:
        assert time.monotonic() < deadline_s
    assert operator.answer("sql") == second
    assert operator.answer("sql") == second, "from its own cached prefix"
    assert operator.load("first", operator.folder / "first").status_code == 200
    assert [operator.answer(name) for name in ("first", "sql", "")] == [first, second, base]
    full = operator.load("third", operator.write("third", seed=3)[0])
    assert full.status_code == 429
    assert "all 2 slots for adapters are in use" in full.text


@soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["llama3", "gpt_oss"])
def test_answers_from_8_bits_are_those_of_one_engine_though_a_worker_dies(
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
            assert stream.tokens == greedy_answer(runner, stream.original_prompt.prompt, ANSWER), stream.name
    restarted(cluster, dead)
    asyncio.run(cluster.controller.set_mode("colocated", step_policy="chunked", step_budget=48))
    colocated = asyncio.run(undisturbed(cluster.grpc_address, questions()))
    assert colocated == [stream.tokens for stream in streams]
    cluster.assert_idle_and_sound()
