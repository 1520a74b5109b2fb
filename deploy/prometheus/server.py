"""Runs and queries a Prometheus on this host that scrapes a cluster and evaluates the repository's rules."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.protocol.errors import DeadlineExceeded, FailedPrecondition, Unavailable

RULES = Path(__file__).parent / "rules.yaml"
NAMESPACE = "tandem"
"""The value of the label `namespace`, which on Kubernetes is the Kubernetes namespace."""
_HOST = "127.0.0.1"
_READY_S, _STOP_S, _ANSWER_S, _POLL_S = 30.0, 10.0, 10.0, 0.2
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_CONFIG = """\
global: {{scrape_interval: {every}s, scrape_timeout: {every}s, evaluation_interval: 1s}}
rule_files: [rules.yaml]
scrape_configs:
  - job_name: tandem
{key}
    http_sd_configs:
      - url: "http://{address}/sd"
        refresh_interval: {every}s
    {key}
    relabel_configs: [{{target_label: namespace, replacement: {namespace}}}]
  - job_name: tandem-controller
{key}
    static_configs: [{{targets: ["{address}"], labels: {{namespace: {namespace}}}}}]
    metric_relabel_configs:
      - {{source_labels: [__name__], regex: tandem_(process|metrics_target|planner)_.*, action: keep}}
  - job_name: exporters
    static_configs: [{{targets: {exporters}}}]
"""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a query's result; `points` are pairs of Unix seconds and value."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]

    @property
    def finite(self) -> bool:
        """True if the series has at least one finite value."""
        return any(math.isfinite(value) for _, value in self.points)


class Prometheus:
    """A client of a running Prometheus."""

    def __init__(self, address: str) -> None:
        """Store the address, host:port."""
        self.address = address

    def at(self, expression: str, when: float | None = None) -> list[Series]:
        """Return the value of a PromQL expression at the Unix time `when`, by default now: one point per series.

        Raises FailedPrecondition if Prometheus rejects it.
        """
        moment = {} if when is None else {"time": str(when)}
        result = self.get("query", query=expression, **moment)["result"]
        return [Series(curve["metric"], [_point(curve["value"])]) for curve in result]

    def between(self, expression: str, start: float, end: float, step_s: float) -> list[Series]:
        """Return the values of a PromQL expression from `start` to `end` (Unix seconds), one every `step_s` seconds."""
        result = self.get("query_range", query=expression, start=str(start), end=str(end), step=str(step_s))["result"]
        return [Series(curve["metric"], [_point(point) for point in curve["values"]]) for curve in result]

    def number(self, expression: str, when: float | None = None) -> float:
        """Return the value of a PromQL expression that has at most one series; 0 if it has none.

        Raises FailedPrecondition for several series.
        """
        series = self.at(expression, when)
        if len(series) > 1:
            raise FailedPrecondition(f"{len(series)} series instead of one: {expression}")
        return series[0].points[0][1] if series else 0.0

    def firing(self) -> set[str]:
        """Return the names of the alerts that are firing."""
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"}

    def get(self, what: str, **parameters: str) -> Any:
        """Call the endpoint `what` of Prometheus' HTTP API, and return the field `data` of the reply.

        Raises Unavailable if no valid reply arrives, and FailedPrecondition if Prometheus rejects the query.
        """
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with _OPENER.open(url, timeout=_ANSWER_S) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise FailedPrecondition(f"Prometheus: {error.read().decode(errors='replace')}") from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"no answer from Prometheus at {self.address}: {error}") from None

    def await_scrape(self, processes: int, after: float | None = None, within_s: float = _READY_S) -> None:
        """Wait until `processes` processes have been scraped after the Unix time `after`, by default now.

        Raises DeadlineExceeded after `within_s` seconds.
        """
        after = time.time() if after is None else after
        deadline_s = time.monotonic() + within_s
        scraped = f'count(timestamp(process_resident_memory_bytes{{job="tandem"}}) > {after:.3f})'
        while self.number(scraped) < processes or self.number("max(timestamp(tandem_process_up))") <= after:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"Prometheus has not scraped {processes} processes within {within_s:g} s")
            time.sleep(_POLL_S)


def find_prometheus() -> str | None:
    """Return the path of the Prometheus program; None if it is not installed."""
    return shutil.which("prometheus")


@contextmanager
def running_prometheus(
    metrics_address: str,
    folder: Path,
    *,
    key: str = "",
    every_s: int = 1,
    full_windows: bool = True,
    exporters: Sequence[str] = (),
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes a cluster by its service discovery, and `exporters` at host:port.

    Without `full_windows`, which is for tests, alerts fire as soon as their condition holds. Increases and rates,
    including burn rates, then cover ten seconds; those that count restarts cover twenty, because a start takes some
    seconds. Raises FailedPrecondition if Prometheus is not installed or does not start.
    """
    program = find_prometheus()
    if program is None:
        raise FailedPrecondition("Prometheus is not installed; on Debian and Ubuntu: apt-get install prometheus")
    rules = RULES.read_text(encoding="utf-8")
    (folder / "rules.yaml").write_text(rules if full_windows else _with_short_windows(rules), encoding="utf-8")
    authorization = f'    authorization: {{credentials: "{key}"}}' if key else ""
    settings = {"every": every_s, "key": authorization, "address": metrics_address, "namespace": NAMESPACE,
                "exporters": json.dumps(list(exporters))}  # fmt: skip
    (folder / "prometheus.yaml").write_text(_CONFIG.format(**settings), encoding="utf-8")
    address = f"{_HOST}:{_free_port()}"
    command = [program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
               f"--web.listen-address={address}", "--log.level=warn"]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _await_ready(process, address, folder / "prometheus.log")
            yield Prometheus(address)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _with_short_windows(rules: str) -> str:
    at_once = re.sub(r"(?m)^ +for: .*\n", "", rules).replace("restarts_total[15m]", "restarts_total[20s]")
    return re.sub(r"((?:increase|rate)\([^\[]*)\[\d+[mh]\]", r"\1[10s]", at_once)


def _await_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline_s = time.monotonic() + _READY_S
    while True:
        try:
            with _OPENER.open(f"http://{address}/-/ready", timeout=_ANSWER_S):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise FailedPrecondition(f"Prometheus does not start: {log.read_text()[-500:]}") from None
            time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_HOST, 0))
        return int(free.getsockname()[1])


def _point(pair: Sequence[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])
