"""Ranks that are processes: the collectives over gloo, and the steps over sockets."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.config.sharding import Rank
from tandem.engine.model_runner import Follower, ModelRunner
from tandem.engine.parallel.collectives import GlooCollectives
from tandem.engine.parallel.step_stream import StepSender, received_steps
from tandem.protocol.errors import Unavailable
from tests.factories import FAMILIES, greedy_answer, tiny_engine_config, write_tiny_model
from tests.soak import soak
from tests.unit.engine.parallel.test_ranks import INDIVISIBLE, TOLERANCE, logits_of
from tests.unit.engine.test_models import SEEDS

PROMPT = [(5 * position + 2) % 150 for position in range(50)]
LIMIT_S = 120.0


Answer = tuple[list[int], list[np.ndarray]]
"""A greedy answer, and the logits of the steps of `test_ranks`."""


def answer_of(runner: ModelRunner) -> Answer:
    return greedy_answer(runner, PROMPT, 6), [logits.numpy() for logits in logits_of(runner)]


def config_of(folder: Path) -> EngineConfig:
    return tiny_engine_config(folder, kv_cache_bytes=8 << 20)


def lead(
    meeting: Path, rank: Rank, folders: list[Path], followers: list[list[socket.socket]], results: SimpleQueue[Answer]
) -> None:
    """Run as the first rank of the model in each folder, one after the other."""
    collectives = GlooCollectives(rank, meeting, LIMIT_S)
    for folder, sockets in zip(folders, followers, strict=True):
        sender = StepSender(sockets)
        results.put(answer_of(ModelRunner.load(config_of(folder), collectives=collectives, on_step=sender.send)))
        sender.close()
    collectives.close()


def follow(meeting: Path, rank: Rank, folders: list[Path], leaders: list[socket.socket]) -> None:
    collectives = GlooCollectives(rank, meeting, LIMIT_S)
    for folder, leader in zip(folders, leaders, strict=True):
        follower = Follower.load(config_of(folder), collectives)
        with leader:
            follower.run(received_steps(leader, torch.device("cpu")))
    collectives.close()


def answers_of_ranks(ranks: list[Rank], meeting: Path, folders: list[Path]) -> Iterator[Answer]:
    """Yields the answer to `PROMPT` of each model, whose ranks are processes."""
    pairs = [[socket.socketpair() for _ in ranks[1:]] for _ in folders]
    context = multiprocessing.get_context("spawn")
    results: SimpleQueue[Answer] = context.SimpleQueue()
    leading = [[mine for mine, _ in of_model] for of_model in pairs]
    processes = [context.Process(target=lead, args=(meeting, ranks[0], folders, leading, results))]
    for rank, *following in zip(ranks[1:], *pairs, strict=True):
        theirs = [leader for _, leader in following]
        processes.append(context.Process(target=follow, args=(meeting, rank, folders, theirs)))
    for process in processes:
        process.start()
    for end in (end for of_model in pairs for pair in of_model for end in pair):
        end.close()
    results._writer.close()  # so that `get` raises EOFError after the first rank has ended
    yield from (results.get() for _ in folders)
    for process in processes:
        process.join(LIMIT_S)
    assert [process.exitcode for process in processes] == [0] * len(ranks)
    results.close()


def assert_answer_of_one(folder: Path, answer: Answer) -> None:
    tokens, logits = answer_of(ModelRunner.load(config_of(folder)))
    assert answer[0] == tokens
    for actual, wanted in zip(answer[1], logits, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_two_processes_give_the_tokens_and_logits_of_one_for_every_family(tmp_path: Path) -> None:
    """With the kernels of CPUs. The families that two ranks cannot divide are refused in `test_ranks`."""
    families = [family for family in sorted(FAMILIES) if (family, 2) not in INDIVISIBLE]
    folders = [write_tiny_model(tmp_path / family, family, seed=SEEDS.get(family, 7)) for family in families]
    for folder, answer in zip(
        folders, answers_of_ranks([Rank(0, 2), Rank(1, 2)], tmp_path / "meeting", folders), strict=True
    ):
        assert_answer_of_one(folder, answer)


@pytest.mark.parametrize("divides_tokens", [pytest.param(False, marks=soak), True])
def test_three_processes_give_the_tokens_and_logits_of_one(divides_tokens: bool, tmp_path: Path) -> None:
    """`tests/integration/test_rank_group.py` runs a worker's own processes in `make test`."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    folder = write_tiny_model(tmp_path / "model", "llama3", **sizes)
    ranks = [Rank(number, 3, divides_tokens=divides_tokens) for number in range(3)]
    for answer in answers_of_ranks(ranks, tmp_path / "meeting", [folder]):
        assert_answer_of_one(folder, answer)


def test_the_end_of_a_follower_is_an_error_of_the_next_step(tmp_path: Path) -> None:
    mine, theirs = socket.socketpair()
    theirs.close()
    with mine, pytest.raises(Unavailable, match="a rank of this worker has ended"):
        ModelRunner.load(tiny_engine_config(write_tiny_model(tmp_path)), on_step=StepSender([mine]).send)
