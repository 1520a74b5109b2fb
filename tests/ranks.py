"""Groups of ranks in one process, for tests: each rank is a thread."""

from __future__ import annotations

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
from tandem.engine.parallel.adapter_stream import AdapterSender, write_adapters
from tandem.engine.parallel.collectives import Collectives
from tandem.engine.parallel.step_stream import StepSender, received_steps

LIMIT_S = 20.0


class Board:
    """Where the threads of a group exchange their tensors."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=LIMIT_S)
        self.parts: list[Tensor] = [torch.empty(0)] * count


class ThreadCollectives(Collectives):
    """The collectives of threads of one process."""

    def __init__(self, rank: Rank, board: Board) -> None:
        super().__init__(rank)
        self._board = board

    def all_reduce(self, part: Tensor) -> None:
        part.copy_(torch.stack(self._all(part)).sum(0))

    def broadcast(self, values: Tensor) -> None:
        values.copy_(self._all(values)[0])

    def gather_columns(self, part: Tensor, columns: int) -> Tensor:
        parts = self._all(part)
        return torch.cat(parts, dim=1) if self.rank.leads else part.new_empty(0, columns)

    def close(self) -> None:
        """The threads end by themselves."""

    def _all(self, part: Tensor) -> list[Tensor]:
        self._board.parts[self.rank.number] = part.clone()
        self._board.barrier.wait()
        parts = list(self._board.parts)
        self._board.barrier.wait()
        return parts


@contextmanager
def group_runner(config: EngineConfig, ranks: int) -> Iterator[tuple[ModelRunner, list[Follower]]]:
    """Loads a model on several ranks, and yields the runner of the first and the others."""
    board = Board(ranks)
    leading, following = zip(*(socket.socketpair() for _ in range(ranks - 1)), strict=True)
    naming, named = zip(*(socket.socketpair() for _ in range(ranks - 1)), strict=True)
    sender, adapters = StepSender(leading), AdapterSender(naming)

    def follow(number: int) -> None:
        collectives = ThreadCollectives(Rank(number, ranks), board)
        try:
            with following[number - 1] as leader, named[number - 1]:
                followers[number] = Follower.load(config, collectives, kernels=ReferenceKernels())
                threads.submit(write_adapters, named[number - 1], followers[number].adapters)
                followers[number].run(received_steps(leader, torch.device("cpu")))
        except BaseException:
            board.barrier.abort()
            raise

    followers: dict[int, Follower] = {}
    with ThreadPoolExecutor(2 * ranks) as threads:
        running = [threads.submit(follow, number) for number in range(1, ranks)]
        collectives = ThreadCollectives(Rank(0, ranks), board)
        try:
            runner = ModelRunner.load(config, kernels=ReferenceKernels(), collectives=collectives, on_step=sender.send)
            runner.adapters.on_write = adapters.write
            yield runner, [followers[number] for number in range(1, ranks)]
        except BaseException:
            board.barrier.abort()
            raise
        finally:
            sender.close()
            adapters.close()
            for future in running:
                future.result()
