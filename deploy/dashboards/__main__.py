"""`python -m deploy.dashboards`: writes a JSON file for each dashboard."""

import json
from pathlib import Path

from deploy.dashboards import phases, serving, workers
from deploy.dashboards.grafana import Dashboard

FOLDER = Path(__file__).parent
DASHBOARDS: tuple[Dashboard, ...] = (serving.DASHBOARD, phases.DASHBOARD, workers.DASHBOARD)


def text_of(dashboard: Dashboard) -> str:
    """What its file says."""
    return json.dumps(dashboard.as_json(), indent=1) + "\n"


def file_of(dashboard: Dashboard) -> Path:
    """Where it is."""
    return FOLDER / f"{dashboard.name}.json"


if __name__ == "__main__":
    for each in DASHBOARDS:
        file_of(each).write_text(text_of(each), encoding="utf-8")
        print("wrote", file_of(each).name)
