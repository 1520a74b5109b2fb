"""The chart without KubeRay, its manifests for kubectl in deploy/kubernetes, and models of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from tandem.cli.main import app
from tandem.cli.models.default_model import NAME
from tandem.cli.models.hub_model import HubModel, hub_model
from tests.unit.deploy.chart import CHART, ONE_POD, ROOT, Chart, HelmError, Manifest, containers, driver, one, pods
from tests.unit.deploy.test_chart_manifests import KUBERNETES, UPDATE
from tests.unit.deploy.test_chart_refusals import GROUPS

FOLDER = ROOT / "deploy" / "kubernetes"
HEADS = {
    "one-pod-cpu": """\
# Tandem in one pod on CPUs, with the small model that is in the CPU image:
#
#   docker build -f deploy/Dockerfile --target cpu -t REGISTRY/tandem:0.1.0-cpu .
#   docker push REGISTRY/tandem:0.1.0-cpu
#   sed 's|image: tandem:|image: REGISTRY/tandem:|' deploy/kubernetes/cpu.yaml | kubectl apply -f -
#   kubectl wait --for=condition=available --timeout=10m deployment/tandem
#   kubectl port-forward service/tandem-http 8000:80
#
# No registry has the image `tandem`: REGISTRY is one of yours that the nodes can pull from.
# Every client that reaches the Service is served. Made of deploy/helm/tandem/examples/one-pod-cpu.yaml.
""",
    "one-pod-gpu": """\
# Tandem in one pod on one GPU, with Qwen/Qwen3-8B of the Hugging Face Hub, which is downloaded once, into a claim:
#
#   docker build -f deploy/Dockerfile -t REGISTRY/tandem:0.1.0 .
#   docker push REGISTRY/tandem:0.1.0
#   sed 's|image: tandem:|image: REGISTRY/tandem:|' deploy/kubernetes/gpu.yaml | kubectl apply -f -
#   kubectl logs -f deployment/tandem -c model                              the download
#   kubectl wait --for=condition=available --timeout=60m deployment/tandem
#   kubectl port-forward service/tandem-http 8000:80
#
# No registry has the image `tandem`: REGISTRY is one of yours that the nodes can pull from.
# Every client that reaches the Service is served. Made of deploy/helm/tandem/examples/one-pod-gpu.yaml.
""",
}
"""The comment at the head of each file, by the example of which it is made."""
HELM_LABELS = ("app.kubernetes.io/managed-by", "helm.sh/chart")
HUB = "model.source=hub,model.hub.id=org/tiny@v1"
SHARED_DOWNLOADS = "model.pvc.claimName=models,model.pvc.subPath=hub"


def for_kubectl(manifests: list[Manifest]) -> str:
    """Returns the manifests without what only helm reads."""
    shown = []
    for manifest in manifests:
        copy = json.loads(json.dumps(manifest))
        for label in HELM_LABELS:
            copy["metadata"]["labels"].pop(label)
        copy["metadata"].pop("annotations", None)
        shown.append(copy)
    shown.sort(key=lambda document: (document["kind"], document["metadata"]["name"]))
    return yaml.safe_dump_all(shown, allow_unicode=True, width=120)


def quick_start(chart: Chart, example: str) -> list[Manifest]:
    text = chart.run("template", "tandem", str(CHART), "-f", str(CHART / "examples" / f"{example}.yaml"))
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def options(container: Manifest) -> dict[str, Any]:
    """Returns the options of the container's `tandem up`, parsed by typer."""
    program, name, *rest = container["command"]
    assert (program, name) == ("tandem", "up")
    group: Any = typer.main.get_command(app)
    return dict(group.commands[name].make_context(name, rest).params)


def variables(container: Manifest) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container.get("env", ())}


