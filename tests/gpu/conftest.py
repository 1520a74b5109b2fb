"""Libraries that only GPU machines have warn of their own future, one of them as it is imported: an error there would
be taken for a library that is missing, and the test would measure what stands in for it.
"""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of this folder: warnings are shown and are no errors."""
    item.add_marker(pytest.mark.filterwarnings("default"))
