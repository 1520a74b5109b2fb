"""Kubernetes and KubeRay accept the rendered manifests, and the examples render their golden files."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from tandem.cluster.supervision.roles import Slot, bundle
from tandem.protocol.messages import Role
from tests.unit.deploy.chart import CHART, EXAMPLES, NAMESPACE, ROOT, Chart, Manifest, containers, one, pods

HERE = Path(__file__).parent
KUBERNETES = "1.34"
"""The Kubernetes version whose schemas validate the manifests."""
NOT_KUBERNETES = ("ray.io/", "monitoring.coreos.com/", "gateway.networking.k8s.io/")
UPDATE = "UPDATE_GOLDEN"
"""The environment variable that makes the test write the golden files."""


def strict(schema: Any) -> Any:
    """Returns the schema for Kubernetes' strict field validation, which rejects unknown fields."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    free = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not free:
        inside["additionalProperties"] = False
    return inside


@pytest.fixture(scope="module")
def ray_cluster() -> jsonschema.Draft7Validator:
    raw = gzip.decompress((HERE / "crds" / "raycluster-v1.json.gz").read_bytes())
    schema = json.loads(raw)
    schema["properties"]["spec"] = strict(schema["properties"]["spec"])
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize("example", EXAMPLES)
def test_lint_finds_nothing(chart: Chart, example: str) -> None:
    assert "0 chart(s) failed" in chart.run("lint --strict", str(CHART), "-f", str(CHART / f"examples/{example}.yaml"))


@pytest.mark.parametrize("example", EXAMPLES)
def test_kubernetes_accepts_it(chart: Chart, example: str) -> None:
    judged = [document for document in chart.example(example) if not document["apiVersion"].startswith(NOT_KUBERNETES)]
    for manifest in judged:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    assert {"Service", "Secret", "ServiceAccount", "NetworkPolicy"} <= {document["kind"] for document in judged}


@pytest.mark.parametrize("example", EXAMPLES)
def test_kuberay_accepts_it(chart: Chart, example: str, ray_cluster: jsonschema.Draft7Validator) -> None:
    cluster = one(chart.example(example), "RayCluster")
    ray_cluster.validate(cluster)
    for group in pods(chart.example(example)).values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_ray_is_the_pinned_one(chart: Chart) -> None:
    spec = one(chart.example("cpu"), "RayCluster")["spec"]
    assert f"ray=={spec['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_kuberay_would_refuse_a_misspelt_field(chart: Chart, ray_cluster: jsonschema.Draft7Validator) -> None:
    cluster = json.loads(json.dumps(one(chart.example("cpu"), "RayCluster")))
    cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["nodeSelektor"] = {}
    with pytest.raises(jsonschema.ValidationError, match="nodeSelektor"):
        ray_cluster.validate(cluster)


@pytest.mark.parametrize("example", EXAMPLES)
def test_no_container_may_more_than_it_needs(chart: Chart, example: str) -> None:
    for name, group in pods(chart.example(example)).items():
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["automountServiceAccountToken"] is False
        writable = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
        assert {"shm", "tmp", "cache"} <= writable
    for name, container in containers(chart.example(example)):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"], name
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"]["drop"] == ["ALL"]
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert "model" not in mounts or mounts["model"].get("readOnly") or container["name"] == "model"
        for env in container.get("env", []):
            assert (
                ("TOKEN" not in env["name"] and "KEY" not in env["name"])
                or "valueFrom" in env
                or env["name"].endswith("_FILE")
            ), env["name"]


def test_rdma_reaches_the_workers_alone(chart: Chart) -> None:
    for name, container in containers(chart.example("many-hosts")):
        works = name in {"prefill", "decode"} and container["name"] == "ray-worker"
        limits = container.get("resources", {}).get("limits", {})
        assert ("rdma/ib" in limits) is works
        assert ("hugepages-2Mi" in limits) is works
        assert (container["securityContext"]["capabilities"].get("add") == ["IPC_LOCK"]) is works
        env = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
        assert (env.get("UCX_NET_DEVICES") == "mlx5_0:1") is works
        assert (env.get("NCCL_IB_HCA") == "mlx5") is works


