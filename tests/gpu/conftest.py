"""Warnings are no errors in this folder.

Libraries that only GPU machines have emit deprecation warnings, one of them at import: an error there would look like a
missing library, and the test would measure its fallback.
"""

import gc

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Shows warnings of this folder's tests, without turning them into errors."""
    item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="module", autouse=True)
def _engines_of_other_files_are_gone() -> None:
    """Frees the engines of earlier files before a file loads its own.

    Collected later, a CUDA graph could be destroyed while another one is captured, which ends the process.
    """
    gc.collect()


@pytest.fixture(autouse=True)
def _engines_of_other_tests_are_gone() -> None:
    """Frees the engine of the test before, likewise."""
    gc.collect()
