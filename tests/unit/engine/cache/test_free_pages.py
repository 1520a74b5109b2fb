"""Extents of free pages: against a plain set, and their effects on fragmentation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.cache.free_pages import FreePages


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 39), st.randoms()), max_size=60))
def test_it_is_a_set_with_the_right_extents(total: int, moves: list[tuple[bool, int, object]]) -> None:
    free = FreePages(range(total))
    here, away = set(range(total)), set[int]()
    for takes, asked, random in moves:
        if takes:
            count = min(asked, len(here))
            largest = max(_extents(here), default=0)
            taken = free.take(count)
            assert len(set(taken)) == len(taken) == count
            assert set(taken) <= here
            if count <= largest:
                assert taken == list(range(taken[0], taken[0] + count)) if taken else not count
            here, away = here - set(taken), away | set(taken)
        else:
            given_back = random.sample(sorted(away), min(asked, len(away)))  # type: ignore[attr-defined]
            free.give(given_back)
            here, away = here | set(given_back), away - set(given_back)
        assert sorted(free) == sorted(here)
        assert len(free) == len(here)
        assert free.extents == len(_extents(here))


def _extents(pages: set[int]) -> list[int]:
    """Returns the length of each run of adjacent pages."""
    starts = [page for page in pages if page - 1 not in pages]
    return [next(n for n in range(1, len(pages) + 1) if start + n not in pages) for start in starts]


def test_single_pages_fill_gaps_and_leave_long_extents_alone() -> None:
    free = FreePages([0, 1, 5, 10, 11, 12, 13])
    assert free.take(1) == [5]
    assert free.take(4) == [10, 11, 12, 13]
    assert free.take(2) == [0, 1]


def test_without_a_large_enough_extent_the_largest_come_first() -> None:
    assert FreePages([0, 2, 3, 4, 7, 8]).take(5) == [2, 3, 4, 7, 8]


def test_neighbours_that_come_back_one_by_one_are_one_extent_again() -> None:
    free = FreePages(range(6))
    pages = free.take(6)
    for page in (pages[4], pages[0], pages[2], pages[5], pages[1], pages[3]):
        free.give([page])
    assert free.extents == 1
    assert free.take(6) == pages


@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_one_gives_nothing(count: int) -> None:
    free = FreePages([])
    assert not free.take(0)
    free.give([3] * count)
    assert list(free) == [3] * count
