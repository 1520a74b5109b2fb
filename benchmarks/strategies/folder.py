"""The folder of a strategy run's parts, which holds loads of one cluster and one kind of load only."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.protocol.errors import InvalidArgument

_RUN = "run.json"


def claim(folder: Path, run: Mapping[str, object]) -> None:
    """Claims the folder for this run. InvalidArgument if it has loads of a different run."""
    ours = {name: str(value) for name, value in run.items()}
    file = folder / _RUN
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")
        return
    theirs = read_kept(file)
    if not isinstance(theirs, dict):
        raise damaged(file)
    other = [f"{name} {theirs.get(name)}, not {value}" for name, value in ours.items() if theirs.get(name) != value]
    if other:
        raise InvalidArgument("--parts", f"{folder} has loads of another run ({'; '.join(other)}); name another folder")


def read_kept(file: Path) -> Any:
    """Reads a JSON file of the folder. InvalidArgument if it is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise damaged(file) from None


def damaged(file: Path) -> InvalidArgument:
    """Returns the error for a damaged file, with the remedy."""
    if file.name == _RUN:
        return InvalidArgument(
            "--parts", f"{file} is damaged, so the run that these loads belong to is unknown; name another folder"
        )
    return InvalidArgument("--parts", f"{file} is damaged; delete it, and what it had is measured again")
