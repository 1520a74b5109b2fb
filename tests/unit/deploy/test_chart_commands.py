"""The pods' commands are accepted by the CLI, by `ray start`, and by `ClusterSettings`."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from ray.scripts import scripts as ray_scripts

from tandem.cli.main import app
from tandem.cli.observe.log_folder import log_root
from tandem.cluster.supervision.roles import GPU, offer
from tandem.net.security.credentials import check_guarded
from tandem.protocol.errors import InvalidArgument
from tandem.settings.cluster import ClusterSettings
from tandem.settings.options import read_options
from tandem.settings.planner import Limits, PlannerMode, PlannerSettings, Range
from tests.unit.deploy.chart import EXAMPLES, Chart, Manifest, containers, driver, one, pods
from tests.unit.deploy.test_chart_refusals import GROUPS

TANDEM: Any = typer.main.get_command(app)


def parsed(command: list[str]) -> tuple[str, dict[str, Any]]:
    """Returns name and options of a `tandem` command, parsed by typer."""
    program, name, *rest = command
    assert program == "tandem"
    return name, TANDEM.commands[name].make_context(name, rest).params


def ray_start(params: dict[str, str], *fixed: str) -> dict[str, Any]:
    """Returns the options that Ray parses from the shell command that KubeRay builds from `params`."""
    words = shlex.split(" ".join(f"--{name}={value}" for name, value in params.items()))
    return dict(ray_scripts.start.make_context("start", [*fixed, *words]).params)


@pytest.mark.parametrize("example", EXAMPLES)
def test_tandem_up_asks_for_the_places_that_pods_offer(chart: Chart, example: str) -> None:
    check_places(chart.example(example))


def test_workers_of_several_gpus_get_the_gpus_of_a_pod(chart: Chart) -> None:
    """A Ray bundle of a worker has all its GPUs, so that they are on one node."""
    manifests = chart.render("--set", f"{GROUPS},groups.both.gpu.count=8")
    assert parsed(driver(manifests)["command"])[1]["tensor_parallel_size"] == 4
    check_places(manifests)
    sizes = "serving.prefillTensorParallelSize=4,serving.decodeTensorParallelSize=2"
    manifests = chart.render("--set", f"{sizes},groups.prefill.gpu.count=4,groups.decode.gpu.count=2")
    options = parsed(driver(manifests)["command"])[1]
    assert (options["prefill_tensor_parallel_size"], options["decode_tensor_parallel_size"]) == (4, 2)
    check_places(manifests)


def test_prefill_workers_with_pipeline_stages_get_the_gpus_of_all_stages(chart: Chart) -> None:
    sizes = "serving.prefillTensorParallelSize=2,serving.prefillPipelineSize=3,groups.prefill.gpu.count=6"
    manifests = chart.render("--set", sizes)
    options = parsed(driver(manifests)["command"])[1]
    assert (options["prefill_tensor_parallel_size"], options["prefill_pipeline_size"]) == (2, 3)
    check_places(manifests)


def test_prefill_workers_that_divide_tokens_get_the_gpus_of_all_ranks(chart: Chart) -> None:
    sizes = "serving.prefillContextParallelSize=4,groups.prefill.gpu.count=4"
    manifests = chart.render("--set", sizes)
    assert parsed(driver(manifests)["command"])[1]["prefill_context_parallel_size"] == 4
    check_places(manifests)


def test_tiers_of_the_prefix_cache_lie_where_the_pods_may_write(chart: Chart) -> None:
    manifests = chart.render("--set-json", 'serving.kvTiers={"hostGib": 1.5, "diskGib": 200}')
    options = parsed(driver(manifests)["command"])[1]
    assert (options["kv_host_gib"], options["kv_disk_gib"]) == (1.5, 200)
    assert options["kv_disk_path"] == Path("/var/cache/tandem/kv")
    tiers = "serving.kvTiers.diskGib=200,serving.kvTiers.diskHostPath=/mnt/nvme"
    groups = pods(chart.render("--set", tiers))
    for name in ("prefill", "decode"):
        pod = groups[name]["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts["kv"] == "/var/cache/tandem/kv"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["kv"]["hostPath"] == {"path": "/mnt/nvme", "type": "Directory"}


def check_places(manifests: Sequence[Manifest]) -> None:
    """Checks that `tandem up` needs as many Ray resources as all pods have."""
    name, options = parsed(driver(manifests)["command"])
    assert name == "up"
    config = ClusterSettings.of(
        model=options["model"],
        mode=options["mode"],
        prefill=options["prefill"] or 1,
        decode=options["decode"] or 1,
        workers=options["workers"] or 1,
        device=options["device"],
        tensor_parallel_size=options["tensor_parallel_size"] or 1,
        prefill_tensor_parallel_size=options["prefill_tensor_parallel_size"],
        decode_tensor_parallel_size=options["decode_tensor_parallel_size"],
        pipeline_parallel_size=options["prefill_pipeline_size"],
        context_parallel_size=options["prefill_context_parallel_size"],
        ray_address=options["address"],
        places_timeout_s=options["places_timeout"],
        start_timeout_s=options["start_timeout"],
        grpc_port=options["grpc_port"],
        http_port=options["http_port"],
        metrics_port=options["metrics_port"],
        controller_port=options["controller_port"],
        outlive_s=options["workers_outlive"],
        cluster_name=options["cluster_name"],
        token="of-the-secret",
        log_format=options["log_format"],
    )
    offered: dict[str, float] = {}
    for group in pods(manifests).values():
        started = ray_start(group["rayStartParams"])
        places = {**json.loads(started["resources"]), GPU: started["num_gpus"] or 0}
        for resource, count in places.items():
            offered[resource] = offered.get(resource, 0) + count * group.get("replicas", 1)
    assert {resource: count for resource, count in offered.items() if count} == offer(config)


def test_answers_without_a_limit_are_bounded_as_values_say(chart: Chart) -> None:
    assert parsed(driver(chart.render())["command"])[1]["default_max_tokens"] is None
    rendered = chart.render("--set", "serving.defaultMaxTokens=1000")
    assert parsed(driver(rendered)["command"])[1]["default_max_tokens"] == 1000


def test_drafts_are_proposed_as_values_say(chart: Chart) -> None:
    assert parsed(driver(chart.render())["command"])[1]["speculate"] == "auto"
    rendered = chart.render("--set", "serving.speculate=draft,serving.draft=/models/heads")
    options = parsed(driver(rendered)["command"])[1]
    assert (options["speculate"], str(options["draft"])) == ("draft", "/models/heads")


def test_the_planner_is_asked_for_as_values_say(chart: Chart) -> None:
    assert parsed(driver(chart.render())["command"])[1]["planner"] == PlannerMode.OFF
    settings = "planner.mode=on,planner.windowSeconds=30,planner.workers=2:8,planner.decode=1:6"
    _, options = parsed(driver(chart.render("--set", settings))["command"])
    config = read_options(PlannerSettings, options)
    assert config == PlannerSettings(PlannerMode.ON, 30.0, Limits(decode=Range(1, 6), workers=Range(2, 8)))


def test_a_routers_pod_finds_the_workers_of_the_one_before(chart: Chart) -> None:
    _, options = parsed(driver(chart.render())["command"])
    assert (options["workers_outlive"], options["cluster_name"]) == (300.0, "llm-tandem")
    env = {variable["name"] for variable in driver(chart.render())["env"]}
    assert "TANDEM_CLUSTER_TOKEN_FILE" in env, "else nobody could take them over"
    _, options = parsed(driver(chart.render("--set", "router.workersOutliveSeconds=0"))["command"])
    assert (options["workers_outlive"], options["cluster_name"]) == (0.0, "tandem")


def test_two_routers_stand_beside_each_other(chart: Chart) -> None:
    manifests = chart.render("--set", "router.replicas=2")
    group = pods(manifests)["router"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)
    labels = group["template"]["metadata"]["labels"]
    (rule,) = group["template"]["spec"]["affinity"]["podAntiAffinity"].values()
    assert rule[0]["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()
    budget = one(manifests, "PodDisruptionBudget", "-router")["spec"]
    assert budget["minAvailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    controller = one(manifests, "Service", "-controller")["spec"]
    assert controller["publishNotReadyAddresses"] is False, "one that still starts answers nobody"
    alone = chart.render()
    assert "affinity" not in pods(alone)["router"]["template"]["spec"]
    assert one(alone, "Service", "-controller")["spec"]["publishNotReadyAddresses"] is True
    assert not [
        manifest
        for manifest in alone
        if manifest["metadata"]["name"].endswith("-router") and "Budget" in manifest["kind"]
    ]


@pytest.mark.parametrize("example", EXAMPLES)
def test_services_and_probes_meet_the_listeners(chart: Chart, example: str) -> None:
    manifests = chart.example(example)
    _, options = parsed(driver(manifests)["command"])
    router = driver(manifests)
    listeners = {port["name"]: port["containerPort"] for port in router["ports"]}
    assert listeners == {name: options[f"{name}_port"] for name in ("grpc", "http", "metrics", "controller")}
    for service in ("grpc", "http", "controller"):
        spec = one(manifests, "Service", f"-{service}")["spec"]
        assert all(port["targetPort"] in listeners for port in spec["ports"])
        assert spec["selector"].items() <= pods(manifests)["router"]["template"]["metadata"]["labels"].items()
    assert router["readinessProbe"]["grpc"] == {"port": listeners["grpc"], "service": "tandem.v1.Inference"}
    assert router["startupProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert router["livenessProbe"]["httpGet"] == {"path": "/live", "port": "http"}
    assert router["startupProbe"]["periodSeconds"] * router["startupProbe"]["failureThreshold"] == 3600
    address = next(env["value"] for env in router["env"] if env["name"] == "TANDEM_CONTROLLER")
    controller = one(manifests, "Service", "-controller")
    assert address == f"{controller['metadata']['name']}:{options['controller_port']}"


@pytest.mark.parametrize("example", EXAMPLES)
def test_workers_pods_drain_before_they_end(chart: Chart, example: str) -> None:
    workers = {name: group for name, group in pods(chart.example(example)).items() if name not in {"head", "router"}}
    assert workers
    for group in workers.values():
        spec = group["template"]["spec"]
        shell, flag, line = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, flag) == ("/bin/sh", "-c")
        execute, *command = shlex.split(line)
        assert execute == "exec"
        name, options = parsed(command)
        assert (name, options["node"]) == ("drain", "$POD_IP")
        assert options["grace"] + 60 <= spec["terminationGracePeriodSeconds"]
        env = {variable["name"] for variable in spec["containers"][0]["env"]}
        assert {"POD_IP", "TANDEM_CONTROLLER", "TANDEM_CLUSTER_TOKEN_FILE"} <= env


def test_the_routers_pod_stays_until_what_runs_has_ended(chart: Chart) -> None:
    manifests = chart.render("--set", "drain.routerSeconds=70")
    assert parsed(driver(manifests)["command"])[1]["stop_grace"] == 70
    spec = pods(manifests)["router"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 130
    (ray,) = [container for container in spec["containers"] if container["name"] == "ray-worker"]
    shell, flag, script = ray["lifecycle"]["preStop"]["exec"]["command"]
    with socket.socket() as controller:
        controller.bind(("127.0.0.1", 0))
        controller.listen(100)
        here = {"PATH": "/usr/bin:/bin", "POD_IP": "127.0.0.1"}
        script = script.replace("/50052", f"/{controller.getsockname()[1]}")
        with subprocess.Popen([shell, flag, script], env=here) as hook:
            controller.accept()[0].close()
            controller.accept()[0].close()
            assert hook.poll() is None, "it waits for the controller's end"
            controller.close()
            assert hook.wait(60) == 0


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_pod_with_processes_prints_their_logs(chart: Chart, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for group, pod in pods(chart.example(example)).items():
        logs = [container for container in pod["template"]["spec"]["containers"] if container["name"] == "logs"]
        if group == "head":
            assert not logs
            continue
        (container,) = logs
        name, options = parsed(container["command"])
        assert (name, options["follow"]) == ("logs", True)
        roots = set()
        for one_of_them in pod["template"]["spec"]["containers"]:
            (cache,) = [env["value"] for env in one_of_them["env"] if env["name"] == "XDG_CACHE_HOME"]
            monkeypatch.setenv("XDG_CACHE_HOME", cache)
            roots.add(log_root())
            (mount,) = [mount for mount in one_of_them["volumeMounts"] if mount["name"] == "cache"]
            assert log_root().is_relative_to(mount["mountPath"])
        assert len(roots) == 1, "logs are read where they are written"


@pytest.mark.parametrize("example", EXAMPLES)
def test_probes_of_ray_knock_where_it_listens(chart: Chart, example: str) -> None:
    for name, group in pods(chart.example(example)).items():
        started = ray_start(group["rayStartParams"], *(["--head"] if name == "head" else []))
        listens = 6379 if name == "head" else started["node_manager_port"]
        ray = group["template"]["spec"]["containers"][0]
        workers = name not in {"head", "router"}
        for probe in ("startupProbe", "livenessProbe", *(() if workers else ("readinessProbe",))):
            assert ray[probe]["tcpSocket"] == {"port": listens}, name


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_pod_is_ready_when_its_workers_are(chart: Chart, example: str) -> None:
    """Otherwise the disruption budget would evict the next pod as soon as Ray runs in the last one's replacement."""
    for name, group in pods(chart.example(example)).items():
        if name in {"head", "router"}:
            continue
        ray = group["template"]["spec"]["containers"][0]
        shell, flag, line = ray["readinessProbe"]["exec"]["command"]
        assert (shell, flag) == ("/bin/sh", "-c")
        execute, *command = shlex.split(line)
        assert execute == "exec"
        asked, options = parsed(command)
        assert (asked, options["node"]) == ("ready", "$POD_IP")
        assert {"POD_IP", "TANDEM_CONTROLLER", "TANDEM_CLUSTER_TOKEN_FILE"} <= {
            variable["name"] for variable in ray["env"]
        }


