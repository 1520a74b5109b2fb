"""Invalid values are rejected before an installation, by messages that name them."""

from __future__ import annotations

import re

import pytest

from tests.unit.deploy.chart import CHART, Chart, HelmError, one

SHARED = "serving.mode=adaptive,groups.both.replicas=2"
GROUPS = (
    "serving.mode=colocated,serving.tensorParallelSize=4,groups.prefill.replicas=0,groups.decode.replicas=0,"
    "groups.both.replicas=1,groups.both.places.prefill=2,groups.both.places.decode=2"
)
GATEWAY = "gateway.enabled=true,gateway.parentRefs[0].name=public"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("serving.mode=both", r"'/serving/mode': value must be one of 'disaggregated', 'colocated', 'adaptive'"),
        ("serving.devise=cpu", r"'/serving': additional properties 'devise' not allowed"),
        ("groups.prefill.replicas=-1", r"'/groups/prefill/replicas': minimum: got -1, want 0"),
        ("groups.Big.replicas=1", r"'Big' does not match pattern"),
        ("model.path=models/x", r"'/model/path': 'models/x' does not match pattern"),
        ("ucx.NCCL_DEBUG=INFO", r"'NCCL_DEBUG' does not match pattern '\^UCX_"),
        ("services.grpc.port=70000", r"'/services/grpc/port': maximum: got 70,?000, want 65,?535"),
        ("auth.rayToken.existingSecret=My_Keys", r"'/auth/rayToken/existingSecret': 'My_Keys' does not match pattern"),
        ("auth.clusterToken.key=a/b", r"'/auth/clusterToken/key': 'a/b' does not match pattern"),
        ("groups.decode.gpu.resource=gpu", r"'/groups/decode/gpu/resource': 'gpu' does not match pattern"),
        ("groups.decode.gpu.product=NVIDIA H200", r"'/groups/decode/gpu/product': 'NVIDIA H200' does not match"),
        ("head.nodeSelector.pool=a b", r"'/head/nodeSelector/pool': 'a b' does not match pattern"),
        ("fabric.topologyKey=a b", r"'/fabric/topologyKey': 'a b' does not match pattern"),
        ("model.pvc.subPath=/x", r"'/model/pvc/subPath': '/x' does not match pattern"),
        ("image.tag=a b", r"'/image/tag': 'a b' does not match pattern"),
        (
            "router.resources.requests.memory=64Gi",
            r"router.resources: the request of memory, 64Gi, is above its limit, 8Gi: set both",
        ),
        (
            "groups.decode.resources.limits.cpu=500m",
            r"groups.decode.resources: the request of cpu, 8, is above .* 500m",
        ),
        (
            "extraVolumeMounts[0].name=ca,extraVolumeMounts[0].mountPath=/ca",
            r"extraVolumeMounts: ca is the name of none of extraVolumes",
        ),
        ("sharedMemory=much", r"'/sharedMemory': 'much' does not match pattern"),
        ("groups.prefill.replicas=0", r"no group has a place for a prefill worker: give groups.prefill.replicas"),
        ("groups.decode.maxReplicas=0", r"groups.decode.maxReplicas is less than replicas, 1"),
        ("groups.decode.maxReplicas=many", r"'/groups/decode/maxReplicas': got string, want null or integer"),
        ("autoscaling.idleTimeoutSeconds=0", r"'/autoscaling/idleTimeoutSeconds': minimum: got 0, want 1"),
        ("planner.mode=maybe", r"'/planner/mode': value must be one of 'off', 'dry-run', 'on'"),
        ("planner.workers=8", r"'/planner/workers': '?8'? does not match pattern|got number, want string"),
        ("serving.mode=adaptive", r"serving.mode adaptive needs pods with places of both roles: set groups.both"),
        ("groups.decode.gpu.count=0", r"groups.decode: the workers of a pod need 1 GPUs .*, gpu.count is 0"),
        ("serving.tensorParallelSize=0", r"'/serving/tensorParallelSize': minimum: got 0, want 1"),
        ("serving.decodeTensorParallelSize=2", r"groups.decode: the workers of a pod need 2 GPUs .*, gpu.count is 1"),
        (f"{GROUPS},serving.prefillTensorParallelSize=2", r"serving.prefillTensorParallelSize is for serving.mode"),
        ("serving.prefillPipelineSize=0", r"'/serving/prefillPipelineSize': minimum: got 0, want 1"),
        ("serving.prefillPipelineSize=2", r"groups.prefill: the workers of a pod need 2 GPUs .*, gpu.count is 1"),
        (f"{GROUPS},serving.prefillPipelineSize=2", r"serving.prefillPipelineSize is for serving.mode disaggregated"),
        ("serving.prefillPipelineSize=2,planner.mode=on", r"serving.prefillPipelineSize excludes planner.mode on"),
        (
            "serving.prefillPipelineSize=2,serving.draft=/models/x",
            r"serving.prefillPipelineSize excludes serving.draft",
        ),
        ("serving.kvTiers.hostGib=-1", r"'/serving/kvTiers/hostGib': minimum: got -1, want 0"),
        ("serving.kvTiers.diskHostPath=/kv", r"serving.kvTiers.diskHostPath needs serving.kvTiers.diskGib"),
        (
            "serving.kvTiers.hostGib=9,serving.prefillTensorParallelSize=2,groups.prefill.gpu.count=2",
            r"serving.kvTiers is for workers of one GPU",
        ),
        ("serving.prefillContextParallelSize=0", r"'/serving/prefillContextParallelSize': minimum: got 0, want 1"),
        ("serving.prefillContextParallelSize=2", r"groups.prefill: the workers of a pod need 2 GPUs"),
        (
            "serving.prefillContextParallelSize=2,planner.mode=on",
            r"prefillContextParallelSize excludes planner.mode on",
        ),
        (
            "serving.prefillContextParallelSize=2,serving.prefillTensorParallelSize=2",
            r"serving.prefillContextParallelSize excludes prefill workers that divide the model",
        ),
        (
            "serving.prefillContextParallelSize=2,serving.prefillPipelineSize=2",
            r"serving.prefillContextParallelSize excludes prefill workers that divide the model",
        ),
        (
            "serving.prefillPipelineSize=2,serving.speculate=mtp",
            r"serving.prefillPipelineSize excludes serving.speculate mtp",
        ),
        (
            f"{GROUPS},groups.both.gpu.count=7",
            r"groups.both: the workers of a pod need 8 GPUs .*, gpu.count is 7",
        ),
        ("drain.seconds=150", r"drain.gracePeriodSeconds \(180\) has to be at least 60 more than drain.seconds"),
        ("model.source=pvc", r"model.source pvc needs model.pvc.claimName"),
        ("model.source=hostPath", r"model.source hostPath needs model.hostPath"),
        ("model.source=init", r"model.source init needs model.init.command"),
        (
            "model.source=hostPath,model.hostPath=/srv,model.path=/srv/x",
            r"model.path /srv/x is not below model.mountPath",
        ),
        ("model.source=hostPath,model.hostPath=/srv,model.path=/models-2/x", r"model.path /models-2/x is not below"),
        ("hugepages.size=2Mi", r"hugepages.size and hugepages.amount need each other"),
        ("hugepages.amount=4Gi", r"hugepages.size and hugepages.amount need each other"),
        ("networkPolicy.kvPorts.first=30000", r"networkPolicy.kvPorts.first is above last"),
        ("rdma.enabled=true,rdma.hostNetwork=true", r"rdma.hostNetwork needs networkPolicy.nodes, the hosts"),
        ("planner.mode=on,planner.workers=4:2", r"planner.workers: 4:2 is no range, its minimum is above its maximum"),
        (f"{SHARED},planner.mode=on", r"planner.mode on needs planner.workers where serving.mode is adaptive"),
        ("router.replicas=0", r"'/router/replicas': minimum: got 0, want 1"),
        ("router.replica=2", r"'/router': additional properties 'replica' not allowed"),
        ("router.replicas=2,router.workersOutliveSeconds=0", r"router.replicas 2 needs router.workersOutliveSeconds"),
        (
            "router.replicas=2,monitoring.serviceMonitor.enabled=true,monitoring.serviceMonitor.scrape=processes",
            r"monitoring.serviceMonitor.scrape processes knows one router",
        ),
        ("ingress.enabled=true", r"ingress.enabled needs ingress.host"),
        ("ingress.enabled=true,ingress.host=a.b,ingress.grpcHost=a.b", r"ingress.grpcHost has to be another name"),
        ("gateway.enabled=true", r"gateway.enabled needs gateway.parentRefs"),
        (f"{GATEWAY},gateway.grpcHostnames={{g.b}}", r"gateway.grpcHostnames needs gateway.hostnames: without"),
        (f"{GATEWAY},gateway.hostnames={{a.b}},gateway.grpcHostnames={{a.b}}", r"a.b is one of gateway.hostnames, too"),
        (f"{GATEWAY},gateway.hostnames={{*.b}},gateway.grpcHostnames={{g.b}}", r"g.b is one of .*, too \(\*\.b\)"),
        (f"{GATEWAY},gateway.hostnames={{a.b}},gateway.grpcHostnames={{*.b}}", r"\*.b is one of .*, too \(a\.b\)"),
        ("auth.apiKeys.existingSecret=", r"auth.apiKeys.existingSecret is needed: without keys, every client"),
        ("tls.clientCaKey=ca.crt", r"tls.clientCaKey needs tls.existingSecret"),
        ("monitoring.serviceMonitor.enabled=true", r"monitoring.serviceMonitor needs auth.metricsKey.existingSecret"),
    ],
)
def test_what_is_wrong_is_named(chart: Chart, setting: str, message: str) -> None:
    with pytest.raises(HelmError) as refusal:
        chart.render("--set", setting)
    assert re.search(message, str(refusal.value)), refusal.value