def test_workers_on_their_hosts_network_reach_head_and_router(chart: Chart) -> None:
    """Other pods know them by their hosts' addresses only."""
    hosts = {"ipBlock": {"cidr": "10.1.0.0/16"}}
    settings = "rdma.enabled=true,rdma.hostNetwork=true,networkPolicy.nodes[0].ipBlock.cidr=10.1.0.0/16"
    policy = one(chart.render("--set", settings), "NetworkPolicy", "-tandem")
    kubernetes_validate.validate(policy, KUBERNETES, strict=True)
    assert hosts in policy["spec"]["ingress"][0]["from"]
    chart.render("--set", "rdma.enabled=true,rdma.hostNetwork=true,networkPolicy.enabled=false")


def admits(rule: dict[str, Any], labels: dict[str, str], port: int) -> bool:
    """Returns True if a NetworkPolicy's rule admits a pod with these labels to this TCP port."""
    selectors = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer]
    ports = [(allowed["port"], allowed.get("endPort", allowed["port"])) for allowed in rule["ports"]]
    return any(first <= port <= last for first, last in ports) and any(
        selector.items() <= labels.items() for selector in selectors
    )


def test_none_but_workers_reach_the_ports_where_ucx_listens(chart: Chart) -> None:
    manifests = chart.render("--set", "networkPolicy.kvPorts.first=22000,networkPolicy.kvPorts.last=22009")
    rules = one(manifests, "NetworkPolicy", "-tandem")["spec"]["ingress"]
    groups = pods(manifests)
    everyone = {
        name: groups[name]["template"]["metadata"]["labels"] for name in ("head", "prefill", "decode", "router")
    }
    for port, allowed in ((21999, set(everyone)), (22000, {"prefill", "decode"}), (22009, {"prefill", "decode"})):
        reach = {name for name, labels in everyone.items() if any(admits(rule, labels, port) for rule in rules)}
        assert reach == allowed, port
    assert {name for name, labels in everyone.items() if any(admits(rule, labels, 22010) for rule in rules)} == set(
        everyone
    )
    for name, container in containers(manifests):
        env = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
        works = name in {"prefill", "decode"} and container["name"] == "ray-worker"
        assert (env.get("UCX_TCP_PORT_RANGE") == "22000-22009") is works
    settings = "monitoring.serviceMonitor.enabled=true,monitoring.serviceMonitor.scrape=processes"
    peers = "networkPolicy.monitoring[0].podSelector.matchLabels.app=prometheus,auth.metricsKey.existingSecret=k"
    scrapers = one(chart.render("--set", f"{settings},{peers}"), "NetworkPolicy", "-scrapers")["spec"]["ingress"]
    assert not any(admits(rule, {"app": "prometheus"}, 21000) for rule in scrapers)
    assert any(admits(rule, {"app": "prometheus"}, 40000) for rule in scrapers)


@pytest.mark.parametrize(("policy", "key"), [("together", "podAffinity"), ("spread", "topologySpreadConstraints")])
def test_prefill_and_decode_share_a_fabric(chart: Chart, policy: str, key: str) -> None:
    groups = pods(chart.render("--set", f"fabric.policy={policy},fabric.topologyKey=rack,fabric.required=true"))
    for name in ("prefill", "decode"):
        labels = groups[name]["template"]["metadata"]["labels"]
        spec = groups[name]["template"]["spec"]
        constraints = spec.get("affinity", {}).get(key) or spec[key]
        terms = constraints["requiredDuringSchedulingIgnoredDuringExecution"] if policy == "together" else constraints
        assert [term["topologyKey"] for term in terms] == ["rack"]
        assert terms[0]["labelSelector"]["matchLabels"].items() <= labels.items()
    assert key not in str(groups["router"])


