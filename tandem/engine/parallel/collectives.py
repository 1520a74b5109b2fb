"""The exchange of tensors between the ranks of a group."""

from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.engine.config.sharding import Rank


class Collectives(ABC):
    """The exchange of tensors in one group.

    All ranks make the same calls in the same order. A rank that fails ends the group: the others get no answer.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @abstractmethod
    def all_reduce(self, part: Tensor) -> None:
        """Replace `part` by the sum of the parts of all ranks, with the same bits on all ranks."""

    @abstractmethod
    def broadcast(self, values: Tensor) -> None:
        """Replace `values` by those of the first rank."""

    @abstractmethod
    def gather_columns(self, part: Tensor, columns: int) -> Tensor:
        """Return the parts [D, n] of all ranks side by side, [D, columns].

        The parts are those of `Rank.rows(columns)`. Only the first rank gets them, the others get [0, columns].
        """

    def close(self) -> None:  # noqa: B027 - most groups have nothing to close
        """Leave the group, after the last exchange."""


class GlooCollectives(Collectives):
    """The collectives of processes on CPUs, over torch.distributed's gloo back end. A process can be in one group."""

    def __init__(self, rank: Rank, meeting: Path, timeout_s: float) -> None:
        """Join the group; its ranks meet in the file `meeting`, which must not exist before the first of them comes.

        `timeout_s` limits the time until all ranks have joined, and that of each exchange, in seconds; when it is over,
        calls raise RuntimeError.
        """
        super().__init__(rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank.number,
            world_size=rank.count,
            timeout=timedelta(seconds=timeout_s),
        )

    def all_reduce(self, part: Tensor) -> None:
        """Sum the parts in the order of the ranks, so that the result does not depend on their arrival."""
        parts = [torch.empty_like(part) for _ in range(self.rank.count)]
        dist.all_gather(parts, part)
        part.copy_(torch.stack(parts).sum(0))

    def broadcast(self, values: Tensor) -> None:
        """Send the values of the first rank to all."""
        dist.broadcast(values, 0)

    def gather_columns(self, part: Tensor, columns: int) -> Tensor:
        """Gather the parts, padded to the length of the first one."""
        most = len(Rank(0, self.rank.count).rows(columns))
        padded = torch.nn.functional.pad(part, (0, most - part.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.rank.count)] if self.rank.leads else None
        dist.gather(padded, parts, 0)
        return part.new_empty(0, columns) if parts is None else torch.cat(parts, dim=1)[:, :columns]

    def close(self) -> None:
        """End the connections; otherwise they would abort this process when those of another rank end."""
        dist.destroy_process_group()
