"""Prompts of real English text, and the reference answers of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.reference import Reference

PROMPT_LENGTHS = (
    5,
    7,
    15,
    16,
    17,
    23,
    31,
    33,
    48,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    200,
    255,
    300,
    511,
    513,
    700,
    1025,
    1500,
)
"""Prompt lengths in tokens around every page and chunk boundary, 24 of them."""


@pytest.fixture(scope="session")
def prompts(model_folder: Path) -> list[tuple[int, ...]]:
    """Real English prompts of exact token lengths, each from another part of the text."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    text = "\n".join(topics[key] for key in sorted(topics))
    ids = Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode(text[:400_000]).ids
    starts = [1_000 + 2_111 * i for i in range(len(PROMPT_LENGTHS))]
    return [tuple(ids[s : s + n]) for s, n in zip(starts, PROMPT_LENGTHS, strict=True)]


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Reference:
    """The reference: transformers on the served model."""
    return Reference(model_folder)