def test_a_release_that_begins_with_a_digit_is_refused(chart: Chart) -> None:
    with pytest.raises(HelmError, match="release name 1st begins with a digit"):
        chart.run("template 1st", str(CHART), "--set", "auth.insecure=true")


def test_dangerous_settings_are_named_in_the_notes(chart: Chart) -> None:
    settings = "auth.insecure=true,ingress.enabled=true,ingress.host=a.b"
    notes = chart.run("install llm", str(CHART), "--dry-run=client", "--set", settings)
    assert "auth.insecure: every client that reaches the router is served" in notes
    assert "the ingress has no tlsSecret" in notes
    assert "can write into their memory" not in notes
    assert "rdma.enabled is false: KV pages between hosts are transferred over TCP" in notes
    assert "workersOutliveSeconds" not in notes[notes.index("NOTES:") :]
    settings += ",router.workersOutliveSeconds=0,networkPolicy.enabled=false"
    notes = chart.run("install llm", str(CHART), "--dry-run=client", "--set", settings)
    assert "any process that reaches workers' pods at ports 21000 to 21099 can write into their memory" in notes
    assert "workersOutliveSeconds is 0: whenever the router's pod ends, workers end" in notes


@pytest.mark.parametrize(("example", "worker"), [("cpu", "decode-0"), ("one-gpu", "both-0")])
def test_the_worker_in_the_notes_is_there(chart: Chart, example: str, worker: str) -> None:
    notes = chart.run("install llm", str(CHART), "--dry-run=client", "-f", str(CHART / "examples" / f"{example}.yaml"))
    assert f"tandem drain {worker} --restart" in notes


