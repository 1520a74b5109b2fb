"""Workers with tiers of the prefix cache and pools that are too small are killed and change their roles.

Their files serve the next incarnations, bytes of the files are flipped, and no answer changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.model_runner import ModelRunner
from tandem.metrics import families as f
from tandem.metrics.metrics_server import fetch
from tandem.metrics.scrape import Scrape
from tests.factories import greedy_answer, tiny_engine_config
from tests.soak import SOAKING, soak

from .conftest import VOCAB
from .moments import kill, restarted
from .streams import Client, Question, undisturbed

PROMPTS, PROMPT_TOKENS, ANSWER = 6, 1000, 20
POOL_BYTES, HOST_BYTES, DISK_BYTES = 16 << 20, 8 << 20, 256 << 20
"""The prompts have 48 MiB of KV."""
CHATS, TURNS, FAULTS = (170, 4, 15) if SOAKING else (16, 2, 3)
FIRST_TOKENS, TURN_ANSWER, TURN_TOKENS, AT_ONCE = 150, 16, 10, 3
TOKEN_BYTES = 8 << 10
CHANGES: list[dict[str, Any]] = [
    {"mode": "disaggregated", "prefill": 1, "decode": 1, "grace_s": 0.5},
    {"mode": "colocated", "grace_s": 0.5},
    {"mode": "adaptive", "grace_s": 0.5},
]


def loaded(cluster: Any, tier: str) -> float:
    """Returns the number of pages that the processes of all workers have loaded from a tier."""
    exported = Scrape(asyncio.run(fetch(cluster.metrics_address, "/metrics", timeout_s=60.0)), 0.0)
    return exported.total(f.TIER_PAGES, tier=tier, event="loaded")


@soak
@pytest.mark.timeout(300)
def test_a_restarted_worker_reads_its_files(
    running_cluster: Callable[..., Any], small_model: Path, tmp_path: Path
) -> None:
    cluster = running_cluster(
        model=small_model, mode="colocated", workers=1, dtype="float32", kv_cache_bytes=POOL_BYTES,
        kv_host_bytes=HOST_BYTES, kv_disk_bytes=DISK_BYTES, kv_disk_path=tmp_path,
    )  # fmt: skip
    rng = random.Random(5)
    questions = [
        Question(tuple(rng.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)), ANSWER, shares_pages=True)
        for _ in range(PROMPTS)
    ]
    answers = asyncio.run(undisturbed(cluster.grpc_address, questions))
    assert asyncio.run(undisturbed(cluster.grpc_address, questions)) == answers
    dead = cluster.worker("both")
    kill(dead)
    restarted(cluster, dead)
    assert asyncio.run(undisturbed(cluster.grpc_address, questions)) == answers
    assert loaded(cluster, "disk") > 0
    cluster.assert_idle_and_sound()


def conversations(model: Path, rng: random.Random) -> list[list[tuple[Question, list[int]]]]:
    """Returns the turns of each conversation with the answers of one engine: each prompt has all turns before it."""
    engine = ModelRunner.load(tiny_engine_config(model, kv_cache_bytes=POOL_BYTES, max_step_tokens=64))
    chats = []
    for _ in range(CHATS):
        prompt, turns = some_tokens(rng, FIRST_TOKENS), []
        while len(turns) < TURNS:
            answer = greedy_answer(engine, prompt, TURN_ANSWER)
            if set(answer) & set(engine.facts.eos_token_ids):
                prompt += some_tokens(rng, 1)
                continue
            turns.append((Question(tuple(prompt), TURN_ANSWER, shares_pages=True), answer))
            prompt = [*prompt, *answer, *some_tokens(rng, TURN_TOKENS)]
        chats.append(turns)
    return chats


def some_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def flip_a_byte(folder: Path, rng: random.Random) -> None:
    """Flip a byte of a quarter of the pages on the disk."""
    for file in sorted(folder.glob("*/*/*-0")):
        if rng.random() < 0.25:
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                damaged = bytearray(file.read_bytes())
                damaged[rng.randrange(len(damaged))] ^= 1
                file.write_bytes(damaged)


async def converse(
    cluster: Any, chats: list[list[tuple[Question, list[int]]]], rng: random.Random, folder: Path
) -> None:
    """Run all turns of all conversations, a few at a time, between faults; check each answer."""
    running, answered = asyncio.Semaphore(AT_ONCE), 0

    async def one(client: Client, turns: list[tuple[Question, list[int]]]) -> None:
        nonlocal answered
        for question, expected in turns:
            async with running:
                stream = client.ask(question)
                await stream.task
                stream.check(expected)
                answered += 1

    async def more(answers: int) -> None:
        enough = min(answered + answers, CHATS * TURNS)
        while answered < enough and not all(chat.done() for chat in talking):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async with Client(cluster.grpc_address) as client:
        talking = [asyncio.ensure_future(one(client, turns)) for turns in chats]
        for fault in range(FAULTS):
            await more(CHATS * TURNS // (FAULTS + 1))
            if fault % 3 == 2:
                await asyncio.to_thread(flip_a_byte, folder, rng)
            elif fault % 3:
                await cluster.controller.set_mode(**rng.choice(CHANGES))
            else:
                victim = await asyncio.to_thread(cluster.named, rng.choice(cluster.members()).peer.worker_id)
                kill(victim)
                await asyncio.to_thread(restarted, cluster, victim)
        await asyncio.gather(*talking)


@pytest.mark.timeout(1800 if SOAKING else 300)
@pytest.mark.parametrize("share", [2.0, pytest.param(1.1, marks=soak), pytest.param(10.0, marks=soak)])
def test_conversations_keep_their_answers_under_kills_and_role_changes(
    running_cluster: Callable[..., Any], small_model: Path, tmp_path: Path, share: float
) -> None:
    """The pools together are `share` times too small for the conversations."""
    rng = random.Random(f"conversations {share}")
    chats = conversations(small_model, rng)
    tokens = max(len(turns[-1][0].prompt) + TURN_ANSWER for turns in chats)
    needed = CHATS * tokens * TOKEN_BYTES
    cluster = running_cluster(
        model=small_model, mode="colocated", workers=2, dtype="float32", page_tokens=16, max_step_tokens=64,
        kv_cache_bytes=max(int(needed / share / 2), 4 * tokens * TOKEN_BYTES), kv_host_bytes=needed // 3,
        kv_disk_bytes=4 * needed, kv_disk_path=tmp_path,
    )  # fmt: skip
    asyncio.run(converse(cluster, chats, rng, tmp_path))
    cluster.assert_idle_and_sound()
