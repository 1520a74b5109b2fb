"""Pairwise cases, which tests use instead of a full product."""

from itertools import combinations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import covering, each_value_once, pairwise

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def columns_of(counts: list[int]) -> list[list[str]]:
    return [[f"{'abcd'[column]}{value}" for value in range(count)] for column, count in enumerate(counts)]


@given(sizes, st.integers(0, 2**32))
def test_each_two_values_meet_and_what_is_asked_for_is_there(counts: list[int], seed: int) -> None:
    columns = columns_of(counts)
    asked = tuple(column[seed % len(column)] for column in columns)
    cases = covering(columns, [asked])
    assert cases == covering(columns, [asked])
    assert cases[0] == asked
    assert len(cases) == len(set(cases)) <= prod(counts)
    for one, other in combinations(range(len(counts)), 2):
        met = {(case[one], case[other]) for case in cases}
        assert len(met) == counts[one] * counts[other]
    assert {value for case in cases for value in case} == {value for column in columns for value in column}


def test_each_value_is_in_one_of_the_first_cases() -> None:
    cases = covering(columns_of([4, 7, 2, 2]))
    first = each_value_once(cases, cases[5:6])
    assert first[0] == cases[5]
    assert len(first) <= 9
    assert {value for case in first for value in case} == {value for case in cases for value in case}


@pytest.mark.parametrize(("counts", "most"), [([10, 2, 2], 20), ([4, 7, 2, 2], 28), ([2, 2, 3], 6), ([5, 5, 3, 3], 30)])
def test_there_are_about_as_many_as_the_two_longest_columns_need(counts: list[int], most: int) -> None:
    assert len(covering(columns_of(counts))) <= most


def test_a_case_of_unknown_values_is_refused() -> None:
    with pytest.raises(AssertionError, match="no such values"):
        pairwise(always=[("a", "4")], letter=["a"], number=[1, 2])


def test_values_are_given_and_names_are_shown() -> None:
    names, cases = pairwise(letter={"first": "a"}, number=[1, 2]).args
    assert names == ["letter", "number"]
    assert [(case.id, case.values) for case in cases] == [("first-1", ("a", 1)), ("first-2", ("a", 2))]
