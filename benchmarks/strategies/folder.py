"""The folder of a strategy run's parts: loads of one cluster and one kind of load alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    theirs = read_kept(file)
    if not isinstance(theirs, dict):
        raise damaged(file)
    other = [f"{name} {theirs.get(name)}, not {value}" for name, value in ours.items() if theirs.get(name) != value]
    if other:
        raise InvalidArgument("--parts", f"{folder} has loads of another run ({'; '.join(other)}); name another folder")


def read_kept(file: Path) -> Any:
    """The JSON that a start has kept in the folder. InvalidArgument if it is not whole."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise damaged(file) from None


def damaged(file: Path) -> InvalidArgument:
    """What a person can do about a file that nobody can go on from."""
    if file.name == _RUN:
        return InvalidArgument(
            "--parts", f"{file} is damaged, and nothing else says whose loads these are; name another folder"
        )
    return InvalidArgument("--parts", f"{file} is damaged; delete it, and what it had is measured again")
