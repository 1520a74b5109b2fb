"""Collective operations between GPUs of one host: small tensors are summed by a kernel of ours, others by NCCL."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from tandem.engine.config.sharding import Rank
from tandem.engine.kernels.layers import Norm
from tandem.engine.kernels.rowwise.triton_all_reduce import AllReduce, buffer_bytes
from tandem.engine.parallel.collectives import Collectives, padded_columns, stage_group

SENT_BYTES = 1 << 21
"""Maximum number of bytes that a rank sends in a sum that NCCL does not compute.

On two H200, NCCL is faster for more: 35 us against 36 for 4 MiB, but 29 against 18 for 2 MiB
(docs/decisions/tensor_parallelism.md).
"""
TRIP_BYTES = 200 << 10
"""The number of bytes that a rank sends in the time of one more trip over NVLink.

On two H200, two more trips take 2.8 us for 8 KiB, and a rank sends 143 KiB in a microsecond (the same table).
"""


def shots_for(size: int, ranks: int) -> int:
    """Return in how many shots a tensor of `size` bytes is summed: 1, 2, or 0 if NCCL sums it.

    A rank sends (N - 1) · S bytes in one shot, and 2 · (N - 1) / N · S in two, which take one more trip.
    """
    one, two = (ranks - 1) * size, 2 * (ranks - 1) * size // ranks + TRIP_BYTES
    if min(one, two) > SENT_BYTES:
        return 0
    return 1 if one <= two else 2


def most_summed(ranks: int) -> int:
    """Return the maximum size in bytes of a tensor that NCCL does not sum, rounded down to whole 32-bit words."""
    return max(SENT_BYTES // (ranks - 1), (SENT_BYTES - TRIP_BYTES) * ranks // (2 * (ranks - 1))) // 4 * 4


class CudaCollectives(Collectives):
    """Collective operations between processes with a GPU each, on the current stream; they can be captured in graphs.

    A process can be in only one group. If a rank ends, the kernels of the others never end: the processes must be
    killed.
    """

    def __init__(
        self,
        rank: Rank,
        meeting: Path,
        timeout_s: float,
        device: torch.device,
        *,
        most_bytes: int | None = None,
    ) -> None:
        """Join the group as `GlooCollectives` does; `device` is this rank's GPU.

        `most_bytes` is the maximum size of a tensor that NCCL does not sum, the same on all ranks; None = that of
        `shots_for`.
        """
        super().__init__(rank)
        torch.cuda.set_device(device)
        self._device = device
        # A program that uses NVLink multicast can put all GPUs of a host out of service when it is killed.
        os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        # All ranks are on this host; otherwise NCCL would listen on the host's address.
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "nccl",
            init_method=f"file://{meeting}",
            rank=rank.world_number,
            world_size=rank.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
        self._stage, self._links = stage_group(rank), _links(rank)
        self._suspended = False
        self.shots_for = shots_for
        """The function that chooses how tensors are summed; it is the same on all ranks. A measurement replaces it."""
        if rank.count > 1:
            most_bytes = most_summed(rank.count) if most_bytes is None else most_bytes
            self._memory, addresses = self._shared(buffer_bytes(most_bytes, rank.count))
            self.sums = AllReduce(rank.number, addresses, most_bytes)
        # The memory of all ranks is 0 before the first rank writes to it.
        torch.cuda.synchronize()
        dist.barrier()

    def _shared(self, size: int) -> tuple[Tensor, Tensor]:
        """Allocate zeroed memory that all ranks can access; return it, and the addresses [ranks] of each rank's."""
        memory = symmetric_memory.empty(size, dtype=torch.uint8, device=self._device).zero_()
        handle = symmetric_memory.rendezvous(memory, self._stage or dist.distributed_c10d._get_default_group())
        return memory, torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self._device)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave out all communication in the `with` block, for trial steps whose results are not used.

        Trial steps run concurrently, so their operations would not be in the same order on all ranks.
        """
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def all_reduce(self, part: Tensor) -> None:
        """Sum the tensors of the ranks of the stage."""
        self._reduce(part, None)

    def all_reduce_add(self, part: Tensor, total: Tensor, norm: Norm | None = None) -> Tensor | None:
        """Add the sum to `total`, and compute the norm; unless NCCL sums, one kernel does all."""
        return self._reduce(part, total, norm)

    def sums_in_place(self, total: Tensor) -> bool:
        """Return True for tensors that NCCL sums; the kernel of the others adds to `total` itself."""
        return not self._suspended and self._shots(total) == 0

    def _shots(self, tensor: Tensor) -> int:
        return self.shots_for(tensor.nbytes, self.rank.count)

    def _reduce(self, part: Tensor, total: Tensor | None, norm: Norm | None = None) -> Tensor | None:
        if not self._suspended and (shots := self._shots(part)):
            return self.sums.add_sum(part, total, norm, shots=shots)
        if not self._suspended:
            dist.all_reduce(part, group=self._stage)
        if total is not None:
            total += part
        return None

    def broadcast(self, values: Tensor) -> None:
        """Replace `values` by the tensor of the stage's first rank; a small tensor is added to zeros."""
        if not self._suspended and self._shots(values) == 0:
            dist.broadcast(values, group=self._stage, group_src=0)
            return
        if self.rank.number > 0:
            values.zero_()
        self.all_reduce(values)

    def gather_columns(self, part: Tensor, columns: int) -> Tensor:
        """Return the columns of the stage's ranks, on each of them."""
        padded = padded_columns(part, columns, self.rank)
        parts = self.all_gather(padded)
        return parts.transpose(0, 1).reshape(len(padded), -1)[:, :columns].contiguous()

    def all_gather(self, part: Tensor) -> Tensor:
        """Gather the tensors as bytes, because NCCL does not know every dtype."""
        parts = part.new_empty(self.rank.count, *part.shape)
        if self._suspended:
            return parts.zero_()
        dist.all_gather_into_tensor(parts.view(torch.uint8), part.view(torch.uint8), self._stage)
        return parts

    def send(self, hidden: Tensor) -> None:
        """Send the tensor; later work of this GPU starts when it has arrived."""
        self._exchange(hidden, self.rank.world_number)

    def receive(self, hidden: Tensor) -> None:
        """Receive the tensor; later work of this GPU waits for it."""
        if self._suspended:
            hidden.zero_()
        self._exchange(hidden, self.rank.world_number + self.rank.count)

    def _exchange(self, hidden: Tensor, source: int) -> None:
        """Send the tensor of rank `source` to the next stage: a broadcast to one rank, which a graph may contain."""
        if not self._suspended:
            dist.broadcast(hidden, source, self._links.get(source))

    def minimum(self, number: int) -> int:
        """Return the smallest number."""
        numbers = torch.tensor([number], dtype=torch.int64, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers.item())

    def close(self) -> None:
        """Leave the group."""
        torch.cuda.synchronize()
        if self.rank.count > 1:
            del self._memory, self.sums
        dist.destroy_process_group()


def _links(rank: Rank) -> dict[int, dist.ProcessGroup]:
    """Create the group of each two ranks that exchange hidden states, and return those of `rank` by the sender.

    Two ranks need no group other than that of all ranks.
    """
    if rank.world_size == 2:
        return {}
    groups: dict[int, dist.ProcessGroup] = {
        sender: dist.new_group([sender, sender - rank.count]) for sender in range(rank.count, rank.world_size)
    }
    mine = rank.world_number, rank.world_number + rank.count
    return {sender: group for sender, group in groups.items() if sender in mine}
