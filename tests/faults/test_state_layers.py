"""Models with state layers under load: workers are killed and clients leave at random, and every answer is right.

The pools are small, so that the pages of states are used again and again, and requests are preempted. The prompts have
prefixes in common, so that prefills begin with kept states, and are sent again and again, so that steps verify draft
tokens of earlier answers. TANDEM_STATE_EVENTS is the number of random kills and aborts in `make soak`.
`tests/integration/test_state_faults.py` has ten, in one process.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.soak import soak

from .conftest import VOCAB
from .moments import kill, restarted
from .streams import Client, Load, Question, undisturbed
from .test_families import accepted_drafts, copy_of_tiny_model

EVENTS = int(os.environ.get("TANDEM_STATE_EVENTS", "300"))
KILL_EVERY = 4
"""The distance of kills among the events; the others are aborts."""
AT_ONCE = 16
STEM = 72
TAILS = (3, 9, 24, 41, 77)
MAX_TOKENS = 330
ENDS = range(3, VOCAB, 40)
"""The tokens that end an answer: so many that few answers are long, and exceed their prediction."""
NEVER_PREEMPTED = {"nemotron_h"}
"""The families whose answers do not differ enough in length for that."""


def questions() -> list[Question]:
    """Returns prompts with two stems in common, which end within pages and at an end of a page."""
    rng = random.Random(5)
    stems = [[rng.randrange(3, VOCAB) for _ in range(STEM)] for _ in range(2)]
    return [
        Question((*stem, *(rng.randrange(3, VOCAB) for _ in range(tail))), MAX_TOKENS, shares_pages=True)
        for tail in TAILS
        for stem in stems
    ]


async def disturb(cluster: Any, load: Load, events: int) -> None:
    """Kills a random worker in each fourth event, and cancels a random request in the others."""
    rng = random.Random(12)
    for event in range(1, events + 1):
        await asyncio.sleep(rng.random() / 2)
        if event % KILL_EVERY:
            load.abort(rng)
            continue
        worker = rng.choice(cluster.workers())
        kill(worker)
        await asyncio.to_thread(restarted, cluster, worker)


def right_answers_amid(events: int, cluster: Any) -> Load:
    """Returns the load during which the events happened; every answer was that of the quiet cluster."""
    asked = questions()
    expected = asyncio.run(undisturbed(cluster.grpc_address, asked))

    async def run() -> Load:
        async with Client(cluster.grpc_address) as client:
            load = Load(client, asked, expected, AT_ONCE)
            await disturb(cluster, load, events)
            await load.stop()
            return load

    load = asyncio.run(run())
    drafted = accepted_drafts(cluster)
    print(
        f"{events} events: {load.right} answers right, {load.with_cached_prefix} of them with a cached prefix and"
        f" {load.preempted} preempted; {load.aborted} aborted, {len(load.refused)} refused; {drafted:.0f} draft tokens"
        " accepted since the last restarts"
    )
    cluster.assert_idle_and_sound()
    return load


@pytest.fixture
def hybrid(running_cluster: Callable[..., Any], model_folder: Path, tmp_path: Path) -> Callable[[str], Any]:
    """Starts a cluster of two prefill and two decode workers with a tiny model of a family."""

    def start(family: str) -> Any:
        return running_cluster(
            model=copy_of_tiny_model(family, model_folder, tmp_path, eos_token_id=list(ENDS)),
            prefill=2,
            decode=2,
            dtype="float32",
            page_tokens=48,
            max_step_tokens=32,
            kv_cache_bytes=1 << 20,
            speculate="suffix",
        )

    return start


@soak
@pytest.mark.timeout(300 + 30 * EVENTS)
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_no_answer_is_wrong_or_hangs_amid_many_random_faults(family: str, hybrid: Callable[[str], Any]) -> None:
    load = right_answers_amid(EVENTS, hybrid(family))
    assert load.right >= EVENTS
    assert load.with_cached_prefix
    assert load.preempted or family in NEVER_PREEMPTED
    assert len(load.refused) <= EVENTS // 20, load.refused
