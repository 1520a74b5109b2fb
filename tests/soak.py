"""What `make soak` adds to `make test`: tests marked `soak`, more random seeds, and more generated examples."""

from __future__ import annotations

import os

import pytest

SOAKING = os.environ.get("TANDEM_SOAK") == "1"
"""True in `make soak`, which takes hours."""
EXAMPLES_FACTOR = 20
"""The number of generated examples in `make soak` for each one in `make test`."""

soak = pytest.mark.soak
"""Marks a test that only `make soak` runs: more of a behaviour that another test already covers."""


def examples(count: int) -> int:
    """Return the number of generated examples of a property test, of which `make test` runs `count`."""
    return count * EXAMPLES_FACTOR if SOAKING else count


def seeds(count: int) -> pytest.MarkDecorator:
    """Run a randomized test, which takes `seed`, with 0 in `make test` and with 1 to `count` - 1 in `make soak`."""
    return pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=soak) for seed in range(1, count))])
