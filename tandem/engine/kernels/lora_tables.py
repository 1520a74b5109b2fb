"""The matrices of all adapters for one product of the base model."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LoraTables:
    """Low-rank updates of one stacked product [N, K] for S adapters: y += B · (A · x), for each part of its rows.

    The product's rows are one part, or several where it stacks matrices that adapters change separately: q, k and v, or
    gate and up. P is the number of parts, r the rank to which all adapters are padded with zeros.

    a           [S, P·r, K]: each part's A
    b           [S, N, r]: B, times the adapter's scale
    part_ends   the row at which each part ends; the last one is N
    """

    a: Tensor
    b: Tensor
    part_ends: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The padded rank."""
        return self.b.shape[2]

    @property
    def part_rows(self) -> tuple[range, ...]:
        """The rows of each part."""
        return tuple(map(range, (0, *self.part_ends[:-1]), self.part_ends))
