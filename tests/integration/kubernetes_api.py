"""Runs a Kubernetes API server with its etcd on this host, without nodes and controllers, so that no pod is started."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.ray_start import free_port

PROGRAMS = ("etcd", "kube-apiserver", "kubectl")
ASSETS = "KUBEBUILDER_ASSETS"
"""The environment variable of envtest for the folder with the programs; those that are not there are found in PATH."""
READY_S, COMMAND_S, STOP_S = 180, 120, 30


class KubernetesError(Exception):
    """A failure of kubectl, or a warning of the API server, with kubectl's output."""


class KubernetesApi:
    """An API server; `kubectl` runs any kubectl command as its administrator."""

    def __init__(self, kubectl: str, folder: Path) -> None:
        """Reads the file `kubeconfig` in `folder`, where kubectl also keeps its own files."""
        self.kubeconfig = folder / "kubeconfig"
        self._kubectl = kubectl
        self._env = {"PATH": os.environ["PATH"], "HOME": str(folder), "KUBECONFIG": str(self.kubeconfig)}

    def kubectl(self, command: str, *arguments: str, manifests: Iterable[Mapping[str, Any]] = ()) -> str:
        """Returns the output of a command with `manifests` as its standard input.

        KubernetesError if it failed, or if the API server warned of something.
        """
        items = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        line = [self._kubectl, *command.split(), *arguments]
        done = subprocess.run(line, env=self._env, input=json.dumps(items), capture_output=True, text=True,
                              check=False, timeout=COMMAND_S)  # fmt: skip
        if done.returncode or "Warning:" in done.stderr:
            raise KubernetesError(done.stdout + done.stderr)
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """Returns the objects that `kubectl get` finds."""
        return json.loads(self.kubectl("get -o json", *arguments))


def find_programs() -> dict[str, str]:
    """Returns the programs' paths by name. The test is skipped if one is missing."""
    path = os.pathsep.join(filter(None, (os.environ.get(ASSETS), os.environ.get("PATH"))))
    found = {name: shutil.which(name, path=path) for name in PROGRAMS}
    missing = [name for name, program in found.items() if program is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: neither in PATH nor in the folder that {ASSETS} names (see setup-envtest)")
    return {name: program for name, program in found.items() if program}


@contextmanager
def running_api(folder: Path) -> Iterator[KubernetesApi]:
    """Runs etcd and an API server with its default admission on free ports of the loopback address.

    `folder` takes their data, logs and keys. Both processes are stopped at the end.
    """
    programs = find_programs()
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    (folder / "service-accounts.key").write_bytes(key)
    token = secrets.token_hex()
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    store, peers, port = (free_port() for _ in range(3))
    with ExitStack() as running:
        running.enter_context(_process(folder, [
            programs["etcd"], f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync",
            f"--listen-client-urls=http://127.0.0.1:{store}", f"--advertise-client-urls=http://127.0.0.1:{store}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-cluster=default=http://127.0.0.1:{peers}",
        ]))  # fmt: skip
        server = running.enter_context(_process(folder, [
            programs["kube-apiserver"], f"--etcd-servers=http://127.0.0.1:{store}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
            f"--secure-port={port}", f"--cert-dir={folder / 'certificates'}", "--service-cluster-ip-range=10.0.0.0/16",
            f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=RBAC", "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'service-accounts.key'}",
            f"--service-account-signing-key-file={folder / 'service-accounts.key'}",
        ]))  # fmt: skip
        authority = str(folder / "certificates" / "apiserver.crt")
        cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": authority}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        api = KubernetesApi(programs["kubectl"], folder)
        _await_ready(api, server, folder / "kube-apiserver.log")
        yield api


@contextmanager
def _process(folder: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{Path(command[0]).name}.log").open("wb") as log, \
            subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _await_ready(api: KubernetesApi, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        try:
            api.kubectl("get --raw /readyz")
        except KubernetesError:
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise KubernetesError(f"kube-apiserver does not serve: {log.read_text()[-2000:]}") from None
            time.sleep(0.5)
        else:
            return
