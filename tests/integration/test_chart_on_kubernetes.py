"""A Kubernetes API server accepts the chart and the manifests for kubectl; helm installs, upgrades and removes them."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.kubernetes_api import KubernetesApi, KubernetesError, running_api
from tests.soak import soak
from tests.unit.deploy.chart import CHART, EXAMPLES, ONE_POD, ROOT, Chart, Manifest, one

CRDS = "TANDEM_CRDS"
"""The environment variable for a folder with the definitions of Gateway API and of the Prometheus operator."""
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
"""Labels of a namespace that admits only pods of the Pod Security Standard `restricted`."""
KEYS = "auth.apiKeys.existingSecret=tandem-keys"
ONE_GROUP = "groups.prefill.replicas=0,groups.decode.replicas=0,groups.both.replicas=1"
HUB = f"{KEYS},model.source=hub,model.hub.id=org/tiny@v1,model.hub.token.existingSecret=huggingface"
VARIANTS = {
    "default": KEYS,
    "TLS": f"{KEYS},tls.existingSecret=llm-tls,tls.clientCaKey=ca.crt",
    "ingress": f"{KEYS},ingress.enabled=true,ingress.host=a.b,ingress.grpcHost=g.b,ingress.tlsSecret=cert",
    "gateway": f"{KEYS},gateway.enabled=true,gateway.parentRefs[0].name=public,gateway.hostnames={{a.b}}",
    "hub": HUB,
    "hub with a claim": f"{HUB},model.pvc.size=9Gi,model.pvc.storageClass=fast,model.hub.endpoint=https://h.b",
    "hub with a folder of the hosts": f"{HUB},model.hostPath=/srv/hub",
    "hub with an existing claim": f"{HUB},model.pvc.claimName=models,model.pvc.subPath=hub",
    "two routers": f"{KEYS},router.replicas=2,planner.mode=on,planner.workers=2:8",
    "autoscaling": f"{KEYS},groups.both.maxReplicas=2,groups.both.gpu.count=2,groups.prefill.maxReplicas=3",
    "spread": f"{KEYS},fabric.policy=spread,fabric.required=true,priorityClassName=serving",
    "host network": f"{KEYS},rdma.enabled=true,rdma.hostNetwork=true,networkPolicy.nodes[0].ipBlock.cidr=10.1.0.0/16",
    "tiers": f"{KEYS},serving.kvTiers.hostGib=1,serving.kvTiers.diskGib=200",
    "tiers on the hosts": f"{KEYS},serving.kvTiers.diskGib=200,serving.kvTiers.diskHostPath=/mnt/nvme",
    "metrics of processes": f"{KEYS},auth.metricsKey.existingSecret=k,monitoring.serviceMonitor.enabled=true,"
    "monitoring.serviceMonitor.scrape=processes,networkPolicy.monitoring[0].podSelector.matchLabels.app=prometheus",
    "load balancer": f"{KEYS},services.http.type=LoadBalancer,services.grpc.type=NodePort",
    "everything exists": f"{KEYS},serviceAccount.create=false,auth.rayToken.existingSecret=ray,"
    "networkPolicy.enabled=false,auth.clusterToken.existingSecret=cluster,podDisruptionBudget.enabled=false",
    "one pod": f"kubeRay.enabled=false,{ONE_GROUP},{KEYS},tls.existingSecret=llm-tls,serving.mode=colocated,"
    "hugepages.size=2Mi,hugepages.amount=4Gi,ucx.UCX_TLS=tcp,serving.kvTiers.diskGib=9,priorityClassName=serving",
}
"""Settings by what they are for."""
PRIVILEGED = {
    "many-hosts",
    "one-host-eight-gpus",
    "hub with a folder of the hosts",
    "host network",
    "tiers on the hosts",
}
"""Examples and variants with RDMA or folders of the host, which the standard `restricted` excludes."""
ARGUMENTS = {
    **{name: ("-f", str(CHART / "examples" / f"{name}.yaml")) for name in (*EXAMPLES, *ONE_POD)},
    **{name: ("--set", settings) for name, settings in VARIANTS.items()},
}
"""The arguments of helm by example and variant."""
numbers = itertools.count()


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    return Chart(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesApi]:
    """An API server that knows RayCluster, and what the folder of TANDEM_CRDS defines."""
    schema = json.loads(gzip.decompress((ROOT / "tests/unit/deploy/crds/raycluster-v1.json.gz").read_bytes()))
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "RayCluster", "listKind": "RayClusterList", "plural": "rayclusters", "singular": "raycluster"}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "rayclusters.ray.io"},
        "spec": {"group": "ray.io", "scope": "Namespaced", "names": names, "versions": [version]},
    }
    shared: list[Manifest] = [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "serving"},
            "value": 1000,
        },
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"},
    ]
    with running_api(tmp_path_factory.mktemp("kubernetes")) as server:
        if folder := os.environ.get(CRDS):
            server.kubectl("apply --server-side -f", folder)
        server.kubectl("apply --server-side --force-conflicts -f -", manifests=[definition, *shared])
        server.kubectl("wait --for=condition=Established --timeout=60s crd --all")
        yield server


@pytest.fixture
def namespace(api: KubernetesApi) -> str:
    """A new namespace for pods of the standard `restricted`."""
    name = f"serving-{next(numbers)}"
    labelled = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}}
    api.kubectl("create -f -", manifests=[labelled, account])
    return name


class Release:
    """A release of the chart in a namespace of the API server."""

    def __init__(self, chart: Chart, api: KubernetesApi, namespace: str, name: str = "llm") -> None:
        self._chart, self._api, self._namespace, self._name = chart, api, namespace, name

    def helm(self, command: str, *arguments: str) -> str:
        where = ("--namespace", self._namespace, "--kubeconfig", str(self._api.kubeconfig))
        return self._chart.run(command, self._name, *arguments, *where)

    def render(self, *arguments: str) -> list[Manifest]:
        text = self._chart.run("template", self._name, str(CHART), "--namespace", self._namespace, *arguments)
        return [manifest for manifest in yaml.safe_load_all(text) if manifest]

    def objects(self) -> dict[str, Manifest]:
        """Returns all objects with the labels of the release, by kind and name."""
        kinds = set(self._api.kubectl("api-resources --verbs=create,list --namespaced -o name").split()) - {"endpoints"}
        items = self._api.get(",".join(kinds), "-n", self._namespace, "-l", f"app.kubernetes.io/instance={self._name}")
        return {f"{item['kind']}/{item['metadata']['name']}": item for item in items["items"]}


def names(manifests: list[Manifest]) -> set[str]:
    return {f"{manifest['kind']}/{manifest['metadata']['name']}" for manifest in manifests}


def secrets(objects: dict[str, Manifest]) -> dict[str, dict[str, str]]:
    """Returns the data of the secrets by their names."""
    return {item["metadata"]["name"]: item["data"] for item in objects.values() if item["kind"] == "Secret"}


def templates(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Yields the pods that KubeRay and the controller of Deployments would create."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        found = {"head": spec["headGroupSpec"]} if "headGroupSpec" in spec else {}
        found |= {group["groupName"]: group for group in spec.get("workerGroupSpecs", ())}
        found |= {"pod": spec} if manifest["kind"] == "Deployment" else {}
        for name, group in found.items():
            template = group["template"]
            yield {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
                   "metadata": {"name": name, **template["metadata"]}}  # fmt: skip


def skip_unknown(api: KubernetesApi, manifests: list[Manifest]) -> None:
    served = api.kubectl("api-versions").split()
    missing = {manifest["apiVersion"] for manifest in manifests}.difference(served)
    if missing:
        pytest.skip(f"{', '.join(sorted(missing))}: set {CRDS} to a folder with the definitions")


@pytest.mark.parametrize("variant", [pytest.param(name, marks=soak if name in VARIANTS else ()) for name in ARGUMENTS])
def test_each_variant_is_installed_and_removed(chart: Chart, api: KubernetesApi, namespace: str, variant: str) -> None:
    """Neither the manifests nor the pods of them are refused, and none causes a warning."""
    release = Release(chart, api, namespace)
    manifests = release.render(*ARGUMENTS[variant])
    skip_unknown(api, manifests)
    if variant in PRIVILEGED:
        api.kubectl("label --overwrite namespace", namespace, *(f"{label}=privileged" for label in RESTRICTED))
    api.kubectl("apply --dry-run=server -n", namespace, "-f", "-", manifests=manifests)
    release.helm("install", str(CHART), *ARGUMENTS[variant])
    assert release.objects().keys() == names(manifests)
    api.kubectl("create --dry-run=server -n", namespace, "-f", "-", manifests=templates(manifests))
    release.helm("uninstall")
    assert {name.partition("/")[0] for name in release.objects()} <= {"PersistentVolumeClaim"}


@pytest.mark.parametrize("name", ["true", "v1.2", "t" * 53])
def test_every_name_is_a_string(chart: Chart, api: KubernetesApi, namespace: str, name: str) -> None:
    """YAML reads `true` and `1` as other types, `*.a.b` as an alias; names of Services are short and have no dots."""
    gpu = {"count": 2, "resource": "nvidia.com/gpu", "product": ""}
    values = {
        "groups": {"true": {"replicas": 2, "places": {"prefill": 1, "decode": 1}, "gpu": gpu}},
        "auth": {"apiKeys": {"existingSecret": "1"}, "metricsKey": {"existingSecret": "2", "key": "3"}},
        "image": {"pullSecrets": ["4"]},
        "ingress": {"enabled": True, "host": "*.a.b", "grpcHost": "*.g.b", "className": "5", "tlsSecret": "6"},
        "model": {"source": "pvc", "pvc": {"claimName": "7", "subPath": "8"}},
        "tls": {"existingSecret": "9", "clientCaKey": "10"},
        "podDisruptionBudget": {"protectRouter": True},
    }
    release = Release(chart, api, namespace, name)
    arguments = [word for key, value in values.items() for word in ("--set-json", f"{key}={json.dumps(value)}")]
    release.helm("install", str(CHART), *arguments)


@pytest.mark.parametrize("file", sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml")), ids=lambda file: file.stem)
def test_kubectl_applies_the_manifests_of_the_quick_start(api: KubernetesApi, namespace: str, file: Path) -> None:
    api.kubectl("apply -n", namespace, "-f", str(file))
    again = api.kubectl("apply -n", namespace, "-f", str(file)).splitlines()
    assert again
    assert all(line.endswith(" unchanged") for line in again), again
    pods = templates(list(yaml.safe_load_all(file.read_text())))
    api.kubectl("create --dry-run=server -n", namespace, "-f", "-", manifests=pods)


def test_an_upgrade_keeps_tokens_and_changes_everything_else(chart: Chart, api: KubernetesApi, namespace: str) -> None:
    """No field that an upgrade changes is one that Kubernetes does not let change."""
    release = Release(chart, api, namespace)
    releases = [
        KEYS,
        f"{KEYS},image.tag=v2,router.replicas=2,groups.prefill.replicas=3,groups.decode.maxReplicas=4,services.http.port=81,"
        "services.http.type=LoadBalancer,tls.existingSecret=llm-tls,networkPolicy.kvPorts.last=21010,hugepages.size=2Mi,"
        "hugepages.amount=4Gi,monitoring.dashboards.enabled=true,ingress.enabled=true,ingress.host=a.b",
        f"{HUB},{ONE_GROUP},kubeRay.enabled=false,serving.mode=colocated,model.pvc.size=9Gi",
        f"{KEYS},{ONE_GROUP},kubeRay.enabled=false,serving.mode=adaptive,image.tag=v2,groups.both.gpu.count=2",
    ]
    claim = "PersistentVolumeClaim/llm-tandem-models"
    tokens = []
    for settings in releases:
        release.helm("upgrade", str(CHART), "--install", "--set", settings)
        found = release.objects()
        assert found.keys() - {claim} == names(release.render("--set", settings)) - {claim}
        images = {box["image"] for pod in templates(list(found.values())) for box in pod["spec"]["containers"]}
        assert images == {"tandem:v2" if "image.tag=v2" in settings else "tandem:0.1.0"}
        tokens.append(secrets(found))
    assert tokens[0] == tokens[1]
    release.helm("rollback", "1")
    assert secrets(release.objects()) == tokens[0]
    release.helm("upgrade", str(CHART), "--set", f"{KEYS},auth.clusterToken.key=other")
    first, then = tokens[0], secrets(release.objects())
    assert then["llm-tandem-ray-token"] == first["llm-tandem-ray-token"]
    assert len(then["llm-tandem-cluster-token"]["other"]) == len(first["llm-tandem-cluster-token"]["token"]) > 64
    release.helm("uninstall")
    assert release.objects().keys() == {claim}
    release.helm("install", str(CHART), "--set", f"{HUB},model.pvc.size=9Gi")


def test_an_unknown_field_is_refused(chart: Chart, api: KubernetesApi, namespace: str) -> None:
    manifests = Release(chart, api, namespace).render("--set", KEYS)
    one(manifests, "RayCluster")["spec"]["workerGroupSpecs"][0]["template"]["spec"]["nodeSelektor"] = {}
    with pytest.raises(KubernetesError, match="nodeSelektor"):
        api.kubectl("apply --dry-run=server -n", namespace, "-f", "-", manifests=manifests)


def test_a_users_variables_replace_the_charts(chart: Chart, api: KubernetesApi, namespace: str) -> None:
    """A RayCluster with a variable twice in a container is refused."""
    variables = {name: [{"name": "RAY_worker_niceness", "value": name}] for name in ("everywhere", "prefill")}
    both = {"UCX_TCP_PORT_RANGE": "1-2", "UCX_NET_DEVICES": "eth0"}
    values = {
        "extraEnv": variables["everywhere"],
        "groups.prefill.env": variables["prefill"],
        "ucx": both,
        "rdma.netDevices": "eth1",
    }
    arguments = [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
    Release(chart, api, namespace).helm("install", str(CHART), "--set", KEYS, *arguments)
    (cluster,) = api.get("rayclusters", "-n", namespace)["items"]
    found = {
        pod["metadata"]["name"]: {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
        for pod in templates([cluster])
    }
    assert {name: env["RAY_worker_niceness"] for name, env in found.items()} == {
        "head": "everywhere",
        "router": "everywhere",
        "prefill": "prefill",
        "decode": "everywhere",
    }
    assert both.items() <= found["decode"].items()
