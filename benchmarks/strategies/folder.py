"""The folder of a strategy run's parts: loads of one cluster and one kind of load alone."""

import json
from collections.abc import Mapping
from pathlib import Path

from wire.errors import InvalidArgument

_RUN = "run.json"


def claim(folder: Path, run: Mapping[str, object]) -> None:
    """Make the folder this run's, if it is nobody's. InvalidArgument if it has loads of a run that differs: their
    figures would stand in this one's table.
    """
    ours = {name: str(value) for name, value in run.items()}
    file = folder / _RUN
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")
        return
    theirs = json.loads(file.read_text(encoding="utf-8"))
    other = [f"{name} {theirs.get(name)}, not {value}" for name, value in ours.items() if theirs.get(name) != value]
    if other:
        raise InvalidArgument("--parts", f"{folder} has loads of another run ({'; '.join(other)}); name another folder")
