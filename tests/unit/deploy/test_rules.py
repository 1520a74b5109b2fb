"""Rules query only exported metrics; every alert has a section in the runbook, and a test of its cause."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.promql import known, strangers

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "prometheus"
RULES, CASES = FOLDER / "rules.yaml", sorted((FOLDER / "tests").glob("*.yaml"))

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def series() -> dict[str, set[str]]:
    recorded = {rule["record"]: {"namespace", "model", "slo_class"} for rule in rules() if "record" in rule}
    return {**known(), **recorded}


@cache
def cases() -> list[dict[str, Any]]:
    return [case for file in CASES for case in yaml.safe_load(file.read_text())["tests"]]


def test_rules_ask_for_what_is_exported() -> None:
    have = series()
    for rule in rules():
        expression = rule["expr"]
        assert strangers(expression, have) == [], rule


def test_cases_play_series_that_are_exported() -> None:
    have = known()
    for case in cases():
        for input_series in case["input_series"]:
            assert strangers(input_series["series"], have) == [], input_series["series"]
            (labels,) = re.findall(r"\{.*\}", input_series["series"])
            assert {"namespace", "model", "worker"} <= set(re.findall(r"(\w+)=", labels)), input_series["series"]


def test_each_alert_is_complete() -> None:
    for name, rule in alerts().items():
        assert re.fullmatch(r"Tandem[A-Z]\w+", name)
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"].keys() == {"summary", "runbook"}


def test_each_alert_has_its_paragraph() -> None:
    page = (ROOT / "docs" / "operations" / "alerts.md").read_text()
    paragraphs = dict(re.findall(r"^## (\w+)\n\n(.+)$", page, re.M))
    assert list(paragraphs) == list(alerts())
    assert all(len(paragraph) > 80 for paragraph in paragraphs.values())
    assert set(re.findall(r"\bTandem[A-Z]\w+", page)) == set(alerts())
    named = {name: rule["annotations"]["runbook"] for name, rule in alerts().items()}
    assert named == {name: f"docs/operations/alerts.md#{name.lower()}" for name in paragraphs}


def test_each_alert_fires_and_rests_in_a_case() -> None:
    for name in alerts():
        played = [
            sorted((one for one in case.get("alert_rule_test", ()) if one["alertname"] == name), key=_minute)
            for case in cases()
        ]
        ends = [bool(one["exp_alerts"]) for steps in played for one in steps]
        assert any(before and not after for before, after in pairwise(ends)), name


def _minute(step: dict[str, Any]) -> float:
    number, unit = re.fullmatch(r"(\d+)([mh])", step["eval_time"]).groups()
    return float(number) * {"m": 1, "h": 60}[unit]


@needs_promtool
def test_promtool_finds_nothing_wrong() -> None:
    _promtool("check", "rules", str(RULES))


@needs_promtool
def test_causes_fire_and_ends_rest() -> None:
    _promtool("test", "rules", *map(str, CASES))


@needs_promtool
def test_a_rule_that_never_fires_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES.read_text().replace('{state="quarantined"} > 0', '{state="shared"} > 0'))
    (tmp_path / "tests").mkdir()
    copy = shutil.copy(FOLDER / "tests" / "kv.yaml", tmp_path / "tests")
    with pytest.raises(AssertionError, match="TandemPagesQuarantined"):
        _promtool("test", "rules", str(copy))


def _promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