@pytest.mark.parametrize("example", ONE_POD)
def test_kubectl_alone_installs_it(chart: Chart, example: str) -> None:
    """The files in deploy/kubernetes are what the chart renders, with kinds that every cluster knows."""
    linted = chart.run("lint --strict", str(CHART), "-f", str(CHART / "examples" / f"{example}.yaml"))
    assert "0 chart(s) failed" in linted
    manifests = quick_start(chart, example)
    assert {manifest["kind"] for manifest in manifests} <= {
        "Deployment",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "Service",
        "ServiceAccount",
    }
    for manifest in manifests:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    file = FOLDER / f"{example.removeprefix('one-pod-')}.yaml"
    now = HEADS[example] + for_kubectl(manifests)
    if os.environ.get(UPDATE):
        file.write_text(now)
    assert now == file.read_text(), f"look at the difference; if it is meant, run with {UPDATE}=1 and commit"
    assert str(file.relative_to(ROOT)) in HEADS[example]
    for service, port in re.findall(r"port-forward service/(\S+) \d+:(\d+)", HEADS[example]):
        assert [entry["port"] for entry in one(manifests, "Service", service)["spec"]["ports"]] == [int(port)]
    assert one(manifests, "Deployment")["metadata"]["name"] == "tandem"


@pytest.mark.parametrize("example", ONE_POD)
def test_services_find_the_pod_and_its_ports(chart: Chart, example: str) -> None:
    manifests = quick_start(chart, example)
    deployment = one(manifests, "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    named = {port["name"] for port in deployment["template"]["spec"]["containers"][0]["ports"]}
    services = [manifest["spec"] for manifest in manifests if manifest["kind"] == "Service"]
    assert len(services) == 2
    for service in services:
        assert service["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["ports"]} <= named
    for policy in (manifest["spec"] for manifest in manifests if manifest["kind"] == "NetworkPolicy"):
        ports = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
        assert {port for port in ports if isinstance(port, str)} <= named


def test_one_pod_starts_its_own_ray_with_the_workers_of_its_group(chart: Chart) -> None:
    container = one(quick_start(chart, "one-pod-cpu"), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    chosen = options(container)
    assert (chosen["address"], chosen["prefill"], chosen["decode"], chosen["device"]) == ("", 1, 1, "cpu")
    assert not chosen["trusted_network"]
    assert Path(chosen["model"]) == Path("/opt/tandem/models") / NAME
    assert "RAY_AUTH_TOKEN" not in variables(container)
    container = one(quick_start(chart, "one-pod-gpu"), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert options(container)["workers"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("kubeRay.enabled=false", "set replicas of one group to 1, and of the others to 0; there are 2"),
        ("router.replicas=2", "router.replicas above 1 needs kubeRay.enabled"),
        ("rdma.enabled=true", "rdma and monitoring.serviceMonitor need kubeRay.enabled"),
        ("model.source=hub", "model.hub.id is the model of model.source hub: set both"),
        ("model.hub.id=org/tiny", "model.hub.id is the model of model.source hub: set both"),
        ("model.source=hub,model.hub.id=tiny", "'/model/hub/id': 'tiny' does not match pattern"),
        ("model.source=hub,model.hub.id=a/b:c.gguf", "'/model/hub/id': 'a/b:c.gguf' does not match pattern"),
        ("model.pvc.size=1Gi", "model.pvc.size creates a claim for the downloads of model.source hub"),
        (f"{HUB},{SHARED_DOWNLOADS},model.pvc.size=1Gi", "model.pvc.size creates a claim"),
        ("groups.decode.affinity.podAfinity.x=1", "additional properties 'podAfinity' not allowed"),
    ],
)
def test_what_does_not_fit_is_refused(chart: Chart, settings: str, message: str) -> None:
    one_pod = f"{GROUPS},serving.tensorParallelSize=1,groups.both.gpu.count=2,kubeRay.enabled=false,"
    whole = settings if settings.startswith(("kubeRay", "groups", "model")) else one_pod + settings
    with pytest.raises(HelmError, match=re.escape(message)):
        chart.render("--set", whole)


@pytest.mark.parametrize("place", ["", SHARED_DOWNLOADS, "model.hostPath=/srv/hub", "model.pvc.size=9Gi"])
def test_each_pod_downloads_the_model_before_it_serves_it(chart: Chart, place: str) -> None:
    token = "model.hub.token.existingSecret=hf,model.hub.endpoint=https://hub.example.com"
    manifests = chart.render("--set", ",".join(filter(None, (HUB, token, place))))
    assert hub_model(Path(options(driver(manifests))["model"])) == HubModel("org/tiny", "v1")
    for name, group in pods(manifests).items():
        pod = group["template"]["spec"]
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod}, KUBERNETES, strict=True
        )
        if name == "head":
            assert "initContainers" not in pod
            continue
        (fetch,) = pod["initContainers"]
        assert fetch["command"] == ["tandem", "models", "pull", "org/tiny@v1"]
        assert variables(fetch)["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
        assert variables(fetch)["HF_ENDPOINT"] == "https://hub.example.com"
        mounted = next(mount for mount in fetch["volumeMounts"] if mount["name"] == "model")
        assert variables(fetch)["HF_HOME"] == mounted["mountPath"]
        for container in pod["containers"][:-1]:
            assert "HF_TOKEN" not in variables(container)
            assert variables(container)["HF_HUB_OFFLINE"] == "1"
            assert variables(container)["HF_HOME"] == mounted["mountPath"]
            assert {**mounted, "readOnly": True} in container["volumeMounts"]
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "model")
        if "pvc" in place:
            claim = "models" if "claimName" in place else "llm-tandem-models"
            assert volume["persistentVolumeClaim"] == {"claimName": claim}
        else:
            assert ("hostPath" in volume, "emptyDir" in volume) == (bool(place), not place)
    assert ("PersistentVolumeClaim" in {manifest["kind"] for manifest in manifests}) == ("size" in place)


def test_the_values_of_the_deploy_page_render(chart: Chart, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations" / "deploy.md").read_text()
    (values,) = re.findall(r"```yaml\n(model:.*?)```", page, re.DOTALL)
    (secret, key) = re.findall(r"create secret generic (huggingface) --from-literal=(\w+)=", values)[0]
    file = tmp_path / "mine.yaml"
    file.write_text(values)
    manifests = chart.render("-f", str(CHART / "examples" / "many-hosts.yaml"), "-f", str(file))
    (fetch,) = pods(manifests)["prefill"]["template"]["spec"]["initContainers"]
    assert variables(fetch)["HF_TOKEN"] == {"secretKeyRef": {"name": secret, "key": key}}
    assert options(driver(manifests))["model"] == fetch["command"][-1]
    assert one(manifests, "PersistentVolumeClaim")["spec"]["resources"]["requests"]["storage"] in values


def test_every_container_of_tandem_has_the_users_environment_and_volumes(chart: Chart) -> None:
    proxy, volume = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}, {"name": "ca", "configMap": {"name": "ca"}}
    mount = {"name": "ca", "mountPath": "/etc/ssl/certs", "readOnly": True}
    lists = {"extraEnv": [proxy], "extraVolumes": [volume], "extraVolumeMounts": [mount]}
    settings = [word for name, value in lists.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
    manifests = chart.render(*settings, "--set", HUB)
    for _, container in containers(manifests):
        serves = container["name"] != "logs"
        assert (proxy in container["env"]) is serves
        assert (mount in container["volumeMounts"]) is (serves and container["name"] != "model")
    assert all(volume in group["template"]["spec"]["volumes"] for group in pods(manifests).values())


def test_a_users_affinity_comes_before_the_charts(chart: Chart) -> None:
    zone = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}
    mine = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": zone}}
    settings = [
        word
        for part in ("head", "router", "groups.prefill")
        for word in ("--set-json", f"{part}.affinity={json.dumps(mine)}")
    ]
    groups = pods(chart.render(*settings, "--set", "fabric.policy=together,router.replicas=2"))
    affinities = {name: group["template"]["spec"].get("affinity", {}) for name, group in groups.items()}
    assert affinities["head"] == mine
    assert affinities["router"].keys() == {"nodeAffinity", "podAntiAffinity"}
    assert affinities["prefill"].keys() == {"nodeAffinity", "podAffinity"}
    assert affinities["decode"].keys() == {"podAffinity"}
    term = {"weight": 1, "podAffinityTerm": {"topologyKey": "rack", "labelSelector": {"matchLabels": {"app": "x"}}}}
    own = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    groups = pods(
        chart.render("--set-json", f"groups.decode.affinity={json.dumps(own)}", "--set", "fabric.policy=together")
    )
    assert groups["decode"]["template"]["spec"]["affinity"] == own
