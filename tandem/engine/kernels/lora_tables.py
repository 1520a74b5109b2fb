"""The LoRA matrices of all adapters for one product of the base model."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LoraTables:
    """The LoRA matrices of S adapters for one stacked product [N, K]: y += B · (A · x), for each part of its rows.

    A product has several parts if it stacks matrices that adapters change separately (q, k and v, or gate and up), else
    one. P is the number of parts, r the rank to which all adapters are padded with zeros.

    a           [S, P·r, K]: the A of each part
    b           [S, N, r]: B, multiplied with the adapter's scale
    part_ends   the row at which each part ends; the last one is N
    """

    a: Tensor
    b: Tensor
    part_ends: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The rank r to which all adapters are padded."""
        return self.b.shape[2]

    @property
    def part_rows(self) -> tuple[range, ...]:
        """The range of rows of each part."""
        return tuple(map(range, (0, *self.part_ends[:-1]), self.part_ends))
