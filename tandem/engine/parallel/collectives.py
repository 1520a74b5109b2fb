"""Collective operations on tensors between the ranks of a group."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.engine.config.sharding import Rank
from tandem.engine.kernels.layers import Norm
from tandem.protocol.errors import Unavailable

_BARRIER_ELEMENTS = 8
"""A size that every kernel for sums supports."""


class Collectives(ABC):
    """The collective operations of one rank with the ranks of its stage, and the exchange between stages.

    All ranks of a stage make the same calls in the same order. If a rank fails, the calls of the other ranks cannot
    complete, and the group ends.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @abstractmethod
    def all_reduce(self, part: Tensor) -> None:
        """Replace `part` by its sum over the stage's ranks; the result is bitwise equal on all of them."""

    def all_reduce_add(self, part: Tensor, total: Tensor, norm: Norm | None = None) -> Tensor | None:
        """Add the sum of `part` over the stage's ranks to `total` in place; `part` may be overwritten.

        Returns RMSNorm(total) if `norm` is given and one kernel computes both, else None, as the default does.
        """
        self.all_reduce(part)
        total += part
        return None

    def sums_in_place(self, total: Tensor) -> bool:
        """Return True if one term should be added to `total` on one rank, and `total` then summed over the ranks.

        This saves an addition after the sum.
        """
        return False

    @abstractmethod
    def broadcast(self, values: Tensor) -> None:
        """Replace `values` by the tensor of the stage's first rank."""

    @abstractmethod
    def gather_columns(self, part: Tensor, columns: int) -> Tensor:
        """Return the columns of the stage's ranks, concatenated to [D, columns]; only the first rank needs them.

        `part` [D, n] has the columns `Rank.rows(columns)` of this rank. The other ranks may get [0, columns].
        """

    @abstractmethod
    def all_gather(self, part: Tensor) -> Tensor:
        """Return the contiguous tensors of the stage's ranks [ranks, *part.shape], which have the same shape."""

    def barrier(self, like: Tensor) -> None:
        """Let what follows on this rank's device begin only after what came before on all ranks has ended.

        `like` is any tensor of the device.
        """
        self.all_reduce(like.new_zeros(_BARRIER_ELEMENTS))

    @abstractmethod
    def send(self, hidden: Tensor) -> None:
        """Send a contiguous tensor to the rank of the same number in the next stage, which calls `receive`."""

    @abstractmethod
    def receive(self, hidden: Tensor) -> None:
        """Replace `hidden` by the tensor that the rank of the same number in the previous stage sends."""

    @abstractmethod
    def minimum(self, number: int) -> int:
        """Return the smallest `number` of all ranks of all stages."""

    def pool_bytes(self, capacity: int, page_bytes: int) -> int:
        """Return the size of this rank's page pool: as many pages as the rank with space for the fewest has, in bytes.

        This rank has space for `capacity` bytes. The sizes of pages differ if stages have different numbers of layers.
        """
        return self.minimum(capacity // page_bytes) * page_bytes

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Called after the last collective operation."""


class GlooCollectives(Collectives):
    """Collective operations between processes on CPUs, with the gloo backend of torch.distributed.

    A process can be in only one group. Operations raise Unavailable if another rank has ended.
    """

    def __init__(self, rank: Rank, meeting: Path, timeout_s: float) -> None:
        """Join the group, whose ranks find each other through the file `meeting`.

        The file must not exist before the first rank joins. `timeout_s` is the maximum time in seconds until all ranks
        have joined, and the maximum time of each operation; if it has passed, the constructor raises
        RuntimeError, and an operation raises Unavailable.
        """
        super().__init__(rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank.world_number,
            world_size=rank.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        self._stage = stage_group(rank)

    def all_reduce(self, part: Tensor) -> None:
        """Sum the tensors in the order of the ranks, so that the result does not depend on which arrives first."""
        parts = [torch.empty_like(part) for _ in range(self.rank.count)]
        with _while_all_run():
            dist.all_gather(parts, part, self._stage)
        part.copy_(torch.stack(parts).sum(0))

    def broadcast(self, values: Tensor) -> None:
        """Send the tensor of the stage's first rank to its other ranks."""
        with _while_all_run():
            dist.broadcast(values, group=self._stage, group_src=0)

    def gather_columns(self, part: Tensor, columns: int) -> Tensor:
        """Gather the columns; ranks with fewer columns than the first are padded, and the padding is removed."""
        padded = padded_columns(part, columns, self.rank)
        parts = [torch.empty_like(padded) for _ in range(self.rank.count)] if self.rank.number == 0 else None
        with _while_all_run():
            dist.gather(padded, parts, group=self._stage, group_dst=0)
        return part.new_empty(0, columns) if parts is None else torch.cat(parts, dim=1)[:, :columns]

    def all_gather(self, part: Tensor) -> Tensor:
        """Gather the tensors as bytes, because gloo does not know every dtype."""
        gathered = part.new_empty(self.rank.count, *part.shape)
        with _while_all_run():
            parts = [*gathered.view(torch.uint8)]
            dist.all_gather(parts, part.view(torch.uint8), self._stage)
        return gathered

    def send(self, hidden: Tensor) -> None:
        """Send the tensor, and return when it has arrived."""
        with _while_all_run():
            dist.send(hidden, self.rank.world_number - self.rank.count)

    def receive(self, hidden: Tensor) -> None:
        """Wait for the tensor."""
        with _while_all_run():
            dist.recv(hidden, self.rank.world_number + self.rank.count)

    def minimum(self, number: int) -> int:
        """Return the smallest number."""
        numbers = torch.tensor([number])
        with _while_all_run():
            dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers.item())

    def close(self) -> None:
        """Close the connections; without this, the process would be aborted when another rank closes its own."""
        dist.destroy_process_group()


def stage_group(rank: Rank) -> dist.ProcessGroup | None:
    """Create the process group of each stage, and return that of this rank's stage; None = all ranks, or this alone."""
    if rank.stages == 1 or rank.count == 1:
        return None
    starts = range(0, rank.world_size, rank.count)
    groups: list[dist.ProcessGroup] = [dist.new_group([*range(start, start + rank.count)]) for start in starts]
    return groups[rank.world_number // rank.count]


@contextmanager
def _while_all_run() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Unavailable("a rank of this worker has ended, and the worker ends with it") from error


def padded_columns(part: Tensor, columns: int, rank: Rank) -> Tensor:
    """Return the columns of a rank [D, n], padded with zeros to as many columns as the first rank has."""
    most = len(Rank(0, rank.count).rows(columns))
    missing = most - part.shape[1]
    return torch.nn.functional.pad(part, (0, missing)) if missing else part.contiguous()
