"""Groups of ranks in one process, for tests: each rank is a thread."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.config import EngineConfig
from tandem.engine.config.sharding import Rank
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import Follower, ModelRunner
from tandem.engine.parallel.adapter_stream import AdapterSender, write_adapters
from tandem.engine.parallel.collectives import Collectives
from tandem.engine.parallel.step_stream import StepSender, received_steps

LIMIT_S = 20.0


class Board:
    """Where threads that compute together exchange their tensors."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=LIMIT_S)
        self.parts: list[Tensor] = [torch.empty(0)] * count

    def all(self, number: int, part: Tensor) -> list[Tensor]:
        """Returns the tensors of all threads."""
        self.parts[number] = part.clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


class Boards:
    """The boards of a group: one for all ranks, one for each stage; and the hidden states that each rank receives."""

    def __init__(self, ranks: int, stages: int = 1) -> None:
        self.world = Board(ranks * stages)
        self.stages = [Board(ranks) for _ in range(stages)]
        self.received: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(ranks * stages)]

    def abort(self) -> None:
        """Ends all waits with an error."""
        for board in (self.world, *self.stages):
            board.barrier.abort()


class ThreadCollectives(Collectives):
    """The collectives of threads of one process."""

    def __init__(self, rank: Rank, boards: Boards) -> None:
        super().__init__(rank)
        self._boards = boards

    def all_reduce(self, part: Tensor) -> None:
        part.copy_(torch.stack(self._all(part)).sum(0))

    def broadcast(self, values: Tensor) -> None:
        values.copy_(self._all(values)[0])

    def gather_columns(self, part: Tensor, columns: int) -> Tensor:
        parts = self._all(part)
        return torch.cat(parts, dim=1) if self.rank.leads else part.new_empty(0, columns)

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.stack(self._all(part))

    def send(self, hidden: Tensor) -> None:
        self._boards.received[self.rank.world_number - self.rank.count].put(hidden.clone())

    def receive(self, hidden: Tensor) -> None:
        hidden.copy_(self._boards.received[self.rank.world_number].get(timeout=LIMIT_S))

    def minimum(self, number: int) -> int:
        return int(min(self._boards.world.all(self.rank.world_number, torch.tensor(number))))

    def close(self) -> None:
        """The threads end by themselves."""

    def _all(self, part: Tensor) -> list[Tensor]:
        return self._boards.stages[self.rank.stage].all(self.rank.number, part)


@contextmanager
def group_runner(
    config: EngineConfig, ranks: int, stages: int = 1, *, divides_tokens: bool = False
) -> Iterator[tuple[ModelRunner, list[Follower]]]:
    """Loads a model on several ranks, and yields the runner of the first and the others."""
    boards, count = Boards(ranks, stages), ranks * stages
    leading, following = zip(*(socket.socketpair() for _ in range(count - 1)), strict=True)
    naming, named = zip(*(socket.socketpair() for _ in range(count - 1)), strict=True)
    sender, adapters = StepSender(leading), AdapterSender(naming)

    def rank_of(number: int) -> Rank:
        return replace(Rank.of(number, ranks, stages), divides_tokens=divides_tokens)

    def follow(number: int) -> None:
        collectives = ThreadCollectives(rank_of(number), boards)
        try:
            with following[number - 1] as leader, named[number - 1]:
                followers[number] = Follower.load(config, collectives, kernels=ReferenceKernels())
                loaded.release()
                threads.submit(write_adapters, named[number - 1], followers[number].adapters)
                followers[number].run(received_steps(leader, torch.device("cpu")))
        except BaseException:
            boards.abort()
            raise

    followers: dict[int, Follower] = {}
    loaded = threading.Semaphore(0)
    with ThreadPoolExecutor(2 * count) as threads:
        running = [threads.submit(follow, number) for number in range(1, count)]
        collectives = ThreadCollectives(rank_of(0), boards)
        try:
            runner = ModelRunner.load(config, kernels=ReferenceKernels(), collectives=collectives, on_step=sender.send)
            runner.adapters.on_write = adapters.write
            for _ in running:
                assert loaded.acquire(timeout=LIMIT_S)
            yield runner, [followers[number] for number in range(1, count)]
        except BaseException:
            boards.abort()
            raise
        finally:
            sender.close()
            adapters.close()
            for future in running:
                future.result()