def test_rays_autoscaler_knows_what_each_pod_would_bring(chart: Chart) -> None:
    """Ray's autoscaler parses the resources: a pending worker of a role finds the group with places for it."""
    cluster = one(chart.example("many-hosts"), "RayCluster")
    assert cluster["spec"]["enableInTreeAutoscaling"]
    cluster = {**cluster, "metadata": {**cluster["metadata"], "namespace": NAMESPACE}}
    kinds = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    limits = {
        name: (kind["min_workers"], kind["max_workers"], kind["resources"])
        for name, kind in kinds.items()
        if name in {"prefill", "decode"}
    }
    assert limits["prefill"][:2] == (4, 8)
    assert limits["decode"][:2] == (8, 16)
    assert limits["prefill"][2].items() >= {"prefill": 2, "GPU": 2}.items()
    assert limits["decode"][2].items() >= {"decode": 1, "GPU": 1}.items()
    for role in ("prefill", "decode"):
        slot = Slot(f"{role}-9", Role(role), "cuda")
        assert all(limits[role][2][resource] >= count for resource, count in bundle(slot).items())
    assert kinds["router"]["max_workers"] == 1
    assert not one(chart.example("one-gpu"), "RayCluster")["spec"]["enableInTreeAutoscaling"]


def test_only_the_autoscaler_may_talk_to_kubernetes(chart: Chart) -> None:
    manifests = chart.example("many-hosts")
    options = one(manifests, "RayCluster")["spec"]["autoscalerOptions"]
    assert "kube-api" in {mount["name"] for mount in options["volumeMounts"]}
    assert options["securityContext"]["readOnlyRootFilesystem"]
    assert "kube-api" in {volume["name"] for volume in pods(manifests)["head"]["template"]["spec"]["volumes"]}
    for name, container in containers(manifests):
        assert "kube-api" not in {mount["name"] for mount in container["volumeMounts"]}, name


def test_a_group_may_begin_with_nothing(chart: Chart) -> None:
    assert "both" not in pods(chart.render())
    group = pods(chart.render("--set", "groups.both.maxReplicas=2,groups.both.gpu.count=2"))["both"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (0, 0, 2)


def test_dashboards_and_rules_are_the_tested_ones(chart: Chart, tmp_path: Path) -> None:
    """Renders from a packaged chart, which must contain the files itself."""
    chart.run("package", str(CHART), "--destination", str(tmp_path))
    package = next(tmp_path.glob("tandem-*.tgz"))
    values = str(CHART / "examples" / "many-hosts.yaml")
    manifests = list(yaml.safe_load_all(chart.run("template", "llm", str(package), "-f", values)))
    rules = one(manifests, "PrometheusRule")["spec"]
    assert rules == yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())
    inside: dict[str, str] = {}
    for manifest in manifests:
        if manifest and manifest["kind"] == "ConfigMap":
            inside |= manifest["data"]
    assert inside == {path.name: path.read_text() for path in (ROOT / "deploy/dashboards").glob("*.json")}
    assert inside


def stable(manifests: tuple[Manifest, ...]) -> str:
    """Returns the manifests without random values and separate files."""
    shown = []
    for manifest in manifests:
        copy = json.loads(json.dumps(manifest))
        if copy["kind"] in {"Secret", "ConfigMap"}:
            copy["data"] = dict.fromkeys(copy["data"], "…")
        if copy["kind"] == "PrometheusRule":
            copy["spec"] = "…"
        shown.append(copy)
    shown.sort(key=lambda document: (document["kind"], document["metadata"]["name"]))
    return yaml.safe_dump_all(shown, allow_unicode=True, width=120)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_give_what_they_gave(chart: Chart, example: str) -> None:
    golden = HERE / "golden" / f"{example}.yaml"
    now = stable(chart.example(example))
    if os.environ.get(UPDATE):
        golden.write_text(now)
    assert now == golden.read_text(), f"look at the difference; if it is meant, run with {UPDATE}=1 and commit"
