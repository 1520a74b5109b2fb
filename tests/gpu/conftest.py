"""Warnings are no errors in this folder.

Libraries that only GPU machines have emit deprecation warnings, one of them at import: an error there would look like a
missing library, and the test would measure its fallback.
"""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Shows warnings of this folder's tests, without turning them into errors."""
    item.add_marker(pytest.mark.filterwarnings("default"))