def test_secrets_are_files_that_the_commands_beside_them_find(chart: Chart) -> None:
    manifests = chart.example("many-hosts")
    for name, container in containers(manifests):
        files = {
            setting["name"]: setting["value"]
            for setting in container.get("env", [])
            if setting["name"].endswith("_FILE")
        }
        mounted = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        volumes = {declared["name"]: declared for declared in pods(manifests)[name]["template"]["spec"]["volumes"]}
        for variable, file in files.items():
            folder, _, path = file.rpartition("/")
            volume = volumes[mounted[folder]["name"]]
            assert mounted[folder]["readOnly"]
            source = volume.get("secret") or volume["projected"]
            assert source["defaultMode"] == 0o440, "the pod's own group reads it, and no others"
            items = [
                item
                for projected in source.get("sources", [{"secret": source}])
                for item in projected["secret"]["items"]
            ]
            assert path in {item["path"] for item in items}, variable
    names = {setting["name"] for setting in driver(manifests)["env"]}
    assert {"TANDEM_API_KEY_FILE", "TANDEM_METRICS_KEY_FILE", "TANDEM_CLUSTER_TOKEN_FILE"} <= names


@pytest.mark.parametrize("client_ca", [False, True])
def test_a_certificate_is_read_by_the_router_and_by_its_command(client_ca: bool, chart: Chart) -> None:
    settings = ["--set", "tls.existingSecret=llm-tls", *(["--set", "tls.clientCaKey=ca.crt"] if client_ca else [])]
    manifests = chart.render(*settings)
    command = driver(manifests)["command"]
    named = {word.partition("=")[0]: word.partition("=")[2] for word in command if word.startswith("--tls")}
    files = {"--tls-certificate": "tls.crt", "--tls-key": "tls.key"}
    files |= {"--tls-client-ca": "client-ca.crt"} if client_ca else {}
    assert named == {option: f"/etc/tandem/tls/{file}" for option, file in files.items()}
    spec = pods(manifests)["router"]["template"]["spec"]
    (volume,) = (mounted for mounted in spec["volumes"] if mounted["name"] == "tls")
    assert volume["secret"]["defaultMode"] == 0o440
    assert [item["path"] for item in volume["secret"]["items"]] == list(files.values())
    mounts = {"name": "tls", "mountPath": "/etc/tandem/tls", "readOnly": True}
    assert [container["name"] for container in spec["containers"] if mounts in container["volumeMounts"]] == [
        "ray-worker",
        "tandem",
    ]
    router = driver(manifests)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert router[probe]["httpGet"]["port"] == "operations"
    assert {"name": "operations", "containerPort": 8001} in router["ports"]
    assert "--operations-port=8001" in command


