"""Groups of ranks in one process, for tests: each rank is a thread."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from tandem.engine.config import EngineConfig
from tandem.engine.config.sharding import Rank
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import Follower, ModelRunner
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
def group_runner(config: EngineConfig, ranks: int, stages: int = 1) -> Iterator[tuple[ModelRunner, list[Follower]]]:
    """Loads a model on several ranks, and yields the runner of the leading one and the others, in their order."""
    boards = Boards(ranks, stages)
    leader, *others = (Rank.of(number, ranks, stages) for number in range(ranks * stages))
    leading, following = zip(*(socket.socketpair() for _ in others), strict=True)
    sender = StepSender(leading)

    def follow(rank: Rank, steps: socket.socket) -> None:
        try:
            with steps:
                followers[rank] = Follower.load(config, ThreadCollectives(rank, boards), kernels=ReferenceKernels())
                followers[rank].run(received_steps(steps, torch.device("cpu")))
        except BaseException:
            boards.abort()
            raise

    followers: dict[Rank, Follower] = {}
    with ThreadPoolExecutor(ranks * stages) as threads:
        running = [threads.submit(follow, rank, steps) for rank, steps in zip(others, following, strict=True)]
        collectives = ThreadCollectives(leader, boards)
        try:
            runner = ModelRunner.load(config, kernels=ReferenceKernels(), collectives=collectives, on_step=sender.send)
            yield runner, [followers[rank] for rank in others]
        except BaseException:
            boards.abort()
            raise
        finally:
            sender.close()
            for future in running:
                future.result()
