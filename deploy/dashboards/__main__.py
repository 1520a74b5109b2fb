"""Writes the JSON file of each dashboard: `python -m deploy.dashboards`."""

import json
from pathlib import Path

from deploy.dashboards import phases, serving, workers
from deploy.dashboards.grafana import Dashboard

FOLDER = Path(__file__).parent
DASHBOARDS: tuple[Dashboard, ...] = (serving.DASHBOARD, phases.DASHBOARD, workers.DASHBOARD)


def text_of(dashboard: Dashboard) -> str:
    """Return the dashboard as the text of its JSON file."""
    return json.dumps(dashboard.as_json(), indent=1) + "\n"


def file_of(dashboard: Dashboard) -> Path:
    """Return the path of the dashboard's file."""
    return FOLDER / f"{dashboard.name}.json"


if __name__ == "__main__":
    for dashboard in DASHBOARDS:
        file_of(dashboard).write_text(text_of(dashboard), encoding="utf-8")
        print("wrote", file_of(dashboard).name)
