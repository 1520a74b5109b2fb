"""How a tensor is summed over the ranks, by its size."""

import pytest

from tandem.engine.parallel.cuda_collectives import SENT_BYTES, most_summed, shots_for

KIB = 1 << 10


def test_two_ranks_never_sum_in_two_shots() -> None:
    """They would send as much, in one more trip."""
    assert {shots_for(size, 2) for size in range(0, SENT_BYTES + 1, 4 * KIB)} == {1}
    assert most_summed(2) == SENT_BYTES


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_larger_tensors_take_two_shots_and_the_largest_are_left_to_nccl(ranks: int) -> None:
    chosen = [shots_for(size, ranks) for size in range(0, 2 * SENT_BYTES, KIB)]
    assert chosen == sorted(chosen, key=[1, 2, 0].index)
    assert set(chosen) == ({0, 1} if ranks == 2 else {0, 1, 2})
    assert shots_for(most_summed(ranks), ranks) > 0
    assert shots_for(most_summed(ranks) + 8, ranks) == 0


def test_eight_ranks_take_two_shots_from_smaller_sizes() -> None:
    """A rank of eight sends 5.25 times the tensor less in two shots, one of four 1.5 times."""
    assert shots_for(134 * KIB - KIB, 4) == 1
    assert shots_for(134 * KIB, 4) == 2
    assert shots_for(38 * KIB, 8) == 1
    assert shots_for(39 * KIB, 8) == 2
