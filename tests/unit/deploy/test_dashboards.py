"""Dashboards query only exported metrics, and Grafana can load them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from deploy.dashboards.__main__ import DASHBOARDS, FOLDER, file_of, text_of
from deploy.dashboards.promql import series
from tandem.metrics import families as f
from tests.unit.deploy.promql import DCGM_LABELS, known, selected, strangers, walk

NAMES = [entry.name for entry in DASHBOARDS]
UNITS = {"s", "reqps", "cps", "bytes", "Bps", "flops", "percentunit", "short", "celsius", "joule", "watt", "hertz"}
"""Units of Grafana's list (packages/grafana-data/src/valueFormats/categories.ts) that these dashboards use."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


@pytest.fixture(params=NAMES)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads((FOLDER / f"{request.param}.json").read_text())


def queries(dashboard: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns title, expression and legend of each target."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in walk(dashboard["panels"])
        for target in panel["targets"]
    ]


def everything() -> dict[str, set[str]]:
    rules = yaml.safe_load((FOLDER.parent / "prometheus" / "rules.yaml").read_text())
    recorded = [rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule]
    return {**known(), **{name: {"namespace", "model", "slo_class"} for name in recorded}}


def test_the_files_are_those_of_the_descriptions() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == set(NAMES)
    stale = [entry.name for entry in DASHBOARDS if file_of(entry).read_text() != text_of(entry)]
    assert not stale, "run `python -m deploy.dashboards`"


def test_a_query_for_what_is_not_there_is_noticed() -> None:
    wrong = 'sum by (finish) (rate(tandem_request_sucess_total{modle="x"}[5m]))'
    assert strangers(wrong, known()) == ["tandem_request_sucess_total", "by (finish)"]
    assert strangers('tandem_kv_pages{stat="free"} + 1', known()) == ["tandem_kv_pages{stat}"]
    assert strangers("tandem_kv_transfer_seconds", known()) == ["tandem_kv_transfer_seconds"]
    with pytest.raises(ValueError, match="no label stat"):
        series(f.KV_PAGES, stat="free")


def test_queries_ask_for_what_is_exported(dashboard: dict[str, Any]) -> None:
    have = everything()
    for title, expression, legend in queries(dashboard):
        if "DCGM_" in expression:
            assert re.fullmatch(r"DCGM_FI_(DEV|PROF)_[A-Z_]+( \* \d+)?", expression), title
            assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= DCGM_LABELS
        else:
            assert strangers(expression, have) == [], title


def test_each_metric_is_in_a_panel() -> None:
    """A metric that no dashboard shows need not be exported."""
    panels = [queries(json.loads(file_of(entry).read_text())) for entry in DASHBOARDS]
    asked = {name for page in panels for _, expression, _ in page for name, _ in selected(expression)}
    unseen = [family.full_name for family in f.FAMILIES if not asked & {family.full_name, *_parts(family.full_name)}]
    assert unseen == []


def _parts(histogram: str) -> set[str]:
    return {f"{histogram}{suffix}" for suffix in ("_bucket", "_sum", "_count")}


def test_legends_name_labels_that_the_result_has(dashboard: dict[str, Any]) -> None:
    for title, expression, legend in queries(dashboard):
        named = set(re.findall(r"\{\{(\w+)\}\}", legend))
        if "DCGM_" not in expression and "slo_burn" not in expression:
            assert all(re.search(rf"by \([^)]*\b{label}\b", expression) for label in named), title


def test_grafana_can_load_it(dashboard: dict[str, Any]) -> None:
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time", "version", "tags"} <= dashboard.keys()
    assert re.fullmatch(r"[a-z-]{1,40}", dashboard["uid"])
    assert "id" not in dashboard, "Grafana gives it; one in the file collides on import"
    assert "__inputs" not in dashboard, "provisioning does not fill them in"
    ids = [panel["id"] for panel in dashboard["panels"]]
    ids += [panel["id"] for row in dashboard["panels"] for panel in row.get("panels", ())]
    assert len(ids) == len(set(ids))
    assert all(number > 0 for number in ids)


def test_panels_have_what_grafana_needs(dashboard: dict[str, Any]) -> None:
    for panel in walk(dashboard["panels"]):
        assert panel["type"] in {"timeseries", "stat", "heatmap", "table"}
        assert panel["title"]
        assert panel["datasource"] == SOURCE
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["fieldConfig"]["overrides"] == []
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert len(letters) == len(set(letters))
        for target in panel["targets"]:
            assert target["datasource"] == SOURCE
            assert target["instant"] is not target["range"]


def test_panels_lie_side_by_side(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= COLUMNS
        taken |= cells


def test_variables_narrow_every_query(dashboard: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "model", "role"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    have = known()
    for name in ("namespace", "model", "role"):
        variable = variables[name]
        assert variable["datasource"] == SOURCE
        asked, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
        assert label == name
        assert strangers(asked, have) == []
        assert re.fullmatch(variable["allValue"], "decode")
    assert not re.fullmatch(variables["role"]["allValue"], "router")
    for title, expression, _ in queries(dashboard):
        assert ("$namespace" in expression and "$model" in expression) or "DCGM_" in expression, title
        assert set(re.findall(r"\$(\w+)", expression)) <= {*variables, "__rate_interval"}
