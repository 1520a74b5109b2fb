"""The report of `tandem check`: a table with a row for each check, JSON, and scripts that send the requests again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.check.run import CheckResult

if TYPE_CHECKING:
    from rich.table import Table


def table(results: Sequence[CheckResult], reproducers: Sequence[str]) -> Table:
    """Return the table: a row for each check, with the command that repeats it."""
    from rich.table import Table
    from rich.text import Text

    from tandem.cli.diagnosis.doctor import COLOURS

    shown = Table(box=None, pad_edge=False)
    for column in ("check", "result", "found", "again"):
        shown.add_column(column, no_wrap=column in ("check", "result"))
    for result, reproducer in zip(results, reproducers, strict=True):
        level = Text(result.level.value, style=COLOURS[result.level.value])
        shown.add_row(result.name, level, Text(result.found), Text(reproducer))
    return shown


def as_json(server: dict[str, Any], results: Sequence[CheckResult], reproducers: Sequence[str]) -> str:
    """Return the report as JSON; `server` describes the server and the settings."""
    rows = [
        {
            "check": result.name,
            "result": result.level.value,
            "found": result.found,
            "reproducer": reproducer,
            "problems": [{"reason": problem.reason, "script": list(problem.script)} for problem in result.problems],
        }
        for result, reproducer in zip(results, reproducers, strict=True)
    ]
    return json.dumps(server | {"checks": rows}, indent=1) + "\n"


def write_scripts(folder: Path, results: Sequence[CheckResult]) -> list[Path]:
    """Write one shell script for each check that failed, which sends the requests of its first problem with curl."""
    written = []
    for result in results:
        problem = next((problem for problem in result.problems if problem.script), None)
        if problem is None:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        reason = "\n".join(f"# {line}" for line in problem.reason.splitlines())
        file = folder / f"{result.name}.sh"
        file.write_text("\n".join(["#!/usr/bin/env bash", reason, *problem.script, ""]), encoding="utf-8")
        file.chmod(0o755)
        written.append(file)
    return written