@pytest.mark.parametrize("example", ["one-gpu", "one-host-eight-gpus"])
def test_no_warning_about_a_network_that_carries_nothing(chart: Chart, example: str) -> None:
    notes = chart.run("install llm", str(CHART), "--dry-run=client", "-f", str(CHART / "examples" / f"{example}.yaml"))
    assert "rdma.enabled" not in notes[notes.index("NOTES:") :]


def test_an_ingress_has_a_host_for_grpc_of_its_own(chart: Chart) -> None:
    settings = "ingress.enabled=true,ingress.host=a.b,ingress.grpcHost=g.b,ingress.tlsSecret=cert"
    manifests = chart.render("--set", settings)
    for name, host in (("-http", "a.b"), ("-grpc", "g.b")):
        ingress = one(manifests, "Ingress", name)
        assert ingress["spec"]["tls"] == [{"secretName": "cert", "hosts": [host]}]
        assert ingress["spec"]["rules"][0]["host"] == host
    annotations = one(manifests, "Ingress", "-grpc")["metadata"]["annotations"]
    assert annotations == {"nginx.ingress.kubernetes.io/backend-protocol": "GRPC"}


def test_a_gateway_has_names_for_grpc_of_its_own(chart: Chart) -> None:
    """A Gateway with both kinds of route for one name accepts one of them and rejects the other."""
    manifests = chart.render("--set", f"{GATEWAY},gateway.hostnames={{a.b}},gateway.grpcHostnames={{g.b}}")
    assert one(manifests, "HTTPRoute")["spec"]["hostnames"] == ["a.b"]
    assert one(manifests, "GRPCRoute")["spec"]["hostnames"] == ["g.b"]
    for names in (",gateway.hostnames={a.b}", ""):
        assert {manifest["kind"] for manifest in chart.render("--set", GATEWAY + names)}.isdisjoint({"GRPCRoute"})