def test_the_router_reads_the_keys_that_its_command_names(chart: Chart) -> None:
    spec = pods(chart.example("many-hosts"))["router"]["template"]["spec"]
    mounts = {"name": "keys", "mountPath": "/etc/tandem/keys", "readOnly": True}
    assert [container["name"] for container in spec["containers"] if mounts in container["volumeMounts"]] == [
        "ray-worker",
        "tandem",
    ]


def test_without_keys_the_router_runs_with_insecure(chart: Chart) -> None:
    assert parsed(driver(chart.render())["command"])[1]["insecure"] is False
    settings = "auth.apiKeys.existingSecret=,auth.insecure=true"
    _, options = parsed(driver(chart.render("--set", settings))["command"])
    assert options["insecure"] is True
    with pytest.raises(InvalidArgument, match="--host"):
        check_guarded("--host", options["host"], guarded=False, insecure=False)


@pytest.mark.parametrize("trusted", [True, False])
def test_kv_pages_cross_the_network_unless_values_forbid_it(trusted: bool, chart: Chart) -> None:
    arguments = [] if trusted else ["--set", "networkPolicy.trustedNetwork=false"]
    assert parsed(driver(chart.render(*arguments))["command"])[1]["trusted_network"] is trusted


def test_a_misspelt_option_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option: --kv-cache-gb"):
        parsed(["tandem", "up", "--kv-cache-gb=1"])
