"""Plays scraped metrics to the rules minute by minute: which alerts fire, and when."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.unit.deploy.test_rules import RULES

Said = Mapping[str, float]
"""Values of one scrape by the series' names and labels."""


def said(text: str, namespace: str) -> Said:
    """Parses a scrape's text as Prometheus does, with the label that a scrape configuration adds."""
    return {
        series(sample.name, {"namespace": namespace, **sample.labels}): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }


def series(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(labels.items())) + "}"


def input_series(scrapes: Sequence[Said]) -> list[dict[str, str]]:
    """Returns promtool's input series, one scrape a minute; a series missing from a scrape is stale."""
    names = dict.fromkeys(name for scrape in scrapes for name in scrape)
    return [{"series": name, "values": " ".join(_points(name, scrapes))} for name in names]


def _points(name: str, scrapes: Sequence[Said]) -> Iterator[str]:
    for before, now in zip([{}, *scrapes], scrapes, strict=False):
        yield str(now[name]) if name in now else "stale" if name in before else "_"


def promtool(case: dict[str, Any], folder: Path) -> str:
    """Runs a case with promtool; returns its failures."""
    (folder / "case.yaml").write_text(json.dumps(case))
    command = ["promtool", "test", "rules", str(folder / "case.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode == 0) is ("FAILED" not in done.stdout + done.stderr)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def play(texts: Sequence[str], firing: Mapping[int, set[str]], folder: Path) -> str:
    """Returns failures if these texts, one a minute, do not make exactly these alerts fire at these minutes."""
    read = {text: said(text, "prod") for text in set(texts)}
    questions = [
        {
            "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": series("", {"alertname": name}), "value": 1} for name in sorted(names)],
        }
        for minute, names in firing.items()
    ]
    case = {
        "interval": "1m",
        "input_series": input_series([read[text] for text in texts]),
        "promql_expr_test": questions,
    }
    return promtool({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}, folder)
