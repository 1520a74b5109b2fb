"""The sets of prompts that speculation is measured with."""

import pytest

from benchmarks.speculation.speed import SETS, TEXTS, read_prompts


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_48_prompts(name: str) -> None:
    assert len(set(read_prompts(name))) == 48


def test_the_texts_are_small() -> None:
    assert sum(file.stat().st_size for file in TEXTS.iterdir()) < 400_000
