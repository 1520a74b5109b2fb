"""The benchmark of common prefixes against a cache of whole pages that the test keeps; no timing."""

from collections.abc import Sequence

import pytest

from benchmarks.serving.prefixes import ANSWERS, SHARES, Asked, page_rows, share_rows, use_rows, with_predictions
from tandem.cli.load.synthetic import Lengths
from tandem.protocol.cost_parameters import CostParameters

PAGE = 16
TOKEN_S = 1e-3


class Server:
    """Has computed whole pages of prompts; a token that was not takes `TOKEN_S`."""

    def __init__(self) -> None:
        self.pages: set[tuple[int, ...]] = set()

    def ask(self, prompt: Sequence[int], answers: int) -> Asked:
        cached = 0
        while cached + PAGE < len(prompt) and tuple(prompt[: cached + PAGE]) in self.pages:
            cached += PAGE
        self.pages |= {tuple(prompt[:end]) for end in range(PAGE, len(prompt) + 1, PAGE)}
        others = (answers - 1) * ((len(prompt) - 1) // PAGE * PAGE)
        return Asked((len(prompt) - cached) * TOKEN_S, answers * len(prompt), cached + others)


def test_each_share_is_cached_in_whole_pages_and_saves_what_is_predicted() -> None:
    rows = share_rows(Server().ask, 320, rounds=3)
    assert [row["cached_tokens"] for row in rows] == [0, 16, 64, 160, 256, 304]
    assert [row["share"] for row in rows] == list(SHARES)
    costs = CostParameters(base_s=0.0, token_s=TOKEN_S, row_s=0.0, context_s=0.0, observed=1)
    predicted = with_predictions(rows, 320, costs)
    assert "saved_over_predicted" not in predicted[0], "nothing is saved and nothing predicted"
    assert [row["saved_over_predicted"] for row in predicted[1:]] == pytest.approx([1.0] * 5, rel=0.02)
    assert with_predictions(rows, 320, None) == rows


def test_uses_compute_each_distinct_token_once_but_for_parts_of_pages() -> None:
    for row in use_rows(Server().ask, 384):
        assert isinstance(row["computed"], int)
        assert isinstance(row["distinct"], int)
        assert row["distinct"] <= row["computed"] < row["distinct"] + PAGE * (ANSWERS + 21), row["use"]
        assert row["computed"] < int(str(row["prompt_tokens"]))


def test_smaller_pages_are_fuller_and_all_are_fuller_than_the_maximum() -> None:
    rows = page_rows(Lengths(1000, 0.8), Lengths(300, 0.8), 8192)
    fills = [row["fill"] for row in rows]
    assert fills == sorted(fills, reverse=True)
    assert fills[0] == 1.0
    assert rows[0]["contiguous"] < 0.5 < fills[-1]
    fixed = page_rows(Lengths(100), Lengths(1), 1000)
    assert [row["fill"] for row in fixed] == pytest.approx([1, 100 / 112, 100 / 128, 100 / 128, 100 / 256], abs=1e-4)
    assert fixed[0]["contiguous"] == 0.1
