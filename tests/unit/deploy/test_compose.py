"""The parts of deploy/compose that can be checked without a container engine: files, commands, ports and secrets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from tandem.cli.main import app
from tandem.cli.models.default_model import NAME
from tandem.cli.models.hub_model import HubModel, hub_model
from tests.unit.deploy.chart import ROOT

FOLDER = ROOT / "deploy" / "compose"
PLAIN, GPU, HUB = (yaml.safe_load((FOLDER / name).read_text()) for name in ("compose.yaml", "gpu.yaml", "hub.yaml"))
GUIDE = (ROOT / "docs" / "guides" / "one_gpu.md").read_text()
PROMETHEUS = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
PROVISIONING = FOLDER / "grafana" / "provisioning"


def parsed(command: list[str]) -> dict[str, Any]:
    """Returns the options that the command line parses, which fails for unknown ones."""
    group = typer.main.get_command(app)
    name, *options = command
    chosen = group.commands[name]  # type: ignore[attr-defined]
    return dict(chosen.make_context(name, options).params)


def mounts(service: str) -> dict[str, str]:
    """Returns what is mounted into a service, by its path there."""
    return {there: here for here, there in (volume.split(":")[:2] for volume in PLAIN["services"][service]["volumes"])}


@pytest.mark.parametrize("file", [PLAIN, GPU, HUB])
def test_the_image_has_its_stage_and_the_command_its_options(file: dict[str, Any]) -> None:
    service = file["services"]["tandem"]
    build = PLAIN["services"]["tandem"]["build"] | service["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    dockerfile = (ROOT / build["dockerfile"]).read_text()
    assert re.search(rf"^FROM .* AS {build['target']}$", dockerfile, re.MULTILINE)
    options = parsed(service["command"])
    assert options["host"] == "0.0.0.0"
    assert options["metrics_port"] == 9464
    assert {Path(str(options[name])).name for name in ("api_key_file", "metrics_key_file")} == set(PLAIN["secrets"])
    assert options["stop_grace"] < float(PLAIN["services"]["tandem"]["stop_grace_period"].removesuffix("s"))
    if file is PLAIN:
        assert options["served_model"] == f"/opt/tandem/models/{NAME}"


def interpolated(text: str, **variables: str) -> str:
    """Returns the text with ${NAME} and ${NAME:?message} replaced, as compose does."""
    return re.sub(r"\$\{(\w+)(:\?[^}]*)?\}", lambda match: variables[match[1]], text)


def test_clients_name_the_model_as_the_guide_does() -> None:
    """A model is served under the name of its folder, or under its id on the Hub."""
    (exported,) = re.findall(r"TANDEM_MODEL=(/\S+)", GUIDE)
    (asked,) = re.findall(r'"model": "([^"]+)"', GUIDE)
    gpu = GPU["services"]["tandem"]
    served = parsed([interpolated(word, TANDEM_MODEL=exported) for word in gpu["command"]])["served_model"]
    assert interpolated(gpu["volumes"][0], TANDEM_MODEL=exported) == f"{served}:{served}:ro"
    assert Path(served).name == asked
    (id_,) = re.findall(r"`TANDEM_MODEL=(\w+/\S+)`", GUIDE)
    served = parsed([interpolated(word, TANDEM_MODEL=id_) for word in HUB["services"]["tandem"]["command"]])
    hub = hub_model(Path(served["served_model"]))
    assert hub == HubModel(id_)
    assert f"clients name it `{hub.name}`" in GUIDE


def test_downloads_are_kept_in_a_volume() -> None:
    home = HUB["services"]["tandem"]["environment"]["HF_HOME"]
    assert any(home.startswith(f"{there}/") for there in mounts("tandem"))


def test_what_is_mounted_is_there() -> None:
    for service in PLAIN["services"]:
        for here in mounts(service).values():
            assert here in PLAIN["volumes"] or (FOLDER / here).exists(), f"{service} mounts {here}"


def test_secrets_come_from_the_environment_and_ports_stay_on_this_host() -> None:
    assert PLAIN["secrets"] == {
        "api_key": {"environment": "TANDEM_API_KEY"},
        "metrics_key": {"environment": "TANDEM_METRICS_KEY"},
    }
    head = (FOLDER / "compose.yaml").read_text().split("name:", maxsplit=1)[0]
    assert "TANDEM_API_KEY=" in head
    assert "TANDEM_METRICS_KEY=" in head
    ports = [port for service in PLAIN["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)
    for service in PLAIN["services"].values():
        assert set(service.get("secrets", ())) <= set(PLAIN["secrets"])


def test_prometheus_reads_the_clusters_metrics_where_they_are() -> None:
    """The controller listens on loopback, so Prometheus is in its network."""
    service = PLAIN["services"]["prometheus"]
    assert service["network_mode"] == "service:tandem"
    (job,) = PROMETHEUS["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9464"]}]
    assert job["authorization"]["credentials_file"] == "/run/secrets/metrics_key"
    assert "metrics_key" in service["secrets"]
    assert PROMETHEUS["rule_files"] == [path for path in mounts("prometheus") if "rules" in path]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    rules = ROOT / "deploy" / "prometheus" / "rules.yaml"
    file = tmp_path / "prometheus.yaml"
    text = (FOLDER / "prometheus.yaml").read_text().replace("/etc/prometheus/rules.yaml", str(rules))
    file.write_text(text)
    done = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_its_source_and_its_dashboards() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text())["datasources"]
    url = urlsplit(source["url"])
    assert (url.hostname, url.port) == ("tandem", 9090), "Prometheus is in the network of this service"
    assert f"127.0.0.1:{url.port}:{url.port}" in PLAIN["services"]["tandem"]["ports"]
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "tandem.yaml").read_text())["providers"]
    path = provider["options"]["path"]
    folder = FOLDER / mounts("grafana")[path]
    assert {json.loads(file.read_text())["uid"] for file in folder.glob("*.json")} >= {"tandem-serving"}
    home = PLAIN["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (folder / Path(home).relative_to(path)).is_file()
