"""Pairwise test parameters: each combination of two values of two parameters occurs in at least one case.

Most defects need one value or a pair of values; the full product of four parameters is many times as large and finds
little more (Kuhn, Wallace, Gallo: Software Fault Interactions and Implications for Software Testing, 2004). A case that
needs three values together is an edge case, and must be listed in `always`.

Without a GPU, `make test` runs enough of the cases that each value occurs once, and `make soak` runs the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

from tests.soak import soak

Case = tuple[Any, ...]
Values = Mapping[str, Any] | Iterable[Any]


def pairwise(
    *, always: Sequence[Case] = (), indirect: Sequence[str] = (), **parameters: Values
) -> pytest.MarkDecorator:
    """Return `pytest.mark.parametrize` with pairwise cases of these parameters.

    Values are given with names, or are named by `str`. `always` has cases to include in any case, each given by the
    names of its values in order. `indirect` is the argument of `parametrize`.
    """
    named = [
        dict(values) if isinstance(values, Mapping) else {str(value): value for value in values}
        for values in parameters.values()
    ]
    cases = covering([list(values) for values in named], always)
    first = cases if torch.cuda.is_available() else each_value_once(cases, always)
    chosen = [
        pytest.param(
            *(values[name] for values, name in zip(named, case, strict=True)),
            id="-".join(case),
            marks=() if case in first else soak,
        )
        for case in cases
    ]
    return pytest.mark.parametrize(list(parameters), chosen, indirect=list(indirect))


def covering(columns: Sequence[Sequence[str]], always: Sequence[Case] = ()) -> list[Case]:
    """Return cases that cover each pair of values of two columns: `always` first, then greedily chosen ones.

    The next case is the one with the most uncovered pairs; ties are broken by the columns' order.
    """
    every = list(product(*columns))
    assert set(always) <= set(every), f"no such values: {set(always) - set(every)}"
    missing = {pair for case in every for pair in _pairs(case)}
    cases = list(always)
    for case in always:
        missing -= _pairs(case)
    while missing:
        best = max(every, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        cases.append(best)
    return cases


def _pairs(case: Case) -> set[tuple[tuple[int, Any], ...]]:
    """Return the pairs of a case with their columns; for a single column, its values."""
    return set(combinations(enumerate(case), min(2, len(case))))


def each_value_once(cases: Sequence[Case], always: Sequence[Case] = ()) -> list[Case]:
    """Return enough of the cases to have each value at least once: `always`, then those with the most new values.

    Among equals, the case with the least used values is chosen, so that short columns vary together with long ones.
    """
    chosen = list(always)
    uses = Counter(value for case in always for value in enumerate(case))

    def worth(case: Case) -> tuple[int, int]:
        counts = [uses[value] for value in enumerate(case)]
        return counts.count(0), -sum(counts)

    while worth(best := max(cases, key=worth))[0]:
        chosen.append(best)
        uses.update(enumerate(best))
    return chosen
