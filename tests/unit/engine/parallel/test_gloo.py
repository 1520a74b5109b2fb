"""Ranks that are processes: the collectives over gloo, and the steps over sockets."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch

from tandem.engine.config.sharding import Rank
from tandem.engine.model_runner import Follower, ModelRunner
from tandem.engine.parallel.collectives import GlooCollectives
from tandem.engine.parallel.step_stream import StepSender, received_steps
from tandem.protocol.errors import Unavailable
from tests.factories import greedy_answer, tiny_engine_config, write_tiny_model
from tests.soak import soak

PROMPT = [(5 * position + 2) % 150 for position in range(50)]
LIMIT_S = 120.0


def lead(folder: Path, rank: Rank, followers: list[socket.socket], results: SimpleQueue[list[int]]) -> None:
    collectives = GlooCollectives(rank, folder / "meeting", LIMIT_S)
    sender = StepSender(followers)
    runner = ModelRunner.load(tiny_engine_config(folder), collectives=collectives, on_step=sender.send)
    results.put(greedy_answer(runner, PROMPT, 20))
    sender.close()
    collectives.close()


def follow(folder: Path, rank: Rank, leader: socket.socket) -> None:
    collectives = GlooCollectives(rank, folder / "meeting", LIMIT_S)
    follower = Follower.load(tiny_engine_config(folder), collectives)
    with leader:
        follower.run(received_steps(leader, torch.device("cpu")))
    collectives.close()


@pytest.mark.parametrize(
    ("ranks", "divides_tokens"),
    [pytest.param(2, False, marks=soak), pytest.param(3, False, marks=soak), pytest.param(3, True)],
)
def test_processes_give_the_tokens_of_one(ranks: int, divides_tokens: bool, tmp_path: Path) -> None:
    """With the kernels of CPUs, and three KV heads or one for each rank; or the whole model on each rank.

    `tests/integration/test_rank_group.py` runs a worker's own processes in `make test`.
    """
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3 if ranks == 3 else 1, "hidden_size": 96}
    folder = write_tiny_model(tmp_path, "llama3", intermediate_size=96, **sizes)
    pairs = [socket.socketpair() for _ in range(ranks - 1)]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    leader = context.Process(
        target=lead, args=(folder, Rank(0, ranks, divides_tokens=divides_tokens), [mine for mine, _ in pairs], results)
    )
    others = [
        context.Process(target=follow, args=(folder, Rank(number, ranks, divides_tokens=divides_tokens), theirs))
        for number, (_, theirs) in enumerate(pairs, 1)
    ]
    for process in (leader, *others):
        process.start()
    for group in (end for pair in pairs for end in pair):
        group.close()
    for process in (leader, *others):
        process.join(LIMIT_S)
    assert [process.exitcode for process in (leader, *others)] == [0] * ranks
    assert results.get() == greedy_answer(ModelRunner.load(tiny_engine_config(folder)), PROMPT, 20)
    results.close()


def test_the_end_of_a_follower_is_an_error_of_the_next_step(tmp_path: Path) -> None:
    mine, theirs = socket.socketpair()
    theirs.close()
    with mine, pytest.raises(Unavailable, match="a rank of this worker has ended"):
        ModelRunner.load(tiny_engine_config(write_tiny_model(tmp_path)), on_step=StepSender([mine]).send)
